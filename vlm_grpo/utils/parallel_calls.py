"""Calls of a slow or remote service: several at once, limited in time, with values kept on disk."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from vlm_grpo.utils.atomic_io import append_durable
from vlm_grpo.utils.jsonl import read_valid_rows

Item = TypeVar("Item")
Value = TypeVar("Value")


class ValueCache:
    """The values that a service has returned, on disk, by the content of the requests.

    A file has one line per value. Each process appends to ``path`` and also reads the files of the
    other processes next to it. A line that a crash has cut off is skipped. If several files have a
    value for one request, that of the process's own file counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, float] = {}

    def __reduce__(self) -> tuple[Callable[[Path], ValueCache], tuple[Path]]:
        return _open_cache, (self.path,)

    def refresh(self) -> None:
        """Read what other processes have written since."""
        others = sorted(set(self.path.parent.glob("*.jsonl")) - {self.path})
        for path in (self.path, *others):
            for row in read_valid_rows(path):
                if isinstance(row.get("value"), int | float):
                    self._values.setdefault(str(row.get("key")), row["value"])

    def get(self, key: str) -> float | None:
        return self._values.get(key)

    def put(self, key: str, value: float) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The line break comes first: a line that was cut off before then costs no other value.
        line = "\n" * self.path.exists() + json.dumps({"key": key, "value": value})
        append_durable(self.path, line.encode())
        self._values[key] = value


@functools.lru_cache
def _open_cache(path: Path) -> ValueCache:
    return ValueCache(path)


def share_calls(
    function: Callable[[Any], float], cache: ValueCache | None
) -> Callable[[Any], float]:
    """Return the function such that it is called once for equal requests, from any thread.

    The function returns a number for a request, a value that JSON can hold. ``cache`` has earlier
    values; None: equal requests share a call only within what is returned.
    """
    calls: dict[str, Future[float]] = {}
    lock = threading.Lock()
    if cache is not None:
        cache.refresh()

    def ask(request: Any) -> float:
        # Two functions may give a request different values.
        asked = [getattr(function, "__qualname__", ""), request]
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        with lock:
            known = cache.get(key) if cache is not None else None
            if known is not None:
                return known
            is_first = key not in calls
            call = calls.setdefault(key, Future())
        if is_first:
            try:
                value = float(function(request))
                if cache is not None and math.isfinite(value):
                    with lock:
                        cache.put(key, value)
                call.set_result(value)
            except BaseException as error:  # those that wait for the same call must not hang
                call.set_exception(error)
        return call.result()

    return ask


def call_all(
    function: Callable[[Item], Value], items: Sequence[Item], concurrency: int, seconds: float
) -> list[Value | BaseException]:
    """Return the results of ``call_each`` in the order of the items."""
    found = dict(call_each(function, items, concurrency, seconds))
    return [found[index] for index in range(len(items))]


def call_each(
    function: Callable[[Item], Value], items: Sequence[Item], concurrency: int, seconds: float
) -> Generator[tuple[int, Value | BaseException]]:
    """Call the function for each item in threads; yield indices and results as they come.

    A result is the function's value, the exception that it raised, or ``TimeoutError``.

    At most ``concurrency`` calls, at least 1, run at once. One that takes longer than ``seconds``
    is left behind in its thread. Once the generator is closed, no further call starts."""
    found: set[int] = set()
    running: dict[int, float] = {}  # the time at which each call started
    left_behind: set[int] = set()
    todo = deque(range(len(items)))
    done: queue.SimpleQueue[tuple[int, Value | BaseException]] = queue.SimpleQueue()

    def work() -> None:
        index = -1
        while index not in left_behind:
            try:
                index = todo.popleft()  # by one thread at a time
            except IndexError:
                return
            running[index] = time.monotonic()
            try:
                done.put((index, function(items[index])))
            except BaseException as error:  # including SystemExit, for which nobody would wait
                done.put((index, error))

    def start_threads(count: int) -> None:
        for _ in range(count):
            threading.Thread(target=work, daemon=True).start()  # must not keep the process alive

    try:
        start_threads(min(concurrency, len(items)))
        while len(found) < len(items):
            first = min(running.copy().values(), default=time.monotonic())
            wait = max(0.0, first + seconds - time.monotonic())
            try:
                results = [done.get(timeout=min(wait, threading.TIMEOUT_MAX))]
            except queue.Empty:
                now = time.monotonic()
                late = [index for index, start in running.copy().items() if start + seconds <= now]
                left_behind.update(late)
                reason = f"it took longer than its limit of {seconds:g} s"
                results = [(index, TimeoutError(reason)) for index in late]
                start_threads(len(late))
            for index, result in results:
                running.pop(index, None)
                if index not in found:  # not the late result of a call that was left behind
                    found.add(index)
                    yield index, result
    finally:
        left_behind.update(range(-1, len(items)))  # nothing more is asked for an interrupted batch
