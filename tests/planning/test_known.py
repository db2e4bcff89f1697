"""Plans of known models: their configurations and stored shapes, and the table in the guide."""

import runpy
from pathlib import Path

import pytest
from commands import fails, run

from vlm_grpo.model.hub import load_known_models
from vlm_grpo.planning import known
from vlm_grpo.planning.devices import GIB, find_device
from vlm_grpo.planning.layer_memory import measure_layers
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.plan import build_plan
from vlm_grpo.planning.planner import Planner

ROOT = Path(__file__).parents[2]
SEVEN = "Qwen/Qwen2.5-VL-7B-Instruct"
SIZES = {
    # The numbers of weights that the models' pages on the hub show.
    "Qwen/Qwen2-VL-2B-Instruct": 2_208_985_600,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    SEVEN: 8_292_166_656,
    "Qwen/Qwen2.5-VL-32B-Instruct": 33_452_718_336,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
}


def build_planner(model: str, *overrides: str, card: str = "24GB") -> known.KnownPlanner:
    return known.KnownPlanner(known.build_known_settings(model, overrides), find_device(card))


def test_stored_values_are_those_of_the_script_and_the_guides_table_that_of_the_command(capsys):
    models = load_known_models()
    configs = dict(runpy.run_path(str(ROOT / "perf/known_models.py"))["build_configs"]())
    assert {name: facts["config"] for name, facts in models.items()} == configs
    found = {name: models[name]["shapes"]["full"]["num_weights"] for name in SIZES}
    assert found == SIZES
    guide = (ROOT / "docs/planning.md").read_text("utf-8")
    assert all(f"| {name.rpartition('/')[2]} " in guide for name in models)
    status, table, _ = run(capsys, "plan", SEVEN)
    assert status == 0
    assert all(line in guide for line in table.splitlines())


# One of each family; the layers of a family are alike, and a measurement takes a second.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen/Qwen2-VL-2B-Instruct", "LoRA"),
        ("Qwen/Qwen2.5-VL-3B-Instruct", "LoRA, 4 bits"),
        ("Qwen/Qwen3-VL-2B-Instruct", "full"),
        ("OpenGVLab/InternVL3-2B-hf", "full"),
    ],
)
def test_a_stored_shape_is_that_of_the_configuration(name, kind):
    planner = build_planner(name, *known.TABLE_KINDS[kind], "policy.activation_offloading=true")
    policy = planner.settings.policy
    shape = measure_layers(read_model_shape(planner.config, policy), policy, on_cpu=False)
    stored = planner.read_shape(policy)
    assert stored == shape
    assert stored.state_bytes == shape.state_bytes


def test_other_settings_are_counted_on_the_configuration(monkeypatch):
    counted = []
    monkeypatch.setattr(Planner, "read_shape", lambda planner, policy: counted.append(policy))
    for overrides in (["policy.lora.r=16"], ["policy.lora.r=64", "policy.lora.use_dora=true"]):
        planner = build_planner(SEVEN, *overrides)
        planner.read_shape(planner.settings.policy)
    assert [policy.lora.r for policy in counted] == [16, 64]


@pytest.mark.parametrize("model", ["models", SEVEN])
@pytest.mark.parametrize("option", ["--devices=2", "--reserved=0.3", "--weights=sharded"])
def test_a_table_takes_no_options_of_a_plan(model, option, capsys):
    message = fails(capsys, "plan", model, option)
    assert f"{option.partition('=')[0]} has no effect on the table of cards" in message


def test_each_cell_is_the_answer_of_a_plan_on_that_card_and_none_holds_the_largest_model():
    _, _, _, row, _ = known.format_table([SEVEN])
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["Qwen2.5-VL-7B-Instruct", "LoRA"]
    assert cells[-1] == "24 GB"
    planner = build_planner(SEVEN, "policy.lora.r=64")
    for card, cell in zip(known.TABLE_CARDS, cells[2:-1], strict=True):
        other = planner.on(find_device(f"{card}GB"))
        plan = build_plan(other)
        assert plan.fits == (cell != "–")
        assert str(other.find_largest_group(64)) == cell.replace("–", "0").removesuffix("+")
        assert plan.smallest_card == 24
        # LoRA in bfloat16: two bytes per weight.
        assert plan.step.memory.weights >= 2 * SIZES[SEVEN]
    plan = build_plan(build_planner("Qwen/Qwen2.5-VL-72B-Instruct", card="80GB"))
    assert (plan.fits, plan.smallest_card) == (False, None)
    assert "card " not in str(plan)
    assert "prompts with one image, assumed" in str(plan)
    assert plan.step.memory.weights > 192 * GIB


def test_prompts_have_the_image_of_the_settings():
    """Qwen's image tokens are 28 × 28 pixels, those of Qwen3 32 × 32."""
    for name, pixels in ((SEVEN, 784), ("Qwen/Qwen3-VL-8B-Instruct", 1024)):
        for tokens in (known.IMAGE_TOKENS, 500):
            change = f"policy.max_pixels={pixels * tokens}"
            planner = build_planner(name, *[change] * (tokens != known.IMAGE_TOKENS))
            (size,) = planner.count_prompts(planner.settings.policy)
            assert (size.tokens, size.pixels) == (tokens + known.TEXT_TOKENS, pixels * tokens)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen2.5-VL-7B", f"(did you mean {SEVEN}?): vlm-grpo plan models lists those"),
        ("Qwen2.5-VL-7B-Instruct", f"did you mean {SEVEN}?"),
        ("nobody/nothing", "nor a well-known model: vlm-grpo plan models"),
        ("countin", "there is no recipe 'countin' (did you mean counting?)"),
        ("missing/recipe.yaml", "there is no recipe"),
    ],
)
def test_a_wrong_name_is_one_message_with_the_nearest(capsys, name, expected):
    assert expected in fails(capsys, "plan", name)


def test_files_that_cannot_be_loaded_name_the_plan_without_them(capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("vlm_grpo.model.hub.urllib.request.getproxies", dict)
    for name, expected in (
        (SEVEN, f"vlm-grpo plan {SEVEN} plans it without them"),
        (SEVEN[:-5], f"cannot be loaded (did you mean {SEVEN}?): it is neither"),
    ):
        message = fails(capsys, "plan", "counting", f"model={name}", "data.train_limit=2")
        assert expected in message
        assert "this machine is offline" in message
