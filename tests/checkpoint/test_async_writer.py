"""Work in the background ends, and fails, where somebody hears it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from vlm_grpo.checkpoint.async_writer import Background


def failing() -> None:
    raise OSError("No space left on device")


def ask_for_ever(background: Background) -> None:
    while True:
        background.check()


def fail_within(background: Background, job: Callable[[], object], error: BaseException) -> None:
    with background:
        background.start(job)
        raise error


def test_one_job_at_a_time_and_all_of_them() -> None:
    running, seen, lock = [], [], threading.Lock()

    def job(number: int) -> None:
        assert lock.acquire(blocking=False)  # no other job is in flight
        running.append(number)
        seen.append(number)
        lock.release()

    with Background() as background:
        for number in range(20):
            background.start(lambda number=number: job(number))
    assert seen == list(range(20))


def test_leaving_waits_for_the_job() -> None:
    free, done = threading.Event(), []
    with Background() as background:
        background.start(lambda: (free.wait(10), done.append(True)))
        threading.Timer(0.05, free.set).start()
    assert done


def test_an_error_comes_up_at_the_next_call_and_once() -> None:
    background = Background()
    background.start(failing)
    with pytest.raises(OSError, match="No space left"):
        background.start(lambda: None)
    background.wait()
    background.start(failing)
    with pytest.raises(OSError, match="No space left"):
        ask_for_ever(background)


def test_an_error_at_the_end_comes_up() -> None:
    with pytest.raises(OSError, match="No space left"), Background() as background:
        background.start(failing)


def test_an_error_of_the_caller_is_the_one_that_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="first"):
        fail_within(Background(), failing, ValueError("first"))
    assert "the work in the background failed too" in caplog.text


def test_an_interruption_does_not_wait() -> None:
    forever = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        fail_within(Background(), forever.wait, KeyboardInterrupt())
    forever.set()
