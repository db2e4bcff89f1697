"""Advantages from outcome rewards: one number per completion, from the rewards of its group.

An estimator of this kind is a baseline and a scale. An estimator that gives every token its own
advantage (GAE with a critic) needs values per token, not groups: it would stand beside this
module and fill ``TokenBatch.token_advantages``; the losses take either.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it (TRL's value)."""


@dataclass(frozen=True)
class Advantages:
    """Advantages of n completions in g groups, and what is known of the groups.

    Attributes:
        values: one per completion; exactly 0 where there is nothing to learn from.
        group: index in 0..g−1 of each completion's group, in the order of first appearance.
        group_means: mean of the scorable rewards; NaN in a group without any.
        group_stds: their standard deviation (ddof 1); 0 in a group with fewer than two.
        zero_spread: groups whose advantages are all 0: equal rewards, or fewer than two
            scorable completions.
        scorable: completions that have a reward.
    """

    values: Float[Tensor, " n"]
    group: Int[Tensor, " n"]
    group_means: Float[Tensor, " g"]
    group_stds: Float[Tensor, " g"]
    zero_spread: Bool[Tensor, " g"]
    scorable: Bool[Tensor, " n"]

    @property
    def frac_reward_zero_std(self) -> float:
        """Share of the groups that teach nothing."""
        return self.zero_spread.double().mean().item() if len(self.zero_spread) else 0.0

    @property
    def unscorable(self) -> int:
        """How many completions have no reward."""
        return int((~self.scorable).sum())


@dataclass(frozen=True)
class _Groups:
    """Moments of one reward in each group, in float64."""

    index: Int[Tensor, " n"]
    sizes: Float[Tensor, " g"]
    means: Float[Tensor, " g"]
    stds: Float[Tensor, " g"]
    zero_spread: Bool[Tensor, " g"]


Baseline = Callable[
    [Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, " n"]], Float[Tensor, " n"]
]
"""(rewards, their group's mean, their group's scorable size) → baseline of each reward."""


def group_mean(rewards: Tensor, means: Tensor, sizes: Tensor) -> Tensor:
    """The mean of the group, the completion itself included (DeepSeekMath, arXiv:2402.03300)."""
    return means


def leave_one_out(rewards: Tensor, means: Tensor, sizes: Tensor) -> Tensor:
    """The mean of the group's other completions (RLOO; Ahmadian et al., arXiv:2402.14740).

    It does not depend on the completion whose baseline it is, so the gradient stays unbiased.
    """
    return (sizes * means - rewards) / (sizes - 1).clamp(min=1)


ADVANTAGE_ESTIMATORS: Mapping[str, Baseline] = {"grpo": group_mean, "rloo": leave_one_out}


def group_advantages(
    rewards: Float[Tensor, " n"],
    group_ids: Sequence[Hashable] | Int[Tensor, " n"],
    *,
    estimator: str = "grpo",
    scale_rewards: str = "group",
) -> Advantages:
    """A_i = (r_i − baseline_i) / (std + 1e-4), std with ddof 1 (arXiv:2402.03300, section 4.1.2).

    Groups are found by id: their order and sizes are free. A completion without a reward counts
    for nothing, neither in the mean nor in the deviation, and gets 0. So does every completion of
    a group with fewer than two rewards, or whose rewards are all equal. The step's completions
    must all be here, those of other ranks too, or groups and the batch's deviation are partial.

    Args:
        rewards: total reward per completion, NaN where it has none (unscorable).
        group_ids: the group of each completion, n of them.
        estimator: a name in ``ADVANTAGE_ESTIMATORS``.
        scale_rewards: divide by the deviation of the ``group``, of the ``batch``, or by 1
            (``none``; "Dr. GRPO", arXiv:2503.20783).

    Raises:
        ValueError: an infinite reward, another number of ids than rewards, or an unknown name.
    """
    scorable = _scorable(rewards, group_ids)
    index, count = _group_index(group_ids, rewards.device)
    groups = _moments(rewards, scorable, index, count)
    values = _centred(rewards, scorable, groups, estimator)
    if scale_rewards == "group":
        values = values / (groups.stds[index] + EPSILON)
    elif scale_rewards == "batch":
        values = values / (_std(rewards.double()[scorable]) + EPSILON)
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards is {scale_rewards!r}; it is group, batch or none")
    return Advantages(
        values.to(rewards.dtype),
        index,
        groups.means.to(rewards.dtype),
        groups.stds.to(rewards.dtype),
        groups.zero_spread,
        scorable,
    )


def per_reward_advantages(
    rewards: Float[Tensor, "n k"],
    weights: Float[Tensor, " k"],
    group_ids: Sequence[Hashable] | Int[Tensor, " n"],
    *,
    estimator: str = "grpo",
) -> Advantages:
    """Normalise each reward in its group, sum by weight, divide by the batch's deviation (GDPO).

    Summing first lets a reward with a wide spread drown the others, and maps different
    combinations to one total; normalising first keeps them apart (GDPO, arXiv:2601.05242).
    The sum needs no centring over the batch: it is 0 in each group already.

    Args:
        rewards: k rewards per completion, NaN where one could not be computed; a NaN under
            a weight other than 0 makes the completion unscorable.
        weights: of the rewards.
        group_ids: the group of each completion, n of them.
        estimator: a name in ``ADVANTAGE_ESTIMATORS``.

    Returns:
        The advantages; ``group_means`` and ``group_stds`` are those of the weighted sum of the
        raw rewards, and a group has zero spread when each of its weighted rewards has.

    Raises:
        ValueError: as in ``group_advantages``.
    """
    used = rewards[:, weights != 0]
    total = (used * weights[weights != 0]).sum(dim=1)
    scorable = _scorable(total, group_ids)
    index, count = _group_index(group_ids, rewards.device)
    values = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    zero_spread = torch.ones(count, dtype=torch.bool, device=rewards.device)
    for reward, weight in zip(used.unbind(1), weights[weights != 0].double(), strict=True):
        groups = _moments(reward, scorable, index, count)
        centred = _centred(reward, scorable, groups, estimator)
        values = values + weight * centred / (groups.stds[index] + EPSILON)
        zero_spread = zero_spread & groups.zero_spread
    values = values / (_std(values[scorable]) + EPSILON)
    groups = _moments(total, scorable, index, count)
    return Advantages(
        values.to(rewards.dtype),
        index,
        groups.means.to(rewards.dtype),
        groups.stds.to(rewards.dtype),
        zero_spread,
        scorable,
    )


def _scorable(
    rewards: Float[Tensor, " n"], group_ids: Sequence[Hashable] | Tensor
) -> Bool[Tensor, " n"]:
    if len(group_ids) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards but {len(group_ids)} group ids")
    if torch.isinf(rewards).any():
        raise ValueError("a reward is infinite; give NaN for a completion without a reward")
    return ~torch.isnan(rewards)


def _group_index(
    group_ids: Sequence[Hashable] | Tensor, device: torch.device
) -> tuple[Int[Tensor, " n"], int]:
    ids = group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids
    order: dict[Hashable, int] = {}
    index = [order.setdefault(group, len(order)) for group in ids]
    return torch.tensor(index, dtype=torch.long, device=device), len(order)


def _moments(
    rewards: Float[Tensor, " n"], scorable: Bool[Tensor, " n"], index: Int[Tensor, " n"], count: int
) -> _Groups:
    """Mean and deviation by group, in two passes so that the deviation of equal rewards is 0."""
    kept, values = index[scorable], rewards.double()[scorable]
    zeros = values.new_zeros(count)
    sizes = zeros.index_add(0, kept, torch.ones_like(values))
    means = zeros.index_add(0, kept, values) / sizes  # 0 / 0 is NaN: no reward, no mean
    squares = zeros.index_add(0, kept, (values - means[kept]) ** 2)
    highest = zeros.scatter_reduce(0, kept, values, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, kept, values, "amin", include_self=False)
    # The same total summed in another order (0.1 + 0.2, 0.3) differs by a rounding error, which
    # is no difference in reward. Groups with one reward or none have no spread either.
    rounding = 4 * torch.finfo(rewards.dtype).eps * torch.maximum(highest.abs(), lowest.abs())
    zero_spread = highest - lowest <= rounding
    stds = torch.where(zero_spread, zeros, (squares / (sizes - 1).clamp(min=1)).sqrt())
    return _Groups(index, sizes, means, stds, zero_spread)


def _centred(
    rewards: Float[Tensor, " n"], scorable: Bool[Tensor, " n"], groups: _Groups, estimator: str
) -> Float[Tensor, " n"]:
    """Reward minus baseline, exactly 0 where there is nothing to compare; float64."""
    if estimator not in ADVANTAGE_ESTIMATORS:
        raise ValueError(
            f"advantage_estimator is {estimator!r}; it is one of {', '.join(ADVANTAGE_ESTIMATORS)}"
        )
    values = rewards.double()
    baseline = ADVANTAGE_ESTIMATORS[estimator](
        values, groups.means[groups.index], groups.sizes[groups.index]
    )
    silent = groups.zero_spread[groups.index] | ~scorable
    return torch.where(silent, torch.zeros_like(values), values - baseline)


def _std(values: Float[Tensor, " m"]) -> Float[Tensor, ""]:
    return values.std(correction=1) if len(values) > 1 else values.new_zeros(())
