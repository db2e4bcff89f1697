"""The text that a run prints before its first step and after its last."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_grpo.config.combinations import list_notes
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.prompt_order import compute_shares
from vlm_grpo.eval.scored import Scored
from vlm_grpo.eval.statistics import format_value
from vlm_grpo.model.policy import Policy
from vlm_grpo.planning.prompts import PromptCounter
from vlm_grpo.report.run import measure_change
from vlm_grpo.task import Task
from vlm_grpo.types import Example

COUNTED_EXAMPLES = 64
"""Number of examples whose image tokens are counted before the first step."""


def describe_start(settings: Settings, origin: str | None, is_done: bool) -> list[str]:
    """Return the line about what a run resumes from: ``origin``, None if it does not."""
    last = settings.optim.max_steps
    if origin is not None:
        return [f"resume     {origin}" + is_done * f"; nothing is left to do of {last} steps"]
    text = f"resume     {settings.run_dir} has no checkpoint: the run begins with its first step"
    return [text] if settings.resume else []


def describe_run(
    settings: Settings,
    policy: Policy,
    task: Task,
    train: Sequence[Example],
    held_out: Sequence[Example],
) -> Iterator[str]:
    """Yield the lines that describe a run before its first step."""
    weights = [weight.numel() for _, weight in policy.trainable_parameters()]
    total = sum(weight.numel() for weight in policy.model.parameters())
    kind = "LoRA" if policy.adapters is not None else "full weights"
    yield f"model      {settings.model} ({total:,} weights, {sum(weights):,} trained, {kind})"
    yield f"task       {', '.join(settings.task_names)}"
    sources = settings.data.describe("train")
    chosen = f" with {settings.data.filter}" if settings.data.filter is not None else ""
    yield f"data       {sources}: {len(train):,} examples{chosen}; {len(held_out):,} held out"
    yield from _describe_mixture(settings, train, held_out)
    yield from _image_line(policy, task, train[:COUNTED_EXAMPLES])
    start, end = (_describe_rewards(task.with_progress(progress)) for progress in (0.0, 1.0))
    yield f"rewards    {start}" + (f"; at the end {end}" if end != start else "")
    form = "one prompt pass per group" if policy.shared else "one prompt pass per completion"
    rollout, optim = settings.rollout, settings.optim
    parts = f" in {optim.mini_batches} mini-batches" if optim.mini_batches > 1 else ""
    is_sampled = settings.steps_after_warm_start > 0
    size = f"× {rollout.num_generations} completions{parts}" if is_sampled else "with their targets"
    yield f"step       {optim.prompts_per_step} prompts {size}, {form}, on {policy.device}"
    if (vllm := rollout.vllm) is not None:
        own = f"servers started by {vllm.python}, logs in {settings.run_dir}/vllm-*.log"
        yield f"sampler    vLLM: {', '.join(vllm.urls) or own}"
    if policy.shared:
        yield f"attention  {policy.describe_engine()}"
    if (count := settings.supervised_steps) and (start := settings.warm_start) is not None:
        then = "GRPO" if count < optim.max_steps else "the run ends"
        yield (
            f"warm start {count} steps on the gold answers of {optim.prompts_per_step} prompts, "
            f"lr {start.lr:g}, {start.schedule}; then {then}"
        )
    yield f"optimizer  {_describe_optimizer(settings)}"
    if is_sampled:
        yield f"loss       {_describe_loss(settings)}"
        yield f"reference  {_reference(settings.objective)}"
        for note in list_notes(settings):
            yield f"note       {note}"
    yield f"run folder {settings.run_dir}"


def _describe_optimizer(settings: Settings) -> str:
    optim, start = settings.optim, settings.warm_start
    rates, schedule = [f"lr {optim.lr:g}"], optim.schedule
    rates += [f"{rate:g} of the {part}" for part, rate in optim.part_rates.items()]
    if start is not None and not settings.steps_after_warm_start:
        rates, schedule = [f"lr {start.lr:g}"], start.schedule
    return ", ".join([optim.name, *rates, schedule])


def _describe_loss(settings: Settings) -> str:
    """Describe the loss and the advantages, with the user's files, and the methods."""
    objective = settings.objective
    own = "" if objective.loss is None else f"{objective.loss}, reduced as "
    methods = "".join(f", method {method.file}" for method in settings.methods)
    return f"{own}{objective.loss_type}, advantages {objective.advantage_estimator}{methods}"


def _describe_rewards(task: Task) -> str:
    weights = task.reward_weights().items()
    return ", ".join(f"{name} × {weight:g}" for name, weight in weights if weight) or "none"


def _describe_mixture(
    settings: Settings, train: Sequence[Example], held_out: Sequence[Example]
) -> Iterator[str]:
    counts = Counter(example.source.partition("/")[0] for example in train)
    left_out = Counter(example.source.partition("/")[0] for example in held_out)
    shares = compute_shares(counts, settings.data) if "" not in counts else {}
    for name in filter(None, {**shares, **left_out}):
        trained = ""
        if name in shares:
            trained = f"{counts[name]:,} examples, {100 * shares[name]:.3g} % of the prompts; "
        yield f"           {name}: {trained}{left_out[name]:,} held out"


def _image_line(policy: Policy, task: Task, examples: Sequence[Example]) -> Iterator[str]:
    if policy.budget is None or not any(example.images for example in examples):
        return
    sizes = PromptCounter(examples, task, policy.prompts).count(policy.budget)
    images = sorted(size.image_tokens for size in sizes)
    spread = f"{images[0]:,}" if images[0] == images[-1] else f"{images[0]:,} to {images[-1]:,}"
    yield (
        f"images     {spread} tokens per example, prompts up to {sizes[-1].tokens:,} "
        f"(the first {len(examples)} examples)"
    )


def _reference(objective: ObjectiveSettings) -> str:
    every = objective.reference_refresh_every
    if objective.beta == 0:
        return "none: beta=0, the loss has no KL"
    if every == 1:
        return "the policy at the start of each step (k=1): no second model, and a KL of about 0"
    if every == "never":
        return "the policy before its first rollout, for the entire run"
    return f"a copy of the policy, refreshed every {every} steps"


@dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    before: Scored | None  # held-out evaluation of the loaded model; None without held-out data
    after: Scored | None  # held-out evaluation after the last step; None without held-out data
    # best held-out value, the loaded model's included, with its step; None without held-out data
    best: tuple[float, int] | None
    checkpoint: Path
    run_dir: Path
    lower_is_better: bool = False  # True if the held-out primary metric is an error
    #: what commands with the run's own settings need: --trust-code; None: no command can read them
    flag: str | None = ""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for title, evaluation in {"before": self.before, "after": self.after}.items():
            lines = [] if evaluation is None else evaluation.lines
            yield from (f"{title:<11}{line}" for line in lines[:1])
            yield from (f"{'':<13}{line}" for line in lines[1:])
        if self.before is not None and self.after is not None:
            yield f"change     {format_change(self.before, self.after)}"
        if self.best is not None:
            value, step = self.best
            yield f"best       {format_value(value, self.lower_is_better)}, {self._locate(step)}"
        yield f"report     {self.run_dir / 'report.html'}"
        yield f"samples    {self.run_dir / 'samples'}"
        yield f"checkpoint {self.checkpoint}"
        config, best = self.run_dir / "config.yaml", self.checkpoint
        if self.best is not None and (kept := self._find(self.best[1])).is_dir():
            best = kept
        following = [f"vlm-grpo export {best} exported"]
        if self.best is not None and self.best[1] == 0:
            following = ["no step was better than the loaded model: try another learning rate"]
        if self.flag is not None:
            following.insert(0, f"vlm-grpo evaluate {config} --checkpoint {best}{self.flag}")
        yield "next       " + f"\n{'':<11}".join(following)

    def _find(self, step: int) -> Path:
        return self.checkpoint.with_name(f"step-{step}")

    def _locate(self, step: int) -> str:
        if step == 0:
            return "the loaded model"
        if (checkpoint := self._find(step)).is_dir():
            return str(checkpoint)
        return f"after step {step}, not kept (checkpoint.keep_best=true keeps it)"


def format_change(before: Scored, after: Scored) -> str:
    """Format the primary metric's mean change with its 95 % interval, paired by example.

    A metric of the full set has no interval, because single examples have no value.
    """
    if not {row["id"] for row in before.rows} & {row["id"] for row in after.rows}:
        return "unknown: the evaluations have no example in common"  # data.eval was changed
    change = measure_change(before, after, after.primary_metric)
    if change is None:
        return "no example was scored both times"
    scale, form, unit = (1, "{:+.3f}", "") if after.lower_is_better else (100, "{:+.1f}", " points")
    values = (change.difference, *change.difference_interval)
    mean, low, high = (form.format(scale * value) for value in values)
    if math.isnan(change.difference_interval[0]):
        return mean + unit
    return f"{mean}{unit} [{low}, {high}]" + ("" if change.verdict else ", which may be chance")
