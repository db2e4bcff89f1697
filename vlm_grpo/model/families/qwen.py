"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from vlm_grpo.model.families.family import Family, ImageFeatures, PromptLayout, Unit, without_mask
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.types import ImageRef, Prompt, VideoRef


class QwenVL(Family):
    """The base of all generations, with images in patch grids and M-RoPE positions."""

    answer_tokens = r"<\|(object_ref|box|quad)_(start|end)\|>"
    takes_videos = True

    def vision_layers(self, model: Any) -> Sequence[Any]:
        return [block.attn for block in model.model.visual.blocks]

    def units(self, images: Unit) -> list[Unit]:
        return [(image,) for image in images]

    def split_images(self, prompt: Prompt) -> list[dict[str, Any]]:
        found = {
            "image": self._split(prompt.vision, "pixel_values", "image_grid_thw"),
            "video": self._split(prompt.vision, "pixel_values_videos", "video_grid_thw"),
        }
        return [next(found[image.kind]) for image in prompt.example.images]

    @staticmethod
    def _split(vision: Mapping[str, Any], pixels: str, sizes: str) -> Iterator[dict[str, Any]]:
        """Yield the tensors of each image or clip, which the tower takes alike."""
        if (grids := vision.get(sizes)) is not None:
            patches = vision[pixels].split(grids.prod(-1).tolist())
            for values, grid in zip(patches, grids, strict=True):
                yield {"pixel_values": values, "image_grid_thw": grid[None]}

    def encode_images(self, model: Any, vision: Sequence[dict[str, Any]]) -> list[ImageFeatures]:
        if not vision:
            return []
        device = next(model.parameters()).device
        grids = torch.cat([image["image_grid_thw"] for image in vision])
        # Computed on the host: the tower would compute them from grids read from the device.
        plan = self.plan_vision(model.model.visual, grids)
        # transformers passes the longest segment unread to the attention, which here takes all.
        lengths = {
            f"max_{name.removeprefix('cu_')[:-1]}": tuple(starts.diff().tolist())
            for name, starts in plan.items()
            if name.startswith("cu_")
        }
        output = model.model.get_image_features(
            copy_to(device, torch.cat([image["pixel_values"] for image in vision])),
            grids,
            return_dict=True,
            **{name: copy_to(device, values) for name, values in plan.items()},
            **lengths,
        )
        levels = getattr(output, "deepstack_features", None) or []
        sizes = [len(embeds) for embeds in output.pooler_output]
        # transformers 5.17 splits only the embeddings by image.
        levels = [x.split(sizes) if isinstance(x, Tensor) else x for x in levels]
        per_image = zip(*levels, strict=True) if levels else [()] * len(vision)
        return [
            ImageFeatures(embeds, tuple(deepstack))
            for embeds, deepstack in zip(output.pooler_output, per_image, strict=True)
        ]

    def plan_vision(self, tower: Any, grids: Int[Tensor, "images 3"]) -> dict[str, Tensor]:
        """Compute the indices of a pass through the tower, by the names of its arguments."""
        positions = get_vision_position_ids(grids, tower.spatial_merge_size)
        return {"position_ids": positions, "cu_seqlens": get_vision_cu_seqlens(grids)}

    def lay_out(self, model: Any, prompt: Prompt) -> PromptLayout:
        tokens = torch.tensor([prompt.token_ids])
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        inputs = {name: prompt.vision[name] for name in names if name in prompt.vision}
        if not inputs:
            return PromptLayout(torch.arange(tokens.shape[1]).expand(3, -1).numpy())
        image_token, video_token = model.config.image_token_id, model.config.video_token_id
        positions, _ = model.model.get_rope_index(
            tokens,
            mm_token_type_ids=(tokens == image_token).int() + 2 * (tokens == video_token).int(),
            **inputs,
        )
        return PromptLayout(positions[:, 0].numpy())

    def run(
        self,
        model: Any,
        token_ids: Int[np.ndarray, "rows T"] | Int[Tensor, "rows T"],
        positions: Int[Tensor, "axes rows T"],
        features: Sequence[ImageFeatures],
        attend: Any,
    ) -> Float[Tensor, "rows T width"]:
        embeds = model.get_input_embeddings()(copy_to(positions.device, token_ids))
        inputs: dict[str, Any] = {"inputs_embeds": embeds}
        if features:
            inputs = self._merge(model, np.asarray(token_ids), features, embeds)
        return model.get_decoder()(
            position_ids=positions.expand(3, -1, -1),
            attention_mask=without_mask(positions.device),
            attend=attend,
            use_cache=False,
            **inputs,
        ).last_hidden_state

    def _merge(
        self,
        model: Any,
        token_ids: Int[np.ndarray, "rows T"],
        features: Sequence[ImageFeatures],
        embeds: Float[Tensor, "rows T width"],
    ) -> dict[str, Any]:
        """Return the language model's arguments for rows with images; the device is not read."""
        device, config = embeds.device, model.config
        is_image = np.isin(token_ids, (config.image_token_id, config.video_token_id))
        image_embeds = torch.cat([image.embeds for image in features]).to(embeds.dtype)
        if int(is_image.sum()) != len(image_embeds):
            raise ValueError(
                f"the prompt has {int(is_image.sum())} image tokens but its images have "
                f"{len(image_embeds)} features: it has a vision token outside an image, or was "
                "truncated inside one"
            )
        places = copy_to(device, is_image.ravel().nonzero()[0])

        def insert(into: Tensor, values: Tensor) -> Tensor:
            return into.flatten(0, 1).index_copy(0, places, values).view_as(into)

        inputs: dict[str, Any] = {"inputs_embeds": insert(embeds, image_embeds)}
        if features[0].deepstack:
            # transformers adds values at the tokens of a mask, whose number it would read from the
            # device. All rows are selected instead; the values are 0 at tokens of text.
            levels = zip(*(image.deepstack for image in features), strict=True)
            zeros = torch.zeros_like(embeds)
            inputs["visual_pos_masks"] = torch.arange(len(token_ids), device=device)
            inputs["deepstack_visual_embeds"] = [
                insert(zeros, torch.cat(level).to(embeds.dtype)) for level in levels
            ]
        return inputs


class Qwen2VL(QwenVL):
    model_types = ("qwen2_vl",)
    frame = "qwen2_vl"
    frame_source = "https://arxiv.org/abs/2409.12191"


class Qwen25VL(QwenVL):
    model_types = ("qwen2_5_vl",)
    frame = "resized"
    frame_source = "https://arxiv.org/abs/2502.13923"

    def plan_vision(self, tower: Any, grids: Int[Tensor, "images 3"]) -> dict[str, Tensor]:
        sizes = (tower.spatial_merge_size, tower.window_size, tower.patch_size)
        index, bounds = get_vision_window_index(grids, *sizes)
        plan = super().plan_vision(tower, grids)
        return plan | {"window_index": index, "cu_window_seqlens": bounds}


class Qwen3VL(QwenVL):
    model_types = ("qwen3_vl", "qwen3_vl_moe")
    frame = "permille"
    frame_source = "https://github.com/QwenLM/Qwen3-VL (cookbooks/2d_grounding.ipynb)"
    has_texts_between_frames = True

    def write_times(self, image: ImageRef, processor: Any) -> str:
        if not isinstance(image, VideoRef):
            return ""
        frames = processor.video_processor.temporal_patch_size
        times = [*image.times, *[image.times[-1]] * (-len(image.times) % frames)]
        middles = (
            (a + b) / 2 for a, b in zip(times[::frames], times[frames - 1 :: frames], strict=True)
        )
        texts = "".join(f"<{time:.1f} seconds><|vision_start|><|vision_end|>" for time in middles)
        return texts.removesuffix("<|vision_start|><|vision_end|>")  # the template's own

    def prepare_videos(
        self, text: str, videos: Sequence[tuple[VideoRef, Sequence[Any]]], processor: Any
    ) -> dict[str, Any]:
        # Each frame gets its own start and end, in place of the clip's: so Qwen's processor writes
        # it, but transformers 5.23 keeps the clip's around them.
        start, pad, end = "<|vision_start|>", processor.video_token, "<|vision_end|>"
        return super().prepare_videos(text.replace(start + pad + end, pad), videos, processor)

    def plan_vision(self, tower: Any, grids: Int[Tensor, "images 3"]) -> dict[str, Tensor]:
        indices, weights = get_vision_interpolation_indices_and_weights(
            grids,
            tower.num_grid_per_side,
            tower.interpolation_mode,
            tower.interpolation_align_corners,
            tower.spatial_merge_size,
        )
        plan = super().plan_vision(tower, grids)
        return plan | {"interp_indices": indices, "interp_weights": weights}


class Qwen35(Qwen3VL):
    """Qwen3.5 and later models of the same type, which write boxes as Qwen3-VL does."""

    model_types = ("qwen3_5", "qwen3_5_moe")
    frame_source = "programs that use the model (its model card was not read)"
