"""A watch over the ranks, which names the one that the others wait for."""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import PartialState
from torch.distributed import Store  # type: ignore[attr-defined]

from vlm_grpo.dist.collectives import COLLECTIVES, explain_lost_rank
from vlm_grpo.dist.launch import connect_store

LONGEST_BEAT = 5.0
"""Seconds between two heartbeats of a rank, or a tenth of the timeout if that is less."""


class RankWatch:
    """A thread that publishes this rank's progress, and ends a run in which a rank is late.

    All ranks make the same collectives in the same order, so the number that a rank has reached
    says how far it is, with every backend. A rank is late if it has not reached a collective
    ``timeout`` seconds after another one. The waiting ranks may be inside a kernel, where no
    exception reaches them, so the thread ends their processes, with status 2. ``store`` is the
    ranks' key-value store, on a connection of its own; ``place`` describes this rank's work."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self.store, self.rank, self.world_size, self.timeout = store, rank, world_size, timeout
        self.place: Callable[[], str] = lambda: "loading"
        self.beat = min(LONGEST_BEAT, timeout / 10)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def __enter__(self) -> RankWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        beats, reached, since = 0, -1, 0.0
        try:
            while not self._stopped.wait(self.beat):
                beats += 1
                if COLLECTIVES.count != reached:
                    reached, since = COLLECTIVES.count, time.monotonic()
                sign = {"beats": beats, "reached": reached, "place": self.place()}
                self.store.set(str(self.rank), json.dumps({**sign, "host": platform.node()}))
                if self.store.check(["end"]):
                    os._exit(2)
                is_long = time.monotonic() - since > self.timeout
                if is_long and self._find_late(reached) and self.store.add("claims", 1) == 1:
                    self._end(reached)
        except RuntimeError:  # the store is gone: its process has died, which the launcher reports
            return

    def _find_late(self, reached: int) -> dict[int, dict[str, Any]]:
        """Return the last heartbeats of the ranks that have not reached a collective."""
        signs = {}
        for rank in range(self.world_size):
            key, sign = str(rank), {"beats": 0, "reached": -1, "place": "starting", "host": "?"}
            signs[rank] = json.loads(self.store.get(key)) if self.store.check([key]) else sign
        return {rank: sign for rank, sign in signs.items() if sign["reached"] < reached}

    def _end(self, reached: int) -> None:
        """End all ranks, unless the late ones have arrived in the meantime."""
        before = self._find_late(reached)
        time.sleep(3 * self.beat)
        late = self._find_late(reached)
        if not late:
            self.store.add("claims", -1)
            return
        lines = [
            f"  rank {rank} on {sign['host']}: {sign['place']}"
            + ("" if sign["beats"] > before[rank]["beats"] else "; its process does not respond")
            for rank, sign in late.items()
        ]
        print(
            f"error: {len(late)} of {self.world_size} processes did not arrive within "
            f"ddp_timeout={self.timeout:g} s:",
            *lines,
            f"The others wait for them ({self.place()}). Find out why they are slow, or raise "
            "ddp_timeout if that work takes so long. Finished checkpoints are intact: resume=true "
            "continues from the newest one",
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
        self.store.set("end", "")
        time.sleep(3 * self.beat)  # otherwise the others would report that this process has died
        os._exit(2)


@contextmanager
def watch_ranks(timeout: float) -> Iterator[RankWatch]:
    """Watch the ranks of a launch inside, and explain the errors of lost ones.

    A rank that the others wait for ends the run after ``timeout`` seconds.
    """
    state = PartialState()
    rank, world_size = state.process_index, state.num_processes
    store: Any = connect_store("watch", timeout) if world_size > 1 else None
    watch = RankWatch(store, rank, world_size, timeout)
    with explain_lost_rank():
        if world_size == 1:
            yield watch
            return
        with watch:
            yield watch
