"""Adapters: frozen parts, adapted layers, and every variant exact in passes, files and resumes."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from family_policies import make_batch
from peft import PeftModel
from small_runs import assert_resumes, save_tiny_model, small_run

from vlm_grpo.config.policy import LoraSettings, PolicySettings
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.adapters import apply_lora_or_freeze, find_adapted
from vlm_grpo.model.engine.linear import is_fast
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.serve.launch import describe_adapter
from vlm_grpo.training.export import export

VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "modules": {"modules_to_save": ["visual.merger"]},
}
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
OF_ROUNDING = ("rslora", "dora", "modules")
"""Variants whose rounding differs from that of each other, and from plain LoRA's."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: save_tiny_model(folder / family, family) for family in FAMILIES}


def make_settings(source: Path, dtype: str = "float32", **lora: Any) -> Settings:
    policy = {"dtype": dtype, "lora": {"r": 4, "alpha": 8, **lora}}
    values = {"task": "none", "data": {"train": "none"}, "model": str(source), "policy": policy}
    return Settings.model_validate(values)


def change(policy: Policy) -> None:
    """Change the trained weights as much as a long training would."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, weight in policy.trainable_parameters():
            scale = 0.3 if "lora_B" in name else 0.1
            weight.add_(scale * weight.std().clamp(min=0.05) * torch.randn_like(weight))


@torch.no_grad()
def score(policy: Policy) -> torch.Tensor:
    prompt = tiny_models.make_prompt(policy, tiny_models.noise_example("a", [(60, 40)]))
    return policy.score(make_batch([prompt])).logprobs.float()


def make_policy(source: Path, name: str, dtype: str = "float32") -> Policy:
    torch.manual_seed(1)
    return load_policy(make_settings(source, dtype, **VARIANTS[name]))


# Sums of up to 64 products: float32 has 24 bits; bfloat16 has 8, and rounds each of the layers.
@pytest.mark.parametrize(
    ("family", "name", "dtype", "bound"),
    [
        *((FAMILIES[n % 2], name, "float32", 2e-5) for n, name in enumerate(OF_ROUNDING)),
        *(("qwen3_vl", name, "bfloat16", 0.15) for name in OF_ROUNDING),
    ],
)
def test_packed_repeated_and_sampled_log_probs_are_equal(sources, family, name, dtype, bound):
    policy = make_policy(sources[family], name, dtype)
    change(policy)
    prompts = tiny_models.mixed_prompts(policy, 3)
    groups = tiny_models.sample_groups(policy, prompts, length=6)
    batch = tiny_models.pack_groups(prompts, groups)
    with torch.no_grad():
        packed = policy.score(batch).logprobs.float()
        repeated = policy.view(repeated=True).score(batch).logprobs.float()
    for other in (tiny_models.sampled_logprobs(groups), repeated):
        assert (packed - other).abs().max() < bound


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((n, "float32") for n in VARIANTS), *((n, "bfloat16") for n in OF_ROUNDING)],
)
def test_a_new_adapter_changes_neither_the_model_nor_its_base_weights(sources, name, dtype):
    settings = make_settings(sources["qwen3_vl"], dtype)
    base = load_policy(settings, training=False)
    before = score(base)
    policy = make_policy(sources["qwen3_vl"], name, dtype)
    # Of DoRA's factors of one, of orthogonal factors, and of another kernel, float32 keeps 24 bits
    # and bfloat16 8; the others add zero.
    rounds = name in {"dora", "orthogonal", "modules"}
    bound = {"float32": 2e-5, "bfloat16": 0.15}[dtype] if rounds else 0
    assert (score(policy) - before).abs().max() <= bound
    assert {weight.dtype for _, weight in policy.trainable_parameters()} == {torch.float32}
    for layer in find_adapted(policy.model):
        for norms in layer.lora_magnitude_vector.values():
            assert torch.equal(norms.weight, layer.get_base_layer().weight.float().norm(dim=1))
    # Whose weights are rounded for each pass, in a rollout as in scoring.
    plain = [m for n, m in policy.model.named_modules() if ".modules_to_save." in n]
    assert not any(is_fast(module) for module in plain)
    change(policy)
    assert (score(policy) - before).abs().max() > 0.01
    found = {n.replace(".base_layer", ""): w for n, w in policy.model.state_dict().items()}
    for key, weight in base.model.state_dict().items():
        if name == "modules":
            key = key.replace("visual.merger.", "visual.merger.original_module.")
        assert torch.equal(found[key], weight), key


@pytest.mark.parametrize("name", VARIANTS)
def test_peft_reads_a_checkpoint_over_the_original_model(sources, name, tmp_path):
    """And a merged export equals it."""
    policy = make_policy(sources["qwen2_5_vl"], name)
    change(policy)
    expected = score(policy)
    settings = make_settings(sources["qwen2_5_vl"], **VARIANTS[name])
    policy.save(tmp_path / "checkpoint", policy.weights())
    settings.save(tmp_path / "checkpoint/config.yaml")
    model, _ = tiny_models.tiny_model("qwen2_5_vl")
    peft = PeftModel.from_pretrained(model, str(tmp_path / "checkpoint"))
    assert max(layer.r["default"] for layer in find_adapted(peft)) == 4
    for folder in (tmp_path / "checkpoint", export(tmp_path / "checkpoint", tmp_path / "merged")):
        found = score(load_policy(settings, folder, training=False))
        assert (found - expected).abs().max() < 2e-5, folder


# The others differ from plain LoRA in their first values or their scale only.
@pytest.mark.no_shapes
@pytest.mark.parametrize(("name", "dtype"), [("dora", "float32"), ("modules", "bfloat16")])
def test_a_run_that_is_stopped_resumes_bit_for_bit(sources, name, dtype, tmp_path):
    changes: Any = {
        "policy": {"dtype": dtype, "lora": {"r": 4, "alpha": 8, **VARIANTS[name]}},
        "objective": {"beta": 0.1, "reference_refresh_every": 2},
        "optim": {"max_steps": 3},
        "rollout": {"max_completion_length": 3, "num_generations": 2},
    }
    whole = small_run(tmp_path, sources["qwen2_5_vl"], name="whole", **changes)
    stopped = whole.model_copy(update={"name": "stopped"})
    assert_resumes(whole, stopped, (3, 2), last="step-3")


def test_only_the_layers_that_a_target_names_are_adapted():
    # Of the default: families/test_facts.py, of all layers: serve/test_launch.py.
    model, _ = tiny_models.tiny_model("qwen2_5_vl")
    target = ("q_proj", "v_proj")
    apply_lora_or_freeze(model, PolicySettings(lora=LoraSettings(r=2, target=target)))
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert {name.partition(".lora_")[0].rpartition(".")[2] for name in trained} == {*target}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_lora_weights": "eva"}, r"start from its folder \(policy\.lora\.adapter\)"),
        ({"init_lora_weights": "pissa"}, "should be 'default', 'gaussian' or 'orthogonal'"),
        ({"modules_to_save": ["mergr"]}, r"called mergr; the projector .* model\.visual\.merger$"),
        ({"modules_to_save": ["embed_tokens"]}, "train full weights instead"),
        ({"modules_to_save": ["language_model"]}, "train full weights instead"),
    ],
)
def test_settings_that_are_not_valid_or_without_an_effect_are_errors(settings, message):
    model, _ = tiny_models.tiny_model("qwen2_5_vl")
    with pytest.raises(UserError, match=message):
        apply_lora_or_freeze(model, PolicySettings(lora=LoraSettings(**settings)))


def test_an_adapter_of_other_settings_is_one_message(sources, tmp_path):
    changes: Any = {"r": 8, "alpha": 16, "use_rslora": True}
    policy = load_policy(make_settings(sources["qwen2_5_vl"], **changes))
    policy.save(tmp_path, policy.weights())
    other = r"policy\.lora\.r=8 policy\.lora\.alpha=16 policy\.lora\.use_rslora=true"
    with pytest.raises(UserError, match=f"other settings: set {other}"):
        load_policy(make_settings(sources["qwen2_5_vl"], adapter=str(tmp_path)))
    with pytest.raises(UserError, match=r"has no adapter_config\.json: name the folder"):
        load_policy(make_settings(sources["qwen2_5_vl"], adapter=str(tmp_path / "none")))
    same = {"r": 4, "alpha": 8, "target": ["q_proj"]}
    other = make_policy(sources["qwen2_5_vl"], "gaussian")
    other.save(tmp_path, other.weights())
    with pytest.raises(UserError, match="weights that the model does not have"):
        load_policy(make_settings(sources["qwen2_5_vl"], adapter=str(tmp_path), **same))
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alpha_pattern": {"q_proj": 3}}))
    with pytest.raises(UserError, match="an adapter with alpha_pattern, which no setting"):
        load_policy(make_settings(sources["qwen2_5_vl"], adapter=str(tmp_path)))


@pytest.mark.parametrize("name", ["dora", "modules"])
def test_vllm_refuses_what_it_does_not_load(sources, name, tmp_path):
    policy = make_policy(sources["qwen2_5_vl"], name)
    policy.save(tmp_path, policy.weights())
    settings = make_settings(sources["qwen2_5_vl"], **VARIANTS[name])
    with pytest.raises(UserError, match="export the merged model first"):
        describe_adapter(settings, tmp_path)
    contents = {"adapter_config.json": b'{"r": "x"}', "adapter_model.safetensors": b""}
    for file, content in contents.items():
        (tmp_path / file).write_bytes(content)
        with pytest.raises(UserError, match=r"^adapter .* cannot be loaded: "):
            describe_adapter(settings, tmp_path)
