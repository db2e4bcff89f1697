"""The batch of a step: its slices, normalizers and masks."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from groups import make_advantages, make_group, truncate

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.model.engine.batch import MicroBatch
from vlm_grpo.model.engine.logprobs import TokenScores
from vlm_grpo.training import update as update_module
from vlm_grpo.training.batch import Rollout, StepBatch, TokenLayout, build_slices
from vlm_grpo.training.update import pack_step
from vlm_grpo.types import Group

GROUPS = [
    make_group({}, {}, name="a", lengths=[2, 3]),
    make_group({}, {}, {}, name="b", lengths=[1, 4, 2]),
]


def pack_groups(groups: list[Group], advantages: list[float], *overrides: str) -> StepBatch:
    settings = load_settings("quickstart", ["rollout.max_completion_length=4", *overrides])
    rollout, accelerator = Rollout(tuple(groups)), Accelerator(cpu=True)
    own = make_advantages(torch.tensor(advantages))
    return pack_step(rollout, {}, own, {}, settings, accelerator)


def read_totals(groups: list[Group], advantages: list[float], *overrides: str) -> tuple[int, ...]:
    """Return the totals in the first token's weights: completions, active tokens, length limit."""
    weights = [
        pack_groups(groups, advantages, f"objective.loss_type={name}", *overrides).weights["policy"]
        for name in ("grpo", "dapo", "dr_grpo")
    ]
    mean, tokens, constant = (1 / weight[0].item() for weight in weights)
    completions = mean / len(groups[0].completions[0].token_ids)
    return round(completions), round(tokens), round(constant / completions)


def test_slices_hold_the_kept_completions_with_their_rows():
    slices = build_slices(GROUPS, [False, True, True, False, True])
    assert [piece.rows for piece in slices] == [(1,), (2, 4)]
    assert [piece.prompt for piece in slices] == [group.prompt for group in GROUPS]
    assert [piece.completions for piece in slices] == [((10, 11, 12),), ((0,), (20, 21))]


def test_groups_without_kept_completions_are_left_out():
    slices = build_slices(GROUPS, [False, False, True, True, True])
    assert [piece.rows for piece in slices] == [(2, 3, 4)]
    assert build_slices(GROUPS, [False] * 5) == ()


def test_completions_without_a_gradient_count_in_the_normalizers():
    batch = pack_groups(GROUPS, [0.0, 0.0, 1.0, -1.0, 0.0])
    assert [piece.rows for piece in batch.slices] == [(2, 3)]
    assert read_totals(GROUPS, [0.0, 0.0, 1.0, -1.0, 0.0]) == (5, 2 + 3 + 1 + 4 + 2, 4)
    assert batch.layout.lengths.tolist() == [2, 3, 1, 4, 2]
    assert batch.values["sampler_logprobs"].shape == (12,)
    assert batch.active.all()


def test_normalizers_are_summed_over_ranks(monkeypatch):
    def add_equal_rank(accelerator: Accelerator, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor *= 2

    monkeypatch.setattr(update_module, "sum_over_ranks", add_equal_rank)
    assert read_totals(GROUPS, [1.0] * 5) == (2 * 5, 2 * 12, 4)


def test_truncated_completions_are_masked_only_if_requested():
    groups, advantages = [GROUPS[0], truncate(GROUPS[1], 1)], [1.0, -1.0, 1.0, -1.0, 0.5]
    assert pack_groups(groups, advantages).active.all()
    assert read_totals(groups, advantages) == (5, 12, 4)
    batch = pack_groups(groups, advantages, "objective.mask_truncated_completions=true")
    assert batch.active.tolist() == [True, True, True, False, True]
    assert [piece.rows for piece in batch.slices] == [(0, 1), (2, 4)]
    assert batch.weights["policy"][3] == 0
    mask = "objective.mask_truncated_completions=true"
    assert read_totals(groups, advantages, mask) == (5, 12 - 4, 4)


def test_a_rank_without_groups_has_an_empty_batch():
    batch = pack_groups([], [])
    assert batch.slices == ()
    assert batch.mini_batches == ((),)
    assert batch.weights["policy"].shape == (0,)


def test_a_mini_batch_has_whole_groups_and_rows_are_numbered_over_the_step():
    rollout = Rollout(tuple(GROUPS), mini_batches=(2, 0))
    overrides = ["rollout.max_completion_length=4", "optim.mini_batches=4"]
    settings = load_settings("quickstart", overrides)
    advantages = make_advantages(torch.tensor([0.0, 1.0, 1.0, -1.0, 0.0]))
    batch = pack_step(rollout, {}, advantages, {}, settings, Accelerator(cpu=True))
    rows = [[piece.rows for piece in part] for part in batch.mini_batches]
    assert rows == [[(2, 3)], [], [(1,)], []]  # a rank may have no group of a mini-batch
    assert batch.num_updates == 4
    assert batch.weights["policy"][0].item() == pytest.approx(4 / (5 * 2))  # of 5 in all


def test_a_completion_whose_tokens_cancel_out_has_a_gradient():
    advantages = make_advantages(torch.zeros(5), torch.tensor([1.0, -1.0, *[0.0] * 10]))
    settings = load_settings("quickstart", ["rollout.max_completion_length=4"])
    rollout = Rollout(tuple(GROUPS))
    batch = pack_step(rollout, {}, advantages, {}, settings, Accelerator(cpu=True))
    assert [piece.rows for piece in batch.slices] == [(0,)]


def test_every_input_of_the_loss_is_that_of_its_completion():
    numbers, layout = torch.arange(5.0), TokenLayout.of([2, 3, 1, 4, 2])
    by_token = numbers.repeat_interleave(torch.tensor(layout.lengths))
    slices = build_slices(GROUPS, [False, True, False, True, True])
    values = {"sampler_logprobs": by_token, "reference_logprobs": by_token, "own": by_token}
    behind, weights = numbers == 1, {"policy": numbers}
    batch = StepBatch((slices,), layout, numbers, numbers > 3, weights, values, 1, None, behind)
    scores = TokenScores(torch.zeros(9, dtype=torch.float64), None, None)
    tokens = batch.select(MicroBatch(slices), torch.device("cpu")).join(scores, by_token)
    expected = torch.tensor([1.0] * 3 + [3.0] * 4 + [4.0] * 2, dtype=torch.float64)
    assert tokens.old_logprobs is not None
    for found in (
        tokens.weights["policy"],
        tokens.old_logprobs,
        tokens.sampler_logprobs,
        tokens.reference_logprobs,
        tokens.scores["own"],
        tokens.advantages[tokens.completion],
    ):
        assert found is not None
        assert found.equal(expected)
    assert tokens.lengths.tolist() == [3, 4, 2]
    assert tokens.active is not None
    assert tokens.active.tolist() == [False, False, True]
    assert tokens.behind_variant is not None
    assert tokens.behind_variant.tolist() == [True, False, False]
