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
from dataclasses import dataclass

WINDOW = 20  # number of steps averaged; a single step of a few hundred completions is too noisy
SHORT = 5
"""Number of steps averaged for conditions that are never normal, to ignore single outliers."""

Row = Mapping[str, object]


@dataclass(frozen=True)
class AlarmContext:
    """The facts about a run that the rules need besides its metrics."""

    weights: Mapping[str, float]
    primary_metric: str
    completions: int  # number of completions per step
    lower_is_better: bool = False  # True if the primary metric is an error
    # True if the sampler excludes tokens that the trainer scores (``rollout.top_p``)
    truncates: bool = False
    recipe: str = "RECIPE"  # the run's settings, for the commands of a remedy


@dataclass(frozen=True)
class Alarm:
    """The beginning of a condition that a rule detects."""

    step: int
    name: str
    message: str
    remedy: str


class AlarmMonitor:
    """A monitor that raises alarms from the metrics of successive steps; of constant size.

    ``active`` has the names of the alarms that were raised and are not over.
    """

    def __init__(self, context: AlarmContext) -> None:
        self.context = context
        self.active: set[str] = set()
        self.first: list[Row] = []
        self.last: deque[Row] = deque(maxlen=WINDOW)
        # The primary metric on the held-out examples: before the first rollout, and the last one.
        self.held_out_before = self.held_out = math.nan
        self.best = 0.0  # highest mean of the primary metric over ``SHORT`` steps, or in the first
        # Means over the ``WINDOW`` steps in which the primary metric was best: the rewards by name,
        # and the primary metric under "primary_metric".
        self.peak: dict[str, float] = {}

    def update(self, step: int, row: Row) -> list[Alarm]:
        """Add a step's metrics and return the alarms that begin with it."""
        is_supervised = "mean_token_accuracy" in row
        value = row.get(f"eval/{self.context.primary_metric}")
        self.add_held_out(value, is_first=is_supervised)
        if is_supervised:
            return []
        self._add(row)
        alarms = []
        for rule in RULES:
            severity, message = rule.check(self)
            if rule.name in self.active and severity < rule.clears:
                self.active.discard(rule.name)
            elif rule.name not in self.active and severity >= rule.raises:
                self.active.add(rule.name)
                remedy = rule.remedy.replace("RECIPE", self.context.recipe)
                alarms.append(Alarm(step, rule.name, message, remedy))
        return alarms

    def add_held_out(self, value: object, is_first: bool) -> None:
        """Add the primary metric on the held-out examples; ``is_first``: before the rollouts."""
        if isinstance(value, int | float):
            self.held_out = float(value)
            if is_first or math.isnan(self.held_out_before):
                self.held_out_before = self.held_out

    def _add(self, row: Row) -> None:
        if len(self.first) < WINDOW:
            self.first.append(row)
        self.last.append(row)
        # One step of few completions may be good by chance.
        is_enough = len(self.last) >= SHORT or self.context.completions >= 64
        recent = self.get_primary(self.recent, 1 if len(self.last) == 1 else SHORT)
        if is_enough and recent > self.best:
            self.best = recent
        primary_metric = self.primary_metric
        if len(self.last) < WINDOW or not math.isfinite(primary_metric):
            return
        if not self.worse_than_peak() >= 0.0:  # also before the first peak, where it is NaN
            self.peak = {name: self.reward(name) for name in self.context.weights}
            self.peak["primary_metric"] = primary_metric

    def worse_than_peak(self) -> float:
        """Return the primary metric's decline from its best mean; NaN before the first mean."""
        fall = self.peak.get("primary_metric", math.nan) - self.primary_metric
        return -fall if self.context.lower_is_better else fall

    def recent(self, name: str, steps: int = WINDOW) -> float:
        """Return the mean over the last ``steps`` rows; NaN if fewer than half have a value."""
        return _mean([*self.last][-steps:], name, (steps + 1) // 2)

    def start(self, name: str) -> float:
        """Return the mean over the first ``WINDOW`` rows; NaN if fewer than half have a value."""
        return _mean(self.first, name, WINDOW // 2)

    def window(self, steps: int = WINDOW) -> str:
        """Describe the rows of ``recent``."""
        return f"the last {min(steps, len(self.last))} steps"

    def reward(self, name: str) -> float:
        return self.recent(f"rewards/{name}/mean")

    @property
    def primary_metric(self) -> float:
        """The recent mean of the primary metric over the sampled completions."""
        return self.get_primary(self.recent)

    def get_primary(self, mean: Callable[..., float], *steps: int) -> float:
        """Return a mean, such as ``start``, of the primary metric over the sampled completions."""
        name = self.context.primary_metric
        reward = mean(f"rewards/{name}/mean", *steps)
        return mean(f"metrics/{name}", *steps) if math.isnan(reward) else reward


def _mean(rows: Sequence[Row], name: str, least: int) -> float:
    """Return the mean of a metric over the rows; NaN if fewer than ``least`` have a value."""
    values = [row.get(name) for row in rows]
    known = [float(v) for v in values if isinstance(v, int | float) and not math.isnan(v)]
    return sum(known) / len(known) if len(known) >= least else math.nan


# Returns the severity of a condition, NaN if it is unknown, and the message of an alarm about it.
Check = Callable[[AlarmMonitor], tuple[float, str]]


@dataclass(frozen=True)
class Rule:
    """One kind of alarm."""

    name: str
    check: Check
    raises: float  # lowest severity that raises the alarm
    clears: float  # severity below which the alarm is over and may be raised again
    remedy: str


RULES: list[Rule] = []


def _rule(name: str, raises: float, clears: float, remedy: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        RULES.append(Rule(name, check, raises, clears, remedy))
        return check

    return add


@_rule(
    "collapse",
    # The recorded run that learned lost a tenth of its best five steps at most.
    raises=0.7,
    clears=0.5,
    remedy="a learning rate that is too high does this: start again with a tenth of it, or "
    "continue from a checkpoint before the fall",
)
def _check_collapse(run: AlarmMonitor) -> tuple[float, str]:
    """Return the share of its best that the primary metric has lost; 0 if it was never earned."""
    context, now = run.context, run.get_primary(run.recent, SHORT)
    if context.lower_is_better or run.best < 0.1:
        return 0.0, ""
    rates = [_mean([row], "learning_rate", 1) for row in (*run.first, *run.last)]
    highest = max((rate for rate in rates if not math.isnan(rate)), default=None)
    at = "" if highest is None else f", after learning rates of up to {highest:.3g} (optim.lr)"
    return 1 - now / run.best, (
        f"{context.primary_metric} fell from {run.best:.2f} to {now:.2f} in {run.window(SHORT)}{at}"
    )


@_rule(
    "overfitting",
    # In the run of the notebook, held-out answers were worse by a tenth at most.
    raises=0.2,
    clears=0.1,
    remedy="use more or more varied training examples, or fewer steps; evaluation.every with "
    "checkpoint.keep_best=true keeps the best checkpoint",
)
def _check_overfitting(run: AlarmMonitor) -> tuple[float, str]:
    """Return the gap of the primary metric between training and held-out examples, or how much it
    has grown if that is less; NaN in a step without an evaluation.

    It is larger from the beginning if the held-out examples are harder, and the metric of sampled
    completions rises as they become more certain, which is no gap."""
    name, now = run.context.primary_metric, run.primary_metric
    if f"eval/{name}" not in run.last[-1] or run.context.lower_is_better:
        return math.nan, ""
    rise = run.held_out - run.held_out_before
    growth = now - run.get_primary(run.start) - rise
    return min(growth, now - run.held_out), (
        f"{name} is {now:.2f} on the training examples of {run.window()}, but "
        f"{run.held_out:.2f} on the held-out ones, and was {run.held_out_before:.2f} at first"
    )


@_rule(
    "groups without a reward",
    # Several hundred completions and not one that differs: more of them will not help.
    raises=1.0,
    clears=0.9,
    remedy="teach the model the gold answers first: vlm-grpo train RECIPE name=warm "
    "warm_start.steps=100, or vlm-grpo sft RECIPE name=warm without GRPO; vlm-grpo sample "
    "RECIPE --difficulty FILE finds the examples that it solves sometimes; or give a graded "
    "reward",
)
def _check_unrewarded(run: AlarmMonitor) -> tuple[float, str]:
    """Return the share of groups with equal rewards if these are near 0; 0 otherwise."""
    context, reward = run.context, run.recent("reward", SHORT)
    highest = sum(weight for weight in context.weights.values() if weight > 0)
    is_low = reward < 0.1 * highest and not _has_collapsed(run)
    share = run.recent("frac_reward_zero_std", SHORT) if is_low else 0.0
    steps = min(SHORT, len(run.last))
    return share, (
        f"no group of {run.window(SHORT)} has different rewards: the mean over "
        f"{steps * context.completions:,} completions is {reward:.3g}, "
        f"{run.recent('completions/answered', SHORT):.0%} of them have an answer, and the "
        "model does not change"
    )


@_rule(
    "groups without a spread",
    # Nine tenths of the sampled completions are wasted. A good run near its end, with a reward of
    # 0.80, had 0.77.
    raises=0.9,
    clears=0.8,
    remedy="reward near its maximum: the training examples are learned: stop if the held-out "
    "metric is high too, or use more or harder examples; near 0: "
    "train on gold answers first (warm_start.steps), or use easier examples, a graded reward "
    "or a stronger model; in between: raise rollout.num_generations, or set "
    "rollout.dynamic_sampling=true",
)
def _check_equal_rewards(run: AlarmMonitor) -> tuple[float, str]:
    """Return the share of groups with equal rewards; 0 if that is because none earn any."""
    is_unrewarded = _check_unrewarded(run)[0] >= 1.0 or _has_collapsed(run)
    share = 0.0 if is_unrewarded else run.recent("frac_reward_zero_std")
    name, held_out = run.context.primary_metric, run.held_out
    known = "" if math.isnan(held_out) else f", {name} on held-out examples was {held_out:.2f} last"
    return share, (
        f"{share:.0%} of the groups of {run.window()} have equal rewards and no "
        f"gradient; the mean reward is {run.recent('reward'):.2f}{known}"
    )


def _has_collapsed(run: AlarmMonitor) -> bool:
    return _check_collapse(run)[0] >= 0.5


@_rule(
    "length drift",
    # Twice the tokens take twice the time to sample. Good runs stayed within 1.02.
    raises=2.0,
    clears=1.5,
    remedy="read the samples: longer completions without better answers are padding, weight "
    "the length or repetition reward or try objective.loss_type=dr_grpo; completions that "
    "shrink to nothing no longer try to answer",
)
def _check_length(run: AlarmMonitor) -> tuple[float, str]:
    """Return the factor by which completions became longer or shorter; 1 for a few tokens."""
    now, before = (mean("completions/mean_length") for mean in (run.recent, run.start))
    factor = 1.0
    if abs(now - before) >= 16:  # a doubling of three tokens is no drift; neither is NaN
        factor = max(now / max(before, 1.0), before / max(now, 1.0))
    return factor, (
        f"completions have {now:.0f} tokens; in the first {len(run.first)} steps they had "
        f"{before:.0f}"
    )


@_rule(
    "cut off",
    # A quarter of the completions is scored unfinished. Good runs stayed below 0.002.
    raises=0.25,
    clears=0.15,
    remedy="raise rollout.max_completion_length, or read the samples: a model that does not "
    "stop needs a length reward",
)
def _check_truncated(run: AlarmMonitor) -> tuple[float, str]:
    share = run.recent("completions/clipped_ratio")
    return share, (
        f"{share:.0%} of the completions of {run.window()} reached rollout.max_completion_length"
    )


@_rule(
    "entropy collapse",
    # Below a twentieth of its first value, or below 0.01 nats per token, where fewer than one of 8
    # completions of 20 tokens differs anywhere. Good runs fell to a fifth, 0.10 nats.
    raises=1.0,
    clears=0.5,
    remedy="lower optim.lr, raise rollout.temperature, set objective.entropy_coef or "
    "objective.epsilon_high, and continue from an earlier checkpoint",
)
def _check_entropy(run: AlarmMonitor) -> tuple[float, str]:
    """Return the lowest healthy entropy divided by the recent one."""
    now, before = run.recent("entropy"), run.start("entropy")
    return max(0.01, 0.05 * before) / max(now, 1e-9), (
        f"the policy's entropy is {now:.4f} nats per token, and was {before:.2f} at first: it has "
        "almost stopped exploring"
    )


@_rule(
    "KL blow-up",
    # At 1 nat per token the policy's tokens are e times less likely under the reference.
    raises=1.0,
    clears=0.5,
    remedy="lower optim.lr or raise objective.beta, and continue from an earlier checkpoint",
)
def _check_kl(run: AlarmMonitor) -> tuple[float, str]:
    kl = run.recent("kl", SHORT)
    return kl, f"the KL to the reference is {kl:.3g} nats per token"


@_rule(
    "one reward dominates",
    # While another reward is mostly not earned, nine tenths of every advantage ignore it.
    raises=0.9,
    clears=0.8,
    remedy="lower its weight in task_options.weights, or set objective.normalize_each_reward=true",
)
def _check_dominance(run: AlarmMonitor) -> tuple[float, str]:
    """Return the largest share of a reward in the spread that determines the advantages.

    It is 0 if all other rewards are mostly earned: a reward near 1 has no spread left because it is
    learned. Penalties are never above 0, and have no spread if nothing is wrong.
    """
    weights = {name: weight for name, weight in run.context.weights.items() if weight}
    stds = {name: abs(w) * run.recent(f"rewards/{name}/std") for name, w in weights.items()}
    total = sum(stds.values())
    if len(stds) < 2 or not total > 0:
        return math.nan, ""
    leader = max(stds, key=lambda name: stds[name])
    others = [name for name in stds if name != leader]
    is_unearned = any(weights[n] > 0 and 0.0 <= run.reward(n) < 0.5 for n in others)
    share = stds[leader] / total
    return share if is_unearned else 0.0, (
        f"{leader} causes {share:.0%} of the spread of rewards, {', '.join(others)} the rest"
    )


@_rule(
    "rewards diverge",
    # In a run that learned nothing, means of 20 steps varied by 0.09 in either direction.
    raises=0.1,
    clears=0.05,
    remedy="the model is rewarded for something other than the answer: lower that reward's "
    "weight in task_options.weights, and read the samples with the highest reward",
)
def _check_divergence(run: AlarmMonitor) -> tuple[float, str]:
    """Return the primary metric's fall from its best if another reward has risen since, else 0."""
    name, peak = run.context.primary_metric, run.peak
    risen = [
        other
        for other, weight in run.context.weights.items()
        if weight > 0 and other != name and run.reward(other) - peak.get(other, math.nan) >= 0.05
    ]
    if not risen:
        return 0.0, ""
    return run.worse_than_peak(), (
        f"{name} went from {peak['primary_metric']:.2f} to {run.primary_metric:.2f} while "
        f"{', '.join(risen)} rose"
    )


@_rule(
    "sampler mismatch",
    # Rounding in bfloat16 causes 0.001 to 0.01; at 0.05 every ratio is off by 5 % on average.
    raises=0.05,
    clears=0.02,
    remedy="run vlm-grpo doctor on the model; policy.dtype=float32 separates rounding from a "
    "defect, objective.sampler_correction=token corrects for it. With rollout.sampler=vllm, "
    "compare the server's dtype, temperature, image sizes and weights with the run's",
)
def _check_mismatch(run: AlarmMonitor) -> tuple[float, str]:
    """Return the mean difference of log-probs of fresh completions; NaN if it is intended."""
    last = run.last[-1]
    is_outside = "staleness/max" in last and not run.context.truncates
    if "sampling/importance_sampling_ratio/mean" in last and not is_outside:
        return math.nan, ""
    fresh = [row for row in run.last if not row.get("staleness/max")]
    least = (SHORT + 1) // 2 if len(fresh) == len(run.last) else 1
    difference = _mean(fresh[-SHORT:], "sampling/sampling_logp_difference/mean", least)
    return difference, (
        f"log-probs of sampler and update differ by {difference:.3g} nats per token: the trained "
        "policy is not the one that was sampled from"
    )


@_rule(
    "reward fails",
    # One in a hundred: a rare unusual completion is not a pattern.
    raises=0.01,
    clears=0.002,
    remedy="the tracebacks are in samples/ under failures: fix the reward",
)
def _check_failures(run: AlarmMonitor) -> tuple[float, str]:
    counts = {n: run.recent(f"rewards/{n}/failed", SHORT) for n in run.context.weights}
    known = {name: count for name, count in counts.items() if not math.isnan(count)}
    if not known:
        return math.nan, ""
    name = max(known, key=lambda name: (known[name], name))
    share = known[name] / run.context.completions
    return share, (
        f"reward {name} failed on {share:.1%} of the recent completions, which are not used"
    )
