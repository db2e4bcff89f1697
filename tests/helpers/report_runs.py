"""Run folders of a simulated policy that improves over the steps. Tasks, embedded examples, scores,
and the writers of metrics, samples and evaluations are real."""

import math
import random
import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from commands import write_jsonl

from vlm_grpo import Settings, Task, load_settings, load_task
from vlm_grpo.config.data import DataSettings
from vlm_grpo.data.loading import load_examples
from vlm_grpo.eval.scored import summarize
from vlm_grpo.report.samples import write_held_out, write_samples
from vlm_grpo.training.metrics import StepLog, group_metrics, rollout_distributions
from vlm_grpo.types import Completion, Example, Group, Prompt

GROUP_SIZE = 8
TASKS = ("counting", "grounding", "ocr")


def make_run(
    folder: Path,
    task_name: str = "counting",
    steps: int = 40,
    *,
    seed: int = 0,
    skill: tuple[float, float] = (0.3, 0.9),
    held_out: int = 24,
    samples_every: int = 10,
    policy: Callable[[Task, Example, float, random.Random], str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write the folder of a run, named after its task and seed; return its path. ``skill`` holds
    the accuracies of the first and the last step. ``policy`` returns the text of a completion."""
    name = f"{task_name}-{seed}"
    changes = {"name": name, "output_dir": folder, "optim.max_steps": steps, "seed": seed}
    changes |= {"optim.warmup_steps": 0, "model": "embedded", **(overrides or {})}
    settings = load_settings(task_name, [f"{key}={value}" for key, value in changes.items()])
    settings.save(settings.run_dir / "config.yaml")
    # With thinking and tags, completions have all the parts that a page distinguishes.
    task = load_task(task_name, tags=True, thinking=True)
    train = load_few_examples(task_name, task, 4 * steps, "train")
    examples = load_few_examples(task_name, task, held_out, "eval")
    policy, generator = policy or write_completion, random.Random(seed)
    log = StepLog(settings.run_dir / "metrics.jsonl")
    distributions = StepLog(settings.run_dir / "distributions.jsonl")
    samples = settings.run_dir / "samples"
    for step in range(steps + 1):
        current = skill[0] + (skill[1] - skill[0]) * step / steps
        if step % max(1, steps // 4) == 0:
            texts = [policy(task, e, current, random.Random(e.id)) for e in examples]
            _write_evaluation(settings, step, task, examples, texts)
        if step == steps:
            break
        groups = [
            make_group(task, e, [policy(task, e, current, generator) for _ in range(GROUP_SIZE)])
            for e in train[4 * step : 4 * step + 4]
        ]
        advantages = [_compute_advantages(g) for g in groups]
        if step % samples_every == 0:
            write_samples(samples, step, groups, advantages, task)
        sampled = group_metrics(groups).values(empty=math.nan)
        log.write(step, sampled | _simulate_metrics(groups, step, generator))
        distributions.write(step, rollout_distributions(groups))
    return settings.run_dir


def _write_evaluation(
    settings: Settings, step: int, task: Task, examples: list[Example], texts: list[str]
) -> None:
    scores = [task.score(text, example) for text, example in zip(texts, examples, strict=True)]
    outputs = [*map(Completion.from_text, texts)]
    evaluation = summarize(task, examples, outputs, scores, settings.seed)
    path = settings.run_dir / "evaluation" / f"step-{step:06d}.jsonl"
    evaluation.write(path)
    write_held_out(settings.run_dir / "samples", step, task, examples, evaluation.rows)


def load_few_examples(
    name: str, task: Task, count: int = 1, split: Literal["train", "eval"] = "eval"
) -> list[Example]:
    """Load the first embedded examples; drawing all of them takes seconds."""
    source = f"embedded:{name}"
    data = DataSettings(train=source, eval=source, train_limit=count, eval_limit=count)
    return list(load_examples(source, task, data, split))


def make_group(task: Task, example: Example, texts: list[str]) -> Group:
    prompt = Prompt(example, task.prompt(example), (0,), {})
    completions, stops = [], {True: "eos", False: "length"}
    for text in texts:
        stop: Any = stops[text.endswith("</answer>")]
        completions.append(Completion((0,) * len(text), (-0.1,) * len(text), text, stop, (0.5,)))
    return Group(prompt, (*completions,), tuple(task.score(text, example) for text in texts))


def write_completion(task: Task, example: Example, skill: float, generator: random.Random) -> str:
    """Return the gold answer with probability ``skill``, or else a typical failure."""
    gold = task.gold(example)
    if (draw := generator.random()) < skill:
        return gold
    if draw > 0.97:
        return "<think>There are so many of them that I"
    if draw > 0.94:
        return "<think>Hm.</think>I cannot tell."
    thinking, _, rest = gold.partition("</think>")
    largest_error = 2 if task.primary_metric == "exact" else 9  # of counts, or of pixels
    wrong = re.sub(r"\b\d+", lambda n: str(int(n[0]) + generator.randint(1, largest_error)), rest)
    wrong = wrong if wrong != rest else rest.replace("E", "F").replace("A", "H").lower()
    return f"{thinking} Or not quite.</think>{wrong}"


def write_alarms(run: Path, alarms: list[Mapping[str, Any]]) -> None:
    write_jsonl(run / "alarms.jsonl", *map(dict, alarms))


def _compute_advantages(sampled: Group) -> list[float]:
    rewards = [score.total or 0.0 for score in sampled.scores]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    return [(r - mean) / (std + 1e-4) for r in rewards]


def _simulate_metrics(groups: list[Group], step: int, generator: random.Random) -> dict[str, float]:
    """Return plausible metrics of the update and of the time per phase."""
    return {
        "frac_reward_zero_std": statistics.mean(
            len({s.total for s in g.scores}) == 1 for g in groups
        ),
        "kl": 0.001 * step + 0.002 * generator.random(),
        "grad_norm": 0.5 + generator.random(),
        "loss": 1e-3 * generator.gauss(0, 1),
        "learning_rate": 2e-4,
        "sampling/sampling_logp_difference/mean": 1e-6 * (1 + generator.random()),
        "sampling/sampling_logp_difference/max": 1e-5 * (1 + generator.random()),
        "time/prompts": 0.02 + 0.002 * generator.random(),
        "time/prefill": 0.03 + 0.002 * generator.random(),
        "time/decode": 0.1 + 0.02 * generator.random(),
        "time/rollout": 0.15,
        "time/update": 0.2 + 0.02 * generator.random(),
        "time/step": 0.41,
    }
