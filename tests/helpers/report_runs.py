"""Run folders as a trainer leaves them, from a simulated policy that gets better over the steps.

Everything but the policy is real: the tasks, their embedded examples, the scores, and the writers
of metrics, samples and evaluations.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from vlm_grpo.config.run import DataSettings, load_settings
from vlm_grpo.data import load_examples
from vlm_grpo.evaluation.evaluate import summarize, write_predictions, write_summary
from vlm_grpo.registry import load_task
from vlm_grpo.task import Task
from vlm_grpo.tracking.metrics import StepLog, group_metrics
from vlm_grpo.tracking.samples import write_held_out, write_samples
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
    write: Callable[[Task, Example, float, random.Random], str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """A run's folder.

    Args:
        folder: its parent; the run is called after its task and seed.
        skill: share of right answers at the first and the last step.
        write: the policy, given the task, the example, its skill and a source of chance.
        overrides: settings over those of the task's recipe.
    """
    name = f"{task_name}-{seed}"
    changes = {"name": name, "output_dir": folder, "optim.max_steps": steps, "seed": seed}
    changes["optim.warmup_steps"] = 0
    changes |= {"model": "embedded"} | dict(overrides or {})
    settings = load_settings(task_name, [f"{key}={value}" for key, value in changes.items()])
    settings.save(settings.run_dir / "config.yaml")
    # Thinking and tags, so that a page has all parts of a completion to set apart.
    task = load_task(task_name, tags=True, thinking=True)
    train = few_examples(task_name, task, 4 * steps, "train")
    examples = few_examples(task_name, task, held_out, "eval")
    policy, chance = write or answer, random.Random(seed)
    log = StepLog(settings.run_dir / "metrics.jsonl")
    samples = settings.run_dir / "samples"
    for step in range(steps + 1):
        now = skill[0] + (skill[1] - skill[0]) * step / steps
        if step % max(1, steps // 4) == 0:
            texts = [policy(task, example, now, random.Random(example.id)) for example in examples]
            scores = [
                task.score(text, example) for text, example in zip(texts, examples, strict=True)
            ]
            found = summarize(task, examples, texts, scores, seed)
            path = settings.run_dir / "evaluation" / f"step-{step:06d}.jsonl"
            write_predictions(path, found)
            write_summary(path.with_suffix(".json"), found)
            write_held_out(samples, step, task, examples, found.rows)
        if step == steps:
            break
        groups = [
            group(task, example, [policy(task, example, now, chance) for _ in range(GROUP_SIZE)])
            for example in train[4 * step : 4 * step + 4]
        ]
        advantages = [_advantages(g) for g in groups]
        if step % samples_every == 0:
            write_samples(samples, step, groups, advantages, task)
        sampled = group_metrics(groups).values(empty=math.nan)
        log.write(step, sampled | _other_metrics(groups, step, chance))
    return settings.run_dir


def few_examples(
    name: str, task: Task, count: int = 1, split: Literal["train", "eval"] = "eval"
) -> list[Example]:
    """The first embedded examples; drawing all of them takes seconds."""
    source = f"embedded:{name}"
    data = DataSettings(train=source, eval=source, train_limit=count, eval_limit=count)
    return load_examples(source, task, data, split)


def group(task: Task, example: Example, texts: list[str]) -> Group:
    """One group with these completions."""
    prompt = Prompt(example, task.prompt(example), (0,), {})
    completions = tuple(
        Completion((0,) * len(text), (-0.1,) * len(text), text, stop_reason(text), (0.5,))
        for text in texts
    )
    return Group(prompt, completions, tuple(task.score(text, example) for text in texts))


def stop_reason(text: str) -> Any:
    return "eos" if text.endswith("</answer>") else "length"


def answer(task: Task, example: Example, skill: float, chance: random.Random) -> str:
    """The gold answer as often as ``skill`` says, and otherwise what a poor model writes."""
    gold = task.gold(example)
    if (roll := chance.random()) < skill:
        return gold
    if roll > 0.97:
        return "<think>There are so many of them that I"
    if roll > 0.94:
        return "<think>Hm.</think>I cannot tell."
    thinking, _, rest = gold.partition("</think>")
    off = 2 if task.primary_metric == "exact" else 9  # pixels are many, counts few
    wrong = re.sub(r"\b\d+", lambda n: str(int(n[0]) + chance.randint(1, off)), rest)
    wrong = wrong if wrong != rest else rest.replace("E", "F").replace("A", "H").lower()
    return f"{thinking} Or not quite.</think>{wrong}"


def with_alarms(run: Path, alarms: list[Mapping[str, Any]]) -> None:
    """Put alarms into a run's folder."""
    lines = "".join(json.dumps(alarm) + "\n" for alarm in alarms)
    (run / "alarms.jsonl").write_text(lines, encoding="utf-8")


def _advantages(sampled: Group) -> list[float]:
    rewards = [score.total or 0.0 for score in sampled.scores]
    mean = sum(rewards) / len(rewards)
    spread = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    return [(r - mean) / (spread + 1e-4) for r in rewards]


def _other_metrics(groups: list[Group], step: int, chance: random.Random) -> dict[str, float]:
    """What the update and the stopwatch would say."""
    equal = [len({score.total for score in g.scores}) == 1 for g in groups]
    return {
        "frac_reward_zero_std": sum(equal) / len(equal),
        "kl": 0.001 * step + 0.002 * chance.random(),
        "grad_norm": 0.5 + chance.random(),
        "loss": 1e-3 * chance.gauss(0, 1),
        "learning_rate": 2e-4,
        "sampling/sampling_logp_difference/mean": 1e-6 * (1 + chance.random()),
        "sampling/sampling_logp_difference/max": 1e-5 * (1 + chance.random()),
        "time/prompts": 0.02 + 0.002 * chance.random(),
        "time/prefill": 0.03 + 0.002 * chance.random(),
        "time/decode": 0.1 + 0.02 * chance.random(),
        "time/rollout": 0.15,
        "time/update": 0.2 + 0.02 * chance.random(),
        "time/step": 0.41,
    }
