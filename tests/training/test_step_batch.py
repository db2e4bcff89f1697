"""The batch of a step: its slices, normalizers and masks."""

from dataclasses import replace

import psutil
import pytest
import torch
from accelerate import Accelerator
from groups import make_advantages, make_group

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.model.engine.packing import find_trunks, pack
from vlm_grpo.training import step_batch as batches
from vlm_grpo.training.speed import GIB, memory_metrics
from vlm_grpo.training.step_batch import Rollout, StepAdvantages, StepBatch, has_spread
from vlm_grpo.training.update import pack_step
from vlm_grpo.types import Group

GROUPS = [
    make_group({}, {}, name="a", lengths=[2, 3]),
    make_group({}, {}, {}, name="b", lengths=[1, 4, 2]),
]
ROLLOUT = Rollout(tuple(GROUPS))
REFERENCE = {"beta": 0.1, "reference_refresh_every": "never"}


def pack_groups(rollout: Rollout, advantages: StepAdvantages, *overrides: str) -> StepBatch:
    settings = load_settings("quickstart", ["rollout.max_completion_length=4", *overrides])
    return pack_step(rollout, {}, advantages, {}, settings)


def test_equal_beginnings_are_passed_once():
    long = tuple(range(20))
    tokens = (long, (50, 51), (*long[:12], 60, 61), (50, 52), long, (*long[:12], 60, 62))
    own = tuple(
        replace(GROUPS[0].completions[0], token_ids=t, logprobs=(-1.0,) * len(t)) for t in tokens
    )
    group = replace(GROUPS[0], completions=own, scores=GROUPS[0].scores[:1] * len(own))
    (piece,) = batches.build_slices([GROUPS[1], group], [False] * 3 + [True] * 6)
    assert piece.rows == (3, 5, 7, 8, 4, 6)  # the trunk's members first, for it has the first
    # 12 tokens once, 7 more of each of two equal ones, a token of each of the other two; one each.
    assert piece.num_tokens == len(group.prompt.token_ids) + 12 + 2 * 7 + 2 + 2
    assert [len(s.members) for s in piece.segments] == [4, 1, 1, 1, 1, 1, 1]
    assert find_trunks([long[:10], long]) == (0, 0)  # the last token is not passed: 9 are shared
    assert find_trunks([long[:9], long]) == ()  # not more than a trunk costs
    cut = [p for micro in pack([piece], 40) for p in micro.slices]
    assert sorted(row for part in cut for row in part.rows) == [3, 4, 5, 6, 7, 8]


def test_completions_without_a_gradient_count_in_the_normalizers():
    # Of five completions with 12 tokens; the first has two, and may have four.
    for loss_type, total in (("grpo", 5 * 2), ("dapo", 2 + 3 + 1 + 4 + 2), ("dr_grpo", 5 * 4)):
        advantages = make_advantages(torch.tensor([0.0, 0.0, 1.0, -1.0, 0.0]))
        batch = pack_groups(ROLLOUT, advantages, f"objective.loss_type={loss_type}")
        assert batch.weights["policy"][0].item() == pytest.approx(1 / total)
    assert [piece.rows for piece in batch.slices] == [(2, 3)]
    assert batch.layout.lengths.tolist() == [2, 3, 1, 4, 2]
    assert batch.values["sampler_logprobs"].shape == (12,)
    assert batch.active.all()
    tokens = torch.tensor([0.0, 0.0, 1.0, 0.0, -1.0, *[0.0] * 7])  # of the second completion
    batch = pack_groups(ROLLOUT, make_advantages(torch.zeros(5), tokens))
    assert [piece.rows for piece in batch.slices] == [(1,)]  # it has one though they cancel out


def test_a_rank_without_groups_has_an_empty_batch():
    batch = pack_groups(Rollout(()), make_advantages(torch.zeros(0)))
    assert batch.slices == ()
    assert batch.mini_batches == ((),)
    assert batch.weights["policy"].shape == (0,)
    assert compute([]).own.shape == (0,)
    assert compute([]).step.frac_reward_zero_std == 0


def test_a_mini_batch_has_whole_groups_and_rows_are_numbered_over_the_step():
    rollout = replace(ROLLOUT, mini_batches=(2, 0))
    advantages = make_advantages(torch.tensor([0.0, 1.0, 1.0, -1.0, 0.0]))
    batch = pack_groups(rollout, advantages, "optim.mini_batches=4")
    rows = [[piece.rows for piece in part] for part in batch.mini_batches]
    assert rows == [[(2, 3)], [], [(1,)], []]  # a rank may have no group of a mini-batch
    assert batch.num_updates == 4
    assert batch.weights["policy"][0].item() == pytest.approx(4 / (5 * 2))  # of 5 in all


def compute(groups: list[Group], penalties: list[torch.Tensor] | None = None) -> StepAdvantages:
    """Compute advantages that are the total reward minus the mean of its group."""
    rollout = Rollout(tuple(groups), {"exact": 2.0, "closeness": 1.0})
    scores = {} if penalties is None else {"penalties": torch.cat(penalties)}
    objective = ObjectiveSettings(scale_rewards="none")
    return batches.compute_advantages(rollout, scores, objective, None, Accelerator(cpu=True))


@pytest.mark.parametrize(
    ("rewards", "penalties", "expected"),
    [
        ([((1, 0), (0, 1)), ((1, 1), (0, 0))], None, [0.5, -0.5, 1.5, -1.5]),  # 2 · exact + close
        # Resampling, or a small dataset, gives one example several groups in a step.
        ([((1, 0), (0, 0)), ((0, 1), (0, 1))], None, [1, -1, 0, 0]),
        ([((1, 0), (1, 0))], [torch.tensor([0.2]), torch.tensor([0.6])], [0.2, -0.2]),
        ([((None, 1), (1, 0), (0, 0))], None, [0, 1, -1]),
    ],
)
def test_advantages_are_those_of_the_weighted_rewards(rewards, penalties, expected):
    groups = [make_group(*({"exact": e, "closeness": c} for e, c in own)) for own in rewards]
    result = compute(groups, penalties)
    assert result.own.tolist() == pytest.approx(expected)
    assert torch.equal(result.own, result.step.values)
    assert result.step.unscorable == sum(exact is None for group in rewards for exact, _ in group)
    assert result.step.zero_spread.tolist() == [group == ((0, 1), (0, 1)) for group in rewards]


def test_a_group_has_spread_if_its_advantages_are_not_zero():
    """Dynamic sampling replaces the groups whose advantages the update would find to be 0."""
    plain, weights = ObjectiveSettings(), {"a": 1.0, "b": 1.0, "shown": 0.0}
    rounded = make_group({"a": 0.1, "b": 0.2, "shown": 1}, {"a": 0.3, "b": 0.0, "shown": 2})
    assert 0.1 + 0.2 != 0.3  # one total, rounded twice; a reward of weight 0 is ignored
    assert not has_spread(rounded, weights, plain)
    assert has_spread(make_group({"a": 1.0, "b": 0.0}, {"a": 0.5, "b": 0.0}), weights, plain)
    assert not has_spread(make_group({"a": 1.0, "b": 0.0}, {"a": None, "b": 0.0}), weights, plain)
    # Equal totals of unequal rewards have no spread, unless each reward is normalized.
    swapped = make_group({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0})
    assert not has_spread(swapped, weights, plain)
    each = ObjectiveSettings(normalize_each_reward=True)
    assert has_spread(swapped, weights, each)
    assert not has_spread(make_group({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}), weights, each)


def test_resident_memory_is_in_gib():
    metrics = memory_metrics(torch.device("cpu"))
    assert set(metrics) == {"memory/resident"}
    resident = psutil.Process().memory_info().rss / 2**30
    assert metrics["memory/resident"] == pytest.approx(resident, rel=0.1)


@pytest.mark.gpu
def test_the_peak_of_an_accelerator_is_reset_by_each_call():
    device = torch.device("cuda")
    memory_metrics(device)
    held = torch.zeros(GIB, dtype=torch.uint8, device=device)
    del held
    assert memory_metrics(device)["memory/cuda_peak"] >= 1
    assert memory_metrics(device)["memory/cuda_peak"] < 1


@pytest.mark.parametrize(
    ("rewards", "objective", "shared", "cost"),
    [
        # A prompt of 2 tokens, completions of 3 and 5 that feed 2 and 4: 8 tokens, forward and
        # backward (3 passes).
        ((0, 1), {}, True, 3 * 8),
        ((0, 1), {"num_iterations": 2}, True, 6 * 8),
        ((0, 1), {}, False, 3 * 10),  # the prompt twice
        ((1, 1), {}, True, 0),  # no gradient
        ((1, 1), {"entropy_coef": 0.1}, True, 3 * 8),
        ((1, 1), REFERENCE, True, 4 * 8),  # the KL penalty has a gradient
        ((1, 1), {**REFERENCE, "kl_in": "reward"}, True, 5 * 8),  # it makes the rewards differ
        ((0, 1), {"mask_truncated_completions": True}, True, 3 * 4),
    ],
)
def test_a_group_costs_the_passes_that_it_needs(settings, rewards, objective, shared, cost):
    group = make_group(*({"exact": r} for r in rewards), lengths=(3, 5))
    first, second = group.completions
    group = replace(group, completions=(first, replace(second, stop="length")))
    run = settings(objective=objective)
    assert batches.estimate_cost(group, {"exact": 1.0}, run, shared) == cost
