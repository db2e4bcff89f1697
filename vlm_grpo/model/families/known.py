"""All model families; those here differ from others in facts only, such as the frame of boxes."""

from typing import Any

from vlm_grpo.model.families.family import Family, token_edge
from vlm_grpo.model.families.qwen import Qwen2VL, Qwen3VL, Qwen25VL, Qwen35


class Glm(Family):
    """GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR."""

    model_types = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")
    frame = "glm"
    frame_source = "https://github.com/zai-org/GLM-V (README.md, Grounding)"
    answer_tokens = r"<\|(begin|end)_of_box\|>"  # around a final answer of any kind


class InternVL(Family):
    """InternVL 2.5, 3 and 3.5."""

    model_types = ("internvl",)
    frame = "internvl"
    frame_source = "https://github.com/OpenGVLab/InternVL (evaluate_grounding.py)"
    answer_tokens = r"</?(ref|box|quad)>"


class PaliGemma(Family):
    model_types = ("paligemma",)
    frame = "paligemma"
    frame_source = "https://github.com/google-research/big_vision (paligemma/README.md)"
    answer_tokens = r"<(loc|seg)\d+>"
    completion_type = 1  # tokens of type 0 see each other in both directions
    # The images, then one text, to which the processor adds <bos> and a line break.
    chat_template = (
        "{% for message in messages %}{% if message.role != 'user' %}"
        "{{ raise_exception('its prompt is one text') }}{% endif %}"
        "{% for part in message.content if part.type == 'image' %}<image>{% endfor %}"
        "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
        "{% endfor %}"
    )


class Gemma4(Family):
    """Gemma 4, which writes boxes as Gemini does; Gemma 3 and 3n have no documented frame."""

    model_types = ("gemma4", "gemma4_unified")
    frame = "gemma4"
    frame_source = "programs that use the model (its model card was not read)"
    thinking_tags = ("<|channel>thought", "<channel|>")


class Llava(Family):
    """LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision."""

    model_types = ("llava", "llava_next", "llava_onevision")
    # Of the image's sides. In one part of LLaVA's data they are of the image padded to a square.
    frame = "fraction"
    frame_source = "https://github.com/haotian-liu/LLaVA/issues/606 and /822"


class Lfm2VL(Family):
    """LFM2-VL and LFM2.5-VL; the demo of LFM2.5-VL-3B asks for thousandths instead."""

    model_types = ("lfm2_vl",)
    frame = "fraction"
    frame_source = "https://github.com/Liquid4All/cookbook (examples/satellite-vlm/README.md)"


class PaddleOCRVL(Family):
    model_types = ("paddleocr_vl",)
    # For tasks that parse ``Spotting:`` answers; boxes of this toolkit's tasks are JSON.
    answer_tokens = r"<\|LOC_(\d+|BEGIN|END|SEP)\|>"


class Mistral3(Family):
    """Mistral Small 3.1 and later, and Magistral."""

    model_types = ("mistral3",)
    thinking_tags = ("[THINK]", "[/THINK]")


class HunyuanVL(Family):
    """HunyuanOCR, whose images are numbered through all rows of a batch, in their positions."""

    model_types = ("hunyuan_vl",)
    can_batch = False

    def image_tokens(self, size: tuple[int, int], processor: Any) -> int:
        rows, columns = (side // token_edge(processor) for side in size[::-1])
        return rows * (columns + 1) + 2  # an end of each row and of the image, and its start


class KimiVL(Family):
    """Kimi-VL, whose code comes with the model."""

    model_types = ("kimi_vl",)
    thinking_tags = ("◁think▷", "◁/think▷")


# Families with facts of their own; all other models have those of ``Family``.
FAMILIES = (
    *(Qwen2VL, Qwen25VL, Qwen3VL, Qwen35, InternVL, Glm),
    *(Gemma4, PaliGemma, Llava, Lfm2VL, PaddleOCRVL, Mistral3, HunyuanVL, KimiVL),
)


def load_family(config: Any) -> Family:
    """Return the family of a transformers configuration, or the generic one if it is unknown."""
    known = (family for family in FAMILIES if config.model_type in family.model_types)
    return next(known, Family)()
