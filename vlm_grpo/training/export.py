"""Export a trained checkpoint as a model for transformers, vLLM and the hub."""

import json
import logging
import math
import re
import shutil
from dataclasses import replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import yaml
from jinja2 import Environment, StrictUndefined
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.config.run import Settings
from vlm_grpo.data.mixed_task import load_run_task
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.linear import is_quantized, restore
from vlm_grpo.model.families.known import load_family
from vlm_grpo.model.loading import LoadedModel, load_config, load_model
from vlm_grpo.model.resolve import NO_TASK, ResolvedModel, resolve_model
from vlm_grpo.report.run import Change, read_run
from vlm_grpo.task import FAILURES
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.registry import get_short_name
from vlm_grpo.types import Example, ImageRef
from vlm_grpo.utils.atomic_io import create_whole_folder, share_weights
from vlm_grpo.utils.chat import IMAGE
from vlm_grpo.utils.jsonl import read_object

logger = logging.getLogger(__name__)

ExportedWeights = Literal["merged", "dequantized", "adapter"]
LIBRARIES = ("vlm-grpo", "transformers", "torch", "peft")
PREPROCESSOR = "preprocessor_config.json"


def export(
    run: str | Path, out: str | Path, weights: ExportedWeights = "merged", dtype: str | None = None
) -> Path:
    """Write a checkpoint as a model folder, completely or not at all, and return the folder.

    Args:
        run: a run or a checkpoint, as for ``resolve_model``.
        weights: ``merged``: all weights; adapters are merged in float32 into the original ones, and
            the result is rounded once. ``dequantized``: they are merged into the 4- or 8-bit
            weights on which they were trained, as these are after dequantization. ``adapter``: the
            adapter alone, for PEFT.
        dtype: dtype of the weights; None: that of the original model. Has no effect on adapters.

    Raises:
        UserError: ``out`` exists, ``run`` has no trained weights, or there is no adapter or no
            quantized weights.
    """
    if not isinstance(run, str | Path):
        raise UserError(f"run must be the folder or the name of a run, not {type(run).__name__}")
    if weights not in get_args(ExportedWeights):
        names = ", ".join(get_args(ExportedWeights))
        raise UserError(f"weights is {weights!r}; it must be one of {names}")
    if dtype not in (None, "float32", "bfloat16"):
        raise UserError(f"dtype is {dtype!r}; it must be float32 or bfloat16")
    disable_progress_bar()
    initialize_distributed()
    out = Path(out)
    trained = resolve_model(str(run))
    if trained.checkpoint is None:
        raise UserError(
            f"{run} is neither a run nor a checkpoint: there are no trained weights to export"
        )
    if out.exists():
        raise UserError(f"{out} exists already: name a new folder, or remove it")
    adapter = weights == "adapter"
    if adapter and not (trained.checkpoint / "adapter_config.json").is_file():
        raise UserError(f"{run} trained full weights and has no adapter: leave out --adapter")
    if adapter and dtype is not None:
        raise UserError("--dtype has no effect with --adapter, which writes the adapter as it is")
    if weights == "dequantized" and trained.settings.policy.load_in == "none":
        raise UserError(f"{run} did not train on quantized weights: leave out --dequantized")
    with create_whole_folder(out) as folder:
        if adapter:
            _write_adapter(trained, folder)
        else:
            _write_model(trained, folder, dtype, weights == "dequantized")
        (folder / "README.md").write_text(build_model_card(trained, weights), encoding="utf-8")
        share_weights(folder)
    return out


def _write_model(
    trained: ResolvedModel, folder: Path, dtype: str | None, dequantized: bool
) -> None:
    settings = trained.settings
    # Merge in float32: an adapter's change is far below the spacing of bfloat16 weights, and
    # rounding the sum once loses less than rounding the weights first.
    policy = settings.policy.model_copy(update={"dtype": "float32", "load_in": "none"})
    in_float32 = settings.model_copy(update={"policy": policy})
    loaded = load_model(in_float32, trained.checkpoint, training=False)
    model: Any = loaded.model
    if dequantized:
        replace_with_dequantized(model, load_model(settings, training=False).model)
    if loaded.adapters is not None:
        model = loaded.adapters.merge_and_unload()  # type: ignore[operator]
    original = str(load_config(settings).dtype or "float32").removeprefix("torch.")
    model.to(getattr(torch, dtype or original))
    model.save_pretrained(folder)
    _write_processor(loaded, folder)


def _write_adapter(trained: ResolvedModel, folder: Path) -> None:
    checkpoint, settings = trained.checkpoint, trained.settings
    assert checkpoint is not None
    shutil.copyfile(checkpoint / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    config = read_object(checkpoint / "adapter_config.json")
    # The public name of the base model, not the local folder it was loaded from.
    if settings.model != "embedded":
        config["base_model_name_or_path"] = settings.model
        config["revision"] = settings.model_revision
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_processor(load_model(settings, checkpoint, training=False), folder)


def _write_processor(loaded: LoadedModel, folder: Path) -> None:
    """Write the processor, with the pixel budget of the training in it."""
    processor, budget = loaded.prompts.processor, loaded.prompts.budget
    loaded.prompts.save_processor(folder)
    # Older programs read the image processor from a separate file, and the pixel budget under the
    # names in the files of the original models.
    values = processor.image_processor.to_dict()
    if budget is not None:
        values |= {"min_pixels": budget.min_pixels, "max_pixels": budget.max_pixels}
    values["processor_class"] = type(processor).__name__
    (folder / PREPROCESSOR).write_text(json.dumps(values, indent=2, default=str) + "\n")


def build_model_card(trained: ResolvedModel, weights: ExportedWeights = "merged") -> str:
    """Return the README.md of an exported model: its training and its held-out results.

    The front matter has the format of the hub (https://huggingface.co/docs/hub/model-cards).
    """
    settings, adapter = trained.settings, weights == "adapter"
    primary_metric, change, rows = _read_results(trained)
    front: dict[str, Any] = {
        "pipeline_tag": "image-text-to-text",
        "library_name": "peft" if adapter else "transformers",
        "tags": ["vlm-grpo", "grpo", get_short_name(settings.task)],
    }
    if settings.model != "embedded" and not Path(settings.model).exists():
        front["base_model"] = settings.model
        front["base_model_relation"] = "adapter" if adapter else "finetune"
    entries = (*settings.data.get_sources("train"), *settings.data.get_sources("eval"))
    sources = [str(entry.source) for entry in entries]
    if named := {source.split(":")[1] for source in sources if source[:3] == "hf:"}:
        front["datasets"] = sorted(named)
    if change is not None:  # the format of the hub's leaderboards
        data = settings.data.describe("train" if settings.data.eval is None else "eval")
        entry = {
            "task": {"type": "image-text-to-text"},
            "dataset": {"name": data, "type": data},
            "metrics": [{"type": primary_metric, "value": round(change.after, 4)}],
        }
        name = settings.name or get_short_name(settings.task)
        front["model-index"] = [{"name": name, "results": [entry]}]
    template = files("vlm_grpo").joinpath("templates/model_card.md.j2").read_text("utf-8")
    prompt = _build_example_prompt(settings)
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        settings=settings,
        settings_text=yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False),
        adapter=adapter,
        dequantized=weights == "dequantized",
        step=trained.checkpoint.name.removeprefix("step-") if trained.checkpoint else "",
        primary_metric=primary_metric,
        change=change,
        rows=rows,
        intervals=change is not None and not math.isnan(change.before_interval[0]),
        versions={name: version(name) for name in LIBRARIES},
        has_task=settings.task != NO_TASK,
        trained_prompt=prompt is not None,
        prompt=json.dumps(prompt or "QUESTION", ensure_ascii=False),
    )


def _build_example_prompt(settings: Settings) -> str | None:
    """Return the training's user message for the question "QUESTION", or None if there is no task
    or the message depends on the image or the answer."""
    if settings.task == NO_TASK:
        return None
    frame = FRAMES[load_family(load_config(settings)).frame]
    try:
        task = replace(load_run_task(settings), frame=frame)
        images = [ImageRef("image", size, size, data=b"") for size in ((640, 480), (480, 640))]
        examples = [Example("card", (image,), "QUESTION", None) for image in images]
        prompts = {settings.prompt.write_chat(e, task)[-1].text for e in examples}
        prompts = {prompt.removeprefix(IMAGE) for prompt in prompts}  # the card has it first
    except FAILURES as error:  # a user's task may read the image or the answer, or be gone
        logger.warning("the model card has no prompt, which the task does not write: %s", error)
        return None
    return prompts.pop() if len(prompts) == 1 else None


def _read_results(
    trained: ResolvedModel,
) -> tuple[str | None, Change | None, list[tuple[str, float, float]]]:
    """Read the primary metric, its change, and all metrics before and at the exported step."""
    if trained.run is None or trained.checkpoint is None:
        return None, None, []
    run = read_run(trained.run)
    match = re.fullmatch(r"step-(\d+)", trained.checkpoint.name)
    change = run.change(until=int(match[1])) if match is not None else None
    if change is None:  # the step was not evaluated
        return run.primary_metric, None, []
    first, last = (e for e in run.evaluations if e.step in change.steps)
    rows = [(name, first.metrics.get(name, math.nan), last.metrics[name]) for name in last.names]
    return run.primary_metric, change, rows


@torch.no_grad()
def replace_with_dequantized(model: Any, quantized: Any) -> None:
    """Replace a model's weights, under its adapters, with those of its quantized form."""
    for name, layer in quantized.named_modules():
        if is_quantized(layer):
            whole = model.get_submodule(name)
            weight = getattr(whole, "base_layer", whole).weight
            weight.copy_(restore(layer.weight, quantized.dtype))
