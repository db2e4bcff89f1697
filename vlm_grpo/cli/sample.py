"""``vlm-grpo sample``: the training examples' completions that earned a reward, and pass rates."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlm_grpo.cli.common import (
    Concurrency,
    Overrides,
    Recipe,
    ServedModelName,
    ServerUrl,
    Timeout,
    build_endpoint,
    exit_when_stopped,
    find_checkpoint,
)
from vlm_grpo.cli.evaluate import Checkpoint
from vlm_grpo.errors import UserError

if TYPE_CHECKING:
    from vlm_grpo.config.run import Settings


def sample(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    samples: Annotated[
        int, typer.Option(min=1, max=4096, help="Completions per training example.")
    ] = 8,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of the kept completions, JSON Lines; default: sampled.jsonl, or none with "
            "--difficulty.",
        ),
    ] = None,
    difficulty: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File of the pass rate of each example, for data.difficulty."
        ),
    ] = None,
    min_reward: Annotated[
        float | None,
        typer.Option(help="Reward that a completion must earn; default: that of a right answer."),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Most completions to keep of an example: the best; default: 1."),
    ] = None,
    server: ServerUrl = None,
    served_model: ServedModelName = None,
    concurrency: Concurrency = None,
    timeout: Timeout = None,
) -> None:
    """Sample the training examples, and keep the completions that earned a reward.

    \b
    vlm-grpo sample counting --samples 16 --out solved.jsonl
    vlm-grpo sample counting --checkpoint runs/counting --out solved.jsonl --keep 4
    vlm-grpo sample grounding --min-reward 0.8 --out solved.jsonl data.train_limit=500
    vlm-grpo sft counting data.train=solved.jsonl          train on them
    vlm-grpo sample counting --difficulty difficulty.jsonl
    vlm-grpo train counting data.difficulty=difficulty.jsonl 'data.filter=0.1 < pass_rate < 0.9'

    The file has the rows with a column completion. Completions are sampled as in training
    (rollout.temperature). The same command continues after an interruption.

    The pass rate is the mean of the primary metric over an example's completions, or, if that is
    an error, the share of them that earned the full reward.
    """
    if difficulty is None:
        out = out or Path("sampled.jsonl")
    elif out is None and (min_reward is not None or keep is not None):
        raise UserError("--min-reward and --keep need --out, the file of the kept completions")
    endpoint = build_endpoint(context.params)
    with exit_when_stopped("the same command continues it"):
        files = {"--out": out, "--difficulty": difficulty}
        settings = _load_settings(recipe, overrides or [], files)
        from vlm_grpo.dist.launch import initialize_distributed
        from vlm_grpo.eval import sampling

        found = sampling.sample_examples(settings, samples, find_checkpoint(checkpoint), endpoint)
        if not initialize_distributed().is_main_process:
            return
        if difficulty is not None:
            rates = sampling.write_difficulty(found, difficulty)
            never, always = sum(rate <= 0 for rate in rates), sum(rate >= 1 for rate in rates)
            typer.echo(
                f"{difficulty}: of {len(rates)} examples, {never} have the pass rate 0, {always} "
                f"have 1, and {len(rates) - never - always} are between; train on the last with\n"
                f"  vlm-grpo train {recipe} data.difficulty={difficulty} "
                "'data.filter=0 < pass_rate < 1'"
            )
        if out is not None:
            rows, examples = sampling.write_completions(found, out, min_reward, keep or 1)
            root, data = sampling.find_outside_folder(found, out), found.settings.data
            is_outside = root is not None and data.image_root is None
            more = f" data.image_root={root}" if is_outside else ""
            typer.echo(
                f"{out}: {rows} completions of {examples} of {len(found.examples)} examples; train "
                f"on them with\n  vlm-grpo sft {recipe} data.train={out}{more}"
            )


def _load_settings(recipe: str, overrides: list[str], files: Mapping[str, Path | None]) -> Settings:
    """Load the settings of the samples, and refuse those and files that cannot be used."""
    for key in (override.partition("=")[0] for override in overrides):
        if key.startswith("evaluation.") and key != "evaluation.max_tokens_per_batch":
            raise UserError(
                f"{key} has no effect on training examples, which are sampled as in training: "
                "use --samples and rollout.temperature"
            )
    from vlm_grpo.config.recipes import load_settings

    settings = load_settings(recipe, overrides)
    for name, neutral in {"top_p": 1.0, "top_k": 0, "min_p": None}.items():
        if (value := getattr(settings.rollout, name)) not in (neutral, 0):
            raise UserError(
                f"rollout.{name}={value:g} has no effect here, where completions are sampled from "
                f"all tokens: add rollout.{name}={'null' if neutral is None else neutral}"
            )
    for option, path in files.items():
        if path is None:
            continue
        if not path.parent.is_dir():
            raise UserError(f"{option} {path}: its folder does not exist")
        if os.path.lexists(path):
            raise UserError(
                f"{option} {path} exists: delete it, or give another file; samples of an earlier "
                f"call are in {settings.run_dir}/sampled and are not taken again"
            )
    return settings
