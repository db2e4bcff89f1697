"""Advantages from outcome rewards.

Group estimators are a baseline and a scale: one number per completion, from the rewards of its
group. Step estimators see all completions of a step, and may give each token its own advantage.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it (TRL's value)."""


@dataclass(frozen=True)
class Advantages:
    """Advantages of n completions, and statistics of their g groups by first appearance."""

    values: Float[Tensor, " n"]  # of each completion; exactly 0 where the group gives no signal
    # standard deviation (ddof 1) of each group's scorable rewards; 0 with fewer than two of them
    group_stds: Float[Tensor, " g"]
    # True for a group whose advantages are 0: with equal rewards, or fewer than two scorable ones
    zero_spread: Bool[Tensor, " g"]
    scorable: Bool[Tensor, " n"]  # True for a completion that has a reward
    # (T,) advantages of each completion's tokens, whose means are ``values``; None: all are alike
    tokens: tuple[Tensor, ...] | None = None

    @property
    def frac_reward_zero_std(self) -> float:
        return self.zero_spread.double().mean().item() if len(self.zero_spread) else 0.0

    @property
    def unscorable(self) -> int:
        return int((~self.scorable).sum())


@dataclass(frozen=True)
class _Groups:
    """Mean and deviation of a reward by group, in float64; ``sizes`` counts scorable rewards."""

    index: Int[Tensor, " n"]
    sizes: Float[Tensor, " g"]
    means: Float[Tensor, " g"]
    stds: Float[Tensor, " g"]
    zero_spread: Bool[Tensor, " g"]


Baseline = Callable[
    [Float[Tensor, " n"], Float[Tensor, " n"], Float[Tensor, " n"]], Float[Tensor, " n"]
]
"""Maps rewards, and the mean and number of scorable rewards of each one's group, to baselines."""


def group_mean(rewards: Tensor, means: Tensor, sizes: Tensor) -> Tensor:
    """Return the group's mean, the completion itself included (DeepSeekMath, arXiv:2402.03300)."""
    return means


def leave_one_out(rewards: Tensor, means: Tensor, sizes: Tensor) -> Tensor:
    """Return the mean of the group's other rewards (RLOO; Ahmadian et al., arXiv:2402.14740).

    The baseline does not depend on its own completion, so the gradient stays unbiased.
    """
    return (sizes * means - rewards) / (sizes - 1).clamp(min=1)


ADVANTAGE_ESTIMATORS: Mapping[str, Baseline] = {"grpo": group_mean, "rloo": leave_one_out}
"""The group estimators."""


@dataclass(frozen=True)
class AdvantageInputs:
    """What a step estimator computes advantages from: the scorable completions of all ranks."""

    rewards: Float[Tensor, " n"]  # total reward of each completion, without KL penalties
    groups: Int[Tensor, " n"]  # index in 0..g−1 of each completion's group
    lengths: Int[Tensor, " n"]  # number of tokens of each completion
    # (T,) KL penalties of each completion's tokens; None without a KL in the reward
    penalties: Sequence[Tensor] | None = None

    @property
    def group_means(self) -> Float[Tensor, " n"]:
        """The mean reward of each completion's group."""
        zeros = self.rewards.new_zeros(int(self.groups.max()) + 1 if len(self.groups) else 0)
        sums = zeros.index_add(0, self.groups, self.rewards)
        counts = zeros.index_add(0, self.groups, torch.ones_like(self.rewards))
        return (sums / counts)[self.groups]


StepEstimator = Callable[[AdvantageInputs], Tensor | Sequence[Tensor]]
"""Computes one advantage per completion, (n,), or (T,) advantages for each completion."""


def reinforce_plus_plus(inputs: AdvantageInputs) -> Tensor | Sequence[Tensor]:
    """Compute (R − mean(R)) / std(R) over all tokens of the step (REINFORCE++, arXiv:2501.03262).

    R of a token is the reward less the KL penalties of the token and of those after it.
    """
    return _whiten(inputs.rewards, inputs)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Tensor | Sequence[Tensor]:
    """Compute ``reinforce_plus_plus`` of rewards less the mean of their group."""
    return _whiten(inputs.rewards - inputs.group_means, inputs)


def _whiten(rewards: Tensor, inputs: AdvantageInputs) -> Tensor | Sequence[Tensor]:
    """Normalize the returns over all tokens; 1e-8 is added to the variance, as in verl."""
    counts = inputs.lengths.to(rewards)
    if inputs.penalties is None:
        returns, weights = [rewards], [counts]
    else:
        returns = [
            reward - penalty.to(rewards).flip(0).cumsum(0).flip(0)
            for reward, penalty in zip(rewards, inputs.penalties, strict=True)
        ]
        weights = [torch.ones_like(part) for part in returns]
    values, weight = torch.cat(returns), torch.cat(weights)
    total = weight.sum()
    mean = (values * weight).sum() / total
    variance = ((values - mean).square() * weight).sum() / (total - 1).clamp(min=1)
    scaled = [(part - mean) * (variance + 1e-8).rsqrt() for part in returns]
    return scaled[0] if inputs.penalties is None else scaled


STEP_ESTIMATORS: Mapping[str, StepEstimator] = {
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}


def step_advantages(
    rewards: Float[Tensor, " n"],
    group_ids: Sequence[Hashable] | Int[Tensor, " n"],
    lengths: Int[Tensor, " n"],
    estimator: StepEstimator,
    penalties: Sequence[Tensor] | None = None,
) -> Advantages:
    """Compute advantages from all completions of a step; 0 for one without a reward.

    Args:
        rewards: total reward of each completion, without KL penalties; NaN where it has none.
        group_ids: group id of each completion.
        lengths: number of tokens of each completion.
        estimator: computes the advantages of the completions that have a reward.
        penalties: (T,) KL penalties of each completion's tokens; None: there are none.
    """
    groups = group_advantages(rewards, group_ids, scale_rewards="none")  # for their statistics
    rows = groups.scorable.nonzero().flatten().tolist()
    index, _ = _index_groups(group_ids, rewards.device)
    known = None if penalties is None else [penalties[row].double() for row in rows]
    inputs = AdvantageInputs(rewards.double()[rows], index[rows], lengths[rows], known)
    found = estimator(inputs) if rows else torch.zeros(0)
    if isinstance(found, Tensor):
        values = torch.zeros_like(rewards)
        values[rows] = found.to(rewards)
        return replace(groups, values=values)
    tokens = [rewards.new_zeros(int(length)) for length in lengths]
    for row, part in zip(rows, found, strict=True):
        tokens[row] = part.to(rewards)
    values = torch.stack([part.mean() for part in tokens])
    return replace(groups, values=values, tokens=tuple(tokens))


def group_advantages(
    rewards: Float[Tensor, " n"],
    group_ids: Sequence[Hashable] | Int[Tensor, " n"],
    *,
    estimator: str = "grpo",
    scale_rewards: str = "group",
) -> Advantages:
    """Compute A_i = (r_i − baseline_i) / (std + 1e-4), ddof 1 (arXiv:2402.03300, section 4.1.2).

    Groups are identified by id, in any order and of any size. A completion without a reward (NaN)
    is left out of the mean and the deviation, and its advantage is 0. So is the advantage of every
    completion in a group with fewer than two rewards, or with equal rewards. Pass the completions
    of all ranks: otherwise groups and the batch's deviation may be incomplete. ``scale_rewards``
    divides by the deviation of the ``group`` or of the ``batch``, or by 1 (``none``; "Dr. GRPO",
    arXiv:2503.20783). ``ValueError``: a reward is infinite, there are not n ids, or a name is
    unknown.
    """
    scorable = _find_scorable(rewards, group_ids)
    index, count = _index_groups(group_ids, rewards.device)
    groups = _compute_moments(rewards, scorable, index, count)
    values = _subtract_baseline(rewards, scorable, groups, estimator)
    if scale_rewards == "group":
        values = values / (groups.stds[index] + EPSILON)
    elif scale_rewards == "batch":
        values = values / (_std(rewards.double()[scorable]) + EPSILON)
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards is {scale_rewards!r}: choose group, batch or none")
    return Advantages(
        values.to(rewards.dtype), groups.stds.to(rewards.dtype), groups.zero_spread, scorable
    )


def per_reward_advantages(
    rewards: Float[Tensor, "n k"],
    weights: Float[Tensor, " k"],
    group_ids: Sequence[Hashable] | Int[Tensor, " n"],
    *,
    estimator: str = "grpo",
) -> Advantages:
    """Normalize each reward in its group, sum by weight, divide by the batch's deviation (GDPO).

    Summing first lets a reward with a wide spread dominate the others, and maps different
    combinations to one total; normalizing first keeps them distinct (GDPO, arXiv:2601.05242). The
    sum needs no centering over the batch: its mean in each group is 0 already. A NaN among the k
    rewards, with a weight other than 0, makes the completion unscorable. ``group_stds`` describes
    the weighted sum of the raw rewards; a group has zero spread when each weighted reward has.
    """
    used = rewards[:, weights != 0]
    total = (used * weights[weights != 0]).sum(dim=1)
    scorable = _find_scorable(total, group_ids)
    index, count = _index_groups(group_ids, rewards.device)
    values = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    zero_spread = torch.ones(count, dtype=torch.bool, device=rewards.device)
    for reward, weight in zip(used.unbind(1), weights[weights != 0].double(), strict=True):
        groups = _compute_moments(reward, scorable, index, count)
        centered = _subtract_baseline(reward, scorable, groups, estimator)
        values = values + weight * centered / (groups.stds[index] + EPSILON)
        zero_spread = zero_spread & groups.zero_spread
    values = values / (_std(values[scorable]) + EPSILON)
    groups = _compute_moments(total, scorable, index, count)
    return Advantages(
        values.to(rewards.dtype), groups.stds.to(rewards.dtype), zero_spread, scorable
    )


def _find_scorable(
    rewards: Float[Tensor, " n"], group_ids: Sequence[Hashable] | Tensor
) -> Bool[Tensor, " n"]:
    if len(group_ids) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards but {len(group_ids)} group ids")
    if torch.isinf(rewards).any():
        raise ValueError("a reward is infinite: use NaN for a completion without a reward")
    return ~torch.isnan(rewards)


def _index_groups(
    group_ids: Sequence[Hashable] | Tensor, device: torch.device
) -> tuple[Int[Tensor, " n"], int]:
    ids = group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids
    order: dict[Hashable, int] = {}
    index = [order.setdefault(group, len(order)) for group in ids]
    return torch.tensor(index, dtype=torch.long, device=device), len(order)


def _compute_moments(
    rewards: Float[Tensor, " n"], scorable: Bool[Tensor, " n"], index: Int[Tensor, " n"], count: int
) -> _Groups:
    """Compute the mean and deviation of each group; equal rewards have deviation 0."""
    kept, values = index[scorable], rewards.double()[scorable]
    zeros = values.new_zeros(count)
    sizes = zeros.index_add(0, kept, torch.ones_like(values))
    means = zeros.index_add(0, kept, values) / sizes  # NaN (0 / 0) in a group without rewards
    squares = zeros.index_add(0, kept, (values - means[kept]) ** 2)
    highest = zeros.scatter_reduce(0, kept, values, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, kept, values, "amin", include_self=False)
    # Equal totals from different summands (0.1 + 0.2 and 0.3) differ by a rounding error, which
    # must not count as spread. A group with one reward or none has no spread either.
    rounding = 4 * torch.finfo(rewards.dtype).eps * torch.maximum(highest.abs(), lowest.abs())
    zero_spread = highest - lowest <= rounding
    stds = torch.where(zero_spread, zeros, (squares / (sizes - 1).clamp(min=1)).sqrt())
    return _Groups(index, sizes, means, stds, zero_spread)


def _subtract_baseline(
    rewards: Float[Tensor, " n"], scorable: Bool[Tensor, " n"], groups: _Groups, estimator: str
) -> Float[Tensor, " n"]:
    """Return reward − baseline in float64; exactly 0 where the group gives no signal."""
    if estimator not in ADVANTAGE_ESTIMATORS:
        raise ValueError(
            f"advantage_estimator is {estimator!r}: choose {' or '.join(ADVANTAGE_ESTIMATORS)}"
        )
    values = rewards.double()
    baseline = ADVANTAGE_ESTIMATORS[estimator](
        values, groups.means[groups.index], groups.sizes[groups.index]
    )
    no_signal = groups.zero_spread[groups.index] | ~scorable
    return torch.where(no_signal, torch.zeros_like(values), values - baseline)


def _std(values: Float[Tensor, " m"]) -> Float[Tensor, ""]:
    return values.std(correction=1) if len(values) > 1 else values.new_zeros(())
