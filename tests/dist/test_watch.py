"""Late ranks are found, named once, and end all; ranks that are even are left alone."""

from __future__ import annotations

import json
import os
import time
from typing import Any, NoReturn

import pytest
from processes import wait_for
from torch.distributed import HashStore  # type: ignore[attr-defined]

from vlm_grpo.dist.collectives import COLLECTIVES
from vlm_grpo.dist.watch import RankWatch


def make_watch(monkeypatch: pytest.MonkeyPatch, timeout: float = 0.1) -> RankWatch:
    """Build the watch of rank 0 of 3, which has reached exchange 5."""

    def end(status: int) -> NoReturn:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(COLLECTIVES, "count", 5)
    watch = RankWatch(HashStore(), 0, 3, timeout)
    watch.place = lambda: "in phase step"
    return watch


def publish(watch: RankWatch, rank: int, reached: int, beats: int = 1) -> None:
    sign = {"beats": beats, "reached": reached, "place": "in phase reward", "host": "node"}
    watch.store.set(str(rank), json.dumps(sign))


def test_late_ranks_are_named(monkeypatch, capsys):
    watch = make_watch(monkeypatch)
    publish(watch, 1, reached=4)  # rank 2 has not started
    started = time.monotonic()
    with pytest.raises(SystemExit, match="2"):
        watch._run()  # noqa: SLF001
    assert time.monotonic() - started > 0.1
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "error: 2 of 3 processes did not arrive within ddp_timeout=0.1 s:",
        "  rank 1 on node: in phase reward; its process does not respond",
        "  rank 2 on ?: starting; its process does not respond",
    ]
    assert lines[3].startswith("The others wait for them (in phase step).")
    # The other ranks end without a message.
    with pytest.raises(SystemExit, match="2"):
        watch._run()  # noqa: SLF001
    assert capsys.readouterr().err == ""


def test_a_rank_that_arrives_at_the_last_moment_ends_nothing(monkeypatch, capsys):
    watch = make_watch(monkeypatch)
    for rank in (1, 2):
        publish(watch, rank, reached=4 + rank // 2)

    def arrive(_: float) -> None:
        publish(watch, 1, reached=5)
        watch._stopped.set()  # noqa: SLF001

    monkeypatch.setattr(time, "sleep", arrive)
    watch._run()  # noqa: SLF001
    assert capsys.readouterr().err == ""
    assert watch.store.add("claims", 0) == 0


def test_ranks_that_work_as_long_as_this_one_are_not_late(monkeypatch):
    watch = make_watch(monkeypatch, timeout=0.05)
    for rank, reached in ((1, 5), (2, 7)):
        publish(watch, rank, reached)

    def read_sign() -> Any:
        return json.loads(watch.store.get("0"))

    with watch:
        time.sleep(0.2)  # longer than the timeout
        wait_for(lambda: read_sign()["beats"] > 10)
    sign = read_sign()
    assert (sign["reached"], sign["place"]) == (5, "in phase step")
    assert not watch.store.check(["end"])
