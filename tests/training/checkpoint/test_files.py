"""A checkpoint is written atomically, and a corrupt one is named."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from dataset_files import write_files

from vlm_grpo.dist import collectives
from vlm_grpo.dist.weights import get_local_names
from vlm_grpo.errors import UserError
from vlm_grpo.model.resolve import list_checkpoints
from vlm_grpo.training.checkpoint import checksums, files, manager
from vlm_grpo.training.checkpoint.resume import find_newest_checkpoint
from vlm_grpo.utils.folder_lock import lock_folder

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(torch.nan)}


def write_weights(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "part").mkdir()
    (folder / "part" / "weights.bin").write_bytes(bytes(1000))


def write(folder: Path, step: int, value: int = 0) -> Path:
    state = {"value": value}, {"optimizer": TENSORS, "reference": {}}
    files.write_checkpoint(Accelerator(cpu=True), folder, step, state, write_weights)
    return folder / f"step-{step}"


def list_names(folder: Path) -> list[str]:
    return [path.name for _, path in list_checkpoints(folder)]


def test_a_renamed_run_is_not_created_again_by_a_checkpoint(tmp_path):
    run = tmp_path / "run"
    with lock_folder(run):
        write(run / "checkpoints", 1)
        run.rename(tmp_path / "renamed")
        with pytest.raises(UserError, match="was renamed or removed"):
            write(run / "checkpoints", 2)
        assert not run.exists()


def test_tensors_and_metadata_are_read_bit_for_bit(tmp_path):
    path = write(tmp_path, 3, value=7)
    assert path.name == "step-3"
    assert files.read_metadata(path) == {"format": 1, "value": 7}
    found = files.read_tensors(path, "optimizer")
    assert torch.equal(found["a"], TENSORS["a"])
    assert bool(found["b"].isnan())
    assert files.read_tensors(path, "reference") == {}
    checksums.verify_checkpoint(path)
    modes = {file.stat().st_mode for file in path.rglob("*") if file.is_file()}
    assert len(modes) == 1  # whoever reads one reads all


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "differs from what was written": lambda p: p.write_bytes(p.read_bytes()[:-1] + b"?"),
    "bytes, and had": truncate,
    "is missing": Path.unlink,
}


@pytest.mark.parametrize("file", ["part/weights.bin", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("what", DAMAGE)
def test_a_corrupt_file_is_named(tmp_path, file, what):
    path = write(tmp_path, 1)
    DAMAGE[what](path / file)
    with pytest.raises(checksums.CorruptCheckpoint, match=what) as caught:
        checksums.verify_checkpoint(path)
    assert str(path / file) in str(caught.value)


@pytest.mark.parametrize(
    "text", [None, "", "{}", '{"files": {}', "[]", '{"files": [1]}', '{"files": {"a": {}}}']
)
def test_a_manifest_without_files_is_corrupt_and_another_format_an_error(tmp_path, text):
    path = write(tmp_path, 1)
    (path / "manifest.json").unlink()
    if text is not None:
        (path / "manifest.json").write_text(text)
    message = r"manifest\.json is missing or cannot be read"
    with pytest.raises(checksums.CorruptCheckpoint, match=message):
        checksums.verify_checkpoint(path)
    (path / "state.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="has format 99, this version reads format 1"):
        files.read_metadata(path)


def test_a_corrupt_checkpoint_is_renamed_and_the_previous_one_is_found(tmp_path, caplog):
    for steps in (1, 2, 3):
        write(tmp_path, steps)
    truncate(tmp_path / "step-3" / "state.json")
    with caplog.at_level(logging.WARNING):
        assert find_newest_checkpoint(tmp_path) == tmp_path / "step-2"
    assert "step-3/state.json has" in caplog.text
    assert "is renamed damaged-step-3, and the run resumes from step-2" in caplog.text
    # It no longer counts: otherwise it would take the place of an intact one when pruning.
    assert list_names(tmp_path) == ["step-1", "step-2"]
    assert (tmp_path / "damaged-step-3").is_dir()


def test_only_corrupt_checkpoints_are_an_error_and_none_is_renamed(tmp_path):
    assert find_newest_checkpoint(tmp_path) is None
    for steps in (1, 2):
        path = write(tmp_path, steps) / "part" / "weights.bin"
        size = path.stat().st_size
        truncate(path)
    with pytest.raises(UserError) as caught:
        find_newest_checkpoint(tmp_path)
    assert str(caught.value) == (
        f"{path} has {path.stat().st_size} bytes, and had {size} when it was written; no other "
        f"checkpoint in {tmp_path} is intact: restore one from a backup, or start a new run with "
        "another name=…"
    )
    assert list_names(tmp_path) == ["step-1", "step-2"]


def test_temporary_folders_of_a_killed_run_are_deleted_and_a_step_is_replaced(tmp_path):
    write_files(tmp_path, {".step-4.tmp/state.json": "{"})
    assert list_checkpoints(tmp_path) == []
    for value in (1, 2):
        write(tmp_path, 5, value)
        assert files.read_metadata(tmp_path / "step-5")["value"] == value
        assert [path.name for path in tmp_path.iterdir()] == ["step-5"]


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for steps in range(7, 12):
        write(tmp_path, steps)
    manager.prune_checkpoints(tmp_path, keep_last=0)
    assert len(list_names(tmp_path)) == 5
    manager.prune_checkpoints(tmp_path, keep_last=2, keep={7})
    assert list_names(tmp_path) == ["step-7", "step-10", "step-11"]


def test_the_tensors_of_a_layer_are_written_by_one_rank():
    """A model's files may join them: its own query, key and value projections, for example."""
    names = [f"layers.{number}.{part}" for number in range(3) for part in "qkv"]
    tensors = {name: torch.zeros(4) for name in [*names, "head"]}
    ranks: Any = [SimpleNamespace(process_index=rank, num_processes=2) for rank in range(2)]
    shares = [get_local_names(rank, tensors) for rank in ranks]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    for share in shares:
        layers = {name.rpartition(".")[0] for name in share} - {""}
        assert share - {"head"} == {f"{layer}.{part}" for layer in layers for part in "qkv"}


@pytest.mark.parametrize("sharded", [False, True])
def test_a_part_that_cannot_be_written_leaves_no_checkpoint(tmp_path, sharded, monkeypatch):
    def fail(folder: Path) -> None:
        (folder / "model.safetensors").touch()
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.write_checkpoint(Accelerator(cpu=True), tmp_path, 1, ({}, {}), fail, sharded)
    assert list(tmp_path.iterdir()) == []
    # The other rank fails at writing, not at making the folder.
    flags = iter([0.0, 1.0])
    monkeypatch.setattr(collectives.utils, "reduce", lambda own, _: own + next(flags))
    place = {"process_index": 0, "num_processes": 2, "is_main_process": True}
    first: Any = SimpleNamespace(**place, device=torch.device("cpu"))
    with pytest.raises(UserError, match="another process of this run has failed"):
        files.write_checkpoint(first, tmp_path, 1, ({}, {}), write_weights, sharded)
    assert list(tmp_path.iterdir()) == []
