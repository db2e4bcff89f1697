"""Flickr30k Entities: the phrases of five captions per image, each with its boxes.

The answer to a phrase with several boxes is the box that contains them all, the "merged boxes"
protocol of the literature; meta.boxes keeps the parts. Phrases without a box are left
out.

--source: the folder with Sentences, Annotations and val.txt, test.txt, train.txt.
--images: flickr30k-images.
"""

import re
from pathlib import Path
from xml.etree import ElementTree

from vlm_grpo.data_scripts.converter import RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import enclosing_box, locate_phrase, read_text, refuse_incomplete
from vlm_grpo.errors import UserError

_IMAGES = {"val": 1_000, "test": 1_000, "train": 29_783}
"""Number of images of each split; the number of their phrases is not published."""
_PHRASE = re.compile(r"\[/EN#(\d+)/(\S+) ([^\]]*)\]")


def _read_boxes(path: Path) -> dict[str, list[list[int]]]:
    """Return the xyxy boxes of each entity; a box may belong to several entities."""
    try:
        root = ElementTree.fromstring(read_text(path))
    except ElementTree.ParseError as error:
        raise UserError(f"{path} is corrupt or truncated: {error}") from error
    boxes: dict[str, list[list[int]]] = {}
    for element in root.iter("object"):
        if (box := element.find("bndbox")) is not None:
            edges = [int(box.findtext(edge, "")) for edge in ("xmin", "ymin", "xmax", "ymax")]
            for name in element.iter("name"):
                boxes.setdefault(name.text or "", []).append(edges)
    return boxes


@converter(tasks=("grounding",), splits=dict.fromkeys(_IMAGES))
def convert(request: Request) -> Rows:
    images = read_text(request.path / f"{request.split}.txt").split()
    yield from refuse_incomplete(f"{request.split}.txt", len(images), _IMAGES[request.split])
    for image in images:
        boxes = _read_boxes(request.path / "Annotations" / f"{image}.xml")
        sentences = read_text(request.path / "Sentences" / f"{image}.txt").splitlines()
        for i, sentence in enumerate(sentences):
            for j, (entity, kinds, phrase) in enumerate(_PHRASE.findall(sentence)):
                name = f"{request.split}-{image}-{i}-{j}"
                if entity not in boxes:
                    yield RefusedRow(name, "its phrase has no box", phrase, kind="excluded")
                    continue
                box = enclosing_box(boxes[entity])
                meta = {"kind": kinds.partition("/")[0], "boxes": boxes[entity]}
                yield locate_phrase(name, f"{image}.jpg", phrase, box, meta)
