"""Adapters that were trained on quantized weights, merged into these and into the original ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import fails
from safetensors.torch import load_file
from small_runs import save_tiny_model, small_run
from torch import nn

from vlm_grpo.deploy.export import ExportedWeights, export
from vlm_grpo.deploy.merge import Merge, measure_merge
from vlm_grpo.model.loading import load_model
from vlm_grpo.model.policy import load_policy


def write_checkpoint(folder: Path, **policy: Any) -> Any:
    """Write the checkpoint of a random adapter on quantized weights, and return its settings."""
    model = save_tiny_model(folder / "model")
    lora = {"r": 4, "alpha": 8, "target": ["q_proj", "down_proj"]}
    run = small_run(folder, model, policy={"load_in": "4bit", "lora": lora, **policy})
    run = run.model_copy(
        update={"rollout": run.rollout.model_copy(update={"max_completion_length": 40})}
    )
    trained = load_policy(run)
    for _, weight in trained.trainable_parameters():
        nn.init.normal_(weight, std=0.1)
    trained.save(folder / "checkpoint", trained.weights())
    run.save(folder / "checkpoint/config.yaml")
    return run


@pytest.mark.parametrize("weights", ["merged", "dequantized"])
def test_the_difference_of_a_merge_is_on_its_card(weights: ExportedWeights, tmp_path: Path) -> None:
    run = write_checkpoint(tmp_path)
    out = export(str(tmp_path / "checkpoint"), tmp_path / "out", weights)
    card = (out / "README.md").read_text()
    assert (
        "| base weights in training | 4bit (nf4, double quantization), by bitsandbytes: language"
        in card
    )
    whole = run.model_copy(
        update={
            "model": str(out),
            "policy": run.policy.model_copy(update={"load_in": "none", "lora": None}),
        }
    )
    merged = load_model(whole, training=False)
    found = measure_merge(run, tmp_path / "checkpoint", merged, weights == "dequantized")
    assert found.tokens > 12
    assert f"log-probs of {found.tokens} tokens" in card
    assert f"by {found.mean:.1e} nats on average and by at most {found.largest:.1e}" in card
    if weights == "dequantized":
        assert "those of the training, dequantized" in card
        assert found.largest < 1e-4  # float32: the same matrices, added in another order
    else:
        assert "the original ones" in card
        assert found.mean > 1e-2  # 4 bits: a tenth of every weight
    original = load_file(tmp_path / "model/model.safetensors")
    exported = load_file(out / "model.safetensors")
    [name] = [n for n in exported if n.endswith("layers.0.self_attn.k_proj.weight")]  # no adapter
    assert torch.equal(exported[name], original[name]) == (weights == "merged")


def test_without_examples_nothing_is_measured(tmp_path: Path) -> None:
    run = write_checkpoint(tmp_path)
    data = run.data.model_copy(update={"train": str(tmp_path / "gone.jsonl")})
    merged = load_model(run, training=False)
    gone = run.model_copy(update={"data": data})
    assert measure_merge(gone, tmp_path / "checkpoint", merged, False) == Merge(False)


def test_dequantized_weights_need_quantized_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, load_in="none")
    checkpoint, out = str(tmp_path / "checkpoint"), str(tmp_path / "out")
    message = fails(capsys, "export", checkpoint, out, "--dequantized")
    assert "did not train on quantized weights: leave out --dequantized" in message
    message = fails(capsys, "export", checkpoint, out, "--dequantized", "--adapter")
    assert "--adapter writes no base weights" in message
