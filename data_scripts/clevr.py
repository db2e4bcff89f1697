"""CLEVR: its counting questions, or the number of objects in its scenes.

--source: CLEVR_v1.0 (reads its questions) or one of its files. questions/CLEVR_val_questions.json
gives the questions that ask for a count; scenes/CLEVR_val_scenes.json gives R1-V's CLEVR-70k
question, how many items there are, for every scene.
--images: the folder of the split's images, CLEVR_v1.0/images/val. The test split has no answers.
"""

from vlm_grpo.data_scripts.converter import (
    ConvertedRow,
    RawRecord,
    RefusedRow,
    Request,
    Rows,
    converter,
)
from vlm_grpo.data_scripts.readers import read_json

_SPLITS = {
    "val": {"questions": 149_991, "scenes": 15_000},
    "train": {"questions": 699_989, "scenes": 70_000},
}
_SCENE_QUESTION = "How many items are there in the image?"


def convert_question(row: RawRecord, split: str) -> ConvertedRow | RefusedRow:
    """Convert a question in CLEVR's form; exclude it if it does not ask for a count.

    In all files of this form, only the answer to a count is a number; programs are in some.
    """
    name, answer = f"{split}-{row['question_index']}", str(row["answer"])
    if not answer.isdecimal():
        return RefusedRow(name, "it does not ask for a count", kind="excluded")
    meta = {"question_family": row.get("question_family_index")}
    return ConvertedRow(name, (row["image_filename"],), row["question"], int(answer), meta)


@converter(tasks=("counting",), splits=_SPLITS)
def convert(request: Request) -> Rows:
    """Yield one row per counting question, or per scene."""
    path = request.find_file(f"**/*_{request.split}_questions.json")
    content = read_json(path)
    if "scenes" in content:
        for scene in content["scenes"]:
            name = f"{request.split}-{scene['image_index']}"
            image = scene["image_filename"]
            yield ConvertedRow(name, (image,), _SCENE_QUESTION, len(scene["objects"]))
    else:
        for row in content["questions"]:
            yield convert_question(row, request.split)
