"""The states of the random number generators survive a round trip through JSON."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from vlm_grpo.training.checkpoint.rng_state import get_rng_states, set_rng_states


def draw() -> list[float]:
    normal = random.gauss(0, 1)  # Python and NumPy keep the second value of a pair in their state
    return [normal, random.random(), np.random.randn(), np.random.rand(), float(torch.rand(()))]


def test_restored_generators_repeat_their_numbers() -> None:
    draw()
    states = json.loads(json.dumps(get_rng_states()))
    first = draw()
    assert draw() != first
    set_rng_states(states)
    assert draw() == first
