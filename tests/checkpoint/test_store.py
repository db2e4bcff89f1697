"""A checkpoint is whole or it is none, and damage is named."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from vlm_grpo.checkpoint import store
from vlm_grpo.checkpoint.store import (
    CheckpointState,
    CheckpointStep,
    CorruptCheckpoint,
    checkpoints,
    newest_checkpoint,
    prune,
    read_numbers,
    read_tensors,
    verify,
    write_checkpoint,
)
from vlm_grpo.errors import UserError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(torch.nan)}


def weights(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "part").mkdir()
    (folder / "part" / "weights.bin").write_bytes(bytes(1000))


def write(folder: Path, moment: CheckpointStep, value: int = 0) -> Path:
    contents = CheckpointState({"value": value}, {"optimizer": TENSORS, "reference": {}})
    return write_checkpoint(folder, moment, contents, weights)


def names(folder: Path) -> list[str]:
    return [moment.name for moment, _ in checkpoints(folder)]


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    path = write(tmp_path, CheckpointStep(3), value=7)
    assert path.name == "step-3"
    assert read_numbers(path) == {"format": 1, "value": 7}
    found = read_tensors(path, "optimizer")
    assert torch.equal(found["a"], TENSORS["a"])
    assert bool(found["b"].isnan())
    assert read_tensors(path, "reference") == {}
    verify(path)


def test_moments_are_found_in_order(tmp_path: Path) -> None:
    for moment in (
        CheckpointStep(10),
        CheckpointStep(2),
        CheckpointStep(2, 1),
        CheckpointStep(2, 0),
    ):
        write(tmp_path, moment)
    assert names(tmp_path) == ["step-2", "step-2-0", "step-2-1", "step-10"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-10"


def damage_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "has other contents": damage_byte,
    "bytes, and had": tear,
    "is missing": Path.unlink,
}


@pytest.mark.parametrize("file", ["part/weights.bin", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("what", DAMAGE)
def test_damage_names_the_file(tmp_path: Path, file: str, what: str) -> None:
    path = write(tmp_path, CheckpointStep(1))
    DAMAGE[what](path / file)
    with pytest.raises(CorruptCheckpoint, match=what) as caught:
        verify(path)
    assert str(path / file) in str(caught.value)


@pytest.mark.parametrize("text", [None, "", "{}", '{"files": {}'])
def test_a_manifest_that_says_nothing_is_damage(tmp_path: Path, text: str | None) -> None:
    path = write(tmp_path, CheckpointStep(1))
    (path / "manifest.json").unlink()
    if text is not None:
        (path / "manifest.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json is missing or cannot be read"):
        verify(path)


def test_a_damaged_one_is_set_aside_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in (1, 2, 3):
        write(tmp_path, CheckpointStep(steps))
    tear(tmp_path / "step-3" / "state.json")
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == tmp_path / "step-2"
    assert "step-3/state.json has" in caplog.text
    assert "set aside as damaged-step-3, and the run goes on from step-2" in caplog.text
    # It counts no more: were it among the newest, pruning would remove whole ones for it.
    assert names(tmp_path) == ["step-1", "step-2"]
    assert (tmp_path / "damaged-step-3").is_dir()


def test_nothing_but_damage_is_an_error_and_nothing_is_moved(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for steps in (1, 2):
        tear(write(tmp_path, CheckpointStep(steps)) / "part" / "weights.bin")
    with pytest.raises(UserError, match=r"step-2/part/weights\.bin has .*no other checkpoint"):
        newest_checkpoint(tmp_path)
    assert names(tmp_path) == ["step-1", "step-2"]


def test_a_disk_that_lies_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, CheckpointStep(1))
    flush = store._flush  # noqa: SLF001 - the place where bytes leave the program

    def losing(path: Path) -> None:
        flush(path)
        if path.name == "optimizer.safetensors":
            damage_byte(path)

    monkeypatch.setattr(store, "_flush", losing)
    with pytest.raises(CorruptCheckpoint, match="reads back other than it was written"):
        write(tmp_path, CheckpointStep(2))
    assert names(tmp_path) == ["step-1"]


def test_writing_again_replaces(tmp_path: Path) -> None:
    write(tmp_path, CheckpointStep(1), value=1)
    write(tmp_path, CheckpointStep(1), value=2)
    assert read_numbers(tmp_path / "step-1")["value"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_what_a_killed_run_left_is_swept_up(tmp_path: Path) -> None:
    (tmp_path / ".step-4.tmp").mkdir()
    (tmp_path / ".step-4.tmp" / "state.json").write_text("{")
    assert checkpoints(tmp_path) == []
    write(tmp_path, CheckpointStep(5))
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for steps in range(1, 6):
        write(tmp_path, CheckpointStep(steps))
    prune(tmp_path, keep_last=0)
    assert len(names(tmp_path)) == 5
    prune(tmp_path, keep_last=2, keep={CheckpointStep(1)})
    assert names(tmp_path) == ["step-1", "step-4", "step-5"]


def test_another_format_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, CheckpointStep(1)) / "state.json"
    path.write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="is of format 99, this program reads format 1"):
        read_numbers(path.parent)
