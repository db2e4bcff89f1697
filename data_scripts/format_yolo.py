"""YOLO: a text file of boxes per image, in fractions of its sides, and a ``data.yaml``."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from vlm_grpo.config.data import Split
from vlm_grpo.data.detection import (
    MAX_BYTES,
    AnnotatedImage,
    Region,
    ask_about_images,
    explain,
    list_images,
    try_region,
)
from vlm_grpo.data.files import SPLIT_NAMES
from vlm_grpo.data.formats import Format, has_suffix, is_folder
from vlm_grpo.data.rows import Row
from vlm_grpo.errors import UserError
from vlm_grpo.media.images import read_size
from vlm_grpo.task import Task

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
            found.append(explain(str(labels), "there is no image with its name"))
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
            if labels.stat().st_size > MAX_BYTES:
                raise ValueError(f"its labels are larger than {MAX_BYTES} bytes")
            lines = labels.read_text("utf-8").splitlines()
    except (ValueError, OSError) as error:
        return explain(str(labels), f"image {image}: {error}")
    regions = [
        try_region(f"{labels}:{number}", size, _read_yolo_region, line, size, names, has_keypoints)
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


FILE = Format("data.yaml of YOLO", has_suffix(".yaml", ".yml"), read_yolo, list_yolo_folders)
FOLDER = Format("of YOLO", is_folder(is_yolo), read_yolo, list_yolo_folders)
