"""The base class of model families, which supports any image-text model of transformers.

In its shared-prefix form, the prompt alone is run up to the language model, to learn the positions
of its tokens and which of them see each other. Then the same forward runs rows of prompts and
completions, with these positions and attention computed by the engine.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from qwen_vl_utils.vision_process import smart_resize
from torch import Tensor, nn
from transformers.video_utils import VideoMetadata

from vlm_grpo.model.transfer import copy_to
from vlm_grpo.types import ImageRef, Prompt, VideoRef

RECURRENT_TYPES = {"linear_attention", "conv"}  # as transformers' configurations name them
ALL_LAYERS = ""  # key of a prompt's mask that holds for layers of all types

Unit = tuple[ImageRef, ...]
"""Images that are encoded together: those of one prompt, or a single one."""
Masks = Mapping[str, Bool[Tensor, "_ _"]]
"""For layers of each type that are not causal: (T, T) which tokens of a prompt see which."""


class ImageFeatures(NamedTuple):
    """The vision tower's output for the images of one unit."""

    embeds: Float[Tensor, "tokens width"]
    # One tensor per layer, where some language layers get features from inside the tower.
    deepstack: tuple[Float[Tensor, "tokens width"], ...] = ()
    layers: tuple[int, ...] = ()  # those that get the features of ``deepstack``; empty: the first
    common: Mapping[str, Tensor] = {}  # what depends on no image, by name
    is_list: bool = True  # whether the tower returns lists with a tensor per image


@dataclass(frozen=True)
class PromptLayout:
    """What the language model receives besides the embeddings of a prompt."""

    positions: Int[np.ndarray, "axes T"]  # rotary
    masks: Masks = field(default_factory=dict)  # with the window of a sliding layer


# Names that transformers gives to the modules of each part, over all its image-text models.
_PARTS = {
    "language": ("language_model", "text_model", "lm_head"),
    "projector": (
        *("multi_modal_projector", "mm_projector", "projector", "connector", "aligner"),
        *("merger", "merger_list", "deepstack_merger_list", "vit_merger", "downsample"),
        *("vision_projection", "embed_vision", "image_newline", "view_separator"),
        *("visual_embeddings_table", "resampler_model", "layerwise_projectors"),
        "spatial_projectors",
    ),
    "vision": ("visual", "vision_tower", "vision_model", "vision_encoder", "vision_embedder"),
}
_PART_OF = {name: part for part, names in _PARTS.items() for name in names}


def find_part(name: str) -> str | None:
    """Return the part of a weight or module by its name: "vision", "projector" or "language".

    A projector may be inside the vision module. None: another part, such as an audio tower.
    """
    parts = [_PART_OF[component] for component in name.split(".") if component in _PART_OF]
    if parts[:1] == ["vision"] and "projector" in parts:
        return "projector"
    return parts[0] if parts else None


# Names that configurations and processors give to the tokens of images, videos and audio.
_MEDIA_SETTING = re.compile(
    r"(^|_)(image|img|video|vision|visual|audio|[be]o[iav])(_\w+)?_token(_ids?|_index)?$"
)
_MEDIA_TOKEN = re.compile(
    r"(?i).*(im(age|g)|video|audio|\brow_\d+_col_).*|TILE\w*|</?slice>|<(\w+_)?im_\w+>|<frame_\w+>"
)


@dataclass(frozen=True)
class PixelBudget:
    """Bounds on the number of pixels of a resized image, or of a frame of a clip."""

    min_pixels: int
    max_pixels: int
    video_pixels: int | None = None  # at most, of all frames of a clip; None: no bound

    def share(self, image: ImageRef) -> PixelBudget:
        """Return the budget of an image, or of each frame of a clip."""
        if self.video_pixels is None or not image.num_frames:
            return self
        most = max(self.min_pixels, self.video_pixels // image.num_frames)
        return replace(self, max_pixels=min(self.max_pixels, most))


class Family:
    """A model family: its coordinate frame, special tokens, images and shared-prefix form.

    The base class supports any image-text model of transformers. A family overrides a method where
    its model differs, or where it can be faster.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    frame: ClassVar[str] = "permille"  # name of the coordinate frame of boxes
    # Where the frame is documented; empty: nowhere, so that only the prompt states its units.
    frame_source: ClassVar[str] = ""
    # Pattern of the special tokens that belong to an answer, such as box markers; all others (end,
    # padding, image) are removed from completions' texts.
    answer_tokens: ClassVar[str] = ""
    thinking_tags: ClassVar[tuple[str, str]] = ("<think>", "</think>")  # as in chat templates
    # What stands for the chat template of models that come without one; empty: they are refused.
    chat_template: ClassVar[str] = ""
    completion_type: ClassVar[int | None] = None  # token type; None: of the prompt's last token
    takes_videos: ClassVar[bool] = False
    # A clip's pairs of frames are encoded as images, with texts between them.
    has_texts_between_frames: ClassVar[bool] = False
    # Whether transformers reads a row of a batch as it reads it alone.
    can_batch: ClassVar[bool] = True

    def pixel_budget(self, processor: Any) -> PixelBudget | None:
        """Return the processor's budget; None: its resizing has none that is known."""
        if (frames := _count_frames(processor)) is None:
            return None
        size = processor.image_processor.size
        return PixelBudget(size["shortest_edge"] // frames, size["longest_edge"] // frames)

    def set_pixel_budget(self, processor: Any, budget: PixelBudget) -> None:
        """Set the processor's pixel budget, which is saved with the model."""
        frames = _count_frames(processor) or 1
        processor.image_processor.size = type(processor.image_processor.size)(
            shortest_edge=budget.min_pixels * frames, longest_edge=budget.max_pixels * frames
        )

    def resized_size(
        self, size: tuple[int, int], budget: PixelBudget, processor: Any
    ) -> tuple[int, int]:
        """Return an image's (width, height) after resizing; ``ValueError``: it is too narrow."""
        frames = _count_frames(processor) or 1
        clip = {"num_frames": frames, "temporal_factor": frames} if frames > 1 else {}
        resize: Any = _find_resize(processor)
        height, width = resize(
            height=size[1],
            width=size[0],
            factor=token_edge(processor),
            min_pixels=budget.min_pixels * frames,
            max_pixels=budget.max_pixels * frames,
            **clip,
        )
        return width, height

    def image_tokens(self, size: tuple[int, int], processor: Any) -> int:
        """Return the number of tokens of an image, resized if there is a budget; 0: not known."""
        if _count_frames(processor) is not None:
            return size[0] * size[1] // token_edge(processor) ** 2
        if (count := getattr(processor, "_get_num_multimodal_tokens", None)) is None:
            return 0
        try:
            return count(image_sizes=[size[::-1]])["num_image_tokens"][0]
        except ValueError:  # the processor refuses the image when the prompt is built
            return 0

    def count_tokens(self, image: ImageRef, processor: Any) -> int:
        """Return the tokens of an image, or of a clip without the texts between its frames."""
        tokens = self.image_tokens(image.resized_size, processor)
        if not image.num_frames:
            return tokens
        return tokens * math.ceil(image.num_frames / processor.video_processor.temporal_patch_size)

    def token_grid(self, image: ImageRef, processor: Any) -> tuple[int, int] | None:
        """Return the rows and columns of an image's tokens; None: they form no grid of it."""
        if _count_frames(processor) is None or image.num_frames:
            return None
        width, height = (side // token_edge(processor) for side in image.resized_size)
        return height, width

    def write_times(self, image: ImageRef, processor: Any) -> str:
        """Return the text that the processor adds between the frames of a clip; "": none."""
        return ""

    def prepare_videos(
        self, text: str, videos: Sequence[tuple[VideoRef, Sequence[Image.Image]]], processor: Any
    ) -> dict[str, Any]:
        """Return the arguments for the processor's call on a text and clips with resized frames."""
        metadata = [
            VideoMetadata(
                total_num_frames=round(video.seconds * 1000),
                fps=1000,
                frames_indices=[round(time * 1000) for time in video.times],
            )
            for video, _ in videos
        ]  # as if clips had a frame per millisecond, because times need not be even
        frames = [np.stack([np.asarray(frame) for frame in frames]) for _, frames in videos]
        options: dict[str, Any] = {"do_resize": False, "do_sample_frames": False}
        if hasattr(processor.video_processor, "cap_pixels_per_frame"):
            options["cap_pixels_per_frame"] = False  # of the resizing; None logs a warning
        options["video_metadata"] = metadata
        return {"text": [text], "videos": frames, "videos_kwargs": options}

    def banned_token_ids(self, config: Any, processor: Any) -> tuple[int, ...]:
        """Return the tokens that must not be sampled: they would corrupt the next forward pass."""
        found = set(self.media_tokens(processor))
        for name, value in config.to_dict().items():
            if _MEDIA_SETTING.search(name) and value is not None:
                found.update(value if isinstance(value, list | tuple) else (value,))
        # Defaults of a configuration may lie outside the vocabulary.
        return tuple(sorted(id for id in found if id < config.get_text_config().vocab_size))

    def media_tokens(self, processor: Any) -> dict[int, str]:
        """Return the tokens that stand for images, videos and audio or frame them, by their ids."""
        tokenizer = processor.tokenizer
        found = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items()}
        found = {id: name for id, name in found.items() if _MEDIA_TOKEN.fullmatch(name)}
        for key, value in vars(processor).items():
            if _MEDIA_SETTING.search(key) and isinstance(value, str):
                found[tokenizer.convert_tokens_to_ids(value)] = value
        return {id: name for id, name in found.items() if not self.belongs_to_answer(name)}

    def control_tokens(self, tokenizer: Any) -> dict[int, str]:
        """Return the special tokens that do not belong to an answer, by their ids."""
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = {
            i: tokenizer.convert_ids_to_tokens(i) for i in {*special, *tokenizer.all_special_ids}
        }
        return {i: name for i, name in names.items() if not self.belongs_to_answer(name)}

    def belongs_to_answer(self, token: str) -> bool:
        """Return whether a special token, which marks an answer or thinking, is kept in texts."""
        opening, closing = self.thinking_tags
        is_tag = token == closing or opening.startswith(token)
        return is_tag or re.fullmatch(self.answer_tokens, token) is not None

    def decoder(self, tokenizer: Any) -> Callable[[Sequence[int]], str]:
        """Return a function that decodes sampled tokens into the text passed to tasks."""
        dropped = self.control_tokens(tokenizer)

        def decode(tokens: Sequence[int]) -> str:
            kept = [token for token in tokens if token not in dropped]
            return tokenizer.decode(kept, skip_special_tokens=False)

        return decode

    # The shared-prefix form.

    def head(self, model: Any) -> Any:
        """Return the module that maps the language model's output to logits."""
        head, (scale, cap) = model.get_output_embeddings(), _probe_head(model)
        return head if (scale, cap) == (1, math.inf) else ScaledHead(head, scale, cap)

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
        encode = model.base_model.get_image_features
        names = inspect.signature(encode).parameters
        known = ({k: v for k, v in tensors.items() if k in names} for tensors in vision)
        return [_read_output(encode(**place(model, own), return_dict=True)) for own in known]

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
        # Some models compute positions on two axes only beside this mask.
        arguments["attention_mask"] = torch.ones_like(tokens)
        reached = _run_to(model.get_decoder(), base, input_ids=tokens, **arguments)
        positions, mask = reached.get("position_ids"), reached.get("attention_mask")
        if positions is None:
            positions = torch.arange(tokens.shape[1])[None]
        # Qwen-Omni's are real numbers, which are whole without clips.
        positions = positions.reshape(-1, tokens.shape[1]).long().cpu().numpy()
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
        tokens = copy_to(device, token_ids)
        if features:
            arguments["mm_encoder_outputs"] = {"image": _join(features)}
        if features or model.training:  # by the types, layers choose experts
            names = "image_token_id", "image_start_token_id", "image_end_token_id"
            for name in inspect.signature(model.base_model.forward).parameters:
                if name.endswith("mm_token_type_ids"):
                    arguments[name] = sum(tokens == getattr(model.config, n, -1) for n in names)
        return model.base_model(
            input_ids=tokens,
            position_ids=positions[0] if len(positions) == 1 else positions,
            attention_mask=without_mask(device),
            attend=attend,
            use_cache=False,
            **arguments,
        ).last_hidden_state


def place(model: Any, vision: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy vision tensors to the model's device, pixels in its precision: not every tower casts."""
    device, placed = next(model.parameters()).device, {}
    for name, values in vision.items():
        is_real = name.startswith("pixel_values") and values.is_floating_point()
        placed[name] = copy_to(device, values.to(model.dtype) if is_real else values)
    return placed


def _find_resize(processor: Any) -> Callable[..., tuple[int, int]] | None:
    """Return the function that resizes within a pixel budget, from the image processor's module."""
    images = getattr(processor, "image_processor", None)
    size = dict(getattr(images, "size", None) or {})
    if not (size.get("shortest_edge") and size.get("longest_edge")):
        return None
    module = type(images).__module__
    if ".qwen2_vl." in module:
        return smart_resize
    resize = getattr(sys.modules[module], "smart_resize", None)
    parameters = inspect.signature(resize).parameters if resize is not None else {}
    return resize if {"factor", "min_pixels", "max_pixels"} <= {*parameters} else None


def _count_frames(processor: Any) -> int | None:
    """Return how often the pixels of an image count in the processor's budget; None: it has none.

    GLM-V's budget counts an image once for each frame of a temporal patch.
    """
    if (resize := _find_resize(processor)) is None:
        return None
    counts_frames = "num_frames" in inspect.signature(resize).parameters
    return processor.image_processor.temporal_patch_size if counts_frames else 1


def token_edge(processor: Any) -> int:
    """Return the side of an image token in pixels."""
    return processor.image_processor.patch_size * processor.image_processor.merge_size


class ScaledHead(nn.Module):
    """A head whose logits are scaled, or become cap · tanh(scale · logits / cap) (Gemma 2: 2024,
    arXiv:2408.00118)."""

    def __init__(self, head: nn.Module, scale: float, cap: float) -> None:
        super().__init__()
        self.head, self.scale, self.cap = head, scale, cap

    @property
    def weight(self) -> Any:
        return self.head.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden) * self.scale
        return logits if self.cap == math.inf else torch.tanh(logits / self.cap) * self.cap


@torch.no_grad()
def _probe_head(model: Any) -> tuple[float, float]:
    """Return the scale and the cap (inf: none) of the logits in the model's own forward, which runs
    here without the layers below; configurations name them in many ways."""
    given = torch.tensor([[[2.0**-40, 2.0**40]]], dtype=torch.float64, device="cpu")
    below, head = model.base_model, model.get_output_embeddings()
    with (
        _replace_forward(below, lambda *_, **__: _Outputs(last_hidden_state=given)),
        _replace_forward(head, lambda _: given),
    ):
        tokens = torch.zeros_like(given[:, :, 0], dtype=torch.long)
        low, high = model(input_ids=tokens, use_cache=False).logits.flatten().tolist()
    return low * 2**40, math.inf if math.isclose(high, low * 2**80, rel_tol=1e-3) else high


@contextlib.contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = {key: value for key, value in vars(module).items() if key == "forward"}
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        vars(module).update(own)


@functools.cache
def without_mask(device: torch.device) -> Tensor:
    """Return an attention mask that transformers passes on as it is and that nothing reads."""
    return torch.zeros(1, 1, 1, 1, device=device)


class _Border(Exception):
    """Ends a forward pass at the language model."""


def _run_to(module: nn.Module, model: nn.Module, **arguments: Any) -> dict[str, Any]:
    """Run a model until it calls ``module``, and return the arguments of that call."""
    reached: dict[str, Any] = {}

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reached.update(kwargs)
        raise _Border

    hook = module.register_forward_pre_hook(stop, with_kwargs=True)
    with hook, contextlib.suppress(_Border):
        model(**arguments, use_cache=False)
    if not reached:
        raise NotImplementedError("the model does not call its language model")
    return reached


_PLAIN_OUTPUTS = {"last_hidden_state", "pooler_output", "hidden_states", "attentions"}


def _read_output(output: Any) -> ImageFeatures:
    levels: Any = getattr(output, "deepstack_features", None) or ()
    layers: tuple[int, ...] = ()
    if levels and isinstance(levels[0][0], int):  # Granite 4 Vision, which has no other features
        layers, levels = zip(*levels, strict=True)
    embeds = levels[0] if output.pooler_output is None else output.pooler_output
    common = {
        name: value
        for name, value in output.items()
        if name not in _PLAIN_OUTPUTS and isinstance(value, Tensor)
    }
    deepstack, is_list = tuple(map(_flatten, levels)), not isinstance(embeds, Tensor)
    return ImageFeatures(_flatten(embeds), deepstack, layers, common, is_list)


def _flatten(values: Tensor | Sequence[Tensor]) -> Float[Tensor, "tokens width"]:
    parts = [values] if isinstance(values, Tensor) else values
    return torch.cat([part.flatten(0, -2) for part in parts])


class _Outputs(SimpleNamespace):
    """An output of the vision tower, in which all else that a model may ask for is None."""

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Any:
        return self.last_hidden_state


def _join(features: Sequence[ImageFeatures]) -> _Outputs:
    """Join the features of several units to an output of the vision tower."""
    first = features[0]
    join: Any = list if first.is_list else torch.cat
    levels = [join(v) for v in zip(*(images.deepstack for images in features), strict=True)]
    return _Outputs(
        pooler_output=join([images.embeds for images in features]),
        deepstack_features=list(zip(first.layers, levels, strict=False)) or levels or None,
        **first.common,
    )
