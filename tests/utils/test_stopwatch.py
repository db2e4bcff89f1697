"""The seconds of phases, with those nested in them."""

import time

import pytest

from vlm_grpo.utils.stopwatch import Stopwatch


def test_a_phase_includes_the_phases_nested_in_it():
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
    before = stopwatch.seconds["inner"]
    with pytest.raises(ZeroDivisionError), stopwatch("inner"):  # adds up, even if it raises
        _ = 1 / 0
    assert (stopwatch.phase, stopwatch.seconds["inner"] > before) == (None, True)
    stopwatch.reset()
    assert stopwatch.seconds == {}
