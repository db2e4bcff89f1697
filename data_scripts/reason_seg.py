"""ReasonSeg (LISA): questions that need reasoning, with the bounding box of the target polygons.

Each image has a .json file of polygons. The answer is the box that contains all polygons of the
target, whether they outline one object or several: those that LISA's masks have, without the labels
"flag" and "ignore".

--source: a split's folder (ReasonSeg/val), or the folder of the splits. --images: the same folder
as --source. For VLM-R1's LISA-Grounding file see vlm_r1.
"""

import re
from pathlib import Path

from vlm_grpo.data_scripts.converter import RawRecord, RefusedRow, Request, Rows, converter
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


@converter(tasks=("grounding",), splits=dict.fromkeys(_IMAGES))
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
            meta = {"kind": "sentence" if content["is_sentence"] else "phrase"}
            yield locate_phrase(f"{request.split}-{path.stem}-{i}", image, question, box, meta)
