"""Small processors of every family, with the texts that stand for their images."""

from collections.abc import Callable
from typing import Any

import transformers as hf
from tiny_models import NORMALIZATION, tiny_tokenizer
from transformers.models.smolvlm import processing_smolvlm

from vlm_grpo.data_scripts.tiny_vlm import CHAT_TEMPLATE

TILES = [[28, 28], [28, 56], [56, 28], [56, 56]]
TILES_56 = [[2 * side for side in sides] for sides in TILES]
TILE_MARKS = {"boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>"}
TILE_MARKS |= {"image_token": "<|IMG_PATCH|>", "img_line_break_token": "<|IMG_LINE_BREAK|>"}
INTERNVL = {"start_image_token": "<img>", "end_image_token": "</img>"}
INTERNVL |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
HUNYUAN = {"image_token": "<img>"} | {f"image_{e}_token": f"<img_{e}>" for e in ("start", "end")}
GEMMA = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
GEMMA4 = ("<|image>", "<image|>", "<|image|>", "<|audio>", "<audio|>", "<|audio|>")
MOLMO2 = [f"<{n}>" for n in ("im_patch", "im_col", "im_start", "low_res_im_start", "im_end")]
MOLMO2 += ["<frame_start>", "<frame_end>", "<im_low>"]
ERNIE = {
    f"{what}_{part}token": f"<|{what.upper()}_{mark}|>"
    for what in ("image", "video")
    for part, mark in (("", "PLACEHOLDER"), ("start_", "START"), ("end_", "END"))
}
MINICPM = {"image_start": "<image>", "image_end": "</image>"}
MINICPM |= {"slice_start": "<slice>", "slice_end": "</slice>"}
IDEFICS: dict[str, Any] = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


SQUARE = _square(28)


def _pixels(token_edge: int) -> dict[str, int]:
    """Return a pixel budget of 1 to 16 image tokens."""
    return {"shortest_edge": token_edge**2, "longest_edge": 16 * token_edge**2}


def _set(target: Any, **values: Any) -> Any:
    """Return the object with attributes that its constructor does not take."""
    for name, value in values.items():
        setattr(target, name, value)
    return target


def _qwen3(kind: Any) -> Any:
    images = hf.Qwen2VLImageProcessor(size=_pixels(32), patch_size=16)
    return kind(images, tiny_tokenizer(), hf.Qwen3VLVideoProcessor(**NORMALIZATION))


def _glm_processor(prefix: str) -> Any:
    kinds = ("Processor", "ImageProcessor", "VideoProcessor")
    processor, images, videos = (getattr(hf, prefix + kind) for kind in kinds)
    marks = [f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end")]
    # The budget counts each image as the two frames of a temporal patch.
    size = {"shortest_edge": 2 * 28**2, "longest_edge": 2 * 16 * 28**2}
    return processor(images(size=size), tiny_tokenizer("<|image|>", "<|video|>", *marks), videos())


def _idefics_tokenizer(*more: str) -> Any:
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    marks = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    return tiny_tokenizer(*marks, *tiles, *more)


def _smolvlm() -> Any:
    # The processor is not built without this package, which writes out numbers in video prompts.
    module: Any = processing_smolvlm
    module.num2words = str
    images, tokenizer = hf.SmolVLMImageProcessor(**IDEFICS), _idefics_tokenizer("<video>")
    return hf.SmolVLMProcessor(images, tokenizer, hf.SmolVLMVideoProcessor(), image_seq_len=1)


def _gemma_tokenizer(*marks: str) -> Any:
    names = ("boi", "eoi", "image", "boa", "eoa", "audio")
    named = zip(names, marks, strict=False)  # not all read sounds
    return tiny_tokenizer(**{f"{name}_token": mark for name, mark in named})


def _llava(kind: Any, images: Any) -> Any:
    tokenizer, own = tiny_tokenizer("<image>"), {"vision_feature_select_strategy": "default"}
    return kind(images, tokenizer, patch_size=14, num_additional_image_tokens=1, **own)


def _pixtral(merge: int) -> Any:
    images = hf.PixtralImageProcessor(size={"longest_edge": 84}, patch_size=_square(14 * merge))
    tokenizer = tiny_tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    return hf.PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=merge)


def _lfm2_vl() -> Any:
    tokens: Any = {"min_image_tokens": 1, "max_image_tokens": 4, "max_tiles": 4}
    images = hf.Lfm2VlImageProcessor(size=SQUARE, tile_size=28, encoder_patch_size=14, **tokens)
    tiles = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    marks = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
    return hf.Lfm2VlProcessor(images, tiny_tokenizer(*marks, *tiles))


def _minicpm(kind: Any) -> Any:
    pads = {f"{what}_token": f"<|{what}_pad|>" for what in ("image", "video")}
    marks = MINICPM | {"image_id_start": "<image_id>", "image_id_end": "</image_id>"}
    tokenizer = tiny_tokenizer(**pads, **{f"{name}_token": mark for name, mark in marks.items()})
    images = hf.MiniCPMV4_6ImageProcessor(max_slice_nums=4, scale_resolution=56)
    return kind(images, hf.MiniCPMV4_6VideoProcessor(), tokenizer)


def _omni(edge: int) -> Any:
    """Build the processor of a Qwen-Omni model with image tokens of this side."""
    marks = {f"{what}_token": f"<|{what}_pad|>" for what in ("image", "video", "audio")}
    marks |= {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    marks |= {"audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
    kind = hf.Qwen2_5OmniProcessor if edge == 28 else hf.Qwen3OmniMoeProcessor
    images = hf.Qwen2VLImageProcessor(size=_pixels(edge), patch_size=edge // 2)
    videos, audio = hf.Qwen2VLVideoProcessor(), hf.WhisperFeatureExtractor(feature_size=4)
    return kind(images, videos, audio, tiny_tokenizer(**marks))


PROCESSORS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: _qwen3(hf.Qwen3VLProcessor),
    "glm4v": lambda: _glm_processor("Glm4v"),
    "glm46v": lambda: _glm_processor("Glm46V"),
    "paddleocr_vl": lambda: hf.PaddleOCRVLProcessor(
        hf.PaddleOCRVLImageProcessor(size=_pixels(28)),
        tiny_tokenizer(image_token="<|IMAGE_PLACEHOLDER|>", video_token="<|video_pad|>"),
    ),
    "internvl": lambda: hf.InternVLProcessor(
        hf.GotOcr2ImageProcessor(size=SQUARE, max_patches=4),
        tiny_tokenizer("<ref>", "</ref>", "<box>", "</box>", **INTERNVL),
        hf.InternVLVideoProcessor(),
        image_seq_length=1,
    ),
    "idefics3": lambda: hf.Idefics3Processor(
        hf.Idefics3ImageProcessor(**IDEFICS), _idefics_tokenizer(), image_seq_len=1
    ),
    "smolvlm": _smolvlm,
    "llava": lambda: _llava(
        hf.LlavaProcessor, hf.LlavaImageProcessor(size={"shortest_edge": 28}, crop_size=SQUARE)
    ),
    "fast_vlm": lambda: hf.LlavaProcessor(
        hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=_square(32)),
        tiny_tokenizer("<image>"),
        patch_size=16,
        vision_feature_select_strategy="full",
    ),
    "llava_next": lambda: _llava(
        hf.LlavaNextProcessor,
        hf.LlavaNextImageProcessor(
            size={"shortest_edge": 28}, crop_size=SQUARE, image_grid_pinpoints=TILES
        ),
    ),
    "llava_onevision": lambda: hf.LlavaOnevisionProcessor(
        hf.LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=TILES),
        tiny_tokenizer("<image>", "<video>"),
        hf.LlavaOnevisionVideoProcessor(),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
    ),
    "pixtral": lambda: _pixtral(1),
    "mistral3": lambda: _pixtral(2),
    "gemma3": lambda: hf.Gemma3Processor(
        hf.Gemma3ImageProcessor(size=SQUARE), _gemma_tokenizer(*GEMMA), image_seq_length=4
    ),
    "gemma4": lambda: hf.Gemma4Processor(
        hf.Gemma4AudioFeatureExtractor(),
        hf.Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2),
        _gemma_tokenizer(*GEMMA4),
        hf.Gemma4VideoProcessor(),
    ),
    "paligemma": lambda: hf.PaliGemmaProcessor(
        _set(hf.SiglipImageProcessor(size=SQUARE), image_seq_length=4),
        _set(tiny_tokenizer("<bos>"), bos_token="<bos>"),
    ),
    "mllama": lambda: hf.MllamaProcessor(
        hf.MllamaImageProcessor(size=SQUARE, max_image_tiles=4),
        _set(tiny_tokenizer("<bos>", "<|image|>", "<|python_tag|>"), bos_token="<bos>"),
    ),
    "lfm2_vl": _lfm2_vl,
    "ovis2": lambda: hf.Ovis2Processor(
        hf.Ovis2ImageProcessor(size=SQUARE, crop_to_patches=True, max_patches=4),
        tiny_tokenizer(
            "<image>", *(f"<IMG_{n}>" for n in ("ATOM", "START", "GRID", "COL", "ROW", "END"))
        ),
        image_seq_length=4,
    ),
    "cohere2_vision": lambda: hf.Cohere2VisionProcessor(
        # patch_size: the side of a tile in image tokens
        _set(hf.Cohere2VisionImageProcessor(size=SQUARE, max_patches=4), patch_size=1),
        tiny_tokenizer(**TILE_MARKS),
    ),
    "aya_vision": lambda: hf.AyaVisionProcessor(
        hf.GotOcr2ImageProcessor(size=SQUARE, max_patches=4),
        tiny_tokenizer("<image>", *TILE_MARKS.values(), "TILE", "TILE_GLOBAL"),
        patch_size=14,
        img_size=28,
        downsample_factor=2,
    ),
    "lfm3_vl": lambda: _qwen3(hf.Lfm3VlProcessor),
    "minicpmv4_6": lambda: _minicpm(hf.MiniCPMV4_6Processor),
    "minicpmv4_7": lambda: _minicpm(hf.MiniCPMV4_7Processor),
    "molmo2": lambda: hf.Molmo2Processor(
        hf.Molmo2ImageProcessor(size=_square(56), max_crops=4, overlap_margins=[1, 1]),
        hf.Molmo2VideoProcessor(),
        tiny_tokenizer(*MOLMO2, "<|image|>", "<|video|>"),
    ),
    "gemma3n": lambda: hf.Gemma3nProcessor(
        hf.Gemma3nAudioFeatureExtractor(),
        hf.SiglipImageProcessor(size=_square(32)),
        _gemma_tokenizer(*GEMMA, *(mark.replace("image", "audio") for mark in GEMMA)),
        image_seq_length=4,
    ),
    "hunyuan_vl": lambda: hf.HunYuanVLProcessor(
        hf.HunYuanVLImageProcessor(size=_pixels(32)), tiny_tokenizer(**HUNYUAN)
    ),
    "lighton_ocr": lambda: hf.LightOnOcrProcessor(
        hf.PixtralImageProcessor(size={"longest_edge": 84}, patch_size=_square(28)),
        tiny_tokenizer(
            image_token="<|image_pad|>",
            image_break_token="<|vision_pad|>",
            image_end_token="<|vision_end|>",
        ),
    ),
    "deepseek_ocr2": lambda: hf.DeepseekOcr2Processor(
        hf.DeepseekOcr2ImageProcessor(size=_square(96), tile_size=96, max_patches=2),
        tiny_tokenizer("<image>"),
        patch_size=2,
    ),
    "granite4_vision": lambda: hf.Granite4VisionProcessor(
        hf.LlavaNextImageProcessor(
            size={"shortest_edge": 56}, crop_size=_square(56), image_grid_pinpoints=TILES_56
        ),
        tiny_tokenizer("<image>"),
        patch_size=14,
        vision_feature_select_strategy="full",
        downsample_rate="1/2",
    ),
    "granite_docling": lambda: hf.GraniteDoclingProcessor(
        hf.GraniteDoclingImageProcessor(size=_square(32), max_patches=4),
        _idefics_tokenizer(),
        image_seq_len=1,
    ),
    "qwen2_5_omni_thinker": lambda: _omni(28),
    "qwen3_omni_moe_thinker": lambda: _omni(32),
    "ernie4_5_vl_moe": lambda: hf.Ernie4_5_VLMoeProcessor(
        hf.Ernie4_5_VLMoeImageProcessor(size=_pixels(28)),
        tiny_tokenizer(**ERNIE),
        hf.Ernie4_5_VLMoeVideoProcessor(draw_on_frames=False),
    ),
}
"""Functions that build a processor of small images."""
EDGES = {
    **dict.fromkeys(
        ("qwen3", "lfm3_vl", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
        ("<|vision_start|>", "<|vision_end|>"),
    ),
    **dict.fromkeys(("glm4v", "glm46v"), ("<|begin_of_image|>", "<|end_of_image|>")),
    "hunyuan_vl": ("<img_start>", "<img_end>"),
    "ernie4_5_vl_moe": ("<|IMAGE_START|>", "<|IMAGE_END|>"),
}
"""The tokens before and after an image, for processors that do not write them."""


def build_processor(name: str) -> Any:
    """Build a processor with a tokenizer of one token per byte, and Qwen's form of a chat."""
    processor = PROCESSORS[name]()
    image = processor.image_token.join(EDGES.get(name, ("", "")))
    template = CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", image)
    return _set(processor, chat_template=template)
