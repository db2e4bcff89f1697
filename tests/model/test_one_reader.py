"""One process reads the weights, and all have them."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from forked import run_ranks
from one_reader_ranks import run_rank
from small_runs import save_tiny_model
from tiny_models import FAMILIES, tiny_model

from vlm_grpo.model import loading
from vlm_grpo.model.loading import has_one_reader, read_once


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    model = save_tiny_model(folder / "model")
    for name in ("without-weights", "broken"):
        shutil.copytree(model, folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "broken" / "model.safetensors").write_bytes(b"no weights")
    folders = [folder / name for name in ("model", "without-weights", "broken")]
    run_ranks(folder / "log", 2, run_rank, folders, folder / "out.json")
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("name", ["ddp", "ddp lora", "fsdp", "fsdp autocast"])
def test_all_processes_have_the_weights_that_the_first_one_reads(
    results: dict[str, Any], name: str
) -> None:
    (first, read), (second, _) = results[name]
    assert first == second == read


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_without_values_has_the_same_weights_and_ties(
    family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = tiny_model(family)
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = tied
    expected = type(model)(model.config)
    monkeypatch.setattr(loading.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(
        loading, "broadcast_object_list", lambda news: [False, model.generation_config]
    )
    empty = read_once(lambda: None, model.config, torch.float32, remote_code=False)
    assert list_tensors(empty) == list_tensors(expected)
    head, embeddings = empty.get_output_embeddings(), empty.get_input_embeddings()
    assert (head.weight is embeddings.weight) == tied
    assert empty.generation_config is model.generation_config
    assert not empty.training


def list_tensors(model: Any) -> list[tuple]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, t.shape, t.dtype, t.device, t.requires_grad) for name, t in tensors]


def test_a_model_that_cannot_be_read_ends_all_processes(results: dict[str, Any]) -> None:
    first, second = results["broken"]
    assert "broken cannot be loaded" in first
    assert second.startswith("the first process cannot read the model")


def test_a_single_process_reads_for_itself() -> None:
    assert not has_one_reader()
