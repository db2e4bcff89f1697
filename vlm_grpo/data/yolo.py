"""YOLO: a text file of boxes per image, in fractions of its sides, and a ``data.yaml``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vlm_grpo.data.annotations import AnnotatedImage, Region, ask_about_images
from vlm_grpo.data.images import IMAGE_SUFFIXES
from vlm_grpo.data.rows import Row
from vlm_grpo.data.splits import SPLIT_NAMES, Split
from vlm_grpo.errors import UserError
from vlm_grpo.media.image_decode import read_size
from vlm_grpo.task import Task

_CONFIGS = ("data.yaml", "data.yml", "dataset.yaml")
_CLASSES = ("classes.txt", "labels/classes.txt", "obj.names")
"""Lists of class names, one per line, that labeling tools write."""
_MAX_BYTES = 16 * 2**20


def is_yolo(folder: Path) -> bool:
    """Return whether a folder has a ``data.yaml``, or folders of images and labels."""
    has_config = any((folder / name).is_file() for name in _CONFIGS)
    return has_config or ((folder / "images").is_dir() and (folder / "labels").is_dir())


def list_yolo_folders(path: Path) -> Sequence[Path]:
    """Return the folder that contains all images."""
    config = _find_config(path)
    if config is None:
        return [path]
    return list(dict.fromkeys([config.parent, _find_root(config, _read_config(config))]))


def read_yolo(path: Path, task: Task, split: Split) -> Iterator[Row]:
    """Yield the rows that a task makes of a dataset's images.

    Args:
        path: the ``data.yaml``, or its folder, or a folder with ``images`` and ``labels``.
        task: asks about the labeled boxes.
        split: selects ``train`` or ``val`` of the ``data.yaml``.

    Raises:
        UserError: the ``data.yaml`` is not one, there are no images or class names, or the task
            cannot ask about labeled boxes.
    """
    config = _find_config(path)
    if config is None or (path.is_dir() and (path / "images").is_dir() and config.parent != path):
        content = {} if config is None else _read_config(config)
        images = _list_images(path / "images")
    else:
        content = _read_config(config)
        images = _list_split(config, content, split)
    names = _read_names(path if config is None else config, content)
    if not images:
        raise UserError(f"{path} has no images of the part {split}")
    found = [_read_image(image, names, "kpt_shape" in content) for image in images]
    orphans = [_find_orphans(folder, images) for folder in {_get_labels(i).parent for i in images}]
    found += [orphan for group in orphans for orphan in group]
    return ask_about_images(found, list(dict.fromkeys(names.values())), task)


def _find_config(path: Path) -> Path | None:
    """Return the ``data.yaml`` of a path, which may be the folder of a split beside it."""
    if path.is_file():
        return path
    candidates = [folder / name for folder in (path, path.parent) for name in _CONFIGS]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


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
    names = [name for name in SPLIT_NAMES[split] if content.get(name)]
    if not names:
        raise UserError(f"{config} has no {' or '.join(SPLIT_NAMES[split])}")
    value = content[names[0]]
    root = _find_root(config, content)
    images: list[Path] = []
    for part in value if isinstance(value, list) else [value]:
        found = next((p for p in _list_places(root, config, str(part)) if p.exists()), None)
        if found is None:
            raise UserError(f"{config}: there is no {part}, the images of {names[0]}, in {root}")
        images += _list_images(found) if found.is_dir() else _read_list(found, root)
    return images


def _list_places(root: Path, config: Path, part: str) -> Iterator[Path]:
    yield root / part
    # Roboflow writes ../train/images beside the folder train.
    yield config.parent / part.removeprefix("../")


def _list_images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)


def _read_list(path: Path, root: Path) -> list[Path]:
    """Return the images that a text file lists, one per line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"file {path} cannot be read: {error}") from error
    return [root / line.strip() for line in lines if line.strip()]


def _read_names(path: Path, content: Mapping[str, Any]) -> dict[int, str]:
    names = content.get("names")
    if names is None:
        lists = [path / name for name in _CLASSES if (path / name).is_file()]
        if not lists:
            raise UserError(
                f"{path} does not name its classes: add a data.yaml with names: [first, second, …]"
            )
        path = lists[0]
        names = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    if isinstance(names, list):
        names = dict(enumerate(names))
    names = names if isinstance(names, dict) else {}
    # Nothing of another type is printed: aliases of YAML can stand for gigabytes.
    is_valid = all(type(k) is int and isinstance(v, str | int | float) for k, v in names.items())
    if not names or not is_valid:
        raise UserError(f"{path}: names must be a list of class names, or the name of each number")
    return {key: str(name).strip() for key, name in names.items()}


def _get_labels(image: Path) -> Path:
    """Return an image's label file: in ``labels`` where the image is in ``images``."""
    parts = list(image.parts)
    for index in reversed(range(len(parts) - 1)):
        if parts[index] == "images":
            parts[index] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _get_id(image: Path) -> str:
    """Return an image's path below the last folder ``images``, without its suffix."""
    parts = image.with_suffix("").parts
    start = len(parts) - parts[::-1].index("images") if "images" in parts else len(parts) - 1
    return "/".join(parts[start:])


def _find_orphans(folder: Path, images: Sequence[Path]) -> Iterator[AnnotatedImage]:
    known = {_get_labels(image) for image in images}
    listed = {Path(name).name for name in _CLASSES}
    for path in sorted(folder.glob("*.txt")):
        if path not in known and path.name not in listed:
            problem = (str(path), "there is no image with its name")
            yield AnnotatedImage("", str(path), "", None, problems=[problem])


def _read_image(image: Path, names: Mapping[int, str], has_keypoints: bool) -> AnnotatedImage:
    labels = _get_labels(image)
    regions: list[Region] = []
    problems: list[tuple[str, str]] = []
    size = None
    try:
        size = read_size(image)
        lines = _read_lines(labels) if labels.is_file() else []
    except (ValueError, OSError) as error:
        return AnnotatedImage(
            "", str(image), "", None, problems=[(str(labels), f"image {image}: {error}")]
        )
    for number, line in enumerate(lines, start=1):
        location = f"{labels}:{number}"
        if not line.strip():
            continue
        try:
            regions.append(_read_region(location, line, size, names, has_keypoints))
        except ValueError as error:
            problems.append((location, str(error)))
    return AnnotatedImage(
        _get_id(image), str(labels), str(image.absolute()), size, regions, problems
    )


def _read_lines(path: Path) -> list[str]:
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"its labels are larger than {_MAX_BYTES} bytes")
    return path.read_text("utf-8").splitlines()


def _read_region(
    location: str, line: str, size: tuple[int, int], names: Mapping[int, str], has_keypoints: bool
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
    across, down = values[::2], values[1::2]
    box = (min(across), min(down), max(across), max(down))
    if len(words) == 5 and (width <= 0 or height <= 0):
        raise ValueError(f"{line!r:.60} is a box without area")
    scaled = [edge * size[axis % 2] for axis, edge in enumerate(box)]
    return Region(location, label, scaled)
