"""Checkpoint folders: written atomically, and verified when they are read.

A checkpoint is ``step-12`` after twelve steps. It holds the weights with the processor,
``config.yaml``, ``state.json`` for metadata, a safetensors file per kind of tensors (and per rank
if the checkpoint is sharded), and ``manifest.json`` with the size and SHA-256 of every other file.
Nothing in it is pickled.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file

from vlm_grpo.dist.collectives import fail_together, gather_object
from vlm_grpo.errors import UserError
from vlm_grpo.training.checkpoint.checksums import MANIFEST, Checksums, compute_checksum
from vlm_grpo.utils.atomic_io import share_weights
from vlm_grpo.utils.folder_lock import check_lock
from vlm_grpo.utils.jsonl import read_object

FORMAT = 1
"""Format version, to be increased with every change that other versions cannot read."""
STATE = "state.json"
INDEX = "model.safetensors.index.json"
"""transformers' index of a model in several files, which maps each weight to its file."""
Contents = tuple[Mapping[str, Any], Mapping[str, Mapping[str, torch.Tensor]]]
"""What a checkpoint holds besides the weights: values that JSON can hold, and tensors by file
(without suffix) and name; a file without tensors is not written."""
_SHARD = re.compile(r"-\d+-of-\d+$")


def write_files(
    folder: Path, contents: Contents, write_weights: Callable[[Path], None]
) -> Checksums:
    """Write a checkpoint's files, flush them, and return their checksums."""
    write_weights(folder)
    metadata, files_of_tensors = contents
    for name, tensors in files_of_tensors.items():
        if tensors:
            plain = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
            save_file(plain, folder / f"{name}.safetensors")
    text = json.dumps({"format": FORMAT, **metadata})
    (folder / STATE).write_text(text, encoding="utf-8")
    share_weights(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in files:
        _flush(path)
    return {str(path.relative_to(folder)): compute_checksum(path) for path in files}


def commit(tmp_dir: Path, target: Path, checksums: Checksums) -> None:
    """Turn a temporary folder into a checkpoint: write the manifest, flush and rename."""
    (tmp_dir / MANIFEST).write_text(json.dumps({"files": checksums}, indent=1), encoding="utf-8")
    for path in [tmp_dir / MANIFEST, *(p for p in tmp_dir.rglob("*") if p.is_dir()), tmp_dir]:
        _flush(path)
    # It is there if the run was resumed from an earlier checkpoint.
    old = rename_for_deletion(target) if target.exists() else None
    tmp_dir.rename(target)
    if old is not None:
        shutil.rmtree(old)
    _flush(target.parent)


def write_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    step: int,
    contents: Contents,
    write_weights: Callable[[Path], None],
    sharded: bool = False,
) -> None:
    """Write a checkpoint to a temporary folder, flush it and rename it. All ranks must call it.

    ``write_weights`` writes weights, processor and settings into the given folder. The first rank
    writes all files; with ``sharded``, each rank writes and flushes its shard of the weights and
    tensors, and the first one, whose metadata count, merges them. The ranks share the folder. If
    one rank fails, all of them raise and nothing remains on the disk. ``UserError``: the run's
    folder, in which ``folder`` is, was renamed."""
    tmp_dir, is_first = folder / f".step-{step}.tmp", accelerator.is_main_process
    world, checksums = accelerator.num_processes, Checksums()
    shards = [f"{rank + 1:05d}-of-{world:05d}" for rank in range(world)]
    try:
        with fail_together(accelerator):
            if is_first:
                check_lock(folder.parent)
                for stale in folder.glob(".step-*"):  # which a killed run left behind
                    shutil.rmtree(stale, ignore_errors=True)
                tmp_dir.mkdir(parents=True)
        with fail_together(accelerator):
            own = tmp_dir / shards[accelerator.process_index] if sharded else tmp_dir
            if sharded or is_first:
                own.mkdir(exist_ok=True)
                checksums = write_files(own, contents, write_weights)
        gathered = dict(zip(shards, gather_object([checksums]), strict=True))
        with fail_together(accelerator):
            if is_first:
                checksums = merge_shards(tmp_dir, gathered) if sharded else checksums
                commit(tmp_dir, folder / f"step-{step}", checksums)
    except BaseException:  # on a full disk, an incomplete checkpoint takes space that is needed
        if is_first:
            shutil.rmtree(tmp_dir, ignore_errors=True)
        raise


def merge_shards(tmp_dir: Path, shards: Mapping[str, Checksums]) -> Checksums:
    """Merge and remove the folders that the ranks wrote; return the checksums of the merged files.

    The files get the names that transformers gives to a sharded model, and its index, so that
    other programs can load the model. Files other than safetensors are taken from the first.
    ``shards`` has the checksums of each folder's files by its name, such as ``00001-of-00002``."""
    checksums: Checksums = {}
    for rank, (shard, files) in enumerate(shards.items()):
        for name, checksum in files.items():
            stem, _, suffix = name.rpartition(".")
            new = f"{stem}-{shard}.{suffix}" if suffix == "safetensors" else name
            if new != name or rank == 0:
                (tmp_dir / new).parent.mkdir(exist_ok=True)
                (tmp_dir / shard / name).rename(tmp_dir / new)
                checksums[new] = checksum
        shutil.rmtree(tmp_dir / shard)
    weight_map, size = {}, 0
    for path in sorted(tmp_dir.glob("model-*.safetensors")):
        with safe_open(path, "pt") as file:
            weight_map |= dict.fromkeys(file.keys(), path.name)
        size += checksums[path.name]["size"]  # includes headers, so that no tensor is read
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    path = tmp_dir / INDEX
    path.write_text(json.dumps(index, indent=1), encoding="utf-8")
    _flush(path)
    return {**checksums, INDEX: compute_checksum(path)}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_for_deletion(checkpoint: Path) -> Path:
    """Rename a checkpoint so that it no longer counts as one if its deletion is interrupted."""
    old = checkpoint.with_name(f".{checkpoint.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    return checkpoint.rename(old)


def read_metadata(checkpoint: Path) -> dict[str, Any]:
    """Return the metadata; ``UserError``: it is of another format, or was saved within a step."""
    path = checkpoint / STATE
    metadata = read_object(path)
    if metadata.get("format") != FORMAT:
        raise UserError(
            f"{path} has format {metadata.get('format')}, this version reads format {FORMAT}: "
            "resume with the version that wrote it"
        )
    if "open_step" in metadata:
        raise UserError(
            f"{checkpoint} was saved within a step by an earlier version, and this one resumes "
            "between steps: continue with that version until the step's end, or delete the folder "
            "to continue from the checkpoint before it"
        )
    return metadata


class _LazyTensors(Mapping[str, torch.Tensor]):
    """The tensors of several files, each read from the disk on access."""

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
    """Return the tensors of one kind, such as ``optimizer``, on the CPU, from one file or shards;
    none if the checkpoint has no such tensors."""
    files = checkpoint.glob("*.safetensors")
    return _LazyTensors([path for path in files if _SHARD.sub("", path.stem) == name])
