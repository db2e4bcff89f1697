"""Stopwatch phases and time limits of calls."""

from __future__ import annotations

import re
import signal
import threading
import time

import pytest

from vlm_grpo.utils.timing import CallTimeout, Stopwatch, can_interrupt, time_limit


def test_a_phase_includes_the_phases_nested_in_it() -> None:
    waits: list[str | None] = []
    stopwatch = Stopwatch()
    stopwatch.wait = lambda: waits.append(stopwatch.phase)
    with stopwatch("outer"):
        with stopwatch("inner"):
            time.sleep(0.02)
            assert stopwatch.phase == "inner"
        assert stopwatch.phase == "outer"
    assert stopwatch.phase is None
    assert stopwatch.seconds["outer"] >= stopwatch.seconds["inner"] >= 0.02
    assert waits == [None, "outer", "inner", "outer"]  # before each start and before each end


def test_a_repeated_phase_adds_up_until_reset_even_if_it_raises() -> None:
    stopwatch = Stopwatch()

    @stopwatch("phase")
    def fail() -> None:
        time.sleep(0.02)
        raise ValueError("expected")

    for _ in range(2):
        with pytest.raises(ValueError, match="expected"):
            fail()
    assert stopwatch.seconds["phase"] >= 0.04
    assert stopwatch.phase is None
    stopwatch.reset()
    assert stopwatch.seconds == {}


def test_the_limit_applies_to_each_call_and_keeps_other_timers() -> None:
    alarms = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: alarms.append(number))
    other = signal.setitimer(signal.ITIMER_REAL, 0.4)  # a test runner's timer, which must fire
    try:
        with time_limit(0.1) as call:
            assert call(pow, 2, 3) == 8
            for _ in range(2):
                with pytest.raises(CallTimeout, match=r"0\.1 s"):
                    call(time.sleep, 60)
            time.sleep(0.15)  # longer than the limit, but outside a call
        time.sleep(0.3)
        assert alarms == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *other)


def test_a_regular_expression_and_code_that_catches_exceptions_are_interrupted() -> None:
    def catch_all() -> None:
        while True:
            try:
                time.sleep(60)
            except Exception:
                continue

    with time_limit(0.1) as call:
        with pytest.raises(CallTimeout):
            call(catch_all)
        with pytest.raises(CallTimeout):
            call(re.match, r"(a+)+$", "a" * 40 + "b")  # backtracks 2^40 times


def test_no_limit_calls_directly() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(None) as call:
        assert call(divmod, 7, 2) == (3, 1)
        assert signal.getsignal(signal.SIGALRM) == before


def test_only_the_main_thread_can_interrupt() -> None:
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(can_interrupt()))
    thread.start()
    thread.join()
    assert (can_interrupt(), results) == (True, [False])
