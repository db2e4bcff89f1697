"""CPU time and memory of steps by group size, with a model whose completions resemble each other.

    OMP_NUM_THREADS=1 python perf/wide_groups.py

trains on the embedded model's own answers, a warm-up step and two timed ones for each group size,
and writes ``results/wide_groups.json``. Expected before measuring: the rollout takes as many calls
for 2 rows as for 32, so it grows least; the update by the tokens that are passed. "Alone" is the
update of the same groups if each completion is passed by itself. Times are of the process, so that
other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from measurement import PeakMemory

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.data.loading import load_examples
from vlm_grpo.model.policy import load_policy
from vlm_grpo.task.registry import load_task
from vlm_grpo.training import step_batch as batch_module
from vlm_grpo.training.step_batch import StepBatch, compute_advantages
from vlm_grpo.training.trainer import Trainer
from vlm_grpo.training.update import pack_step

RESULTS = Path(__file__).resolve().parent / "results" / "wide_groups.json"


def build_trainer(recipe: str, size: int, prompts: int, folder: str) -> Trainer:
    changes = [f"rollout.num_generations={size}", f"optim.prompts_per_step={prompts}"]
    changes += ["data.eval=null", "data.train_limit=64", "evaluation.every=0", "optim.max_steps=30"]
    settings = load_settings(recipe, [*changes, "logging.samples_every=0", f"output_dir={folder}"])
    task = load_task(settings.task, **settings.task_options)
    examples = load_examples(settings.data.train, task, settings.data, "train")
    return Trainer(settings, load_policy(settings), task, examples)


@contextmanager
def pass_alone() -> Iterator[None]:
    """Pass each completion by itself inside."""
    find, batch_module.find_trunks = batch_module.find_trunks, lambda completions: ()
    try:
        yield
    finally:
        batch_module.find_trunks = find


def pack(trainer: Trainer, rollout: Any) -> StepBatch:
    settings, ranks = trainer.settings, trainer.accelerator
    advantages = compute_advantages(rollout, {}, settings.objective, trainer.estimator, ranks)
    return pack_step(rollout, {}, advantages, trainer.methods, settings)


def count_tokens(batch: StepBatch) -> int:
    return sum(piece.num_tokens for part in batch.mini_batches for piece in part)


def measure(recipe: str, size: int, prompts: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(recipe, size, prompts, folder)
        memory, found = PeakMemory("cpu"), []
        for step in range(steps + 1):
            memory.reset()
            starts = [time.process_time()]
            rollout = trainer._rollout()  # noqa: SLF001
            starts.append(time.process_time())
            batch = pack(trainer, rollout)
            trainer.updater.update(batch)
            starts.append(time.process_time())
            peak = memory.peak()
            with pass_alone():
                alone = pack(trainer, rollout)
                trainer.updater.update(alone)
            starts.append(time.process_time())
            row = [b - a for a, b in itertools.pairwise(starts)]
            if step:
                found.append([*row, peak, count_tokens(batch), count_tokens(alone)])
        trainer.sampler.close()
    names = ("rollout", "update", "update_alone", "peak_bytes", "tokens", "tokens_alone")
    columns = zip(*found, strict=True)
    means = {name: statistics.mean(column) for name, column in zip(names, columns, strict=True)}
    return {"recipe": recipe, "size": size, "prompts": prompts, **means}


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| G | rollout, s | update, s | relative | tokens | MB | alone: update, s | tokens |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    first = rows[0]["rollout"] + rows[0]["update"]
    for row in rows:
        relative = (row["rollout"] + row["update"]) / first
        print(
            f"| {row['size']} | {row['rollout']:.2f} | {row['update']:.2f} | {relative:.1f} "
            f"| {row['tokens']:,.0f} | {row['peak_bytes'] / 1e6:,.0f} "
            f"| {row['update_alone']:.2f} | {row['tokens_alone']:,.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", default="grounding")
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 8, 32, 128])
    parser.add_argument("--prompts", type=int, default=4, help="prompts per step")
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one warm-up")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for size in options.sizes:
        rows.append(measure(options.recipe, size, options.prompts, options.steps))
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()
