"""Detection datasets: from labeled boxes to rows of a task, and the reader of COCO.

Other formats of annotations are files of their own, ``data_scripts/format_NAME.py``.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_grpo.config.data import Split
from vlm_grpo.data.boxes import check_inside
from vlm_grpo.data.files import CAPTION_QUESTION, read_json, read_rows
from vlm_grpo.data.images import IMAGE_SUFFIXES
from vlm_grpo.data.rows import Row
from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.types import LabeledBoxes

logger = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20  # Size of an XML file or a label file


@dataclass(frozen=True)
class Region:
    """One annotated object."""

    label: str  # name of its category
    box: Sequence[float]  # xyxy in pixels of the original image
    ignored: bool = False  # it marks a crowd or a difficult object, which is not part of an answer
    mask: Any = None  # run lengths or polygons of COCO


@dataclass(frozen=True)
class AnnotatedImage:
    """An image and its annotated objects."""

    id: str  # unique name in the source
    location: str  # where it was read
    path: str  # path of the image file
    size: tuple[int, int] | None  # width and height in pixels by the annotations; None: not given
    regions: Sequence[Region | Row] = ()  # its objects; a row has the problem of a bad one


def ask_about_images(
    images: Iterable[AnnotatedImage], categories: Sequence[str], task: Task
) -> Iterator[Row]:
    """Yield the rows that a task makes of annotated images, given all categories of the dataset.

    An image with bad objects yields their rows and no other.
    """
    unused = 0
    for image in images:
        rows = [region for region in image.regions if isinstance(region, Row)]
        if not rows:
            rows = _make_rows(image, categories, task)
            unused += not rows
        yield from rows  # which have ids, so that their numbers do not matter
    if unused:
        logger.warning(
            "%d images give no row: %s asks about none of their objects "
            "(some tasks take only one object of a kind, or all with task_options.several=true)",
            unused,
            type(task).__name__,
        )


def _make_rows(image: AnnotatedImage, categories: Sequence[str], task: Task) -> list[Row]:
    regions: dict[bool, list[Region]] = {False: [], True: []}  # by whether they are ignored
    for region in image.regions:
        if isinstance(region, Region):
            regions[region.ignored].append(region)
    objects = LabeledBoxes(
        boxes=tuple(_round_box(region) for region in regions[False]),
        labels=tuple(region.label for region in regions[False]),
        categories=tuple(categories),
        ignored=tuple(dict.fromkeys(region.label for region in regions[True])),
        masks=tuple(region.mask for region in regions[False]),
    )
    try:
        pairs = list(task.ask_about(objects))
    except ValueError as error:
        raise UserError(f"{image.location}: {error}") from error
    meta: dict[str, object] = {"image_id": image.id}
    if ignored := regions[True]:
        boxes, labels = [list(_round_box(r)) for r in ignored], [r.label for r in ignored]
        meta["crowd"] = {"boxes": boxes, "labels": labels}
    rows = []
    for index, (question, answer) in enumerate(pairs, start=1):
        values = {"id": f"{image.id}-{index}", "question": question, "answer": answer}
        values |= {"images": [image.path], "meta": meta}
        rows.append(Row(image.location, 0, values, True, size=image.size, in_pixels=True))
    return rows


def _round_box(region: Region) -> tuple[float, float, float, float]:
    # Sums of decimals are not exact: 129.44 + 119.73 is 249.17000000000002.
    x1, y1, x2, y2 = (round(edge, 3) for edge in region.box)
    return x1, y1, x2, y2


def try_region(
    location: str, size: tuple[int, int] | None, read: Callable[..., Region], *args: Any
) -> Region | Row:
    """Return the object that ``read`` returns, or a row with the reason why it is bad."""
    try:
        region = read(*args)
        box = list(region.box)
        if not all(map(math.isfinite, box)):
            raise ValueError(f"box {box} has a number that is not finite")
        if box[0] >= box[2] or box[1] >= box[3]:
            raise ValueError(f"box {box} (x1, y1, x2, y2) has no area")
        if size is not None:
            check_inside(box, size)
        return region
    except ValueError as error:
        return Row(location, 0, problem=str(error))


def list_labels(images: Iterable[AnnotatedImage]) -> set[str]:
    return {r.label for image in images for r in image.regions if isinstance(r, Region)}


def explain(location: str, problem: object) -> AnnotatedImage:
    return AnnotatedImage("", location, "", None, [Row(location, 0, problem=str(problem))])


# COCO


@dataclass(frozen=True)
class Coco:
    path: Path
    images: Mapping[Any, dict[str, Any]]  # image entries by id, with a ``file_name``
    # annotation entries, unchecked; ``bbox`` is x, y, width, height in pixels
    annotations: Sequence[Any]
    categories: Mapping[Any, dict[str, Any]]  # category entries by id, with a ``name``
    has_captions: bool  # its annotations are captions, without categories


def find_coco_file(folder: Path) -> Path | None:
    """Return the annotation file beside the images in an export of Roboflow, or None."""
    path = folder / "_annotations.coco.json"
    return path if path.is_file() else None


def list_image_folders(path: Path) -> Sequence[Path]:
    """Return the folders in which the images of COCO or Pascal VOC, and of their tools, may be."""
    folder = path if path.is_dir() else path.parent
    split = path.stem.rpartition("_")[2]  # instances_val2017
    candidates = [
        *(folder / name for name in ("images", split, "JPEGImages")),
        *(folder.parent / name for name in (split, f"images/{split}", "images", "JPEGImages")),
    ]
    return [folder, *filter(Path.is_dir, candidates)]


def read_json_source(path: Path, task: Task, split: Split = "train") -> Iterator[Row]:
    """Yield the rows of a JSON file: of its array of objects, or of a COCO annotation file."""
    path = find_coco_file(path) or path
    content = read_json(path)
    if isinstance(content, list):
        return read_rows(path, content)
    if not isinstance(content, dict) or not {"images", "annotations"} <= content.keys():
        raise UserError(
            f"file {path} must be a JSON array of objects or have COCO's images and annotations, "
            f"not a {type(content).__name__}"
            + (f" with {', '.join(list(content)[:9])}" if isinstance(content, dict) else "")
        )
    coco = parse_coco(path, content)
    if coco.has_captions:
        return _read_captions(coco)
    found = list(_read_instances(coco))
    used = list_labels(found)
    groups = {category.get("supercategory") for category in coco.categories.values()} - used
    names = dict.fromkeys(category["name"] for category in coco.categories.values())
    return ask_about_images(found, [name for name in names if name not in groups], task)


def parse_coco(path: Path, content: Mapping[str, Any]) -> Coco:
    """Index the content of a COCO annotation file.

    ``UserError``: a list is missing, or an image or category lacks its id or name, or its id is
    not unique. Nothing that refers to it would be sound.
    """
    images = _index(path, "images", content.get("images"), "file_name")
    annotations = _check_list(path, "annotations", content.get("annotations"))
    has_captions = isinstance((annotations or [None])[0], dict) and "caption" in annotations[0]
    named = [] if has_captions else content.get("categories")
    return Coco(path, images, annotations, _index(path, "categories", named, "name"), has_captions)


def _read_instances(coco: Coco) -> Iterator[AnnotatedImage]:
    sizes: dict[Any, tuple[int, int] | None] = {}
    for key, image in coco.images.items():
        sides: Any = image.get("width"), image.get("height")
        sizes[key] = sides if all(isinstance(side, int) and side > 0 for side in sides) else None
    regions: dict[Any, list[Region | Row]] = defaultdict(list)
    for number, annotation in enumerate(coco.annotations, start=1):
        location, key = f"{coco.path}: annotation {number}", None
        if isinstance(annotation, dict):
            key = annotation.get("image_id")
            location += f" (id {annotation['id']})" * ("id" in annotation)
        key = key if isinstance(key, int | str) else None
        region = try_region(location, sizes.get(key), _read_coco_region, annotation, coco)
        regions[key].append(region)
    for number, (key, image) in enumerate(coco.images.items(), start=1):
        location, own = f"{coco.path}: image {number}", regions.pop(key, ())
        yield AnnotatedImage(str(key), location, image["file_name"], sizes[key], own)
    for left in regions.values():  # annotations without an image
        yield AnnotatedImage("", str(coco.path), "", None, left)


def _read_coco_region(annotation: Any, coco: Coco) -> Region:
    _get_image(annotation, coco)
    category = _get_key(annotation, "category_id")
    if category not in coco.categories:
        raise ValueError(f"there is no category with its category_id {category!r}")
    box = annotation.get("bbox")
    numbers = box if isinstance(box, list) else []
    if len(numbers) != 4 or any(type(number) not in (int, float) for number in numbers):
        raise ValueError(f"its bbox must be four numbers x, y, width, height, not {box!r:.60}")
    x, y, width, height = numbers
    corners, is_crowd = (x, y, x + width, y + height), bool(annotation.get("iscrowd"))
    mask = annotation.get("segmentation") or None
    return Region(coco.categories[category]["name"], corners, is_crowd, mask)


def _read_captions(coco: Coco) -> Iterator[Row]:
    captions: dict[int | str, list[str]] = defaultdict(list)
    for number, annotation in enumerate(coco.annotations, start=1):
        try:
            key, caption = _get_image(annotation, coco), annotation.get("caption")
            if not isinstance(caption, str) or not caption.strip():
                raise ValueError(f"its caption must be text, not {caption!r:.60}")
            captions[key].append(caption.strip())
        except ValueError as error:
            yield Row(f"{coco.path}: annotation {number}", 0, problem=str(error))
    for number, (key, image) in enumerate(coco.images.items(), start=1):
        if texts := captions[key]:
            values = {"id": str(key), "images": [image["file_name"]], "answer": texts}
            location = f"{coco.path}: image {number}"
            yield Row(location, 0, values, True, question=CAPTION_QUESTION)


def _get_image(annotation: Any, coco: Coco) -> int | str:
    if not isinstance(annotation, dict):
        raise ValueError(f"it must be an object, not a {type(annotation).__name__}")
    if (key := _get_key(annotation, "image_id")) not in coco.images:
        raise ValueError(f"there is no image with its image_id {key!r}")
    return key


def _index(path: Path, name: str, entries: Any, field: str) -> dict[Any, dict[str, Any]]:
    """Return the entries of a list by id; each must have a text in ``field``."""
    found: dict[Any, dict[str, Any]] = {}
    for number, entry in enumerate(_check_list(path, name, entries), start=1):
        where = f"{path}: {name}, entry {number}"
        if not isinstance(entry, dict):
            raise UserError(f"{where} must be an object, not a {type(entry).__name__}")
        try:
            key = _get_key(entry, "id")
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        if not isinstance(entry.get(field), str) or not entry[field].strip():
            raise UserError(f"{where}: its {field} must be text, not {entry.get(field)!r:.60}")
        if key in found:
            first = list(found).index(key) + 1
            raise UserError(f"{where}: its id {key!r} is a duplicate of entry {first}")
        found[key] = entry
    return found


def _check_list(path: Path, name: str, entries: Any) -> list[Any]:
    if not isinstance(entries, list):
        raise UserError(f"{path}: {name} must be a list, not {entries!r:.60}")
    return entries


def _get_key(entry: Mapping[str, Any], name: str) -> int | str:
    key = entry.get(name)
    if not isinstance(key, int | str) or isinstance(key, bool):
        raise ValueError(f"its {name} must be an integer or text, not {key!r:.60}")
    return key


def list_images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
