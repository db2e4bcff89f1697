"""Time limits of calls."""

import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from vlm_grpo.utils.time_limit import CallTimeout, can_interrupt, time_limit


def test_the_limit_applies_to_each_call_and_keeps_other_timers():
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


def test_a_regular_expression_and_code_that_catches_exceptions_are_interrupted():
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

    with ThreadPoolExecutor() as pool:  # only the main thread can interrupt
        assert (can_interrupt(), pool.submit(can_interrupt).result()) == (True, False)
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(None) as call:  # calls directly
        assert call(divmod, 7, 2) == (3, 1)
        assert signal.getsignal(signal.SIGALRM) == before
