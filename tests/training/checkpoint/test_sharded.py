"""Ranks write about equal shards, which are merged into one checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from vlm_grpo.dist.collectives import get_local_names
from vlm_grpo.training.checkpoint.sharded import write_sharded_checkpoint
from vlm_grpo.training.checkpoint.store import (
    CheckpointState,
    commit,
    create_tmp_dir,
    merge_shards,
    read_metadata,
    read_tensors,
    verify_checkpoint,
    write_files,
)

WEIGHTS = {name: torch.full((size,), float(size)) for size, name in enumerate("fedcba", 1)}


def make_rank(rank: int, world: int) -> Any:
    return SimpleNamespace(process_index=rank, num_processes=world)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_each_tensor_is_written_by_one_rank_and_sizes_are_balanced(world: int) -> None:
    tensors = {**WEIGHTS, "tied": WEIGHTS["a"]}
    shares = [get_local_names(make_rank(rank, world), tensors) for rank in range(world)]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    assert any({"a", "tied"} <= share for share in shares)
    sizes = [sum(len(WEIGHTS[name]) for name in share - {"tied"}) for share in shares]
    assert max(sizes) - min(sizes) <= len(WEIGHTS["a"])  # the largest tensor


def test_the_tensors_of_a_layer_are_written_by_one_rank() -> None:
    """A model's files may join them: its own query, key and value projections, for example."""
    names = [f"layers.{number}.{part}" for number in range(3) for part in "qkv"]
    tensors = {name: torch.zeros(4) for name in [*names, "head"]}
    shares = [get_local_names(make_rank(rank, 2), tensors) for rank in range(2)]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    for share in shares:
        layers = {name.rpartition(".")[0] for name in share} - {""}
        assert share - {"head"} == {f"{layer}.{part}" for layer in layers for part in "qkv"}


def test_shards_are_merged_into_one_checkpoint(tmp_path: Path) -> None:
    at, halves = 3, [dict(list(WEIGHTS.items())[i::2]) for i in range(2)]
    tmp_dir, shards = create_tmp_dir(tmp_path, at), {}
    for rank, half in enumerate(halves):
        shard = f"{rank + 1:05d}-of-00002"
        (tmp_dir / shard).mkdir()
        state = CheckpointState({"rank": rank}, {"optimizer": half})
        shards[shard] = write_files(
            tmp_dir / shard,
            state,
            lambda path, half=half: save_file(half, path / "model.safetensors"),
        )
    checkpoint = commit(tmp_path, at, merge_shards(tmp_dir, shards))
    verify_checkpoint(checkpoint)
    assert read_metadata(checkpoint)["rank"] == 0
    optimizer = read_tensors(checkpoint, "optimizer")
    assert set(optimizer) == set(WEIGHTS)
    assert all(torch.equal(optimizer[name], WEIGHTS[name]) for name in WEIGHTS)
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    sizes = [path.stat().st_size for path in checkpoint.glob("model-*.safetensors")]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"] == {
        name: f"model-{rank + 1:05d}-of-00002.safetensors"
        for rank, half in enumerate(halves)
        for name in half
    }


def test_a_rank_that_fails_leaves_no_files(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "model.safetensors").touch()
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_sharded_checkpoint(Accelerator(cpu=True), tmp_path, 1, CheckpointState({}, {}), fail)
    assert list(tmp_path.iterdir()) == []
