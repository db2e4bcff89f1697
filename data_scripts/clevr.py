"""CLEVR: its counting questions, or the number of objects of its scenes.

--source: CLEVR_v1.0, or one of its files: questions/CLEVR_val_questions.json gives the questions
whose program ends in a count; scenes/CLEVR_val_scenes.json gives, for every scene, the question
of R1-V's CLEVR-70k, how many items there are. The folder stands for its questions.
--images: the folder of the split's images, CLEVR_v1.0/images/val. The test split has no answers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow, Request
from vlm_grpo.data_scripts.readers import RawRecord, find_file, read_json

_SCENE_QUESTION = "How many items are there in the image?"


def read(request: Request) -> Iterator[ConvertedRow | RefusedRow]:
    """One row for each counting question, or for each scene."""
    path = find_file(request.source, f"**/*_{request.split}_questions.json")
    content = read_json(path)
    if "scenes" in content:
        for scene in content["scenes"]:
            name = f"{request.split}-{scene['image_index']}"
            image = scene["image_filename"]
            yield ConvertedRow(name, (image,), _SCENE_QUESTION, len(scene["objects"]))
    else:
        for row in content["questions"]:
            yield counting_question(row, request.split)


def counting_question(row: RawRecord, split: str) -> ConvertedRow | RefusedRow:
    """A question of the CLEVR form, refused where it asks for no count."""
    name = f"{split}-{row['question_index']}"
    step = row["program"][-1]
    if step.get("function", step.get("type")) != "count":
        return RefusedRow(name, "it does not ask for a count")
    meta = {"question_family": row.get("question_family_index")}
    return ConvertedRow(name, (row["image_filename"],), row["question"], int(row["answer"]), meta)


CONVERTER = Converter(__doc__ or "", read, tasks=("counting",), splits=("val", "train"))

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
