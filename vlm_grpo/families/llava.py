"""LLaVA and LFM2-VL, which write boxes as fractions of the image's sides."""

from __future__ import annotations

from vlm_grpo.families.base import Family


class Llava(Family):
    """LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision.

    In one part of LLaVA's data, the fractions are of the image padded to a square; those of the
    image itself, as in the other parts, are read here.
    """

    model_types = ("llava", "llava_next", "llava_onevision")
    frame = "fraction"
    frame_source = "https://github.com/haotian-liu/LLaVA/issues/606 and /822"


class Lfm2VL(Family):
    """LFM2-VL and LFM2.5-VL; the demo of LFM2.5-VL-3B asks for thousandths instead."""

    model_types = ("lfm2_vl",)
    frame = "fraction"
    frame_source = "https://github.com/Liquid4All/cookbook (examples/satellite-vlm/README.md)"
