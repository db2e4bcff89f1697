"""A process of a group that sends its sharded weights to vLLM servers."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rank_cases import STRATEGIES, make_settings
from safetensors.torch import load_file
from transfer_server import GPU, run_transfer_server

from vlm_grpo.dist.launch import build_accelerator
from vlm_grpo.model.policy import load_policy
from vlm_grpo.serve import weights
from vlm_grpo.serve.server import Server
from vlm_grpo.serve.weights import DirectTransfer, IpcChannel
from vlm_grpo.training.update import build_updater


def send_weights(folder: Path, launch: str) -> None:
    """Send them to a server of this process, then to one of the first process only."""
    os.environ |= STRATEGIES[launch]
    weights.get_device_id = lambda device: GPU
    weights.PART_BYTES = 1 << 16
    settings = make_settings(folder, launch)
    accelerator = build_accelerator(settings)
    policy = load_policy(settings)
    expected = load_file(folder / "model" / "model.safetensors")
    strategy = build_updater(policy, settings, accelerator).strategy
    assert any(isinstance(w, weights.Sharded) for w in strategy.weights().values())
    transfer = DirectTransfer(strategy, IpcChannel(torch.device("cpu")), may_load=True)
    for every_rank in (True, False):
        with run_transfer_server() as server:
            has_server = every_rank or accelerator.is_main_process
            servers = [Server(server.url, 60)] if has_server else []
            assert transfer.send(servers) == {}
            accelerator.wait_for_everyone()
            assert len(server.weights) == (len(expected) if has_server else 0)
            for name, found in server.weights.items():
                assert torch.equal(found, expected[name]), name
