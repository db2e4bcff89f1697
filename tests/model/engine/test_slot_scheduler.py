"""The scheduler gives every completion a place, and its prompt a slot."""

from typing import Any

import numpy as np
import pytest
import torch

from vlm_grpo.model.engine.slot_scheduler import SlotScheduler


def test_empty_slots_have_as_many_tokens_as_parts():
    scheduler = SlotScheduler(np.array([5, 7]), [2, 2], slots=2, places=2)
    scheduler.admit()  # the completions of one prompt fill all places
    _, lengths, *_ = scheduler.build_index([(4, 2)], torch.device("cpu"), parts=3)
    assert lengths.tolist() == [7, 3]


@pytest.mark.parametrize(("slots", "places"), [(1, 2), (2, 3), (3, 4), (6, 24)])
def test_every_completion_gets_a_place_beside_its_prompt(slots, places):
    """A place is free for another completion, of any prompt, as soon as its own is finished."""
    random = np.random.default_rng(0)
    scheduler = SlotScheduler(np.array([5, 3, 1, 6, 2, 4]), [4] * 6, slots, places)
    left = random.integers(1, 9, 24)  # steps until each completion is finished
    started: list[int] = []
    steps = 0
    while not scheduler.is_empty:
        new_slots, _ = scheduler.admit()
        started += scheduler.prompts[new_slots].tolist()
        waiting = 24 - int((left <= 0).sum()) - int((scheduler.rows >= 0).sum())
        free_slots = int((scheduler.prompts < 0).sum())
        assert not waiting or not free_slots or (scheduler.rows >= 0).all()
        kept = scheduler.shrink(0.5)
        assert kept is None or not waiting
        used = np.flatnonzero(scheduler.rows >= 0)
        assert len(set(scheduler.rows[used])) == len(used)
        found = scheduler.prompts[scheduler.find_slots(used)]
        assert (found == scheduler.rows[used] // 4).all()
        left[scheduler.rows[used]] -= 1
        scheduler.release(left > 0)
        steps += 1
    assert started == [3, 0, 5, 1, 4, 2]
    assert (left == 0).all()
    assert steps < 60 * 4 / places + 9


def test_empty_places_are_given_up_when_none_waits_but_an_empty_slot_is_kept_beside_the_first():
    scheduler = SlotScheduler(np.array([2, 1]), [4] * 2, 2, 8)
    scheduler.admit()
    assert scheduler.shrink(0.5) is None
    for active, slots, places in (([2, 4], [0, 1], [2, 4]), ([4], [1], [1])):
        scheduler.release(np.isin(np.arange(8), active))
        kept: Any = scheduler.shrink(0.5)
        assert (kept[0].tolist(), kept[1].tolist()) == (slots, places)
        assert scheduler.rows.tolist() == active
    scheduler = SlotScheduler(np.array([3, 2, 1]), [2] * 3, 3, 6)
    scheduler.admit()
    scheduler.release(np.isin(np.arange(6), [0, 4]))
    kept = scheduler.shrink(0.5)
    assert [part.tolist() for part in kept] == [[0, 2, 1], [0, 4, 1]]
    assert scheduler.prompts.tolist() == [0, 2, -1]
