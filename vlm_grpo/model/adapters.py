"""Low-rank adapters of PEFT: adding them to a model, or freezing parts, and loading them."""

import contextlib
import copy
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners import lora
from peft.utils.other import ModulesToSaveWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from vlm_grpo.config.policy import LoraSettings, PolicySettings
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.linear import is_quantized, restore
from vlm_grpo.model.families.family import find_part
from vlm_grpo.utils.jsonl import read_object

BROKEN = (LookupError, TypeError, AttributeError, ArithmeticError)
"""What libraries raise that do not check the values of a configuration."""
LOAD_ERRORS = (OSError, ValueError, RuntimeError, SafetensorError, *BROKEN)
"""Of files: RuntimeError of other shapes."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"  # PEFT's name of the only adapter


class TrainedModule(ModulesToSaveWrapper):
    """A module that is trained in full, in float32, because bfloat16 would lose small updates.

    Its weights are rounded for each pass, which computes in the dtype of the original module.
    """

    def _forward_wrapped(self, *args: Any, **kwargs: Any) -> Any:
        module = self.modules_to_save[self.active_adapters[0]]
        dtype = next(self.original_module.parameters()).dtype
        rounded = {name: weight.to(dtype) for name, weight in module.named_parameters()}
        return torch.func.functional_call(module, rounded, args, kwargs)


def apply_lora_or_freeze(
    model: Any, policy: PolicySettings, start: Path | None = None
) -> PeftModel | None:
    """Add the adapters of the settings and return the PEFT model, or freeze their parts.

    The adapter takes the values of the one in the folder ``start``.
    """
    if (settings := policy.lora) is None:
        found = {find_part(name) for name, _ in model.named_parameters()}
        for part in policy.freeze:  # the vision part has no projector
            if part not in found:
                raise UserError(f"policy.freeze={part}: this model has no such part: remove it")
        for name, weight in model.named_parameters():
            if find_part(name) in policy.freeze:
                weight.requires_grad_(False)
        return None
    with _ignore_peft_warnings():
        adapters = get_peft_model(model, _build_config(settings, model))
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            module.__class__ = TrainedModule
            module.modules_to_save.float()
    if settings.use_dora:  # PEFT rounds the norms like the weights
        for layer in find_adapted(adapters):
            weight = restore(layer.get_base_layer().weight, torch.float32).detach().float()
            layer.lora_magnitude_vector[_NAME].weight.data = weight.norm(dim=1)
    if start is not None:
        try:
            saved = load_file(start / WEIGHTS)
            check_weight_names(start, set(saved), set(get_peft_model_state_dict(adapters)))
            set_peft_model_state_dict(adapters, saved)
        except LOAD_ERRORS as error:
            raise UserError(f"adapter {start} cannot be loaded: {error}") from error
    return adapters


def find_adapted(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, lora.LoraLayer)]


def is_adapter_weight(name: str) -> bool:
    return "lora_" in name or f".modules_to_save.{_NAME}." in name


def load_adapters(model: Any, folder: Path) -> PeftModel:
    """Add a trained adapter, as its own files describe it, to the base model."""
    try:
        with _ignore_peft_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # an error below
            adapters = PeftModel.from_pretrained(model, str(folder))
        saved = set(load_file(folder / WEIGHTS))
    except LOAD_ERRORS as error:
        raise UserError(f"adapter {folder} cannot be loaded: {error}") from error
    check_weight_names(folder, saved, set(get_peft_model_state_dict(adapters)))
    return adapters


def check_start(settings: LoraSettings) -> Path | None:
    """Return the folder of the adapter that the settings start from and describe, if any."""
    if settings.adapter is None:
        return None
    folder = Path(settings.adapter)
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"policy.lora.adapter={folder} has no {CONFIG}: name the folder of an adapter, such as "
            "the checkpoint of a run (runs/NAME/checkpoints/step-100)"
        )
    config = read_object(folder / CONFIG)
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise UserError(f"{folder} has an adapter with {name}, which no setting describes")
    expected = {
        "r": settings.r,
        "lora_alpha": settings.alpha,
        "use_rslora": settings.use_rslora,
        "use_dora": settings.use_dora,
    }
    found = {name: config.get(name) or type(value)() for name, value in expected.items()}
    wrong = [
        f"policy.lora.{name.removeprefix('lora_')}={json.dumps(found[name])}"
        for name, value in expected.items()
        if found[name] != value
    ]
    if wrong:
        raise UserError(f"{folder} has an adapter with other settings: set {' '.join(wrong)}")
    return folder


def check_weight_names(source: str | Path, saved: set[str], expected: set[str]) -> None:
    """Refuse a file without all weights of a model, or with others."""
    for names, problem in (
        (expected - saved, "lacks {} weights of the model"),
        (saved - expected, "has {} weights that the model does not have"),
    ):
        if names:
            first = ", ".join(sorted(names)[:5])
            raise UserError(f"{source} {problem.format(len(names))}: {first}, …")


@contextlib.contextmanager
def _ignore_peft_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        # PEFT reads an attribute that transformers has deprecated.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # PEFT adds ranks for experts, which no setting adapts.
        warnings.filterwarnings("ignore", "The following rank_pattern keys", RuntimeWarning)
        yield


def _build_config(settings: LoraSettings, model: Any) -> LoraConfig:
    initial = settings.init_lora_weights
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=_find_targets(settings.target, model),
        task_type="CAUSAL_LM",
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        init_lora_weights=True if initial == "default" else initial,
        modules_to_save=_find_modules(settings.modules_to_save, model) or None,
    )
    converted = copy.deepcopy(config)
    # In some mixtures of experts, PEFT reads the projections of dense and shared feed-forward
    # layers as the experts, which are one tensor: those layers have no adapters.
    convert_peft_config_for_transformers(converted, model, None)
    if converted.target_parameters:
        if settings.target not in ("language", "all"):
            raise UserError(
                "policy.lora.target: PEFT would adapt all experts of this model instead of its "
                "feed-forward layers: remove gate_proj, up_proj and down_proj"
            )
        config.target_modules = converted.target_modules
    return config


def _find_modules(names: Sequence[str], model: Any) -> list[str]:
    vocabulary = {model.get_input_embeddings(), model.get_output_embeddings()}
    found = []
    for name in names:
        matching = {n: m for n, m in model.named_modules() if f".{n}".endswith(f".{name}")}
        if not any([*module.parameters()] for module in matching.values()):
            parts = [n for n, _ in model.named_modules() if find_part(n) == "projector"]
            outermost = [part for part in parts if part.rpartition(".")[0] not in parts]
            raise UserError(
                f"policy.lora.modules_to_save: no module with weights is called {name}; the "
                f"projector of this model is {', '.join(outermost) or 'not known'}"
            )
        if any(vocabulary & set(module.modules()) for module in matching.values()):
            raise UserError(
                f"policy.lora.modules_to_save: {name} has the embeddings or the head, which may be "
                "tied and are as large as a small model: train full weights instead (without "
                "policy.lora)"
            )
        if any(is_quantized(part) for module in matching.values() for part in module.modules()):
            raise UserError(
                f"policy.lora.modules_to_save: {name} is quantized (policy.load_in), and cannot be "
                "trained in full: leave it out"
            )
        found += matching
    return found


def _find_targets(target: str | Sequence[str], model: Any) -> list[str]:
    head = model.get_output_embeddings()
    modules = model.named_modules()
    linear = [name for name, m in modules if isinstance(m, nn.Linear) and m is not head]
    if target == "language":
        found = [name for name in linear if find_part(name) == "language"]
        if not found:
            raise UserError(
                "policy.lora.target=language: this model's language model is not known: list "
                "module-name suffixes instead, such as [q_proj, v_proj]"
            )
        return found
    if target == "all":
        return linear
    matching = {t: [n for n in linear if f".{n}".endswith(f".{t}")] for t in target}
    if missing := [t for t, names in matching.items() if not names]:
        names = sorted({name.rpartition(".")[2] for name in linear})
        raise UserError(
            f"policy.lora.target: no linear layer is called {', '.join(missing)}; "
            f"this model has {', '.join(names)}"
        )
    return [name for name in linear if any(name in names for names in matching.values())]
