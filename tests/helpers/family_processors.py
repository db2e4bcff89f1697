"""Processors of each family for small images, with a tokenizer of one token per byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf
from tiny_models import NORMALIZATION, tiny_tokenizer
from transformers.models.smolvlm import processing_smolvlm

from vlm_grpo.data_scripts.tiny_vlm import CHAT_TEMPLATE

TILES = [[28, 28], [28, 56], [56, 28], [56, 56]]
SQUARE = {"height": 28, "width": 28}


def pixels(token_edge: int) -> dict[str, int]:
    """Return a pixel budget of 1 to 16 image tokens."""
    return {"shortest_edge": token_edge**2, "longest_edge": 16 * token_edge**2}


def chat_template(image: str) -> str:
    """Return Qwen's chat template with another text for an image."""
    return CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", image)


def qwen3() -> Any:
    return hf.Qwen3VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(size=pixels(32), patch_size=16),
        tokenizer=tiny_tokenizer(),
        video_processor=hf.Qwen3VLVideoProcessor(**NORMALIZATION),
        chat_template=CHAT_TEMPLATE,
    )


def _glm(processor: Any, images: Any, videos: Any) -> Callable[[], Any]:
    marks = [f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end")]

    def build() -> Any:
        return processor(
            # The budget counts each image as the two frames of a temporal patch.
            images(size={"shortest_edge": 2 * 28**2, "longest_edge": 2 * 16 * 28**2}),
            tiny_tokenizer("<|image|>", "<|video|>", *marks),
            videos(),
            chat_template=chat_template("<|begin_of_image|><|image|><|end_of_image|>"),
        )

    return build


glm4v = _glm(hf.Glm4vProcessor, hf.Glm4vImageProcessor, hf.Glm4vVideoProcessor)
glm46v = _glm(hf.Glm46VProcessor, hf.Glm46VImageProcessor, hf.Glm46VVideoProcessor)


def paddleocr_vl() -> Any:
    return hf.PaddleOCRVLProcessor(
        hf.PaddleOCRVLImageProcessor(size=pixels(28)),
        tiny_tokenizer(image_token="<|IMAGE_PLACEHOLDER|>", video_token="<|video_pad|>"),
        chat_template=chat_template("<|vision_start|><|IMAGE_PLACEHOLDER|><|vision_end|>"),
    )


def internvl() -> Any:
    tokens = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    return hf.InternVLProcessor(
        hf.GotOcr2ImageProcessor(size=SQUARE, max_patches=4),
        tiny_tokenizer("<ref>", "</ref>", "<box>", "</box>", **tokens),
        hf.InternVLVideoProcessor(),
        image_seq_length=1,
        chat_template=chat_template("<IMG_CONTEXT>"),
    )


def idefics3() -> Any:
    return hf.Idefics3Processor(
        hf.Idefics3ImageProcessor(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
        _idefics_tokenizer(),
        image_seq_len=1,
        chat_template=chat_template("<image>"),
    )


def smolvlm() -> Any:
    # The processor is not built without this package, which writes out numbers in video prompts.
    module: Any = processing_smolvlm
    module.num2words = str
    return hf.SmolVLMProcessor(
        hf.SmolVLMImageProcessor(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
        _idefics_tokenizer("<video>"),
        hf.SmolVLMVideoProcessor(),
        image_seq_len=1,
        chat_template=chat_template("<image>"),
    )


def _idefics_tokenizer(*more: str) -> Any:
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    marks = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    return tiny_tokenizer(*marks, *tiles, *more)


def llava() -> Any:
    return hf.LlavaProcessor(
        hf.LlavaImageProcessor(size={"shortest_edge": 28}, crop_size=SQUARE),
        tiny_tokenizer("<image>"),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template("<image>"),
    )


def fast_vlm() -> Any:
    edges = {"height": 32, "width": 32}
    return hf.LlavaProcessor(
        hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=edges),
        tiny_tokenizer("<image>"),
        patch_size=16,
        vision_feature_select_strategy="full",
        chat_template=chat_template("<image>"),
    )


def llava_next() -> Any:
    images = hf.LlavaNextImageProcessor(
        size={"shortest_edge": 28}, crop_size=SQUARE, image_grid_pinpoints=TILES
    )
    return hf.LlavaNextProcessor(
        images,
        tiny_tokenizer("<image>"),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template("<image>"),
    )


def llava_onevision() -> Any:
    return hf.LlavaOnevisionProcessor(
        hf.LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=TILES),
        tiny_tokenizer("<image>", "<video>"),
        hf.LlavaOnevisionVideoProcessor(),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=chat_template("<image>"),
    )


def pixtral(merge: int = 1) -> Any:
    return hf.PixtralProcessor(
        hf.PixtralImageProcessor(
            size={"longest_edge": 84}, patch_size={"height": 14 * merge, "width": 14 * merge}
        ),
        tiny_tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        patch_size=14,
        spatial_merge_size=merge,
        chat_template=chat_template("[IMG]"),
    )


def mistral3() -> Any:
    return pixtral(merge=2)


def gemma3() -> Any:
    return hf.Gemma3Processor(
        hf.Gemma3ImageProcessor(size=SQUARE),
        _gemma_tokenizer(),
        image_seq_length=4,
        chat_template=chat_template("<start_of_image>"),
    )


def _gemma_tokenizer() -> Any:
    return tiny_tokenizer(
        boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    )


def gemma4() -> Any:
    tokens = {
        **{"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
        **{"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
    }
    return hf.Gemma4Processor(
        hf.Gemma4AudioFeatureExtractor(),
        hf.Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2),
        tiny_tokenizer(**tokens),
        hf.Gemma4VideoProcessor(),
        chat_template=chat_template("<|image|>"),
    )


def paligemma() -> Any:
    images: Any = hf.SiglipImageProcessor(size=SQUARE)
    images.image_seq_length = 4
    tokenizer = tiny_tokenizer("<bos>")
    tokenizer.bos_token = "<bos>"
    return hf.PaliGemmaProcessor(images, tokenizer, chat_template=chat_template("<image>"))


def mllama() -> Any:
    tokenizer = tiny_tokenizer("<bos>", "<|image|>", "<|python_tag|>")
    tokenizer.bos_token = "<bos>"
    images = hf.MllamaImageProcessor(size=SQUARE, max_image_tiles=4)
    return hf.MllamaProcessor(images, tokenizer, chat_template=chat_template("<|image|>"))


def lfm2_vl() -> Any:
    images = hf.Lfm2VlImageProcessor(
        size=SQUARE,
        tile_size=28,
        encoder_patch_size=14,
        min_image_tokens=1,
        max_image_tokens=4,
        max_tiles=4,
    )
    tiles = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    marks = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
    return hf.Lfm2VlProcessor(
        images, tiny_tokenizer(*marks, *tiles), chat_template=chat_template("<image>")
    )


def ovis2() -> Any:
    marks = [f"<IMG_{name}>" for name in ("ATOM", "START", "GRID", "COL", "ROW", "END")]
    return hf.Ovis2Processor(
        hf.Ovis2ImageProcessor(size=SQUARE, crop_to_patches=True, max_patches=4),
        tiny_tokenizer("<image>", *marks),
        image_seq_length=4,
        chat_template=chat_template("<image>"),
    )


def cohere2_vision() -> Any:
    tokens = {
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "image_token": "<|IMG_PATCH|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    }
    images: Any = hf.Cohere2VisionImageProcessor(size=SQUARE, max_patches=4)
    images.patch_size = 1  # the side of a tile in image tokens
    return hf.Cohere2VisionProcessor(
        images, tiny_tokenizer(**tokens), chat_template=chat_template("<|IMG_PATCH|>")
    )


def aya_vision() -> Any:
    marks = ("START_OF_IMG", "END_OF_IMG", "IMG_PATCH", "IMG_LINE_BREAK")
    names = (*(f"<|{mark}|>" for mark in marks), "TILE", "TILE_GLOBAL")
    return hf.AyaVisionProcessor(
        hf.GotOcr2ImageProcessor(size=SQUARE, max_patches=4),
        tiny_tokenizer("<image>", *names),
        patch_size=14,
        img_size=28,
        downsample_factor=2,
        chat_template=chat_template("<image>"),
    )
