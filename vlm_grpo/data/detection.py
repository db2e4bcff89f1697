"""Detection datasets: from the labeled boxes of COCO, Pascal VOC and YOLO to rows of a task."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

import yaml

from vlm_grpo.config.data import Split
from vlm_grpo.data.files import CAPTION_QUESTION, read_json, read_rows
from vlm_grpo.data.images import IMAGE_SUFFIXES
from vlm_grpo.data.rows import Row, check_inside
from vlm_grpo.errors import UserError
from vlm_grpo.media.images import read_size
from vlm_grpo.task import Task
from vlm_grpo.types import LabeledBoxes

logger = logging.getLogger(__name__)

SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "eval": ("val", "valid", "validation", "dev", "test"),
}
"""Names of each part in published datasets, the preferred one first."""
_MAX_BYTES = 16 * 2**20  # Size of an XML file or a label file


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


def _try_region(
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


def _list_labels(images: Iterable[AnnotatedImage]) -> set[str]:
    return {r.label for image in images for r in image.regions if isinstance(r, Region)}


def _explain(location: str, problem: object) -> AnnotatedImage:
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
    used = _list_labels(found)
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
        region = _try_region(location, sizes.get(key), _read_coco_region, annotation, coco)
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


# Pascal VOC


def is_voc(folder: Path) -> bool:
    """Return whether a folder has XML files, itself or in ``Annotations``."""
    return any(_list_voc_files(folder))


def read_voc(path: Path, task: Task, split: Split) -> Iterator[Row]:
    """Yield the rows that a task makes of the annotations of a file or folder.

    Of a folder with ``ImageSets/Main``, the images listed there for the split are read.
    """
    files = [path] if path.is_file() else list(_select_voc_files(path, split))
    images = [_read_voc_image(file) for file in files]
    return ask_about_images(images, sorted(_list_labels(images)), task)


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
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"the file is larger than {_MAX_BYTES} bytes")
        parser = ElementTree.XMLParser(target=_Builder())
        root = ElementTree.fromstring(path.read_bytes(), parser)
        if root.tag != "annotation":
            raise ValueError(f"its root must be annotation, not {root.tag[:60]}")
        name = _get_text(root, "filename")
    except OSError as error:
        return _explain(str(path), f"it cannot be read: {error.strerror}")
    except (ValueError, LookupError, ElementTree.ParseError) as error:
        return _explain(str(path), error)
    # Some tools write 0 for an unknown side.
    texts = root.findtext("size/width"), root.findtext("size/height")
    sides = [int(text) for text in texts if text and text.strip().isdigit()]
    size = (sides[0], sides[1]) if len(sides) == 2 and all(sides) else None
    # Coordinates of the official files count from 1 and include both ends; those of other tools
    # count from 0 (as in Detectron2's loader of the official files).
    first = int("VOC" in (root.findtext("source/database") or ""))
    regions = [
        _try_region(f"{path}: object {number}", size, _read_voc_region, element, first)
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


# YOLO: a text file of boxes per image, in fractions of its sides, and a data.yaml

_CONFIGS = ("data.yaml", "data.yml", "dataset.yaml")


def is_yolo(folder: Path) -> bool:
    """Return whether a folder has a ``data.yaml``, or is that of a part beside one."""
    is_part = (folder / "images").is_dir() and (folder / "labels").is_dir()
    return any((folder / name).is_file() for name in _CONFIGS) or is_part


def list_yolo_folders(path: Path) -> Sequence[Path]:
    """Return the folders that contain all images."""
    config = _find_config(path)
    return list(dict.fromkeys([config.parent, _find_root(config, _read_config(config))]))


def read_yolo(path: Path, task: Task, split: Split) -> Iterator[Row]:
    """Yield the rows that a task makes of the images of a ``data.yaml``, or its folder, or of the
    folder of a part beside it."""
    config = _find_config(path)
    content = _read_config(config)
    if path.is_dir() and (path / "images").is_dir() and config.parent != path:
        images = list_images(path / "images")
    else:
        images = _list_split(config, content, split)
    names = _read_names(config, content)
    if not images:
        raise UserError(f"{path} has no images of the part {split}")
    found = [_read_yolo_image(image, names, "kpt_shape" in content) for image in images]
    known = {_get_labels(image) for image in images}
    others = chain.from_iterable(sorted(f.glob("*.txt")) for f in {k.parent for k in known})
    for labels in others:
        if labels not in known and labels.name != "classes.txt":  # which labeling tools write
            found.append(_explain(str(labels), "there is no image with its name"))
    return ask_about_images(found, list(dict.fromkeys(names.values())), task)


def _find_config(path: Path) -> Path:
    # The path may be the folder of a split beside the file.
    if path.is_file():
        return path
    for candidate in (folder / name for folder in (path, path.parent) for name in _CONFIGS):
        if candidate.is_file():
            return candidate
    raise UserError(
        f"{path} does not name its classes: add a data.yaml with train: images, val: images and "
        "names: [first, second, …]"
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"file {path} is not YAML: {error}") from error
    if not isinstance(content, dict) or "names" not in content:
        raise UserError(f"{path} is not a YOLO data.yaml: it has no names of the classes")
    return content


def _find_root(config: Path, content: Mapping[str, Any]) -> Path:
    """Return the folder that a ``data.yaml`` calls ``path``; its own if there is none."""
    root = config.parent / str(content.get("path") or "")
    return root if root.is_dir() else config.parent


def _list_split(config: Path, content: Mapping[str, Any], split: Split) -> list[Path]:
    name = next((name for name in SPLIT_NAMES[split] if content.get(name)), None)
    if name is None:
        raise UserError(f"{config} has no {' or '.join(SPLIT_NAMES[split])}")
    value, root = content[name], _find_root(config, content)
    images: list[Path] = []
    for part in map(str, value if isinstance(value, list) else [value]):
        # Roboflow writes ../train/images beside the folder train.
        places = root / part, config.parent / part.removeprefix("../")
        found = next((place for place in places if place.exists()), None)
        if found is None:
            raise UserError(f"{config}: there is no {part}, the images of {name}, in {root}")
        if found.is_dir():
            if found.resolve() in config.resolve().parent.parents:  # "/" would be the whole disk
                raise UserError(
                    f"{config}: {name} is all of {found.resolve()}: name a folder in it"
                )
            images += list_images(found)
            continue
        try:
            lines = found.read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise UserError(f"file {found} cannot be read: {error}") from error
        images += [root / line.strip() for line in lines if line.strip()]
    return images


def list_images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)


def _read_names(path: Path, content: Mapping[str, Any]) -> dict[int, str]:
    names = content["names"]
    if isinstance(names, list):
        names = dict(enumerate(names))
    names = names if isinstance(names, dict) else {}
    # Nothing of another type is printed: aliases of YAML can stand for gigabytes.
    is_valid = all(type(k) is int and isinstance(v, str | int | float) for k, v in names.items())
    if not names or not is_valid:
        raise UserError(f"{path}: names must be a list of class names, or the name of each number")
    return {key: str(name).strip() for key, name in names.items()}


def _get_labels(image: Path) -> Path:
    parts = list(image.parts)
    for index in reversed(range(len(parts) - 1)):
        if parts[index] == "images":
            parts[index] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _read_yolo_image(image: Path, names: Mapping[int, str], has_keypoints: bool) -> AnnotatedImage:
    labels = _get_labels(image)
    lines: list[str] = []
    try:
        size = read_size(image)
        if labels.is_file():
            if labels.stat().st_size > _MAX_BYTES:
                raise ValueError(f"its labels are larger than {_MAX_BYTES} bytes")
            lines = labels.read_text("utf-8").splitlines()
    except (ValueError, OSError) as error:
        return _explain(str(labels), f"image {image}: {error}")
    regions = [
        _try_region(f"{labels}:{number}", size, _read_yolo_region, line, size, names, has_keypoints)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    # The id is the path below the last folder images.
    parts = image.with_suffix("").parts
    start = len(parts) - parts[::-1].index("images") if "images" in parts else len(parts) - 1
    path = str(image.absolute())
    return AnnotatedImage("/".join(parts[start:]), str(labels), path, size, regions)


def _read_yolo_region(
    line: str, size: tuple[int, int], names: Mapping[int, str], has_keypoints: bool
) -> Region:
    """Parse ``class x y width height``, a polygon (``class x1 y1 x2 y2 x3 y3 …``) or keypoints."""
    words = line.split()
    try:
        label, values = names.get(int(words[0])), [float(word) for word in words[1:]]
    except ValueError as error:
        raise ValueError(f"it must be a class number and numbers, not {line!r:.60}") from error
    if label is None:
        raise ValueError(f"class {words[0]} has no name in the {len(names)} names")
    if has_keypoints:
        values = values[:4]
    has_mask = len(values) > 4
    if len(values) < 4 or len(values) % 2:
        raise ValueError(
            f"it must be a class and x, y, width, height or the points of a polygon, "
            f"not {len(words)} values"
        )
    if not all(-0.01 <= value <= 1.01 for value in values):
        raise ValueError(f"{line!r:.60} has a value outside 0 to 1, the image's sides")
    if len(values) == 4:
        x, y, width, height = values
        values = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
        if len(words) == 5 and (width <= 0 or height <= 0):
            raise ValueError(f"{line!r:.60} is a box without area")
    values = [edge * size[axis % 2] for axis, edge in enumerate(values)]
    across, down = values[::2], values[1::2]
    box = (min(across), min(down), max(across), max(down))
    return Region(label, box, mask=[values] if has_mask else None)
