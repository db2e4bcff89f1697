"""Plans of known models: their stored shapes, the table in the guide, and no slow imports."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import fails, run
from huggingface_hub import constants

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.model import hub
from vlm_grpo.planning.activations import measure_layers
from vlm_grpo.planning.devices import GIB, find_device
from vlm_grpo.planning.known import (
    IMAGE_TOKENS,
    TABLE_CARDS,
    TEXT_TOKENS,
    KnownPlanner,
    build_known_settings,
    format_table,
    load_known_models,
)
from vlm_grpo.planning.model_shape import read_model_shape

ROOT = Path(__file__).parents[2]
SEVEN = "Qwen/Qwen2.5-VL-7B-Instruct"
SMALL = {
    *("Qwen/Qwen2-VL-2B-Instruct", "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen3-VL-2B-Instruct"),
    "OpenGVLab/InternVL3-2B-hf",
}
"""The smallest model of each family."""
SIZES = {
    # The numbers of weights that the models' pages on the hub show.
    "Qwen/Qwen2-VL-2B-Instruct": 2_208_985_600,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    SEVEN: 8_292_166_656,
    "Qwen/Qwen2.5-VL-32B-Instruct": 33_452_718_336,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
}


@pytest.fixture(scope="module")
def configs() -> dict[str, Any]:
    return dict(runpy.run_path(str(ROOT / "perf/known_models.py"))["build_configs"]())


@pytest.mark.parametrize("name", load_known_models())
def test_a_stored_shape_is_that_of_the_configuration(configs, name):
    changes = {"gradient_checkpointing": "mlp", "activation_offloading": True}
    # The layers of a family are alike, and many take a second.
    for lora in (None, {"r": 16, "alpha": 3}) if name in SMALL else (None,):
        policy = PolicySettings.model_validate({"lora": lora, **changes})
        planner = KnownPlanner(build_known_settings(name), "24GB")
        shape = read_model_shape(configs[name], policy)
        stored = planner.read_shape(policy)
        if name not in SMALL:
            sizes = (stored.num_weights, stored.num_linear, stored.text, stored.vision)
            assert sizes == (shape.num_weights, shape.num_linear, shape.text, shape.vision)
            continue
        assert stored == measure_layers(shape, policy, on_cpu=False)
        # With adapters without the steps' numbers, which do not grow with their rank.
        assert stored.state_bytes["adamw"] == pytest.approx(shape.state_bytes["adamw"], rel=1e-4)


def test_the_numbers_of_weights_are_those_of_the_hub():
    models = load_known_models()
    found = {name: models[name]["shapes"]["full"]["num_weights"] for name in SIZES}
    assert found == SIZES


def test_the_table_of_the_guide_is_what_the_command_prints(capsys):
    status, table, _ = run(capsys, "plan", "models")
    assert status == 0
    assert table in (ROOT / "docs/planning.md").read_text("utf-8")


@pytest.mark.parametrize("model", ["models", SEVEN])
@pytest.mark.parametrize("option", ["--devices=2", "--reserved=0.3", "--weights=sharded"])
def test_a_table_takes_no_options_of_a_plan(model, option, capsys):
    status, _, error = run(capsys, "plan", model, option)
    assert status == 2
    assert f"{option.partition('=')[0]} has no effect on the table of cards" in error


def test_each_cell_is_the_answer_of_a_plan_on_that_card():
    _, _, _, row = format_table([SEVEN], ["policy.lora.r=16"])
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["Qwen2.5-VL-7B-Instruct", "LoRA"]
    assert cells[-1] == "24 GB"
    for card, cell in zip(TABLE_CARDS, cells[2:-1], strict=True):
        settings = build_known_settings(SEVEN, ["policy.lora.r=16"])
        planner = KnownPlanner(settings, f"{card}GB")
        plan = planner.plan()
        assert planner.device == plan.device  # not the last card that was tried
        assert plan.fits == (cell != "–")
        assert plan.largest_group >= 64 or str(plan.largest_group) == cell.replace("–", "0")
        assert plan.smallest_card == 24
        # LoRA in bfloat16: two bytes per weight.
        assert plan.step.memory.weights >= 2 * SIZES[SEVEN]


def test_prompts_have_the_image_of_the_settings():
    """Qwen's image tokens are 28 × 28 pixels, those of Qwen3 32 × 32."""
    for name, pixels in ((SEVEN, 784), ("Qwen/Qwen3-VL-8B-Instruct", 1024)):
        for tokens in (IMAGE_TOKENS, 500):
            change = [f"policy.max_pixels={pixels * tokens}"] if tokens != IMAGE_TOKENS else []
            settings = build_known_settings(name, [*change, "policy.lora.r=8"])
            planner = KnownPlanner(settings, "80GB")
            (size,) = planner.count_prompts(settings.policy)
            assert (size.tokens, size.pixels) == (tokens + TEXT_TOKENS, pixels * tokens)


def test_the_largest_image_is_the_largest_that_fits():
    settings = build_known_settings(SEVEN, ["policy.lora.r=64"])
    planner = KnownPlanner(settings, "24GB")
    largest = planner.find_largest_image()

    def fits(pixels: int) -> bool:
        policy = settings.policy.model_copy(update={"max_pixels": pixels, "min_pixels": pixels})
        return planner.fits(settings.model_copy(update={"policy": policy}))

    assert fits(largest)
    assert not fits(largest + 784)
    assert f"policy.max_pixels: {largest}, if all" in str(planner.plan())
    assert planner.on(find_device("12GB")).find_largest_image() == 0


def test_no_card_is_large_enough_for_the_largest_model():
    planner = KnownPlanner(build_known_settings("Qwen/Qwen2.5-VL-72B-Instruct"), "80GB")
    plan = planner.plan()
    assert (plan.fits, plan.smallest_card) == (False, None)
    assert "card " not in str(plan)
    assert plan.step.memory.weights > 192 * GIB


def test_the_table_needs_neither_torch_nor_the_network(tmp_path):
    """So that it takes a second (1.3 s of processor time, most of it pydantic's and rich's)."""
    program = (
        "import socket, sys\n"
        "def refuse(*_, **__): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "sys.argv = ['vlm-grpo', 'plan', 'models']\n"
        "from vlm_grpo.cli.app import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'peft'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 2 + 3 * len(load_known_models())


def test_what_is_not_stored_is_one_message(capsys, monkeypatch):
    message = fails(capsys, "plan", SEVEN, "policy.dtype=float32")
    assert "policy.dtype=float32 is not among the known shapes" in message
    message = fails(capsys, "plan", SEVEN, "policy.lora.use_dora=true", "--gpu", "24GB")
    assert "plan a recipe with model=FOLDER" in message
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    message = fails(capsys, "plan", "counting", f"model={SEVEN}", "data.train_limit=2")
    assert f"vlm-grpo plan {SEVEN} plans it without any" in message
