"""Alarms over a run's metrics, for failures that leave every metric finite.

An alarm is raised once when its rule's condition begins, and again only after the condition has
clearly ended: each rule has a threshold that raises it and a lower one that clears it. The state
depends only on the rows so far, so a resumed run replays its earlier rows and continues exactly
as if it had not been interrupted.

Thresholds were set from recorded runs of the three embedded tasks that learned well; a comment
next to each gives the values in those runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

WINDOW = 20
"""Number of steps averaged; a single step of a few hundred completions is too noisy."""
SHORT = 5
"""Number of steps averaged for conditions that are never normal, to ignore single outliers."""

Row = Mapping[str, object]


@dataclass(frozen=True)
class AlarmContext:
    """The facts about a run that the rules need besides its metrics.

    Attributes:
        completions: number of completions per step.
        lower_is_better: True if the primary metric is an error.
        truncates: True if the sampler excludes tokens that the trainer scores (``rollout.top_p``).
        recipe: the run's settings, for the commands of a remedy.
    """

    weights: Mapping[str, float]
    primary_metric: str
    completions: int
    lower_is_better: bool = False
    truncates: bool = False
    recipe: str = "RECIPE"


@dataclass
class History:
    """The part of the metrics that the rules read, of constant size.

    Attributes:
        peak: means over the ``WINDOW`` steps in which the primary metric was best: the rewards by
            name, and the primary metric under "primary_metric".
    """

    context: AlarmContext
    first: list[Row] = field(default_factory=list)
    last: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    peak: dict[str, float] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        if len(self.first) < WINDOW:
            self.first.append(row)
        self.last.append(row)
        if len(self.last) < WINDOW:
            return
        primary_metric = self.primary_metric
        if math.isfinite(primary_metric) and not self.worse_than_peak() >= 0.0:
            rewards = {name: self.recent(f"rewards/{name}/mean") for name in self.context.weights}
            self.peak = {**rewards, "primary_metric": primary_metric}

    def worse_than_peak(self) -> float:
        """Return the primary metric's decline from its best mean; NaN before the first mean."""
        fall = self.peak.get("primary_metric", math.nan) - self.primary_metric
        return -fall if self.context.lower_is_better else fall

    def recent(self, name: str, steps: int = WINDOW) -> float:
        """Return the mean over the last ``steps`` rows; NaN if fewer than half have a value."""
        return mean_of(list(self.last)[-steps:], name, (steps + 1) // 2)

    def start(self, name: str) -> float:
        """Return the mean over the first ``WINDOW`` rows; NaN if fewer than half have a value."""
        return mean_of(self.first, name, WINDOW // 2)

    @property
    def primary_metric(self) -> float:
        """The recent mean of the primary metric over the sampled completions."""
        name = self.context.primary_metric
        reward = self.recent(f"rewards/{name}/mean")
        return self.recent(f"metrics/{name}") if math.isnan(reward) else reward


def mean_of(rows: Sequence[Row], name: str, least: int) -> float:
    """Return the mean of a metric over the rows; NaN if fewer than ``least`` have a value."""
    values = [row.get(name) for row in rows]
    known = [float(v) for v in values if isinstance(v, int | float) and not math.isnan(v)]
    return sum(known) / len(known) if len(known) >= least else math.nan


@dataclass(frozen=True)
class Alarm:
    """The beginning of a condition that a rule detects."""

    step: int
    name: str
    message: str
    remedy: str


@dataclass(frozen=True)
class Rule:
    """One kind of alarm.

    Attributes:
        level: severity of the condition; NaN if it is unknown.
        raises: lowest level that raises the alarm.
        clears: level below which the alarm is over and may be raised again.
    """

    name: str
    level: Callable[[History], float]
    raises: float
    clears: float
    message: Callable[[History], str]
    remedy: str


class AlarmMonitor:
    """A monitor that raises alarms from the metrics of successive steps.

    Attributes:
        active: names of the alarms that were raised and are not over.
    """

    def __init__(self, context: AlarmContext) -> None:
        self.history = History(context)
        self.active: set[str] = set()

    def update(self, step: int, row: Row) -> list[Alarm]:
        """Add a step's metrics and return the alarms that begin with it."""
        if "mean_token_accuracy" in row:  # a supervised step
            return []
        self.history.add(row)
        alarms = []
        for rule in RULES:
            level = rule.level(self.history)
            if rule.name in self.active and level < rule.clears:
                self.active.discard(rule.name)
            elif rule.name not in self.active and level >= rule.raises:
                self.active.add(rule.name)
                remedy = rule.remedy.replace("RECIPE", self.history.context.recipe)
                alarms.append(Alarm(step, rule.name, rule.message(self.history), remedy))
        return alarms


def _equal_rewards(history: History) -> float:
    """Return the share of groups with equal rewards; 0 if that is because none earn any."""
    return 0.0 if _unrewarded(history) >= 1.0 else history.recent("frac_reward_zero_std")


def _unrewarded(history: History) -> float:
    """Return the share of groups with equal rewards, if these are near 0; 0 otherwise."""
    most = sum(weight for weight in history.context.weights.values() if weight > 0)
    is_low = history.recent("reward", SHORT) < 0.1 * most
    return history.recent("frac_reward_zero_std", SHORT) if is_low else 0.0


def _lengths(history: History) -> tuple[float, float]:
    name = "completions/mean_length"
    return history.recent(name), history.start(name)


def _length_change(history: History) -> float:
    """Return the factor by which completions became longer or shorter; 1 for a few tokens."""
    now, before = _lengths(history)
    if not abs(now - before) >= 16:  # a doubling of three tokens is no drift; neither is NaN
        return 1.0
    return max(now / max(before, 1.0), before / max(now, 1.0))


def _truncated_share(history: History) -> float:
    return history.recent("completions/clipped_ratio")


def _entropy_loss(history: History) -> float:
    """Return the lowest healthy entropy divided by the recent one."""
    lowest = max(0.01, 0.05 * history.start("entropy"))
    return lowest / max(history.recent("entropy"), 1e-9)


def _kl(history: History) -> float:
    return history.recent("kl", SHORT)


def _sampler_mismatch(history: History) -> float:
    """Return the mean difference of log-probs of fresh completions; NaN if it is intended."""
    last = history.last[-1]
    is_outside = "staleness/max" in last and not history.context.truncates
    if "sampling/importance_sampling_ratio/mean" in last and not is_outside:
        return math.nan
    fresh = [row for row in history.last if not row.get("staleness/max")]
    least = (SHORT + 1) // 2 if len(fresh) == len(history.last) else 1
    return mean_of(fresh[-SHORT:], "sampling/sampling_logp_difference/mean", least)


def _failure_share(history: History) -> float:
    """Return the share of completions on which the reward with most failures failed."""
    return max((share for share, _ in _failures(history)), default=math.nan)


def _failures(history: History) -> list[tuple[float, str]]:
    counts = [
        (history.recent(f"rewards/{name}/failed", SHORT), name) for name in history.context.weights
    ]
    return [(n / history.context.completions, name) for n, name in counts if not math.isnan(n)]


def _spread_shares(history: History) -> dict[str, float]:
    """Return each weighted reward's share of the spread that determines the advantages."""
    weights = {name: abs(w) for name, w in history.context.weights.items() if w}
    parts = {name: w * history.recent(f"rewards/{name}/std") for name, w in weights.items()}
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()} if total > 0 else {}


def _dominance(history: History) -> float:
    """Return the largest share of the spread, or 0 if all other rewards are mostly earned.

    A reward near 1 has no spread left because it is learned. Penalties are never above 0, and have
    no spread if nothing is wrong.
    """
    parts = _spread_shares(history)
    if len(parts) < 2:
        return math.nan
    leader = max(parts, key=lambda name: parts[name])
    means = {name: history.recent(f"rewards/{name}/mean") for name in parts if name != leader}
    unearned = any(
        0.0 <= mean < 0.5 and history.context.weights[name] > 0 for name, mean in means.items()
    )
    return parts[leader] if unearned else 0.0


def _divergence(history: History) -> float:
    """Return the primary metric's fall from its best if another reward has risen since, else 0."""
    return history.worse_than_peak() if _risen_rewards(history) else 0.0


def _risen_rewards(history: History) -> list[str]:
    """Return the weighted rewards that rose since the primary metric was best."""
    return [
        name
        for name, weight in history.context.weights.items()
        if weight > 0
        and name != history.context.primary_metric
        and history.recent(f"rewards/{name}/mean") - history.peak.get(name, math.nan) >= 0.05
    ]


def _describe_equal_rewards(history: History) -> str:
    share, reward = _equal_rewards(history), history.recent("reward")
    return (
        f"{share:.0%} of the groups of the last {WINDOW} steps have equal rewards and no "
        f"gradient; the mean reward is {reward:.2f}"
    )


def _describe_unrewarded(history: History) -> str:
    steps = min(SHORT, len(history.last))
    answered = history.recent("completions/answered", SHORT)
    return (
        f"no group of the last {steps} steps has different rewards: the mean over "
        f"{steps * history.context.completions:,} completions is "
        f"{history.recent('reward', SHORT):.3g}, {answered:.0%} of them have an answer, and the "
        "model does not change"
    )


def _describe_failures(history: History) -> str:
    share, name = max(_failures(history))
    return f"reward {name} failed on {share:.1%} of the recent completions, which are not used"


def _describe_dominance(history: History) -> str:
    parts = _spread_shares(history)
    leader = max(parts, key=lambda name: parts[name])
    others = ", ".join(name for name in parts if name != leader)
    return f"{leader} causes {parts[leader]:.0%} of the spread of rewards, {others} the rest"


def _describe_divergence(history: History) -> str:
    rising = ", ".join(_risen_rewards(history))
    return (
        f"{history.context.primary_metric} went from {history.peak['primary_metric']:.2f} to "
        f"{history.primary_metric:.2f} while {rising} rose"
    )


RULES = (
    Rule(
        "groups without a reward",
        _unrewarded,
        # Several hundred completions and not one that differs: more of them will not help.
        raises=1.0,
        clears=0.9,
        message=_describe_unrewarded,
        remedy="teach the model the gold answers first: vlm-grpo train RECIPE name=warm "
        "warm_start.steps=100, or vlm-grpo sft RECIPE name=warm without GRPO; vlm-grpo sample "
        "RECIPE --difficulty FILE finds the examples that it solves sometimes; or give a graded "
        "reward",
    ),
    Rule(
        "groups without a spread",
        _equal_rewards,
        # Nine tenths of the sampled completions are wasted. A good run near its end, with a
        # reward of 0.80, had 0.77.
        raises=0.9,
        clears=0.8,
        message=_describe_equal_rewards,
        remedy="reward near its maximum: the task is learned, stop or use harder examples; near 0: "
        "train on gold answers first (warm_start.steps), or use easier examples, a graded reward "
        "or a stronger model; in between: raise rollout.num_generations, or set "
        "rollout.dynamic_sampling=true",
    ),
    Rule(
        "length drift",
        _length_change,
        # Twice the tokens take twice the time to sample. Good runs stayed within 1.02.
        raises=2.0,
        clears=1.5,
        message=lambda history: (
            f"completions have {_lengths(history)[0]:.0f} tokens; in the first {WINDOW} steps they "
            f"had {_lengths(history)[1]:.0f}"
        ),
        remedy="read the samples: longer completions without better answers are padding, weight "
        "the length or repetition reward or try objective.loss_type=dr_grpo; completions that "
        "shrink to nothing no longer try to answer",
    ),
    Rule(
        "cut off",
        _truncated_share,
        # A quarter of the completions is scored unfinished. Good runs stayed below 0.002.
        raises=0.25,
        clears=0.15,
        message=lambda history: (
            f"{_truncated_share(history):.0%} of the completions of the last {WINDOW} steps "
            "reached rollout.max_completion_length"
        ),
        remedy="raise rollout.max_completion_length, or read the samples: a model that does not "
        "stop needs a length reward",
    ),
    Rule(
        "entropy collapse",
        _entropy_loss,
        # Below a twentieth of its first value, or below 0.01 nats per token, where fewer than one
        # of 8 completions of 20 tokens differs anywhere. Good runs fell to a fifth, 0.10 nats.
        raises=1.0,
        clears=0.5,
        message=lambda history: (
            f"the policy's entropy is {history.recent('entropy'):.4f} nats per token, and was "
            f"{history.start('entropy'):.2f} at first: it has almost stopped exploring"
        ),
        remedy="lower optim.lr, raise rollout.temperature, set objective.entropy_coef or "
        "objective.epsilon_high, and continue from an earlier checkpoint",
    ),
    Rule(
        "KL blow-up",
        _kl,
        # At 1 nat per token the policy's tokens are e times less likely under the reference.
        raises=1.0,
        clears=0.5,
        message=lambda history: f"the KL to the reference is {_kl(history):.3g} nats per token",
        remedy="lower optim.lr or raise objective.beta, and continue from an earlier checkpoint",
    ),
    Rule(
        "one reward dominates",
        _dominance,
        # While another reward is mostly not earned, nine tenths of every advantage ignore it.
        raises=0.9,
        clears=0.8,
        message=_describe_dominance,
        remedy="lower its weight in task_options.weights, or set "
        "objective.normalize_each_reward=true",
    ),
    Rule(
        "rewards diverge",
        _divergence,
        # In a run that learned nothing, means of 20 steps varied by 0.09 in either direction.
        raises=0.1,
        clears=0.05,
        message=_describe_divergence,
        remedy="the model is rewarded for something other than the answer: lower that reward's "
        "weight in task_options.weights, and read the samples with the highest reward",
    ),
    Rule(
        "sampler mismatch",
        _sampler_mismatch,
        # Rounding in bfloat16 causes 0.001 to 0.01; at 0.05 every ratio is off by 5 % on average.
        raises=0.05,
        clears=0.02,
        message=lambda history: (
            f"log-probs of sampler and update differ by {_sampler_mismatch(history):.3g} nats per "
            "token: the trained policy is not the one that was sampled from"
        ),
        remedy="run vlm-grpo doctor on the model; policy.dtype=float32 separates rounding from a "
        "defect, objective.sampler_correction=token corrects for it. With rollout.sampler=vllm, "
        "compare the server's dtype, temperature, image sizes and weights with the run's",
    ),
    Rule(
        "reward fails",
        _failure_share,
        # One in a hundred: a rare unusual completion is not a pattern.
        raises=0.01,
        clears=0.002,
        message=_describe_failures,
        remedy="the tracebacks are in samples/ under failures: fix the reward",
    ),
)
