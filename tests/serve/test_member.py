"""What a server is asked for when it rests and when it is given weights."""

from __future__ import annotations

from typing import Any

import pytest
from transfer_server import run_transfer_server

from vlm_grpo.serve.client import VllmClient
from vlm_grpo.serve.process import Server
from vlm_grpo.utils.http_json import ServiceError

RESUME = ["/reset_encoder_cache", "/reset_prefix_cache", "/update_weight_version", "/resume"]
FREED = {
    0: (["/pause?mode=wait", "/release_kv_cache_memory"], []),
    1: (["/sleep?level=1&mode=wait"], ["/wake_up?tags=weights"]),
    2: (["/sleep?level=2&mode=wait"], ["/wake_up?tags=weights"]),
}
"""For each level the requests that free memory, and those that make room for weights."""


@pytest.mark.parametrize("level", FREED)
def test_memory_is_freed_and_taken_in_the_order_of_what_comes(level: int) -> None:
    free, make_room = FREED[level]
    with run_transfer_server() as fake:
        server = Server(VllmClient(fake.url, 10), sleep_level=level, version=4)
        server.rest()
        server.rest()
        assert fake.calls == free, "once"
        assert server.version is None, "the next weights are loaded whatever their version is"
        fake.calls.clear()
        server.open()
        fake.calls.append("weights")
        server.resume(5, "weights/run/5")
        assert fake.calls == [*make_room, "weights", "/wake_up?tags=kv_cache", *RESUME]
        assert (server.version, server.is_asleep) == (5, False)


def test_a_server_that_does_not_rest_is_paused_while_weights_are_loaded() -> None:
    with run_transfer_server() as fake:
        server = Server(VllmClient(fake.url, 10))
        server.rest()
        assert fake.calls == []
        server.open()
        server.resume(1, "weights/run/1")
        assert fake.calls == ["/pause?mode=wait", *RESUME]


def test_a_server_that_fails_is_not_asleep_when_it_was_started_again() -> None:
    with run_transfer_server() as fake:
        server: Any = Server(VllmClient(fake.url, 10), sleep_level=2, version=4)
        server.rest()
        fake.fails.add("/wake_up?tags=weights")
        with pytest.raises(ServiceError) as failure:
            server.open()
        server.note(str(failure.value))
        assert "out of memory" in server.problem
        server.open()
        assert fake.calls[-1] == "/pause?mode=wait"
