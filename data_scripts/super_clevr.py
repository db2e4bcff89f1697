"""Super-CLEVR: the counting questions of its official files. For R1-V's 200 questions see r1_v.

--source: superCLEVR_questions_30k.json, or its folder. --images: the folder of the images.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vlm_grpo.data_scripts.clevr import convert_question
from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow, Request
from vlm_grpo.data_scripts.readers import find_file, read_json


def read(request: Request) -> Iterator[ConvertedRow | RefusedRow]:
    """Yield one row per question whose program ends in a count."""
    path = find_file(request.source, "superCLEVR_questions_30k.json", "superCLEVR_questions*.json")
    for row in read_json(path)["questions"]:
        yield convert_question(row, request.split)


CONVERTER = Converter(__doc__ or "", read, tasks=("counting",), splits=("train", "test"))

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
