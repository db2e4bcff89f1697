"""A trained checkpoint as a model for other programs: transformers, vLLM, the hub."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jinja2 import Environment, StrictUndefined
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.config.run import Settings
from vlm_grpo.deploy.resolve import NO_TASK, ModelChoice, choose_model
from vlm_grpo.distributed.launch import initialize_distributed
from vlm_grpo.errors import UserError
from vlm_grpo.model.loading import LoadedModel, get_model_source, load_model
from vlm_grpo.report.run import Change, read_run

LIBRARIES = ("vlm-grpo", "transformers", "torch", "peft")
PREPROCESSOR = "preprocessor_config.json"


def export(
    run: str | Path,
    out: str | Path,
    adapter: bool = False,
    step: int | Literal["best"] | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> Path:
    """Write a checkpoint as a model's folder, whole or not at all.

    Args:
        run: a run's folder, its name in ``runs``, or a checkpoint's folder.
        out: the folder to make.
        adapter: write the adapter alone, for PEFT; otherwise adapters are merged in float32 and
            rounded once.
        step: which checkpoint of a run; ``"best"`` by the held-out primary metric; None: the
        newest.
        dtype: precision of the weights; None: that of the model which was trained. Adapters are
            written as they are.

    Returns:
        The folder.

    Raises:
        UserError: ``out`` exists, nothing was trained, or there is no adapter to write.
    """
    disable_progress_bar()
    initialize_distributed()
    out = Path(out)
    choice = choose_model(str(run), step=step)
    if choice.checkpoint is None:
        raise UserError(f"{run} is no run and no checkpoint: there is nothing trained to export")
    if out.exists():
        raise UserError(f"{out} exists already: name a new folder, or remove it")
    has_adapter = (choice.checkpoint / "adapter_config.json").is_file()
    if adapter and not has_adapter:
        raise UserError(f"{run} trained full weights and has no adapter: leave out --adapter")
    if adapter and dtype is not None:
        raise UserError("--dtype has no effect with --adapter, which writes the adapter as it is")
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)  # of an export that was cut short
    aside.mkdir(parents=True)
    try:
        if adapter:
            _write_adapter(choice, aside)
        else:
            _write_model(choice, aside, dtype)
        (aside / "README.md").write_text(model_card(choice, adapter), encoding="utf-8")
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def _write_model(choice: ModelChoice, folder: Path, dtype: str | None) -> None:
    settings = choice.settings
    # In float32: an adapter's change is far below the spacing of bfloat16 weights, and rounding
    # the sum once loses less than rounding the weights before it.
    policy = settings.policy.model_copy(update={"dtype": "float32"})
    wide = settings.model_copy(update={"policy": policy})
    loaded = load_model(wide, choice.checkpoint, training=False)
    model: Any = loaded.model
    if loaded.adapters is not None:
        model = loaded.adapters.merge_and_unload()  # type: ignore[operator]
    model.to(getattr(torch, dtype or _own_dtype(settings)))
    model.save_pretrained(folder)
    _write_processor(loaded, folder)


def _own_dtype(settings: Settings) -> str:
    """Precision of the weights of the model that was trained, as its configuration says."""
    source = get_model_source(settings.model)
    config = AutoConfig.from_pretrained(
        source,
        trust_remote_code=settings.policy.trust_remote_code,
        revision=settings.model_revision or "main",
    )
    return str(config.dtype or "float32").removeprefix("torch.")


def _write_adapter(choice: ModelChoice, folder: Path) -> None:
    checkpoint, settings = choice.checkpoint, choice.settings
    assert checkpoint is not None
    shutil.copyfile(checkpoint / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    config = json.loads((checkpoint / "adapter_config.json").read_text("utf-8"))
    # The name under which others find the base model, not the folder it was loaded from here.
    if settings.model != "embedded":
        config["base_model_name_or_path"] = settings.model
        config["revision"] = settings.model_revision
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_processor(load_model(settings, checkpoint, training=False), folder)


def _write_processor(loaded: LoadedModel, folder: Path) -> None:
    """The processor with the pixel budget of the training as its own."""
    if loaded.budget is not None:
        loaded.family.set_pixel_budget(loaded.processor, loaded.budget)
    loaded.processor.save_pretrained(folder)
    # Programs that know the older layout read the image processor from a file of its own, and
    # the pixel budget under the names that the models' own files have.
    values = loaded.processor.image_processor.to_dict()
    if loaded.budget is not None:
        values |= {"min_pixels": loaded.budget.min_pixels, "max_pixels": loaded.budget.max_pixels}
    values["processor_class"] = type(loaded.processor).__name__
    (folder / PREPROCESSOR).write_text(json.dumps(values, indent=2, default=str) + "\n")


@dataclass(frozen=True)
class _Results:
    """What the run measured on held-out examples, as the card tells it."""

    primary_metric: str | None
    change: Change | None
    rows: tuple[tuple[str, float, float], ...] = ()


def model_card(choice: ModelChoice, adapter: bool) -> str:
    """The README.md of an exported model: what it was trained on, how, and what it reached.

    The front matter is the hub's (https://huggingface.co/docs/hub/model-cards).
    """
    settings = choice.settings
    found = _results(choice)
    step = choice.checkpoint.name.removeprefix("step-") if choice.checkpoint else ""
    front: dict[str, Any] = {
        "pipeline_tag": "image-text-to-text",
        "library_name": "peft" if adapter else "transformers",
        "tags": ["vlm-grpo", "grpo", Path(settings.task_name).stem],
    }
    if settings.model != "embedded" and not Path(settings.model).exists():
        front["base_model"] = settings.model
        front["base_model_relation"] = "adapter" if adapter else "finetune"
    sources = [s for s in map(str, (settings.data.train, settings.data.eval)) if s[:3] == "hf:"]
    if sources:
        front["datasets"] = sorted({source.split(":")[1] for source in sources})
    if found.change is not None:
        front["model-index"] = [_index(settings, found)]
    template = files("vlm_grpo").joinpath("templates/model_card.md.j2").read_text("utf-8")
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        settings=settings,
        settings_text=yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False),
        adapter=adapter,
        step=step,
        found=found,
        intervals=found.change is not None and not math.isnan(found.change.before_interval[0]),
        versions={name: version(name) for name in LIBRARIES},
        has_task=settings.task != NO_TASK,
    )


def _index(settings: Settings, found: _Results) -> Mapping[str, Any]:
    """The primary metric as the hub's leaderboards read it."""
    assert found.change is not None
    data = str(settings.data.eval or settings.data.train)
    result = {
        "task": {"type": "image-text-to-text"},
        "dataset": {"name": data, "type": data},
        "metrics": [{"type": found.primary_metric, "value": round(found.change.after, 4)}],
    }
    return {"name": settings.name or Path(settings.task_name).stem, "results": [result]}


def _results(choice: ModelChoice) -> _Results:
    """Held-out figures of the very step that is exported; nothing where it was not evaluated."""
    if choice.run is None or choice.checkpoint is None:
        return _Results(None, None)
    run = read_run(choice.run)
    whole = re.fullmatch(r"step-(\d+)", choice.checkpoint.name)
    change = run.change(until=int(whole[1])) if whole is not None else None
    if change is None:
        return _Results(run.primary_metric, None)
    first, last = (e for e in run.evaluations if e.step in change.steps)
    rows = tuple((name, first.mean(name), last.mean(name)) for name in last.names)
    return _Results(run.primary_metric, change, rows)
