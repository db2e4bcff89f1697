"""Which failure of a server counts, and what it stops."""

import threading
from typing import Any
from unittest.mock import Mock

from vlm_grpo.config.rollout import VllmSettings
from vlm_grpo.serve.recovery import Recovery
from vlm_grpo.serve.server import Server, WeightLabel
from vlm_grpo.utils.http_json import ServiceError


def test_the_first_failure_counts_and_stops_the_process_with_its_other_requests():
    process: Any = Mock()
    server, other = (Server("http://127.0.0.1:1", 1.0, process) for _ in range(2))
    label, closed = WeightLabel("weights", "run"), threading.Event()
    settings = VllmSettings(urls=("http://127.0.0.1:1",))
    recovery = Recovery([server, other], settings, label, closed, print)
    for text in ("first", "second"):  # the second is one of those that were stopped
        recovery.note(server, ServiceError(text))
    assert server.problem == "first"
    process.stop.assert_called_once_with()
    closed.set()
    recovery.note(other, ServiceError("the run is stopped"))
    assert not other.problem
