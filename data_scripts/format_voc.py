"""Pascal VOC: an XML file of boxes per image."""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

from vlm_grpo.config.data import Split
from vlm_grpo.data.detection import (
    MAX_BYTES,
    AnnotatedImage,
    Region,
    ask_about_images,
    explain,
    list_image_folders,
    list_labels,
    try_region,
)
from vlm_grpo.data.files import SPLIT_NAMES
from vlm_grpo.data.formats import Format, has_suffix, is_folder
from vlm_grpo.data.rows import Row
from vlm_grpo.task import Task


def is_voc(folder: Path) -> bool:
    """Return whether a folder has XML files, itself or in ``Annotations``."""
    return any(_list_voc_files(folder))


def read_voc(path: Path, task: Task, split: Split) -> Iterator[Row]:
    """Yield the rows that a task makes of the annotations of a file or folder.

    Of a folder with ``ImageSets/Main``, the images listed there for the split are read.
    """
    files = [path] if path.is_file() else list(_select_voc_files(path, split))
    images = [_read_voc_image(file) for file in files]
    return ask_about_images(images, sorted(list_labels(images)), task)


def _list_voc_files(folder: Path) -> Iterator[Path]:
    candidates = (folder / name for name in ("Annotations", "annotations"))
    return next((sub for sub in candidates if sub.is_dir()), folder).glob("*.xml")


def _select_voc_files(folder: Path, split: Split) -> Iterator[Path]:
    names = [*SPLIT_NAMES[split], *(["trainval"] if split == "train" else [])]
    for name in names:
        listed = folder / "ImageSets" / "Main" / f"{name}.txt"
        if listed.is_file():
            for line in listed.read_text("utf-8").splitlines():
                if line.strip():
                    yield folder / "Annotations" / f"{line.split()[0]}.xml"
            return
    yield from sorted(_list_voc_files(folder))


class _Builder(ElementTree.TreeBuilder):
    """A builder that refuses document types, without which a file cannot define entities."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> NoReturn:
        raise ValueError("it has a document type, which could define entities: remove it")


def _read_voc_image(path: Path) -> AnnotatedImage:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"the file is larger than {MAX_BYTES} bytes")
        parser = ElementTree.XMLParser(target=_Builder())
        root = ElementTree.fromstring(path.read_bytes(), parser)
        if root.tag != "annotation":
            raise ValueError(f"its root must be annotation, not {root.tag[:60]}")
        name = _get_text(root, "filename")
    except OSError as error:
        return explain(str(path), f"it cannot be read: {error.strerror}")
    except (ValueError, LookupError, ElementTree.ParseError) as error:
        return explain(str(path), error)
    # Some tools write 0 for an unknown side.
    texts = root.findtext("size/width"), root.findtext("size/height")
    sides = [int(text) for text in texts if text and text.strip().isdigit()]
    size = (sides[0], sides[1]) if len(sides) == 2 and all(sides) else None
    # Coordinates of the official files count from 1 and include both ends; those of other tools
    # count from 0 (as in Detectron2's loader of the official files).
    first = int("VOC" in (root.findtext("source/database") or ""))
    regions = [
        try_region(f"{path}: object {number}", size, _read_voc_region, element, first)
        for number, element in enumerate(root.iter("object"), start=1)
    ]
    return AnnotatedImage(path.stem, str(path), name, size, regions)


def _read_voc_region(element: ElementTree.Element, first: int) -> Region:
    label, box = _get_text(element, "name"), element.find("bndbox")
    if box is None:
        raise ValueError("it has no bndbox")
    edges = []
    for name in ("xmin", "ymin", "xmax", "ymax"):
        text = _get_text(box, name)
        try:
            edges.append(float(text))
        except ValueError as error:
            raise ValueError(f"its {name} must be a number, not {text!r:.60}") from error
    x1, y1, x2, y2 = edges
    is_difficult = (element.findtext("difficult") or "0").strip() == "1"
    return Region(label, (x1 - first, y1 - first, x2, y2), is_difficult)


def _get_text(element: ElementTree.Element, name: str) -> str:
    text = (element.findtext(name) or "").strip()
    if not text:
        raise ValueError(f"it has no {name}")
    return text


FILE = Format(".xml of Pascal VOC", has_suffix(".xml"), read_voc, list_image_folders)
FOLDER = Format("of Pascal VOC", is_folder(is_voc), read_voc, list_image_folders)
