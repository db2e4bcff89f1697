"""The batch of a step: its slices, normalizers and masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from groups import make_group, truncate

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.grpo import batch as batch_module
from vlm_grpo.grpo.batch import Rollout, StepBatch, build_slices, pack_step
from vlm_grpo.types import Group

GROUPS = [
    make_group({}, {}, name="a", lengths=[2, 3]),
    make_group({}, {}, {}, name="b", lengths=[1, 4, 2]),
]


def pack_groups(groups: list[Group], advantages: list[float], *overrides: str) -> StepBatch:
    settings = load_settings("quickstart", ["rollout.max_completion_length=4", *overrides])
    reference: Any = {0: torch.zeros(2)}
    rollout, accelerator = Rollout(tuple(groups)), Accelerator(cpu=True)
    return pack_step(rollout, torch.tensor(advantages), reference, settings, accelerator)


def test_slices_hold_the_kept_completions_with_their_rows() -> None:
    slices = build_slices(GROUPS, [False, True, True, False, True])
    assert [piece.rows for piece in slices] == [(1,), (2, 4)]
    assert [piece.prompt for piece in slices] == [group.prompt for group in GROUPS]
    assert [piece.completions for piece in slices] == [((10, 11, 12),), ((0,), (20, 21))]


def test_groups_without_kept_completions_are_left_out() -> None:
    slices = build_slices(GROUPS, [False, False, True, True, True])
    assert [piece.rows for piece in slices] == [(2, 3, 4)]
    assert build_slices(GROUPS, [False] * 5) == ()


def test_completions_without_a_gradient_count_in_the_normalizers() -> None:
    batch = pack_groups(GROUPS, [0.0, 0.0, 1.0, -1.0, 0.0])
    assert [piece.rows for piece in batch.slices] == [(2, 3)]
    assert batch.totals.completions == 5
    assert batch.totals.active_tokens == 2 + 3 + 1 + 4 + 2
    assert batch.totals.max_completion_length == 4
    assert [len(logprobs) for logprobs in batch.sampler_logprobs] == [2, 3, 1, 4, 2]
    assert batch.active.all()


def test_normalizers_are_summed_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_equal_rank(accelerator: Accelerator, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor *= 2

    monkeypatch.setattr(batch_module, "sum_over_ranks", add_equal_rank)
    totals = pack_groups(GROUPS, [1.0] * 5).totals
    assert (totals.completions, totals.active_tokens) == (2 * 5, 2 * 12)
    assert totals.max_completion_length == 4


def test_truncated_completions_are_masked_only_if_requested() -> None:
    groups, advantages = [GROUPS[0], truncate(GROUPS[1], 1)], [1.0, -1.0, 1.0, -1.0, 0.5]
    batch = pack_groups(groups, advantages)
    assert batch.active.all()
    assert batch.totals.active_tokens == 12
    batch = pack_groups(groups, advantages, "objective.mask_truncated_completions=true")
    assert batch.active.tolist() == [True, True, True, False, True]
    assert [piece.rows for piece in batch.slices] == [(0, 1), (2, 4)]
    assert batch.totals.completions == 5
    assert batch.totals.active_tokens == 12 - 4


def test_a_rank_without_groups_has_an_empty_batch() -> None:
    batch = pack_groups([], [])
    assert batch.slices == ()
    assert batch.mini_batches == ((),)
    assert batch.totals.completions == 0


def test_a_mini_batch_has_whole_groups_and_rows_are_numbered_over_the_step() -> None:
    rollout = Rollout(tuple(GROUPS), mini_batches=(2, 0))
    overrides = ["rollout.max_completion_length=4", "optim.mini_batches=4"]
    settings = load_settings("quickstart", overrides)
    advantages = torch.tensor([0.0, 1.0, 1.0, -1.0, 0.0])
    batch = pack_step(rollout, advantages, {}, settings, Accelerator(cpu=True))
    rows = [[piece.rows for piece in part] for part in batch.mini_batches]
    assert rows == [[(2, 3)], [], [(1,)], []]  # a rank may have no group of a mini-batch
    assert (batch.totals.completions, batch.num_updates) == (5, 4)
