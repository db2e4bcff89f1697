"""Requests over HTTP: what is repeated, what is refused, and what a failure tells."""

import math
import random
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from judge_server import Reply, run_judge

from vlm_grpo.utils.http_json import ServiceError, get_json, post_command, post_json

GOOD = Reply(body=b'{"value": 1}')


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits before repetitions, none of which is slept."""
    found: list[float] = []
    clock = SimpleNamespace(sleep=found.append, time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr("vlm_grpo.utils.http_json.time", clock)
    return found


def answer_in_turn(*replies: Reply) -> Callable[[Any], Reply]:
    """Return a function that gives the replies in turn, the last one again and again."""
    left = list(replies)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


def test_values_are_sent_to_this_machine_without_a_proxy_and_responses_are_read(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    key = {"Authorization": "Bearer key"}
    with run_judge(answer_in_turn(GOOD, GOOD, Reply(body=b""))) as server:
        assert post_json(f"{server.address}/x", {"text": "é"}, key, retries=0) == {"value": 1}
        assert get_json(server.address, key, retries=0) == {"value": 1}
        post_command(server.address, retries=0)
    (path, headers, body), (_, asked, nothing), (_, _, empty) = server.requests
    assert (path, body, nothing, empty) == ("/v1/x", {"text": "é"}, None, None)
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == asked["Authorization"] == "Bearer key"


@pytest.mark.parametrize(
    ("status", "body"),
    [(429, b""), (500, b"<html>"), (503, b""), (200, b'{"value": '), (200, b"\xff")],
)
def test_failures_that_may_pass_are_repeated(status, body, waits):
    failure = Reply(status=status, body=body)
    state = random.getstate()  # it is part of a checkpoint, and decides what a resumed run samples
    with run_judge(answer_in_turn(failure, failure, GOOD)) as server:
        assert post_json(server.address, {}) == {"value": 1}
    assert random.getstate() == state
    assert len(server.requests) == 3
    # 1 and 2 seconds, of which at least half are waited so that clients do not return together.
    assert 0.5 <= waits[0] <= 1.0 <= waits[1] <= 2.0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("0.5", 0.5), ("3600", 60.0), ("-3", 0.0), ("soon", 1.0)],
)
def test_a_demanded_wait_is_kept_up_to_a_limit(header, seconds, waits):
    with run_judge(answer_in_turn(Reply(status=429, headers={"Retry-After": header}), GOOD)) as s:
        post_json(s.address, {})
    assert waits == [pytest.approx(seconds, rel=0.5)]  # the wait for "soon" is random


@pytest.mark.parametrize("status", [200, 404])
def test_the_limit_is_that_of_the_whole_response(status):
    drip = Reply(status=status, body=b" " * 500, pause=0.01)
    late = pytest.raises(ServiceError, match="no response within")
    with run_judge(answer_in_turn(drip)) as server, late:
        post_json(server.address, {}, timeout=0.1, retries=0)


def test_a_response_nested_too_deeply_and_control_characters_are_a_failure_of_plain_text():
    nested, red = Reply(body=b"[" * 200_000), Reply(status=404, body=b"\x1b[31mred\x9b\xc2\x9b")
    with run_judge(answer_in_turn(nested, red)) as server:
        with pytest.raises(ServiceError, match="RecursionError"):
            post_json(server.address, {}, retries=0)
        with pytest.raises(ServiceError, match=r"404 Not Found: \\x1b\[31mred�\\x9b$"):
            post_json(server.address, {}, retries=0)


def test_a_service_that_fails_again_is_named_but_not_every_time(waits, monkeypatch, caplog):
    monkeypatch.setattr("vlm_grpo.utils.http_json._last_line", -math.inf)
    with run_judge(answer_in_turn(Reply(status=503, body=b"busy"))) as server:
        for _ in range(2):
            with pytest.raises(ServiceError):
                post_json(server.address, {}, retries=3)
    (record,) = caplog.records
    # The wait before the third attempt is 1 to 2 seconds.
    assert re.search(r"503 Service Unavailable: busy; asking again in [12] s$", record.getMessage())


@pytest.mark.parametrize("status", [302, 303, 307, 308])
def test_a_redirect_is_not_followed(status):
    reply = Reply(status=status, headers={"Location": "http://127.0.0.1:1/other"})
    # It has not asked the other host, which refuses the connection.
    refused = pytest.raises(ServiceError, match=rf"status {status} ")
    with run_judge(answer_in_turn(reply)) as server, refused:
        post_json(server.address, {}, {"Authorization": "Bearer key"}, retries=0)


def test_the_last_failure_is_told_after_all_attempts(waits):
    with run_judge(answer_in_turn(Reply(status=500), Reply(status=502, body=b"bad gateway"))) as s:
        with pytest.raises(ServiceError, match=r"3 attempts failed, .* 502 Bad Gateway: bad"):
            post_json(s.address, {}, retries=2)
        address = s.address
    with pytest.raises(ServiceError, match=r"^\S+: URLError: .*refused") as caught:
        post_json(address, {}, retries=0)
    assert caught.value.status is None
    assert len(waits) == 2


@pytest.mark.parametrize("url", ["file:///etc/passwd", "localhost:8000", "ftp://host/v1"])
def test_other_addresses_are_refused(url):
    with pytest.raises(ValueError, match="must start with http:// or https://"):
        post_json(url, {})
