"""VLM-R1's files: training .jsonl with conversations, and evaluation .json with problem, solution.

One row may have several images. Boxes are xyxy in pixels of the original image.

--source: one such file. --images: the folder that its image paths are relative to.
--split is not in the files: it is a name, and goes into the rows' ids.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vlm_grpo.data_scripts.conversion import Converter, Found, Refused, Request, answer_for
from vlm_grpo.data_scripts.sources import Record, find_file, read_lines

_REC_PREFIX = "Please provide the bounding box coordinate of the region this sentence describes:"


def read(request: Request) -> Iterator[Found | Refused]:
    """The file's rows, numbered where they have no id."""
    for number, row in enumerate(read_lines(find_file(request.source)), start=1):
        name = f"{request.split}-{row.get('id', number)}"
        question, solution = _turns(row) if "conversations" in row else _problem(row)
        answer = answer_for(solution, request.task)
        if answer is None:
            yield Refused(name, f"its answer is none of {request.task}", f"{solution!r:.80}")
            continue
        images = row.get("image", row.get("images", []))
        yield Found(
            id=name,
            images=tuple(images) if isinstance(images, list) else (images,),
            question=question.replace("<image>", "").strip().removeprefix(_REC_PREFIX).strip(),
            answer=answer,
            meta={k: row[k] for k in ("dataset_name", "accu_reward_method") if k in row},
        )


def _turns(row: Record) -> tuple[str, object]:
    human, gpt = row["conversations"]
    if (human["from"], gpt["from"]) != ("human", "gpt"):
        raise ValueError("conversations must be one turn from human and one from gpt")
    return human["value"], gpt["value"]


def _problem(row: Record) -> tuple[str, object]:
    return row.get("normal_caption", row["problem"]), row["solution"]


CONVERTER = Converter(
    __doc__ or "",
    read,
    tasks=("grounding", "counting", "ocr", "detection"),
    splits=("train", "val", "test"),
)

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
