"""PaddleOCR-VL."""

from __future__ import annotations

from vlm_grpo.families.base import Family


class PaddleOCRVL(Family):
    """PaddleOCR-VL, whose ``Spotting:`` answers have four corners of eight location tokens.

    The tokens are kept for tasks that parse them; boxes of this toolkit's tasks are JSON.
    """

    model_types = ("paddleocr_vl",)
    answer_tokens = r"<\|LOC_(\d+|BEGIN|END|SEP)\|>"
