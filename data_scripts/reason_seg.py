"""ReasonSeg (LISA): questions that need reasoning, with the box around the target's outlines.

Each image lies beside a .json of polygons. The box is the hull of all "target" polygons, so it
stands for one object or for all that the question means.

--source: a split's folder (ReasonSeg/val), or the folder of the splits. --images: the same folder
as --source. VLM-R1's LISA-Grounding file is read by vlm_r1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow, Request
from vlm_grpo.data_scripts.readers import RawRecord, enclosing_box, read_text
from vlm_grpo.errors import UserError


def read(request: Request) -> Iterator[ConvertedRow | RefusedRow]:
    """One row for each of an image's questions."""
    folder = request.path / request.split if (request.path / request.split).is_dir() else None
    files = sorted((folder or request.path).glob("*.json"))
    if not files:
        raise UserError(f"{request.source} holds no .json files of split {request.split}")
    for path in files:
        content = _read(path)
        corners = [p for s in content["shapes"] if s["label"] == "target" for p in s["points"]]
        if not corners:
            yield RefusedRow(path.name, "it has no target")
            continue
        box = enclosing_box([[x, y, x, y] for x, y in corners])
        image = path.with_suffix(".jpg").relative_to(request.path).as_posix()
        for i, question in enumerate(content["text"]):
            yield ConvertedRow(
                id=f"{request.split}-{path.stem}-{i}",
                images=(image,),
                question=question,
                answer={"boxes": [box], "labels": [question]},
                meta={"kind": "sentence" if content["is_sentence"] else "phrase"},
            )


def _read(path: Path) -> RawRecord:
    """Some of the published files are in Windows' encoding."""
    try:
        text = read_text(path)
    except UserError:
        text = read_text(path, "cp1252")
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is corrupt or cut off: {error}") from error


CONVERTER = Converter(__doc__ or "", read, tasks=("grounding",), splits=("val", "test", "train"))

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
