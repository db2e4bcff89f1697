"""V*Bench: 191 questions about small objects in large images.

Each image has a .json file with question, options (the first is right), and the targets' boxes
(xywh), which become ``evidence``: the parts at which a demonstration of the environment zoom looks.

--source: the folder with direct_attributes and relative_position. --images: the same folder.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_json, xywh_to_xyxy
from vlm_grpo.errors import UserError

_KINDS = ("direct_attributes", "relative_position")


@converter(tasks=("choice",), splits={"test": 191})
def convert(request: Request) -> Rows:
    files = [path for kind in _KINDS for path in sorted((request.path / kind).glob("*.json"))]
    if not files:
        raise UserError(f"{request.source} has no {' or '.join(_KINDS)} with .json files")
    for path in files:
        content, kind = read_json(path), path.parent.name
        name = f"{kind}-{path.stem}"
        found = [image for image in path.parent.glob(f"{path.stem}.*") if image.suffix != ".json"]
        if len(found) != 1:
            yield RefusedRow(name, "it does not have one image")
            continue
        options = [str(option) for option in content["options"]]
        answer = {"options": options, "answer": options[0]}
        meta = {"category": kind, "evidence": [xywh_to_xyxy(box) for box in content["bbox"]]}
        image = f"{kind}/{found[0].name}"
        yield ConvertedRow(name, (image,), content["question"], answer, meta)
