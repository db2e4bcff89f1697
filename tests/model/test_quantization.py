"""Weights in 4 and 8 bits: what is quantized, and that all forms compute with the same matrices."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.autograd._functions import matmul_4bit
from family_models import BUILDERS
from family_policies import backpropagate, build_family_model, build_prompts, make_batch
from gradients import relative_distance, use_float64_recurrence
from recorded import record_calls
from small_runs import assert_resumes, load_weights, make_trainer, small_run
from tiny_models import pack_groups, sample_groups, sampled_logprobs
from torch import nn
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.model import loading
from vlm_grpo.model.engine import linear, rollout_weights
from vlm_grpo.model.engine.linear import is_quantized, restore
from vlm_grpo.model.engine.sampling import SamplingDistribution
from vlm_grpo.model.loading import build_quantization, find_quantized
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.model.sharing_check import HALF_BOUND
from vlm_grpo.planning.layer_memory import measure_layers
from vlm_grpo.planning.memory import estimate_memory
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.sizes import Workload

# With M-RoPE, with images that see each other and sliding windows, with recurrent layers, and with
# another projector.
FOUR = ("qwen2_5_vl", "gemma3", "qwen3_5", "internvl")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of small random models, by family."""
    root = tmp_path_factory.mktemp("models")
    for name in FOUR:
        torch.manual_seed(0)
        for part in build_family_model(name):
            part.save_pretrained(root / name)
    return {name: root / name for name in FOUR}


@pytest.fixture
def qwen(folders: dict[str, Path]) -> Path:
    return folders["qwen2_5_vl"]


def load(folder: Path, **policy: Any) -> Policy:
    settings = {"dtype": "float32", "lora": {"r": 4, "alpha": 8}, **policy}
    loaded = load_policy(small_run(folder.parent, folder, policy=settings))
    torch.manual_seed(1)
    for name, weight in loaded.trainable_parameters():
        if "magnitude" not in name:
            nn.init.normal_(weight, std=0.05)
    return loaded


@torch.no_grad()
def compare_samples(policy: Policy, name: str) -> torch.Tensor:
    """Sample completions, and return how much their log-probs differ from scored ones."""
    prompts = build_prompts(policy, name, 4)
    groups = sample_groups(policy, prompts, group_size=2, max_tokens=4096, length=4)
    scored = policy.score(pack_groups(prompts, groups)).logprobs
    return (scored.float() - sampled_logprobs(groups)).abs()


def names_of_quantized(policy: Policy) -> set[str]:
    found = {name for name, module in policy.model.named_modules() if is_quantized(module)}
    return {name.removesuffix(".base_layer") for name in found}


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", *BUILDERS])
def test_the_language_model_alone_is_quantized(name):
    whole, _ = build_family_model(name)
    head = whole.get_output_embeddings()
    linear = {n: m for n, m in whole.named_modules() if type(m) is nn.Linear and m is not head}
    found = find_quantized(whole, PolicySettings(load_in="4bit"))
    assert found
    assert found == [n for n in linear if "language_model." in n or ".text_model." in n]


@pytest.mark.no_shapes
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "4bit") for name in FOUR), ("qwen2_5_vl", "8bit")]
)
def test_packed_and_sampled_equal_repeated(name, kind, folders, monkeypatch):
    policy = load(folders[name], load_in=kind, engine="shared")
    use_float64_recurrence(monkeypatch, policy.model)
    whole, _ = build_family_model(name)
    assert names_of_quantized(policy) == {*find_quantized(whole, PolicySettings(load_in=kind))}
    prompts = build_prompts(policy, name, 4)
    results, sampling = [], policy.distribution
    policy.distribution = SamplingDistribution(eos=sampling.eos)  # of all tokens
    for score in (policy.score, policy.view(repeated=True).score):
        logprobs = score(make_batch(prompts)).logprobs
        results.append((logprobs.detach(), backpropagate(policy, logprobs)))
    # All forms multiply with the same float32 matrices: sums of at most 96 products of 24 bits,
    # through at most four layers.
    bound = 1e-4
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=bound)
    assert relative_distance(results[0][1], results[1][1]) < bound
    policy.distribution = sampling
    assert compare_samples(policy, name).max() < bound


@pytest.mark.parametrize(("variant", "kind"), [("use_rslora", "8bit"), ("use_dora", "4bit")])
def test_bfloat16_rollouts_of_variants_have_the_scored_logprobs(kind, variant, qwen):
    lora = {"r": 4, "alpha": 8, variant: True}
    policy = load(qwen, load_in=kind, dtype="bfloat16", lora=lora)
    # The bound of a run's own check, which is the same without quantization.
    assert compare_samples(policy, "qwen2_5_vl").mean() < HALF_BOUND


@pytest.mark.parametrize(("has_room", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_a_rollout_on_a_gpu_restores_matrices_once_if_there_is_room(
    qwen, monkeypatch, has_room, dtype
):
    policy = load(qwen, load_in="4bit", dtype=dtype)
    policy.sharing_check = None
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # as on a GPU
    monkeypatch.setattr(rollout_weights, "_has_room", lambda quantized: has_room)
    restored = record_calls(monkeypatch, linear, "restore")
    bound = 1e-5 if dtype == "float32" else HALF_BOUND
    assert compare_samples(policy, "qwen2_5_vl").mean() < bound
    count = sum(type(call.arguments[0]).__name__ == "Params4bit" for call in restored)
    # One prefill and three steps of decoding, and scoring.
    assert count == ((1 if has_room else 4) + 1) * len(names_of_quantized(policy))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        # nf4 of normal weights: 64 share a scale (QLoRA, arXiv:2305.14314, appendix E: 0.1 of σ).
        ({"load_in": "4bit"}, 0.12),
        ({"load_in": "4bit", "double_quant": False}, 0.12),
        ({"load_in": "4bit", "quant_type": "fp4"}, 0.2),
        ({"load_in": "8bit"}, 0.012),  # a row's largest value of 2 to 3 σ is 127 steps
    ],
)
def test_restored_matrices_are_those_of_bitsandbytes(settings, error, qwen):
    whole = load(qwen).model
    policy = load(qwen, **settings)
    x = torch.randn(5, 64)
    for name in names_of_quantized(policy):
        layer = policy.model.get_submodule(name)
        layer = getattr(layer, "base_layer", layer)
        matrix = restore(layer.weight, torch.float32)
        original = whole.get_submodule(name)
        original = getattr(original, "base_layer", original).weight
        assert 0 < (matrix - original).norm() / original.norm() < error
        if settings["load_in"] == "4bit" and matrix.shape[1] == 64:
            held = layer.weight
            fused = matmul_4bit(x, held.data.t(), quant_state=held.quant_state)
            torch.testing.assert_close(x @ matrix.T, fused, rtol=0, atol=1e-5)  # 64 products


def test_a_run_trains_the_adapter_alone_and_resumes_bit_for_bit(qwen, tmp_path):
    quantized = {"load_in": "8bit", "lora": {"r": 4, "alpha": 8}}
    optim = {"lr": 1e-2, "prompts_per_step": 2, "max_steps": 2}
    run = small_run(tmp_path, qwen, name="whole", policy=quantized, optim=optim)
    trainer = make_trainer(run)
    frozen = [w for w in trainer.policy.model.parameters() if not w.requires_grad]
    before = [weight.detach().clone() for weight in frozen]
    trainer.step()
    assert all(map(torch.equal, frozen, before))
    stopped = run.model_copy(update={"name": "stopped"})
    assert assert_resumes(run, stopped, (2, 2), last="step-2") == ["step-1"]
    assert all("lora_" in name for name in load_weights(run.run_dir / "checkpoints/step-2"))


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_checkpoints_and_weights_that_are_quantized_in_their_files_load(kind, qwen, tmp_path):
    policy = load(qwen, load_in=kind)
    names = names_of_quantized(policy)
    policy.save(tmp_path / "checkpoint", policy.weights())
    whole = {n for n, m in policy.model.named_modules() if isinstance(m, nn.Linear)} - names
    held = BitsAndBytesConfig(
        **{f"load_in_{kind}": True},
        llm_int8_skip_modules=[name for name in whole if "lora_" not in name],
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
    )
    auto: Any = AutoModelForImageTextToText
    model = auto.from_pretrained(qwen, quantization_config=held)
    model.save_pretrained(tmp_path / "model")
    policy.processor.save_pretrained(tmp_path / "model")
    batch = make_batch(build_prompts(policy, "qwen2_5_vl", 4))
    run = small_run(tmp_path, qwen, policy={"load_in": kind, "lora": {"r": 4, "alpha": 8}})
    checkpoint = load_policy(run, tmp_path / "checkpoint", training=False)
    for again in (checkpoint, load(tmp_path / "model", load_in=kind)):
        assert names_of_quantized(again) == names
        with torch.no_grad():
            assert torch.equal(again.score(batch).logprobs, policy.score(batch).logprobs)
    with pytest.raises(UserError, match=f"quantized \\({kind}\\): set policy.load_in={kind}"):
        load(tmp_path / "model")
    with pytest.raises(UserError, match="quant_type has no effect"):
        load(tmp_path / "model", load_in=kind, quant_type="nf4")


def test_what_cannot_be_quantized_is_refused(qwen, monkeypatch):
    config = SimpleNamespace(quantization_config={"quant_method": "awq"})
    with pytest.raises(UserError, match=r"weights of model x are quantized \(awq\): name another"):
        build_quantization("x", config, PolicySettings())
    with pytest.raises(UserError, match=r"cannot be trained themselves: add policy\.lora\.r=16"):
        load(qwen, load_in="4bit", lora=None)
    module = {"r": 4, "modules_to_save": ["gate_proj"]}
    with pytest.raises(UserError, match=r"gate_proj is quantized .* in full: leave it out"):
        load(qwen, load_in="4bit", lora={**module, "target": ["q_proj"]})
    with monkeypatch.context() as patch:
        patch.setattr(loading, "find_part", lambda name: None)
        with pytest.raises(UserError, match=r"the language model of .* is not known"):
            load(qwen, load_in="4bit")
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(UserError, match="load_in=4bit does not work with FSDP2"):
            load(qwen, load_in="4bit")
    monkeypatch.setattr(loading, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'vlm-grpo\[quantization\]'"):
        load(qwen, load_in="4bit")


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"load_in": "4bit"}, "float32"),
        ({"load_in": "4bit", "double_quant": False}, "bfloat16"),
        ({"load_in": "8bit"}, "bfloat16"),
    ],
)
def test_the_plan_counts_the_bytes_of_the_weights(settings, dtype):
    lora = {"lora": {"r": 8}, "dtype": dtype, **settings}
    policy = PolicySettings.model_validate(lora)
    values = {"task": "counting", "data": {"train": "embedded:counting"}, "policy": lora}
    model = load_policy(Settings.model_validate(values)).model
    held = sum(weight.nbytes for weight in model.parameters())
    quantized: list[Any] = [module for module in model.modules() if is_quantized(module)]
    for module in quantized:
        if settings["load_in"] == "8bit":
            held += module.weight.SCB.nbytes
            continue
        state = module.weight.quant_state
        held += state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
    shape = measure_layers(read_model_shape(model.config, policy), policy, on_cpu=True)
    work = Workload(1, 2, 20, 16, 10, 130, 1 << 20, 0)
    # Exact, but for shares of 256 scales that are not full, and without tables of 256 values.
    assert estimate_memory(shape, work).weights == pytest.approx(held, rel=1e-3)
