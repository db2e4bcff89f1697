"""One small dataset in each published format, the same two images with a cup and two books, and
single samples as lmms-eval logs them."""

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset_files import png, write_files


def lmms_eval_sample(number: int, question: str, **more: Any) -> dict[str, Any]:
    """Return a sample as save_results_samples of lmms-eval writes it."""
    return {
        "doc_id": number,
        "target": "['EXIT']",
        "doc_hash": "0" * 64,
        "anls": 1.0,
        "input": f"{question}\nAnswer the question using a single word or phrase.",
        **more,
    }


COCO = {
    "images": [
        {"id": 7, "file_name": "a.png", "width": 64, "height": 48},
        {"id": 8, "file_name": "b.png", "width": 40, "height": 30},
    ],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 3, "bbox": [4, 6, 10, 20], "iscrowd": 0},
        {"id": 2, "image_id": 7, "category_id": 5, "bbox": [20, 8, 16, 12], "iscrowd": 0},
        {"id": 3, "image_id": 7, "category_id": 5, "bbox": [40, 8, 16, 12.5], "iscrowd": 0},
        {"id": 4, "image_id": 8, "category_id": 3, "bbox": [0, 0, 40, 30], "iscrowd": 0},
    ],
    "categories": [{"id": 3, "name": "cup"}, {"id": 5, "name": "book"}, {"id": 6, "name": "cat"}],
}
CAPTIONS = {
    "images": COCO["images"],
    "annotations": [
        {"id": 1, "image_id": 7, "caption": "A cup and two books. "},
        {"id": 2, "image_id": 8, "caption": "A cup."},
        {"id": 3, "image_id": 7, "caption": "Books beside a cup."},
    ],
}
BOXES = {
    "a": [("cup", (4, 6, 14, 26)), ("book", (20, 8, 36, 20)), ("book", (40, 8, 56, 20.5))],
    "b": [("cup", (0, 0, 40, 30))],
}
"""The same objects: label and xyxy box in pixels."""
SIZES = {"a": (64, 48), "b": (40, 30)}
YAML = "path: .\ntrain: images\nval: images\nnames: [cup, book, cat]\n"


def voc_xml(name: str) -> str:
    """Return an image's annotation as LabelImg writes it."""
    width, height = SIZES[name]
    objects = "".join(
        f"<object><name>{label}</name><difficult>0</difficult><bndbox><xmin>{x1}</xmin>"
        f"<ymin>{y1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
        for label, (x1, y1, x2, y2) in BOXES[name]
    )
    return (
        f"<annotation><filename>{name}.png</filename><source><database>Unknown</database></source>"
        f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        f"{objects}</annotation>"
    )


def yolo_labels(name: str) -> str:
    """Return an image's labels in fractions of its sides: class, center, size."""
    width, height = SIZES[name]
    lines = [
        f"{int(label == 'book')} {(x1 + x2) / 2 / width:.9f} {(y1 + y2) / 2 / height:.9f} "
        f"{(x2 - x1) / width:.9f} {(y2 - y1) / height:.9f}\n"
        for label, (x1, y1, x2, y2) in BOXES[name]
    ]
    return "".join(lines)


def make_tar(members: Mapping[str, bytes | tarfile.TarInfo]) -> bytes:
    """Return a tar file; a TarInfo is a member without content, such as a link."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = b"" if isinstance(content, tarfile.TarInfo) else content
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


_ROW = {"question": "How many cups?", "answer": 1}
IMAGES = {name: png(*size, shade=90 + size[0]) for name, size in SIZES.items()}
SAMPLES: dict[str, bytes] = {}
for _name, _image in IMAGES.items():
    SAMPLES |= {f"{_name}.png": _image, f"{_name}.json": json.dumps(_ROW).encode()}
_FILES = {f"{name}.png": data for name, data in IMAGES.items()}
_ROWS = [{"file_name": name, **_ROW} for name in _FILES]
_VOC = {f"Annotations/{name}.xml": voc_xml(name) for name in SIZES}
_LABELS = {f"labels/{name}.txt": yolo_labels(name) for name in SIZES}
_IN_IMAGES = {f"images/{name}": data for name, data in _FILES.items()}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "coco": ("instances.json", {"instances.json": COCO, **_FILES}),
    "captions": ("captions.json", {"captions.json": CAPTIONS, **_FILES}),
    "voc": ("", {**_VOC, **{f"JPEGImages/{name}": data for name, data in _FILES.items()}}),
    "yolo": ("data.yaml", {"data.yaml": YAML, **_LABELS, **_IN_IMAGES}),
    "metadata": ("", {"metadata.jsonl": _ROWS, **_FILES}),
    "webdataset": ("shard-0.tar", {"shard-0.tar": make_tar(SAMPLES)}),
}
"""Source and files of each format."""


def write_format(folder: Path, name: str, changes: Mapping[str, Any] | None = None) -> str:
    """Write a dataset, some of whose files are changed or (None) missing; return its source."""
    source, files = FORMATS[name]
    files = {**files, **(changes or {})}
    write_files(folder, {path: data for path, data in files.items() if data is not None})
    return str(folder / source)
