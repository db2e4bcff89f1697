"""The folder that holds a run's state: written whole or not at all, and checked when it is read.

A checkpoint is ``step-12`` after twelve steps, or ``step-12-1`` after the first update of the
thirteenth. It holds the weights with the processor, ``config.yaml``, ``state.json`` for numbers,
a safetensors file for each kind of tensors (several, where each rank has written its part), and
``manifest.json`` with the size and SHA-256 of every other file. Nothing in it is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vlm_grpo.errors import UserError

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when older programs could no longer read what this one writes, or it them."""
MANIFEST, STATE = "manifest.json", "state.json"
INDEX = "model.safetensors.index.json"
"""Which file holds which weight, where there are several; transformers' name."""
Sums = dict[str, dict[str, Any]]
"""By a file's name its ``size`` in bytes and its ``sha256``."""
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_PART = re.compile(r"-\d+-of-\d+$")


@dataclass(frozen=True, order=True)
class CheckpointStep:
    """A point of a run.

    Attributes:
        steps: steps done.
        updates: updates made in the step that has begun since; -1: none has begun.
    """

    steps: int
    updates: int = -1

    @property
    def name(self) -> str:
        """The name of a checkpoint's folder."""
        return f"step-{self.steps}" + (f"-{self.updates}" if self.updates >= 0 else "")


@dataclass(frozen=True)
class CheckpointState:
    """What a checkpoint holds besides the weights.

    Attributes:
        numbers: what JSON can hold.
        tensors: by file (without suffix), then by name; an empty file is left out.
    """

    numbers: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, torch.Tensor]]


class CorruptCheckpoint(UserError):
    """A file of a checkpoint is not what was written."""


def write_checkpoint(
    folder: Path,
    moment: CheckpointStep,
    contents: CheckpointState,
    write_weights: Callable[[Path], None],
) -> Path:
    """Write a checkpoint aside, flush it to the disk, read it back, and rename it in one go.

    Args:
        folder: the run's ``checkpoints``.
        moment: names it.
        contents: what goes beside the weights.
        write_weights: called with the folder to write weights, processor and settings into.

    Returns:
        The checkpoint's folder.

    Raises:
        Damaged: what the disk gives back is not what was written.
    """
    aside = begin(folder, moment)
    try:
        sums = write_files(aside, contents, write_weights)
        return complete(folder, moment, sums)
    except BaseException:  # what was begun would only take the room that is missing
        shutil.rmtree(aside, ignore_errors=True)
        raise


def get_tmp_dir(folder: Path, moment: CheckpointStep) -> Path:
    """Where a checkpoint is written before it is one."""
    return folder / f".{moment.name}.tmp"


def begin(folder: Path, moment: CheckpointStep) -> Path:
    """An empty folder to write a checkpoint into; what was left over there is removed."""
    for left_over in folder.glob(".step-*"):  # of a run that was killed while it wrote
        shutil.rmtree(left_over, ignore_errors=True)
    aside = get_tmp_dir(folder, moment)
    aside.mkdir(parents=True)
    return aside


def write_files(
    folder: Path, contents: CheckpointState, write_weights: Callable[[Path], None]
) -> Sums:
    """Write, flush and read back a checkpoint's files; returns their sizes and sums.

    Raises:
        Damaged: what the disk gives back is not what was written.
    """
    write_weights(folder)
    for name, tensors in contents.tensors.items():
        if tensors:
            plain = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
            save_file(plain, folder / f"{name}.safetensors")
    numbers = {"format": FORMAT, **contents.numbers}
    (folder / STATE).write_text(json.dumps(numbers), encoding="utf-8")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in files:
        _flush(path)
    _compare(folder, contents)
    return {str(path.relative_to(folder)): _measure(path) for path in files}


def complete(folder: Path, moment: CheckpointStep, sums: Sums) -> Path:
    """Make a checkpoint of what lies aside: write the manifest, flush, rename.

    Args:
        folder: the run's ``checkpoints``.
        moment: names it.
        sums: of all files that belong to it.
    """
    target, aside = folder / moment.name, get_tmp_dir(folder, moment)
    (aside / MANIFEST).write_text(json.dumps({"files": sums}, indent=1), encoding="utf-8")
    for path in [aside / MANIFEST, *(p for p in aside.rglob("*") if p.is_dir()), aside]:
        _flush(path)
    if target.exists():  # a run resumed from an earlier checkpoint comes by here again
        old = _set_aside(target)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)
    _flush(folder)
    return target


def join_parts(aside: Path, parts: Mapping[str, Sums]) -> Sums:
    """Make one checkpoint of the folders into which several processes have written their parts.

    The files take the names that transformers gives a model in several files; with the index
    that it writes beside them every program reads them as one model.

    Args:
        aside: holds the parts' folders, which are gone afterwards.
        parts: the sums of each folder's files, by its name such as ``00001-of-00002``. What is
            not a file of tensors is taken from the first.

    Returns:
        The sums of the files that are in ``aside`` now.
    """
    sums: Sums = {}
    for place, (part, measured) in enumerate(parts.items()):
        for name, measure in measured.items():
            stem, _, suffix = name.rpartition(".")
            new = f"{stem}-{part}.{suffix}" if suffix == "safetensors" else name
            if new != name or place == 0:
                (aside / new).parent.mkdir(exist_ok=True)
                (aside / part / name).rename(aside / new)
                sums[new] = measure
        shutil.rmtree(aside / part)
    weight_map, size = {}, 0
    for path in sorted(aside.glob("model-*.safetensors")):
        with safe_open(path, "pt") as file:
            weight_map |= dict.fromkeys(file.keys(), path.name)
        size += sums[path.name]["size"]  # the header included: a model's tensors are not read again
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    path = aside / INDEX
    path.write_text(json.dumps(index, indent=1), encoding="utf-8")
    _flush(path)
    return {**sums, INDEX: _measure(path)}


def _flush(path: Path) -> None:
    """Bring a file or a folder to the disk, and forget the copy of it in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if path.is_file() and hasattr(os, "posix_fadvise"):  # so that reading back asks the disk
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _compare(aside: Path, contents: CheckpointState) -> None:
    """Read back what was written: tensors bit by bit, weights as far as their file says."""
    for path in aside.rglob("*.safetensors"):
        try:
            with safe_open(path, "pt") as file:
                names = set(file.keys())
                expected = contents.tensors.get(path.stem)
                if expected is None:
                    continue
                same = names == set(expected) and all(
                    _same_bits(file.get_tensor(name), expected[name]) for name in names
                )
        except SafetensorError as error:
            raise CorruptCheckpoint(
                f"{path} cannot be read back: {error}: check the disk"
            ) from error
        if not same:
            raise CorruptCheckpoint(f"{path} reads back other than it was written: check the disk")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in type, shape and every bit, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def _measure(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}


def _set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint so that it is none any more, even if removing it is cut short."""
    old = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    return checkpoint.rename(old)


def checkpoints(folder: Path) -> list[tuple[CheckpointStep, Path]]:
    """All checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    found = [
        (CheckpointStep(int(match[1]), int(match[2]) if match[2] else -1), path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, None where there is none at all.

    Damaged ones are renamed ``damaged-step-N``, with a warning that names the file.

    Raises:
        UserError: there are checkpoints, and all of them are damaged.
    """
    problems = []
    for _, path in reversed(checkpoints(folder)):
        try:
            verify(path)
        except CorruptCheckpoint as error:
            problems.append((path, error))
            continue
        for damaged, error in problems:
            aside = damaged.with_name(f"damaged-{damaged.name}")
            shutil.rmtree(aside, ignore_errors=True)
            damaged.rename(aside)
            logger.warning(
                "%s: the checkpoint is set aside as %s, and the run goes on from %s, the one "
                "before it",
                error, aside.name, path.name,
            )  # fmt: skip
        return path
    if problems:
        raise UserError(
            f"{problems[0][1]}; no other checkpoint in {folder} is whole: put back a copy of one, "
            "or begin anew with another name=…"
        )
    return None


def verify(checkpoint: Path) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        Damaged: with the first file that differs.
    """
    manifest = checkpoint / MANIFEST
    try:
        files: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"{manifest} is missing or cannot be read ({error})") from error
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CorruptCheckpoint(f"{path} is missing")
        size = path.stat().st_size
        if size != expected["size"]:
            raise CorruptCheckpoint(
                f"{path} has {size} bytes, and had {expected['size']} when written"
            )
        if _measure(path) != expected:
            raise CorruptCheckpoint(f"{path} has other contents than when it was written")


def read_numbers(checkpoint: Path) -> dict[str, Any]:
    """The numbers of a checkpoint.

    Raises:
        UserError: they cannot be read, or another version of the program wrote them.
    """
    path = checkpoint / STATE
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if numbers.get("format") != FORMAT:
        raise UserError(
            f"{path} is of format {numbers.get('format')}, this program reads format {FORMAT}: "
            "resume with the version that wrote it"
        )
    return numbers


class _Stored(Mapping[str, torch.Tensor]):
    """Tensors in files, each read from the disk when it is asked for."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[str, Any] = {}
        for path in paths:
            file: Any = safe_open(path, "pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_tensors(checkpoint: Path, name: str) -> Mapping[str, torch.Tensor]:
    """The tensors of one kind, on the CPU; empty where the checkpoint has none of it.

    Whether one process has written them or several is not seen.
    """
    return _Stored([p for p in checkpoint.iterdir() if _kind(p) == name])


def _kind(path: Path) -> str | None:
    """What tensors a file of a checkpoint holds, such as ``optimizer``; None: not a file of any."""
    return _PART.sub("", path.stem) if path.suffix == ".safetensors" else None


def prune(folder: Path, keep_last: int, keep: Collection[CheckpointStep] = ()) -> None:
    """Remove all but the newest ``keep_last`` checkpoints (0: none) and those of ``keep``."""
    found = checkpoints(folder)
    for moment, path in found[: -keep_last or len(found)] if keep_last else []:
        if moment not in keep:
            shutil.rmtree(_set_aside(path))
