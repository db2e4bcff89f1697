"""``vlm-grpo difficulty``: write the pass rate of every training example."""

from __future__ import annotations

from pathlib import Path

import typer

from vlm_grpo.cli.common import (
    ApiKeyEnv,
    Concurrency,
    Overrides,
    Price,
    Recipe,
    RecipeTask,
    ServedModelName,
    ServerUrl,
    Timeout,
    add_task_override,
    build_endpoint,
    exit_when_stopped,
)
from vlm_grpo.cli.evaluate import Checkpoint
from vlm_grpo.cli.sample import Out, Samples, run_sampling


def difficulty(
    recipe: Recipe,
    overrides: Overrides = None,
    task: RecipeTask = None,
    checkpoint: Checkpoint = None,
    samples: Samples = 8,
    out: Out = Path("difficulty.jsonl"),
    server: ServerUrl = None,
    served_model: ServedModelName = None,
    api_key_env: ApiKeyEnv = None,
    concurrency: Concurrency = None,
    timeout: Timeout = None,
    price: Price = None,
) -> None:
    """Sample the training examples, and write the pass rate of each.

    \b
    vlm-grpo difficulty counting --samples 8 --out difficulty.jsonl
    vlm-grpo train counting data.difficulty=difficulty.jsonl 'data.filter=0.1 < pass_rate < 0.9'

    The pass rate is the mean of the primary metric over an example's completions, or, if that is
    an error, the share of them that earned the full reward. Completions are sampled as in training
    (rollout.temperature). The same command continues after an interruption.
    """
    endpoint = build_endpoint(
        server,
        model=served_model,
        api_key_env=api_key_env,
        concurrency=concurrency,
        timeout=timeout,
        price=price,
    )
    with exit_when_stopped("the same command continues it"):
        values = add_task_override(overrides, task)
        found = run_sampling(recipe, values, checkpoint, (samples, out), endpoint)
        from vlm_grpo.dist.launch import initialize_distributed
        from vlm_grpo.eval.sampling import write_difficulty

        if not initialize_distributed().is_main_process:
            return
        rates = write_difficulty(found, out)
        never, always = sum(rate <= 0 for rate in rates), sum(rate >= 1 for rate in rates)
        typer.echo(
            f"{out}: of {len(rates)} examples, {never} have the pass rate 0, {always} have 1, and "
            f"{len(rates) - never - always} are between; train on the last with\n"
            f"  vlm-grpo train {recipe} data.difficulty={out} 'data.filter=0 < pass_rate < 1'"
        )
