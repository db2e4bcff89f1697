"""VLM-R1's data: training .jsonl with conversations, evaluation .json with problem and solution.

A row may have several images. Boxes are xyxy in pixels of the original image.

--source: one such file. --images: the folder that its image paths are relative to.
--split: a name for the rows' ids; the files do not contain it.
"""

from typing import Any

from vlm_grpo.data.messages import read_chat
from vlm_grpo.data_scripts.converter import (
    ConvertedRow,
    RawRecord,
    RefusedRow,
    Request,
    Rows,
    converter,
)
from vlm_grpo.data_scripts.readers import parse_foreign_answer, read_json_rows

_FILES = {
    "refcoco_train.jsonl": 120_624,
    "refcocop_train.jsonl": 120_191,
    "refcocog_train.jsonl": 80_512,
    "refcoco_val.json": 10_834,
    "refcocop_val.json": 10_758,
    "refcocog_val.json": 4_896,
    "lisa_test.json": 1_658,
}


def _build_turns(row: RawRecord) -> list[dict[str, Any]]:
    """Return a row of the evaluation files as a conversation."""
    question = row.get("normal_caption", row["problem"])
    return [{"from": "human", "value": question}, {"from": "gpt", "value": row["solution"]}]


@converter(
    tasks=("grounding", "counting", "ocr", "detection"),
    splits=dict.fromkeys(("train", "val", "test"), _FILES),
)
def convert(request: Request) -> Rows:
    """Yield the file's rows; a row without an id gets its number."""
    for number, row in enumerate(read_json_rows(request.find_file()), start=1):
        name = f"{request.split}-{row.get('id', number)}"
        images = row.get("image", row.get("images", []))
        images = images if isinstance(images, list) else [images]
        turns = row.get("conversations") or _build_turns(row)
        chat = read_chat(turns, images)
        answer = parse_foreign_answer(chat.answer, request.task)
        if answer is None:
            yield RefusedRow(
                name, f"its answer is not valid for {request.task}", f"{chat.answer!r:.80}"
            )
            continue
        yield ConvertedRow(
            id=name,
            images=chat.images,
            question=chat.turns[-1].text,
            answer=answer,
            meta={k: row[k] for k in ("dataset_name", "accu_reward_method") if k in row},
        )
