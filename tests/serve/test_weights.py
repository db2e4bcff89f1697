"""Files with the weights that servers load."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from fake_vllm import read_calls, run_fake
from safetensors.torch import load_file
from small_runs import LORA

from vlm_grpo.model.policy import load_policy
from vlm_grpo.serve.client import VllmClient
from vlm_grpo.serve.weights import FileTransfer
from vlm_grpo.training.update import build_updater


@pytest.fixture(params=[None, LORA], ids=["full weights", "adapters"])
def strategy(settings: Any, request: pytest.FixtureRequest) -> Any:
    build = settings(policy=request.param) if request.param else settings()
    return build_updater(load_policy(build), build, Accelerator(cpu=True)).strategy


def change(strategy: Any, seed: int) -> dict[str, torch.Tensor]:
    """Change the trained weights, and return copies of them."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, weight in strategy.policy.trainable_parameters():
            weight.add_(torch.randn_like(weight))
    return {name: weight.clone() for name, weight in strategy.weights().items()}


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def test_each_version_has_files_with_its_weights(
    strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three versions are kept: a server may load an older one while later ones are written."""
    monkeypatch.chdir(tmp_path)  # a server has another folder of its own
    transfer, loaded = FileTransfer(strategy, Path("files")), []
    client: Any = SimpleNamespace(load_files=loaded.append, load_adapter=loaded.append)
    expected = []
    for version in range(5):
        expected.append(change(strategy, version))
        transfer.stage(version)
    for version in range(2, 5):
        transfer.load(client, version)
        found = read(loaded[-1])
        if strategy.policy.adapters is None:
            own = tmp_path / f"own-{version}"
            own.mkdir()
            strategy.policy.save_shard(own, expected[version], "model")
            wanted = read(own)
        else:
            wanted = {name.replace(".default", ""): w for name, w in expected[version].items()}
        assert found.keys() == wanted.keys()
        assert len(found) > 10
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    folders = list((tmp_path / "files").iterdir())
    assert len(folders) == 3
    modes = {path.stat().st_mode & 0o777 for folder in folders for path in folder.glob("*.s*")}
    assert modes == {folders[0].stat().st_mode & 0o666}  # a server of another user may read them
    assert all(folder.is_absolute() for folder in loaded)
    transfer.close()
    assert not (tmp_path / "files").exists()


def test_a_server_loads_the_kind_of_weights_that_are_trained(
    strategy: Any, tmp_path: Path, model_folder: Path
) -> None:
    transfer, fake = FileTransfer(strategy, tmp_path / "files"), tmp_path / "other"
    transfer.stage(0)
    with run_fake(fake, model_folder) as url:
        client = VllmClient(url, 5)
        client.pause()
        transfer.load(client, 0)
    is_full = strategy.policy.adapters is None
    path = "/collective_rpc" if is_full else "/v1/load_lora_adapter"
    assert [call["path"] for call in read_calls(fake)] == ["/pause", path]
    assert (fake / "last/adapter_config.json").is_file() != is_full
