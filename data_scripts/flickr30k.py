"""Flickr30k Entities: the phrases of five captions an image, each with its boxes.

A phrase with several boxes gets the box around them all, the protocol that papers call merged
boxes; meta.boxes keeps the parts. Phrases without a box are refused.

--source: the folder with Sentences, Annotations and val.txt, test.txt, train.txt.
--images: flickr30k-images.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from vlm_grpo.data_scripts.converter import ConvertedRow, Converter, RefusedRow, Request
from vlm_grpo.data_scripts.readers import enclosing_box, read_text
from vlm_grpo.errors import UserError

_PHRASE = re.compile(r"\[/EN#(\d+)/(\S+) ([^\]]*)\]")


def read(request: Request) -> Iterator[ConvertedRow | RefusedRow]:
    """One row for each phrase of each caption."""
    for image in read_text(request.path / f"{request.split}.txt").split():
        boxes = _boxes(request.path / "Annotations" / f"{image}.xml")
        sentences = read_text(request.path / "Sentences" / f"{image}.txt").splitlines()
        for i, sentence in enumerate(sentences):
            for j, (entity, kinds, phrase) in enumerate(_PHRASE.findall(sentence)):
                name = f"{request.split}-{image}-{i}-{j}"
                if entity not in boxes:
                    yield RefusedRow(name, "its phrase has no box", phrase)
                    continue
                yield ConvertedRow(
                    id=name,
                    images=(f"{image}.jpg",),
                    question=phrase,
                    answer={"boxes": [enclosing_box(boxes[entity])], "labels": [phrase]},
                    meta={"kind": kinds.partition("/")[0], "boxes": boxes[entity]},
                )


def _boxes(path: Path) -> dict[str, list[list[int]]]:
    """xyxy boxes by entity; one box may belong to several entities."""
    try:
        root = ElementTree.fromstring(read_text(path))
    except ElementTree.ParseError as error:
        raise UserError(f"{path} is corrupt or cut off: {error}") from error
    found: dict[str, list[list[int]]] = {}
    for thing in root.iter("object"):
        if (box := thing.find("bndbox")) is not None:
            sides = [int(box.findtext(side, "")) for side in ("xmin", "ymin", "xmax", "ymax")]
            for name in thing.iter("name"):
                found.setdefault(name.text or "", []).append(sides)
    return found


CONVERTER = Converter(__doc__ or "", read, tasks=("grounding",), splits=("val", "test", "train"))

if __name__ == "__main__":
    sys.exit(CONVERTER.main())
