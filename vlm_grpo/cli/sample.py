"""``vlm-grpo sample``: keep the completions of training examples that earned a reward."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from vlm_grpo.errors import UserError

if TYPE_CHECKING:
    from vlm_grpo.eval.sampling import SampledExamples
    from vlm_grpo.serve.chat import Endpoint

Samples = Annotated[int, typer.Option(min=1, max=4096, help="Completions per training example.")]
Out = Annotated[Path, typer.Option(metavar="FILE", help="File to write, JSON Lines.")]


def sample(
    recipe: Recipe,
    overrides: Overrides = None,
    task: RecipeTask = None,
    checkpoint: Checkpoint = None,
    samples: Samples = 8,
    out: Out = Path("sampled.jsonl"),
    min_reward: Annotated[
        float | None,
        typer.Option(help="Reward that a completion must earn; default: that of a right answer."),
    ] = None,
    keep: Annotated[
        int, typer.Option(min=1, help="Most completions to keep of an example: the best.")
    ] = 1,
    server: ServerUrl = None,
    served_model: ServedModelName = None,
    api_key_env: ApiKeyEnv = None,
    concurrency: Concurrency = None,
    timeout: Timeout = None,
    price: Price = None,
) -> None:
    """Sample the training examples, and keep the completions that earned a reward.

    \b
    vlm-grpo sample counting --samples 16 --out solved.jsonl
    vlm-grpo sample counting --checkpoint runs/counting --out solved.jsonl --keep 4
    vlm-grpo sample grounding --min-reward 0.8 --out solved.jsonl data.train_limit=500
    vlm-grpo sft counting data.train=solved.jsonl          train on them

    The file has the rows with a column completion. Completions are sampled as in training
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
        from vlm_grpo.eval.sampling import find_outside_folder, write_completions

        if not initialize_distributed().is_main_process:
            return
        rows, examples = write_completions(found, out, min_reward, keep)
        root, data = find_outside_folder(found, out), found.settings.data
        more = f" data.image_root={root}" if root is not None and data.image_root is None else ""
        typer.echo(
            f"{out}: {rows} completions of {examples} of {len(found.examples)} examples; train on "
            f"them with\n  vlm-grpo sft {recipe} data.train={out}{more}"
        )


def run_sampling(
    recipe: str,
    overrides: list[str],
    checkpoint: Path | None,
    output: tuple[int, Path],
    endpoint: Endpoint | None,
) -> SampledExamples:
    """Sample the training examples of a recipe.

    Args:
        recipe: the recipe.
        overrides: settings that override the recipe's.
        checkpoint: a checkpoint or a run; None: the recipe's model.
        output: the samples per example, and the file to be written later.
        endpoint: address of the model; None: its weights are loaded here.

    Raises:
        UserError: a setting or the file cannot be used, or as for ``sample_examples``.
    """
    for key in (override.partition("=")[0] for override in overrides):
        if key.startswith("evaluation.") and key != "evaluation.max_tokens_per_batch":
            raise UserError(
                f"{key} has no effect on training examples, which are sampled as in training: "
                "use --samples and rollout.temperature"
            )
    from vlm_grpo.config.recipes import load_settings
    from vlm_grpo.deploy.resolve import find_checkpoint

    settings, (count, out) = load_settings(recipe, overrides), output
    for name, neutral in {"top_p": 1.0, "top_k": 0, "min_p": None}.items():
        if (value := getattr(settings.rollout, name)) not in (neutral, 0):
            raise UserError(
                f"rollout.{name}={value:g} has no effect here, where completions are sampled from "
                f"all tokens: add rollout.{name}={'null' if neutral is None else neutral}"
            )
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: its folder does not exist")
    if os.path.lexists(out):
        raise UserError(
            f"--out {out} exists: delete it, or give another file; samples of an earlier call are "
            f"in {settings.run_dir}/sampled and are not taken again"
        )
    from vlm_grpo.eval.sampling import sample_examples

    return sample_examples(settings, count, find_checkpoint(checkpoint), endpoint)
