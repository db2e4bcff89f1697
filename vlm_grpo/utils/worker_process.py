"""The program of a worker process, which makes the calls that the process that started it sends.

    python worker_process.py CONNECTION PARENT

``__main__`` is this file, so that the user's program is not imported, and only the standard library
is, until the first call. A call is answered by an empty message once its function and arguments
are loaded, and then by its result, or by an exception in place of either.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

LOADED = b""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    descriptor, parent = map(int, sys.argv[1:])
    # The parent decides when its workers end, after a signal to a whole job too. These are not
    # ignored, which programs that a reward starts would inherit; nor in processes that it forks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_end_on_signals)
    # The connection's end ends an idle worker; this one in the middle of compiled code, too.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
        sys.path[:] = pickle.loads(connection.recv_bytes())
        while True:
            _answer(connection)


def _end_on_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _answer(connection: Connection) -> None:
    content = connection.recv_bytes()
    try:
        function, arguments = pickle.loads(content)
    except BaseException as error:  # of a user's module, which may raise anything
        connection.send_bytes(_dump_error(error))
        return
    connection.send_bytes(LOADED)
    try:
        answer = pickle.dumps((function(*arguments), None))
    except BaseException as error:  # the same, or a result that cannot be sent
        answer = _dump_error(error)
    connection.send_bytes(answer)


def _dump_error(error: BaseException) -> bytes:
    error.add_note(f"in a worker process:\n{traceback.format_exc()}")
    answer: tuple[Any, BaseException] = None, error
    try:
        pickle.loads(content := pickle.dumps(answer))
    except Exception:  # an exception's own methods may raise anything
        return pickle.dumps((None, RuntimeError(traceback.format_exc())))
    return content


if __name__ == "__main__":
    main()
