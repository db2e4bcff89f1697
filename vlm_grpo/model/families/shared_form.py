"""The shared-prefix form of any image-text model of transformers.

The prompt alone is run up to the language model, to learn the positions of its tokens and which of
them see each other. Then the same forward runs rows of prompts and completions, with these
positions and attention computed by the engine.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, Cache

from vlm_grpo.model.transfer import copy_to
from vlm_grpo.types import ImageRef, Prompt

RECURRENT_TYPES = {"linear_attention", "conv"}  # as transformers' configurations name them
LAYER_TYPES = {"full_attention", "sliding_attention"} | RECURRENT_TYPES  # can share a prompt
ALL_LAYERS = ""  # key of a prompt's mask that holds for layers of all types

Unit = tuple[ImageRef, ...]
"""Images that are encoded together: those of one prompt, or a single one."""
Masks = Mapping[str, Bool[Tensor, "_ _"]]
"""For layers of each type that are not causal: (T, T) which tokens of a prompt see which."""


@dataclass(frozen=True)
class ImageFeatures:
    """The vision tower's output for the images of one unit."""

    embeds: Float[Tensor, "tokens width"]
    # One tensor per layer, of families whose first language layers get features from inside the
    # tower.
    deepstack: tuple[Float[Tensor, "tokens width"], ...] = ()
    common: Mapping[str, Tensor] = field(default_factory=dict)  # what depends on no image, by name
    is_list: bool = True  # whether the tower returns lists with a tensor per image


@dataclass(frozen=True)
class PromptLayout:
    """What the language model receives besides the embeddings of a prompt."""

    positions: Int[np.ndarray, "axes T"]  # rotary
    masks: Masks = field(default_factory=dict)  # with the window of a sliding layer


class SharedForm:
    """How a family's model runs prompts and their completions in one row.

    The methods need only what transformers' image-text models have in common; a family overrides
    one where its model differs, or where it can be faster.
    """

    passes_features: ClassVar[bool] = True  # whether ``run`` gives the model's own forward images

    def why_not_shared(self, config: Any) -> str | None:
        """Return the reason why completions cannot share a prompt, or None if they may.

        The first steps of a run show whether they can (``model/form_check.py``).
        """
        text = config.get_text_config()
        model: Any = AutoModelForImageTextToText._model_mapping.get(type(config), None)  # noqa: SLF001
        if model is None:
            return "its code does not come with transformers"
        if config.is_encoder_decoder:
            return "it is an encoder-decoder model"
        if getattr(text, "cross_attention_layers", None):
            return "its language model reads images by cross-attention"
        parameters = inspect.signature(model.forward).parameters
        if self.passes_features and "mm_encoder_outputs" not in parameters:
            return "its model takes no precomputed image features (transformers 5.18 and later may)"
        kinds = getattr(text, "layer_types", None) or ()
        others = set(kinds) - LAYER_TYPES
        if others:
            return f"it has layers of the type {', '.join(sorted(others))}"
        if RECURRENT_TYPES.intersection(kinds) and not hasattr(Cache, "get_conv_state"):
            return "its recurrent layers need transformers 5.21 or later"
        return None

    def language_model(self, model: Any) -> Any:
        """Return the language model, without its head."""
        return model.get_decoder()

    def head(self, model: Any) -> Any:
        """Return the module that maps the language model's output to logits."""
        text, head = model.config.get_text_config(), model.get_output_embeddings()
        cap = getattr(text, "final_logit_softcapping", None)
        return head if cap is None else CappedHead(head, cap)

    def vision_layers(self, model: Any) -> Sequence[Any]:
        """Return the attention layers of the vision tower that take images as segments of a row."""
        return ()

    def units(self, images: Unit) -> list[Unit]:
        """Split a prompt's images into the units that are encoded together."""
        return [images] if images else []

    def split_images(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Split the prompt's vision tensors into one dict per unit, in order."""
        return [dict(prompt.vision)] if prompt.example.images else []

    def encode_images(self, model: Any, vision: Sequence[dict[str, Any]]) -> list[ImageFeatures]:
        """Encode units of images, each given by its vision tensors."""
        base = model.base_model
        names = inspect.signature(base.get_image_features).parameters
        device = next(model.parameters()).device
        features = []
        for tensors in vision:
            arguments = {k: copy_to(device, v) for k, v in tensors.items() if k in names}
            output = base.get_image_features(**arguments, return_dict=True)
            features.append(_read_output(output))
        return features

    @torch.no_grad()
    def lay_out(self, model: Any, prompt: Prompt) -> PromptLayout:
        """Run the model on a prompt up to its language model, and return what reaches that."""
        base, device = model.base_model, next(model.parameters()).device
        names = inspect.signature(base.forward).parameters
        arguments = {
            name: copy_to(device, values)
            for name, values in prompt.vision.items()
            if name in names and not name.startswith("pixel_values")
        }
        tokens = copy_to(device, np.array([prompt.token_ids]))
        reached = _run_to(self.language_model(model), base, input_ids=tokens, **arguments)
        positions, mask = reached.get("position_ids"), reached.get("attention_mask")
        if positions is None:
            positions = torch.arange(tokens.shape[1])[None]
        positions = positions.reshape(-1, tokens.shape[1]).cpu().numpy()
        masks = mask if isinstance(mask, dict) else {ALL_LAYERS: mask}
        masks = {kind: mask for kind, mask in masks.items() if mask is not None and mask.ndim == 4}
        return PromptLayout(positions, {kind: mask[0, 0] for kind, mask in masks.items()})

    def run(
        self,
        model: Any,
        token_ids: Int[np.ndarray, "rows T"] | Int[Tensor, "rows T"],
        positions: Int[Tensor, "axes rows T"],
        features: Sequence[ImageFeatures],
        attend: Any,
    ) -> Float[Tensor, "rows T width"]:
        """Run the language model and return its last hidden states.

        ``features`` are in the order of their placeholders among the tokens, and ``positions`` on
        the model's device. Attention layers are dispatched to ``attend``.
        """
        device = positions.device
        arguments: dict[str, Any] = {}
        if features:
            arguments["mm_encoder_outputs"] = {"image": _join(features)}
        return model.base_model(
            input_ids=copy_to(device, token_ids),
            position_ids=positions[0] if len(positions) == 1 else positions,
            attention_mask=without_mask(device),
            attend=attend,
            use_cache=False,
            **arguments,
        ).last_hidden_state


class CappedHead(nn.Module):
    """A head whose logits become cap · tanh(logits / cap) (Gemma 2: 2024, arXiv:2408.00118)."""

    def __init__(self, head: nn.Module, cap: float) -> None:
        super().__init__()
        self.head, self.cap = head, cap

    @property
    def weight(self) -> Any:
        return self.head.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.head(hidden) / self.cap) * self.cap


@functools.cache
def without_mask(device: torch.device) -> Tensor:
    """Return an attention mask that transformers passes on as it is and that nothing reads."""
    return torch.zeros(1, 1, 1, 1, device=device)


class _Border(Exception):
    """Ends a forward pass at the language model."""


def _run_to(module: nn.Module, model: nn.Module, **arguments: Any) -> dict[str, Any]:
    """Run a model until it calls ``module``, and return the arguments of that call."""
    reached: dict[str, Any] = {}

    def stop(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        reached.update(kwargs)
        raise _Border

    hook = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(**arguments, use_cache=False)
    except _Border:
        return reached
    finally:
        hook.remove()
    raise NotImplementedError("the model does not call its language model")


_PLAIN_OUTPUTS = {"last_hidden_state", "pooler_output", "hidden_states", "attentions"}


def _read_output(output: Any) -> ImageFeatures:
    embeds = output.pooler_output
    levels = getattr(output, "deepstack_features", None) or ()
    common = {
        name: value
        for name, value in output.items()
        if name not in _PLAIN_OUTPUTS and isinstance(value, Tensor)
    }
    deepstack, is_list = tuple(map(_flatten, levels)), not isinstance(embeds, Tensor)
    return ImageFeatures(_flatten(embeds), deepstack, common, is_list)


def _flatten(values: Tensor | Sequence[Tensor]) -> Float[Tensor, "tokens width"]:
    parts = [values] if isinstance(values, Tensor) else values
    return torch.cat([part.flatten(0, -2) for part in parts])


def _join(features: Sequence[ImageFeatures]) -> SimpleNamespace:
    """Join the features of several units to an output of the vision tower."""
    first = features[0]
    join: Any = list if first.is_list else torch.cat
    levels = zip(*(images.deepstack for images in features), strict=True)
    return SimpleNamespace(
        pooler_output=join([images.embeds for images in features]),
        deepstack_features=[join(level) for level in levels] or None,
        **first.common,
    )
