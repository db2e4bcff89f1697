"""Background jobs run one at a time, and the caller gets their errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from vlm_grpo.training.checkpoint.async_writer import AsyncWriter


def fail() -> None:
    raise OSError("No space left on device")


def check_until_error(writer: AsyncWriter) -> None:
    while True:
        writer.check()


def raise_within(writer: AsyncWriter, job: Callable[[], object], error: BaseException) -> None:
    with writer:
        writer.start(job)
        raise error


def test_jobs_run_one_at_a_time_and_in_order() -> None:
    finished, lock = [], threading.Lock()

    def job(number: int) -> None:
        assert lock.acquire(blocking=False)  # no other job is running
        finished.append(number)
        lock.release()

    with AsyncWriter() as writer:
        for number in range(20):
            writer.start(lambda number=number: job(number))
    assert finished == list(range(20))


def test_exit_waits_for_the_job() -> None:
    free, done = threading.Event(), []
    with AsyncWriter() as writer:
        writer.start(lambda: (free.wait(10), done.append(True)))
        threading.Timer(0.05, free.set).start()
    assert done


def test_an_error_is_raised_once_by_the_next_call() -> None:
    writer = AsyncWriter()
    writer.start(fail)
    with pytest.raises(OSError, match="No space left"):
        writer.start(lambda: None)
    writer.wait()
    writer.start(fail)
    with pytest.raises(OSError, match="No space left"):
        check_until_error(writer)


def test_exit_raises_the_error_of_the_last_job() -> None:
    with pytest.raises(OSError, match="No space left"), AsyncWriter() as writer:
        writer.start(fail)


def test_an_error_of_the_caller_is_raised_and_that_of_the_job_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="first"):
        raise_within(AsyncWriter(), fail, ValueError("first"))
    assert "a background job failed too" in caplog.text


def test_an_interrupt_does_not_wait() -> None:
    forever = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        raise_within(AsyncWriter(), forever.wait, KeyboardInterrupt())
    forever.set()
