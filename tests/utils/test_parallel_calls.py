"""Calls of a remote service: order, limits, and values that outlive a crash."""

import json
import pickle
import threading
import time
from pathlib import Path

import pytest

from vlm_grpo.utils.parallel_calls import ValueCache, call_all, share_calls
from vlm_grpo.utils.time_limit import CallTimeout, time_limit


def test_results_come_in_order_whatever_the_calls_take():
    def sleep(number: int) -> float:
        time.sleep(0.02 * (4 - number))
        return float(number)

    assert call_all(sleep, range(5), 5, 10.0) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert call_all(sleep, [], 5, 10.0) == []


def test_at_most_as_many_calls_run_at_once_as_allowed():
    running, most = set(), []
    three = threading.Barrier(3)

    def count(number: int) -> float:
        running.add(number)
        most.append(len(running))
        three.wait(30)  # until three calls run
        running.discard(number)
        return 0.0

    call_all(count, range(9), 3, 10.0)
    assert max(most) == 3


def test_a_failed_call_gives_its_exception():
    def fail(error: BaseException | None) -> float:
        if error is not None:
            raise error
        return 1.0

    errors = [KeyError("missing"), SystemExit(3)]
    assert call_all(fail, [None, *errors], 1, 10.0) == [1.0, *errors]


def test_a_call_over_its_limit_is_left_behind_and_the_others_run():
    release, begun = threading.Event(), []

    def hang_at_first(number: int) -> float:
        begun.append(number)
        if number < 2:
            release.wait(30)
        return float(number)

    started = time.monotonic()
    # Two threads, both of which hang in their first call.
    late, other, *good = call_all(hang_at_first, range(6), 2, 0.5)
    assert time.monotonic() - started < 10
    assert isinstance(late, TimeoutError)
    assert str(other) == "it took longer than its limit of 0.5 s"
    assert good == [2.0, 3.0, 4.0, 5.0]
    release.set()
    time.sleep(0.05)
    assert sorted(begun) == list(range(6))  # the threads that were left behind took no more


def test_a_batch_that_is_interrupted_asks_nothing_more():
    begun: list[int] = []

    def sleep(number: int) -> float:
        begun.append(number)
        time.sleep(0.05)
        return 0.0

    with pytest.raises(CallTimeout), time_limit(0.02) as call:
        call(call_all, sleep, range(100), 2, 10.0)
    time.sleep(0.15)
    assert len(begun) <= 4  # of 100: each thread ends after its call


def ask_in(path: Path | None, values: dict[str, float], requests: list[str]) -> list[str]:
    """Ask for the requests through a new cache; return those that were really asked."""
    asked: list[str] = []

    def ask(request: str) -> float:
        asked.append(request)
        return values[request]

    calls = share_calls(ask, None if path is None else ValueCache(path))
    found = [calls(request) for request in requests]
    assert found == [values[request] for request in requests]
    return asked


def test_equal_requests_are_asked_once(tmp_path):
    assert ask_in(None, {"a": 1.0, "b": 0.1 + 0.2}, ["a", "b", "a"]) == ["a", "b"]
    path = tmp_path / "cache" / "rank-0.jsonl"
    assert ask_in(path, {"a": 1.0, "b": 0.1 + 0.2}, ["a", "b", "a"]) == ["a", "b"]
    assert ask_in(path, {"a": 1.0, "b": 0.1 + 0.2, "c": 0.0}, ["c", "b", "a"]) == ["c"]
    # Also by other ranks, and by a resumed run with another number of ranks.
    assert ask_in(path.with_name("rank-1.jsonl"), {"a": 1.0, "c": 0.0}, ["a", "c"]) == []


def test_equal_requests_in_flight_share_one_call():
    asked: list[str] = []

    def ask(request: str) -> float:
        asked.append(request)
        time.sleep(0.05)
        if request == "bad":
            raise ValueError("no verdict")
        return float(len(asked))  # a second call would give another value

    calls = share_calls(ask, None)
    found = call_all(calls, ["same", "same", "same"], 3, 10.0)
    assert found == [1.0, 1.0, 1.0]
    failed = call_all(calls, ["bad", "bad"], 2, 10.0)
    assert [str(error) for error in failed] == ["no verdict", "no verdict"]
    assert asked == ["same", "bad"]


def test_failures_and_values_that_are_not_finite_are_not_kept(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    value, error = call_all(share_calls(float, ValueCache(path)), ["nan", "bad"], 1, 10.0)
    assert isinstance(value, float)
    assert isinstance(error, ValueError)
    assert not path.exists()


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_cut_off_by_a_crash_costs_its_own_value_only(tmp_path, cut):
    path = tmp_path / "rank-0.jsonl"
    values = {"a": 1.0, "b": 2.0, "c": 3.0}
    ask_in(path, values, ["a", "b"])
    path.write_bytes(path.read_bytes()[:-cut])  # a line has 91 bytes
    assert ask_in(path, values, ["a", "b", "c"]) == ["b", "c"]
    assert ask_in(path, values, ["a", "b", "c"]) == []


def test_the_values_of_this_process_come_first(tmp_path):
    own, other = tmp_path / "rank-1.jsonl", tmp_path / "rank-0.jsonl"
    # Both ranks asked in the same step; a judge need not give the same verdict twice.
    ask_in(own, {"a": 1.0}, ["a"])
    cache = ValueCache(own)
    cache.refresh()
    key = json.loads(own.read_text())["key"]
    other.write_text(json.dumps({"key": key, "value": 5.0}) + "\n")
    for each in (cache, ValueCache(own)):
        each.refresh()
        assert each.get(key) == 1.0


def test_a_cache_is_reopened_by_its_path_in_a_worker(tmp_path):
    cache = ValueCache(tmp_path / "rank-0.jsonl")
    cache.put("k", 0.25)
    sent = pickle.dumps(cache)
    assert b"0.25" not in sent
    copy = pickle.loads(sent)
    assert copy.get("k") is None
    copy.refresh()
    assert copy.get("k") == 0.25
    assert pickle.loads(sent) is copy  # a worker keeps it for the next batch
