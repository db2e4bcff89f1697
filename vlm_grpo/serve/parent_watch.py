"""Run a command until it ends, or until the process that started this one does.

    python parent_watch.py COMMAND…

The standard input is a pipe that only the starting process holds open: however that process ends,
the pipe closes, and the command and all processes that it started are stopped. Only the standard
library is imported, so that the command starts at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import Any

STOP_SECONDS = 10.0  # for the command to end by itself after SIGTERM


def main() -> int:
    _handle_signals(signal.SIG_IGN)  # of the terminal: the run decides when to stop
    child = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # whose processes can be stopped together
        preexec_fn=lambda: _handle_signals(signal.SIG_DFL),
    )
    threading.Thread(target=_stop_with_parent, args=(child,), daemon=True).start()
    status = child.wait()
    _signal_all(child.pid, signal.SIGKILL)  # processes that it has left
    return status if status >= 0 else 128 - status


def _handle_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)


def _stop_with_parent(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1):
        pass
    _signal_all(child.pid, signal.SIGTERM)
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        _signal_all(child.pid, signal.SIGKILL)


def _signal_all(session: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, number)


if __name__ == "__main__":
    sys.exit(main())
