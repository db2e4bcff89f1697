"""ReasonSeg (LISA): questions that need reasoning, with the bounding box of the target polygons.

Each image has a .json file of polygons. The answer is the box that contains all "target" polygons,
whether they outline one object or several.

--source: a split's folder (ReasonSeg/val), or the folder of the splits. --images: the same folder
as --source. For VLM-R1's LISA-Grounding file see vlm_r1.
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
    """Yield one row per question of each image."""
    folder = request.path / request.split if (request.path / request.split).is_dir() else None
    files = sorted((folder or request.path).glob("*.json"))
    if not files:
        raise UserError(f"{request.source} holds no .json files of split {request.split}")
    for path in files:
        content = _read_polygons(path)
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


def _read_polygons(path: Path) -> RawRecord:
    try:
        text = read_text(path)
    except UserError:  # some of the published files are in Windows' encoding
        text = read_text(path, "cp1252")
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is corrupt or truncated: {error}") from error


CONVERTER = Converter(__doc__ or "", read, tasks=("grounding",), splits=("val", "test", "train"))

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
