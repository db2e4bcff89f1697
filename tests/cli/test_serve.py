"""``vlm-grpo serve`` becomes the server of a model or of a run's rollouts."""

import os
import sys
from typing import Any

import pytest
from commands import run


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of the call that would have replaced this process."""
    calls: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: calls.extend(arguments))
    return calls


def test_a_model_is_served_under_its_name(executed, succeed):
    options = ["--python", sys.executable, "--port", "8123", "--argument=--max-num-seqs=4"]
    out = succeed("serve", "embedded", "policy.max_pixels=5000", *options)
    program, words, environment = executed
    assert program == words[0] == sys.executable
    assert words[1:4] == ["-m", "vllm.entrypoints.cli.main", "serve"]
    assert {"--port=8123", "--max-num-seqs=4", "--served-model-name=embedded"} <= set(words)
    assert '"longest_edge": 5000' in next(w for w in words if "mm-processor-kwargs" in w)
    assert "VLLM_SERVER_DEV_MODE" not in environment, "users must not change the weights"
    assert out.splitlines()[-1] == "the model will be embedded at http://127.0.0.1:8123"


@pytest.mark.parametrize("name", ["quickstart", "embedded"])
def test_rollouts_are_served_for_a_recipe_or_a_model(name, executed, capsys):
    servers = "rollout.vllm.urls=[http://127.0.0.1:8000]"
    given = ["rollout.sampler=vllm", servers, "policy.lora.r=8", "--python", sys.executable]
    assert run(capsys, "serve", name, *given, "--for-rollouts")[0] == 0
    _, words, environment = executed
    assert {"--served-model-name=policy", "--enable-lora", "--enable-scale-out"} <= set(words)
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
