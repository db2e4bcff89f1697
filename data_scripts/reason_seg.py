"""ReasonSeg (LISA): questions that need reasoning, with the target's bounding box or mask.

Each image has a .json file of polygons. The answer is the box that contains all polygons of the
target, whether they outline one object or several: those that LISA's masks have, without the labels
"flag" and "ignore". For the task segmentation, the answer has these polygons as one mask, and
meta.ignored_mask those labeled "ignore", which LISA's metrics leave out.

--source: a split's folder (ReasonSeg/val), or the folder of the splits. --images: the same folder
as --source. For VLM-R1's LISA-Grounding file see vlm_r1.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vlm_grpo.data_scripts.converter import (
    ConvertedRow,
    RawRecord,
    RefusedRow,
    Request,
    Rows,
    converter,
)
from vlm_grpo.data_scripts.readers import (
    enclosing_box,
    locate_phrase,
    parse_json,
    read_text,
    refuse_incomplete,
)
from vlm_grpo.errors import UserError

_IMAGES = {"val": 200, "test": 779, "train": 239}
"""Number of images of each split; an image has one or several questions."""
_NO_TARGET = re.compile("flag|.*ignore.*", re.IGNORECASE)


def _read_polygons(path: Path) -> RawRecord:
    try:
        text = read_text(path)
    except UserError:  # some of the published files are in Windows' encoding
        text = read_text(path, "cp1252")
    return parse_json(text, path)


def _list_polygons(shapes: Iterable[RawRecord]) -> list[list[float]]:
    """Return the polygons of shapes, each as x1, y1, x2, y2, …"""
    return [[v for point in s["points"] for v in point] for s in shapes if len(s["points"]) > 2]


@converter(tasks=("grounding", "segmentation"), splits=dict.fromkeys(_IMAGES))
def convert(request: Request) -> Rows:
    files = request.list_files("*.json")
    yield from refuse_incomplete(str(files[0].parent), len(files), _IMAGES[request.split])
    for path in files:
        content = _read_polygons(path)
        shapes = [s for s in content["shapes"] if not _NO_TARGET.fullmatch(s["label"])]
        corners = [point for shape in shapes for point in shape["points"]]
        if not corners:
            yield RefusedRow(path.name, "it has no target", kind="excluded")
            continue
        box = enclosing_box([[x, y, x, y] for x, y in corners])
        image = path.with_suffix(".jpg").relative_to(request.path).as_posix()
        for i, question in enumerate(content["text"]):
            meta: dict[str, Any] = {"kind": "sentence" if content["is_sentence"] else "phrase"}
            name = f"{request.split}-{path.stem}-{i}"
            if request.task == "grounding":
                yield locate_phrase(name, image, question, box, meta)
                continue
            if ignored := _list_polygons(
                s for s in content["shapes"] if "ignore" in s["label"].lower()
            ):
                meta["ignored_mask"] = ignored
            answer = {"boxes": [box], "masks": [_list_polygons(shapes)]}
            yield ConvertedRow(name, (image,), question, answer, meta)
