"""Alarms over a run's metrics: what goes wrong while every number still looks like a number.

An alarm is raised once when its rule's condition begins, and again only after the condition has
clearly ended: each rule has two thresholds, one that raises and a milder one that re-arms. The
state is a function of the rows seen, so a resumed run that is shown its earlier rows goes on
exactly as if it had not been interrupted.

Thresholds were set against recorded runs of the three embedded tasks that learned well; beside
each stands what those runs reached.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

WINDOW = 20
"""Steps whose mean is judged: single steps of some hundred completions are noise."""
SHORT = 5
"""Steps for what is wrong at any time and only needs not to be a single outlier."""

Row = Mapping[str, object]


@dataclass(frozen=True)
class Alarm:
    """One onset.

    Attributes:
        step: whose metrics raised it.
        name: of its rule.
        message: what was seen.
        remedy: what to do.
    """

    step: int
    name: str
    message: str
    remedy: str


@dataclass(frozen=True)
class Trained:
    """What the rules must know of a run besides its metrics.

    Attributes:
        weights: of the task's rewards by name.
        primary metric: name of the reward or metric by which models are compared.
        completions: of one step.
        lower_is_better: the primary metric is an error.
    """

    weights: Mapping[str, float]
    primary_metric: str
    completions: int
    lower_is_better: bool = False


@dataclass
class History:
    """The part of a metrics history that the rules look at; its size does not grow.

    Attributes:
        trained: what is known of the run.
        first: the first ``WINDOW`` rows.
        last: the last ``WINDOW`` rows.
        peak: the rewards' means, and under "primary_metric" the primary metric's, over the
        ``WINDOW`` steps
            in which the primary metric was best.
    """

    trained: Trained
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
            rewards = {name: self.recent(f"rewards/{name}/mean") for name in self.trained.weights}
            self.peak = {**rewards, "primary_metric": primary_metric}

    def worse_than_peak(self) -> float:
        """How much worse than at its best the primary metric is; NaN before it had a best."""
        fall = self.peak.get("primary_metric", math.nan) - self.primary_metric
        return -fall if self.trained.lower_is_better else fall

    def recent(self, name: str, steps: int = WINDOW) -> float:
        """Mean over the last ``steps`` rows; NaN where less than half of them have a value."""
        return _mean(list(self.last)[-steps:], name, (steps + 1) // 2)

    def start(self, name: str) -> float:
        """The same over the first ``WINDOW`` rows."""
        return _mean(self.first, name, WINDOW // 2)

    @property
    def primary_metric(self) -> float:
        """The primary metric's recent mean, of the sampled completions."""
        name = self.trained.primary_metric
        reward = self.recent(f"rewards/{name}/mean")
        return self.recent(f"metrics/{name}") if math.isnan(reward) else reward


@dataclass(frozen=True)
class Rule:
    """One kind of alarm.

    Attributes:
        name: of the alarm.
        level: how bad it is; NaN where nothing can be said.
        raises: the level from which on there is an alarm.
        clears: the level below which the alarm is over and may be raised again.
        message: what was seen.
        remedy: what to do.
    """

    name: str
    level: Callable[[History], float]
    raises: float
    clears: float
    message: Callable[[History], str]
    remedy: str


class Health:
    """Raises alarms, step by step.

    Args:
        trained: what is known of the run.
    """

    def __init__(self, trained: Trained) -> None:
        self.history = History(trained)
        self.raised: set[str] = set()

    def step(self, number: int, row: Row) -> list[Alarm]:
        """Take note of a step's metrics; the alarms that begin with it."""
        self.history.add(row)
        alarms = []
        for rule in RULES:
            level = rule.level(self.history)
            if rule.name in self.raised and level < rule.clears:
                self.raised.discard(rule.name)
            elif rule.name not in self.raised and level >= rule.raises:
                self.raised.add(rule.name)
                message = rule.message(self.history)
                alarms.append(Alarm(number, rule.name, message, rule.remedy))
        return alarms


def _no_spread(history: History) -> float:
    return history.recent("frac_reward_zero_std")


def _growth(history: History) -> float:
    """How many times longer (or shorter) completions are than at first; 1 for a few tokens more."""
    now, before = (
        history.recent("completions/mean_length"),
        history.start("completions/mean_length"),
    )
    if not abs(now - before) >= 16:  # a doubling of three tokens is no drift; NaN is none either
        return 1.0
    return max(now / max(before, 1.0), before / max(now, 1.0))


def _cut_off(history: History) -> float:
    return history.recent("completions/clipped_ratio")


def _entropy_lost(history: History) -> float:
    """The least entropy that is healthy, over the recent one."""
    least = max(0.01, 0.05 * history.start("entropy"))
    return least / max(history.recent("entropy"), 1e-9)


def _kl(history: History) -> float:
    return history.recent("kl", SHORT)


def _mismatch(history: History) -> float:
    """Mean difference of log-probs; where its correction is on, it is meant to be there."""
    if not math.isnan(history.recent("sampling/importance_sampling_ratio/mean", 1)):
        return math.nan
    return history.recent("sampling/sampling_logp_difference/mean", SHORT)


def _failing(history: History) -> float:
    """Share of the completions on which the worst reward failed."""
    return max((share for share, _ in _failures(history)), default=math.nan)


def _failures(history: History) -> list[tuple[float, str]]:
    counts = [
        (history.recent(f"rewards/{name}/failed", SHORT), name) for name in history.trained.weights
    ]
    return [(n / history.trained.completions, name) for n, name in counts if not math.isnan(n)]


def _weighted(history: History) -> dict[str, float]:
    """Each trained reward's part of the spread that advantages are made of; they add up to 1."""
    weights = {name: abs(w) for name, w in history.trained.weights.items() if w}
    parts = {name: w * history.recent(f"rewards/{name}/std") for name, w in weights.items()}
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()} if total > 0 else {}


def _dominance(history: History) -> float:
    """The largest part of the spread, where another reward is mostly not earned.

    Rewards are 1 for a gold completion, so one that is near 1 has no spread left to give, and its
    silence is success. Penalties are never above 0, and are silent where nothing is wrong.
    """
    parts = _weighted(history)
    if len(parts) < 2:
        return math.nan
    leader = max(parts, key=lambda name: parts[name])
    means = {name: history.recent(f"rewards/{name}/mean") for name in parts if name != leader}
    unearned = any(
        0.0 <= mean < 0.5 and history.trained.weights[name] > 0 for name, mean in means.items()
    )
    return parts[leader] if unearned else 0.0


def _divergence(history: History) -> float:
    """How much worse than its best the primary metric is while another trained reward has risen."""
    return history.worse_than_peak() if _risen(history) else 0.0


def _risen(history: History) -> list[str]:
    """Trained rewards, other than the primary metric, that rose since the primary metric was
    best."""
    return [
        name
        for name, weight in history.trained.weights.items()
        if weight > 0
        and name != history.trained.primary_metric
        and history.recent(f"rewards/{name}/mean") - history.peak.get(name, math.nan) >= 0.05
    ]


def _say_no_spread(history: History) -> str:
    share, reward = _no_spread(history), history.recent("reward")
    return (
        f"{share:.0%} of the groups of the last {WINDOW} steps have equal rewards and teach "
        f"nothing; the mean reward is {reward:.2f}"
    )


def _say_growth(history: History) -> str:
    now, before = (
        history.recent("completions/mean_length"),
        history.start("completions/mean_length"),
    )
    return f"completions have {now:.0f} tokens; in the first {WINDOW} steps they had {before:.0f}"


def _say_failing(history: History) -> str:
    share, name = max(_failures(history))
    return f"reward {name} failed on {share:.1%} of the last completions, which teach nothing then"


def _say_dominance(history: History) -> str:
    parts = _weighted(history)
    leader = max(parts, key=lambda name: parts[name])
    others = ", ".join(name for name in parts if name != leader)
    return f"{leader} makes {parts[leader]:.0%} of the rewards' spread; {others} hardly counts"


def _say_divergence(history: History) -> str:
    rising = ", ".join(_risen(history))
    return (
        f"{history.trained.primary_metric} went from {history.peak['primary_metric']:.2f} to "
        f"{history.primary_metric:.2f} while {rising} rose"
    )


RULES = (
    Rule(
        "groups without a spread",
        _no_spread,
        # Nine tenths of the sampled completions are wasted. A good run that was nearly done, with
        # the reward at 0.80, had 0.77.
        raises=0.9,
        clears=0.8,
        message=_say_no_spread,
        remedy="reward near its maximum: the task is learned, stop or take harder examples; near "
        "0: take easier examples, a graded reward or a stronger model; in between: more "
        "rollout.num_generations, or rollout.dynamic_sampling=true",
    ),
    Rule(
        "length drift",
        _growth,
        # Twice the tokens is twice the time of a rollout. Good runs stayed within 1.02.
        raises=2.0,
        clears=1.5,
        message=_say_growth,
        remedy="read the samples: growing without better answers is padding, weight the length or "
        "repetition reward or try objective.loss_type=dr_grpo; shrinking to nothing is giving up",
    ),
    Rule(
        "cut off",
        _cut_off,
        # A quarter of the completions is scored before it is finished. Good runs stayed below
        # 0.002.
        raises=0.25,
        clears=0.15,
        message=lambda history: (
            f"{_cut_off(history):.0%} of the completions of the last {WINDOW} steps reached "
            "rollout.max_completion_length"
        ),
        remedy="raise rollout.max_completion_length, or read the samples: a model that does not "
        "stop needs a length reward",
    ),
    Rule(
        "entropy collapse",
        _entropy_lost,
        # Below a twentieth of its first value, or below 0.01 nats a token, where in 8 completions
        # of 20 tokens less than one differs anywhere. Good runs fell to a fifth, 0.10 nats.
        raises=1.0,
        clears=0.5,
        message=lambda history: (
            f"the policy's entropy is {history.recent('entropy'):.4f} nats a token, at first "
            f"{history.start('entropy'):.2f}: it hardly tries anything else any more"
        ),
        remedy="lower optim.lr, raise rollout.temperature, set objective.entropy_coef or "
        "objective.epsilon_high, and go on from an earlier checkpoint",
    ),
    Rule(
        "KL blow-up",
        _kl,
        # At 1 nat a token the policy's own tokens are e times less likely to the reference.
        raises=1.0,
        clears=0.5,
        message=lambda history: f"the KL to the reference is {_kl(history):.3g} nats a token",
        remedy="lower optim.lr or raise objective.beta, and go on from an earlier checkpoint",
    ),
    Rule(
        "one reward dominates",
        _dominance,
        # Where another reward is mostly not earned, nine tenths of every advantage say nothing of
        # it.
        raises=0.9,
        clears=0.8,
        message=_say_dominance,
        remedy="lower its weight in task_options.weights, or set "
        "objective.normalize_each_reward=true",
    ),
    Rule(
        "rewards diverge",
        _divergence,
        # Means of 20 steps of a run that learned nothing wandered by 0.09 either way.
        raises=0.1,
        clears=0.05,
        message=_say_divergence,
        remedy="the model is paid for something else than the answer: lower that reward's weight "
        "in task_options.weights, and read the samples with the highest reward",
    ),
    Rule(
        "sampler mismatch",
        _mismatch,
        # Rounding in bfloat16 makes 0.001 to 0.01; at 0.05 every ratio is 5 % off on average.
        raises=0.05,
        clears=0.02,
        message=lambda history: (
            f"log-probs of sampler and update differ by {_mismatch(history):.3g} nats a token: "
            "what is trained is not what was sampled"
        ),
        remedy="run vlm-grpo doctor on the model; policy.dtype=float32 tells rounding from a "
        "defect, objective.sampler_correction=token weighs it away",
    ),
    Rule(
        "reward fails",
        _failing,
        # One in a hundred: a rare odd completion is the samples' business, not a pattern.
        raises=0.01,
        clears=0.002,
        message=_say_failing,
        remedy="the tracebacks are in samples/ under failures: mend the reward",
    ),
)


def _mean(rows: Sequence[Row], name: str, least: int) -> float:
    """Mean of the numbers of that name; NaN with fewer than ``least`` of them."""
    values = [row.get(name) for row in rows]
    known = [float(v) for v in values if isinstance(v, int | float) and not math.isnan(v)]
    return sum(known) / len(known) if len(known) >= least else math.nan
