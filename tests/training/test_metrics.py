"""Metrics of a rollout, and the log that a resumed run continues."""

import math
from dataclasses import replace

import groups
import pytest
from report_runs import load_few_examples, make_group

from vlm_grpo.task.registry import load_task
from vlm_grpo.training.metrics import group_metrics, rollout_distributions
from vlm_grpo.types import Example, Group

TASK = load_task("counting", tags=True)


@pytest.fixture(scope="module")
def example() -> Example:
    return load_few_examples("counting", TASK)[0]


def add_noise(group: Group) -> Group:
    """Let the last completion be of another form of the prompt, where its entropy was high."""
    *own, last = group.completions
    noisy = replace(last, variant=("noise", 7), entropies=(9.0,))
    return replace(group, completions=(*own, noisy))


def test_group_metrics_count_rewards_lengths_and_truncations(example):
    gold, truncated = TASK.gold(example), "<answer>"
    values = group_metrics([make_group(TASK, example, [gold, truncated])]).values(empty=math.nan)
    # The helper makes a token of each letter, and stops at a closing tag.
    lengths = {"min": len(truncated), "max": len(gold), "mean": (len(truncated) + len(gold)) / 2}
    expected = {f"completions/{name}_length": value for name, value in lengths.items()}
    expected |= {"completions/clipped_ratio": 0.5, "completions/answered": 0.5}
    expected |= {"rewards/exact/mean": 0.5, "rewards/exact/failed": 0}
    expected["rewards/exact/std"] = pytest.approx(math.sqrt(0.5))
    assert {name: values[name] for name in expected} == expected
    values = group_metrics([]).values(empty=math.nan)
    assert set(values) >= {"reward", "entropy", "completions/mean_length"}
    assert all(math.isnan(value) for value in values.values())


def test_wide_groups_have_pass_at_k_and_narrow_ones_do_not(example):
    gold = TASK.gold(example)
    groups = [make_group(TASK, example, [gold] * c + ["<answer>"] * (17 - c)) for c in (1, 4)]
    groups = [*map(add_noise, groups)]
    narrow = make_group(TASK, example, [gold] * 15)
    values = group_metrics([*groups, narrow], metric="exact").values()
    assert [n for n in values if n.startswith("pass")] == [f"pass_at_{2**n}" for n in range(5)]
    assert values["pass_at_1"] == (1 / 16 + 4 / 16) / 2
    # 1 - C(15, 2) / C(16, 2) and 1 - C(12, 2) / C(16, 2)
    assert values["pass_at_2"] == pytest.approx((1 - 105 / 120 + 1 - 66 / 120) / 2)
    assert values["pass_at_16"] == 1
    assert not any(name.startswith("pass") for name in group_metrics(groups).values())


def test_completions_from_behind_noise_have_a_reward_of_their_own_and_no_entropy(example):
    gold = TASK.gold(example)
    clean = make_group(TASK, example, [gold, "<answer>", gold])
    pairs = [clean, clean], [clean, add_noise(clean)]
    before, values = (group_metrics(pair).values() for pair in pairs)
    assert not {"noise/reward", "noise/clean_reward"} & before.keys()
    assert (values["noise/reward"], values["noise/clean_reward"]) == (1.0, 0.5)
    assert values["reward"] == before["reward"]
    assert values["entropy"] < 9.0 / 7  # no part of the noisy one's


def test_distributions_have_all_values_of_few_completions_and_quantiles_of_many(example):
    gold = TASK.gold(example)
    found = rollout_distributions([make_group(TASK, example, [gold, "<answer>", gold])])
    assert found["reward"] == [0.0, 1.0, 1.0]
    assert found["completions/length"] == [8, len(gold), len(gold)]
    assert rollout_distributions([]) == {"reward": [], "completions/length": []}
    groups = [make_group(TASK, example, ["x" * n for n in range(128)]) for _ in range(5)]
    lengths = rollout_distributions(groups)["completions/length"]
    # Each of 64 values stands for 10 of 640, of which it is one in the middle: five of each length.
    assert lengths == [2 * i + 1 for i in range(64)]


def test_the_entropy_of_an_outside_sampler_is_estimated_from_its_log_probs():
    group = groups.make_group({"exact": 1.0}, {"exact": 0.0}, lengths=[3, 1])  # of −0.5 each
    assert group_metrics([group]).values()["entropy"] == 0.5
    first, second = group.completions
    known = replace(group, completions=(replace(first, entropies=(1.0, 2.0, 3.0)), second))
    assert group_metrics([known]).values()["entropy"] == pytest.approx(6.5 / 4)
