"""The plan's formulas against counts of the real thing: autograd's, the engine's, torch's FLOPs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import fails, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, noise_example, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.run import Settings, load_settings
from vlm_grpo.engine.attention import use_shared_attention
from vlm_grpo.engine.batch import GroupSlice, MicroBatch, pack
from vlm_grpo.engine.sampling import build_sampling_distribution
from vlm_grpo.errors import UserError
from vlm_grpo.families import load_family
from vlm_grpo.model.loading import LoadedModel, apply_lora_or_freeze, get_model_source, load_model
from vlm_grpo.model.policy import Policy
from vlm_grpo.planning import Planner, plan
from vlm_grpo.planning.devices import GIB, Device, named_device, this_device
from vlm_grpo.planning.memory import (
    cache_bytes,
    estimate_memory,
    kept_casts,
    kept_per_patch,
    kept_per_prompt_token,
    kept_per_token,
)
from vlm_grpo.planning.planner import changed
from vlm_grpo.planning.seconds import completion_flops, estimate_seconds, prompt_flops, vision_flops
from vlm_grpo.planning.shape import read_shape
from vlm_grpo.planning.work import Work, estimate_work
from vlm_grpo.task import PlainQuestion
from vlm_grpo.types import Prompt

POLICIES: dict[str, dict[str, Any]] = {
    "lora-float32": {"dtype": "float32", "lora": {"r": 4, "alpha": 8}},
    "lora-bfloat16": {"dtype": "bfloat16", "lora": {"r": 4, "alpha": 8}},
    "full-float32": {"dtype": "float32"},
    "full-bfloat16": {"dtype": "bfloat16"},
}


def policy_of(family: str, values: dict[str, Any], **depths: int) -> tuple[Policy, PolicySettings]:
    """A tiny policy as ``load_model`` makes one, its towers cut to the given depths."""
    policy_settings = PolicySettings.model_validate(values)
    dtype = torch.bfloat16 if values.get("lora") and values["dtype"] == "bfloat16" else None
    model, processor = tiny_model(family, dtype or torch.float32)
    language, vision = model.model.language_model, model.model.visual
    if "text" in depths:
        language.layers = language.layers[: depths["text"]]
        model.config.text_config.num_hidden_layers = depths["text"]
    if "vision" in depths:
        vision.blocks = vision.blocks[: depths["vision"]]
        model.config.vision_config.depth = depths["vision"]
        if hasattr(vision, "fullatt_block_indexes"):
            vision.fullatt_block_indexes = [0]
            model.config.vision_config.fullatt_block_indexes = [0]
    which = load_family(model.config)
    adapters = apply_lora_or_freeze(model, which, policy_settings)
    use_shared_attention(which.language_model(model))
    budget = which.pixel_budget(processor)
    autocast = policy_settings.lora is None and values["dtype"] == "bfloat16"
    loaded = LoadedModel(model, processor, which, budget, True, adapters, autocast)
    rollout = load_settings("counting").rollout
    return Policy(loaded, build_sampling_distribution(model, which, rollout)), policy_settings


def prompt_of(policy: Policy, side: int = 112) -> Prompt:
    return policy.build_prompt(
        policy.with_resized_sizes(noise_example("a", [(side, side)])), PlainQuestion()
    )


def batch_of(prompt: Prompt, group: int = 3, length: int = 5) -> MicroBatch:
    completion = tuple(range(70, 70 + length))
    return MicroBatch((GroupSlice(prompt, (completion,) * group, tuple(range(group))),))


def kept(policy: Policy, batch: MicroBatch) -> int:
    """Bytes of all storages that autograd keeps for the backward pass, weights left out."""
    weights = {weight.untyped_storage().data_ptr() for weight in policy.model.parameters()}
    found: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no address is used twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy.score(batch)
    return sum(found.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", POLICIES)
def test_a_decoder_layer_keeps_what_the_formula_says(family: str, name: str) -> None:
    values = POLICIES[name]
    if "lora" not in values:
        values = values | {"freeze": ("vision", "projector")}
    found = {}
    for layers in (2, 3):
        policy, policy_settings = policy_of(family, values, text=layers)
        prompt = prompt_of(policy)
        batch = batch_of(prompt)
        found[layers] = kept(policy, batch)
    shape, _ = read_shape(policy.model.config, policy_settings)
    # To the byte: the third layer's share is the difference.
    expected = batch.num_tokens * kept_per_token(shape) + kept_casts(shape)
    expected += len(prompt.token_ids) * kept_per_prompt_token(shape, on_cpu=True)
    assert found[3] - found[2] == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vision_block_keeps_what_the_formula_says(family: str, dtype: str) -> None:
    found = {}
    depths = (1, 2) if family != "qwen3_vl" else (2, 3)  # deepstack leaves from blocks 0 and 1
    for depth in depths:
        policy, policy_settings = policy_of(family, {"dtype": dtype}, vision=depth)
        prompt = prompt_of(policy)
        found[depth] = kept(policy, batch_of(prompt))
    shape, _ = read_shape(policy.model.config, policy_settings)
    casts = 2 * shape.vision.layer_weights if dtype == "bfloat16" else 0
    patches = len(prompt.vision["pixel_values"])
    assert found[depths[1]] - found[depths[0]] == patches * kept_per_patch(shape) + casts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", POLICIES)
def test_weights_are_counted_exactly(family: str, name: str) -> None:
    policy, policy_settings = policy_of(family, POLICIES[name])
    shape, _ = read_shape(policy.model.config, policy_settings)
    assert shape.trained == sum(weight.numel() for _, weight in policy.trainable_parameters())
    everything = sum(weight.numel() for weight in policy.model.parameters())
    assert shape.weights + (shape.trained if shape.rank else 0) == everything
    assert shape.trains_vision == policy.trains_vision


def test_tied_weights_are_counted_once() -> None:
    settings = load_settings("counting")
    model = load_model(settings).model
    shape, _ = read_shape(model.config, settings.policy)
    assert model.config.tie_word_embeddings
    counted = sum(weight.numel() for weight in model.parameters())
    assert shape.weights == shape.trained == counted


@pytest.mark.parametrize("family", FAMILIES)
# In bfloat16: torch's counter does not know oneDNN's products in float32.
@pytest.mark.parametrize("name", ["lora-bfloat16", "full-bfloat16"])
def test_flops_are_torchs(family: str, name: str) -> None:
    policy, policy_settings = policy_of(family, POLICIES[name])
    prompt = prompt_of(policy)
    shape, _ = read_shape(policy.model.config, policy_settings)
    batch = batch_of(prompt)
    policy.model.train(False)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        policy.score(batch)
    text = shape.text
    scored = 3 * 5 * 2 * text.hidden * text.vocabulary
    patches = len(prompt.vision["pixel_values"])
    ours = (
        vision_flops(shape, patches)
        + prompt_flops(shape, len(prompt.token_ids))
        + 3 * completion_flops(shape, len(prompt.token_ids), 4)
        + scored
    )
    # Torch counts no product inside the CPU's fused attention, which is some percent of all here;
    # deepstack's mergers (Qwen3) are not ours.
    assert counter.get_total_flops() == pytest.approx(ours, rel=0.15)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(1, 9),
    group=st.integers(2, 12),
    prompt=st.integers(1, 200),
    completion=st.integers(1, 40),
    budget=st.integers(1, 900),
)
def test_the_cut_is_the_updates(
    prompts: int, group: int, prompt: int, completion: int, budget: int
) -> None:
    work = Work(prompts, group, prompt, 0, completion, 1 << 16, budget, 0)
    made = Prompt(noise_example("a", []), "", (0,) * prompt, {})
    slices = [
        GroupSlice(made, ((1,) * completion,) * group, tuple(range(group))) for _ in range(prompts)
    ]
    batches = pack(slices, budget)
    assert work.micro_tokens == max(batch.num_tokens for batch in batches)
    assert work.micro_batches == len(batches)
    assert work.update_tokens == sum(batch.num_tokens for batch in batches)
    most = max(sum(map(len, batch.completions)) for batch in batches)
    assert work.micro_completion_tokens == most
    most = max(sum(len(piece.prompt.token_ids) for piece in batch.slices) for batch in batches)
    assert work.micro_prompt_tokens == most


def test_the_cache_is_the_decoders() -> None:
    policy, policy_settings = policy_of("qwen2_5_vl", POLICIES["full-float32"])
    shape, _ = read_shape(policy.model.config, policy_settings)
    work = Work(4, 3, 20, 16, 10, 130, 1 << 20, 0)
    # Two prompts of 20 + 3 · 10 tokens fit into 130 tokens.
    assert work.slots == 2
    # 3 layers, keys and values, 2 key heads of 16, 4 bytes.
    assert cache_bytes(shape, work) == 2 * 50 * 3 * 2 * 32 * 4


@pytest.fixture(scope="module")
def planner() -> Planner:
    settings = load_settings("counting", ["data.train_limit=30"])
    return Planner(settings, Device("toy", GIB // 2, is_cpu=True))


def test_prompts_are_counted_as_the_policy_makes_them(planner: Planner) -> None:
    policy = Policy(load_model(planner.settings), restriction_of_embedded(planner.settings))
    sizes = planner.step(planner.settings).prompts
    made = [
        policy.build_prompt(policy.with_resized_sizes(example), planner.task)
        for example in planner.prompts.examples
    ]
    assert [size.tokens for size in sizes] == sorted(len(prompt.token_ids) for prompt in made)
    patches = [len(prompt.vision["pixel_values"]) for prompt in made]
    assert sorted(size.patches for size in sizes) == sorted(patches)


def restriction_of_embedded(settings: Settings) -> Any:
    loaded = load_model(settings)
    return build_sampling_distribution(loaded.model, loaded.family, settings.rollout)


def test_what_fits_is_the_most_that_fits(planner: Planner) -> None:
    group = planner.largest_group()
    assert 8 < group < 1024
    assert planner.fits(changed(planner.settings, "rollout", num_generations=group))
    assert not planner.fits(changed(planner.settings, "rollout", num_generations=group + 1))


def test_changes_are_valid_and_make_it_fit(planner: Planner) -> None:
    values = ["rollout.num_generations=64", "rollout.max_completion_length=64"]
    overrides = ["data.train_limit=30", "objective.beta=0.1", *values]
    overrides += ["objective.reference_refresh_every=never"]
    tight = Planner(load_settings("counting", overrides), Device("small", 210 << 20, is_cpu=True))
    assert not tight.fits(tight.settings)
    peaks = []
    for text, step in tight.remedies():
        overrides += text.split()
        assert load_settings("counting", overrides) == step.settings
        peaks.append(step.memory.peak)
    assert peaks[-1] <= tight.device.usable < peaks[0]
    told = str(tight.plan()).splitlines()
    assert any(line.startswith("fits       no: ") for line in told)


def test_no_change_may_be_enough(planner: Planner) -> None:
    tiny = Planner(planner.settings, Device("tiny", 1 << 20, is_cpu=True))
    assert "not even then" in str(tiny.plan()).splitlines()[-1]
    assert tiny.largest_group() == 0


def test_memory_falls_with_what_is_meant_to_lower_it() -> None:
    policy = load_settings("counting_qwen2_vl_2b", ["data.train=x", "data.eval=y"]).policy
    model, _ = tiny_model("qwen2_5_vl")
    work = Work(16, 8, 400, 1200, 64, 1 << 16, 1 << 14, 1024)

    def memory(**changes: Any) -> Any:
        shape, _ = read_shape(model.config, policy.model_copy(update=changes))
        return estimate_memory(shape, work)

    plain = memory(gradient_checkpointing=False)
    assert memory(gradient_checkpointing=True).activations < plain.activations / 2
    lora = load_settings("ocr_qwen3_vl_4b", ["data.train=x", "data.eval=y"]).policy.lora
    assert memory(lora=lora).optimizer < plain.optimizer
    wide = memory(dtype="float32", gradient_checkpointing=False)
    assert wide.activations > plain.activations


def test_seconds_follow_the_device() -> None:
    model, _ = tiny_model("qwen2_5_vl")
    shape, _ = read_shape(model.config, PolicySettings())
    work = Work(16, 8, 400, 1200, 64, 1 << 16, 1 << 14, 1024)
    fast, slow = named_device("H100"), named_device("L4")
    assert estimate_seconds(shape, work, Device("x", 1)) is None
    ours, theirs = estimate_seconds(shape, work, fast), estimate_seconds(shape, work, slow)
    assert ours is not None
    assert theirs is not None
    # The update is bound by the rate of products: 989 against 121 TFLOP/s.
    assert theirs.update / ours.update == pytest.approx(989 / 121)
    # 64 steps of 3 layers whose kernels Python starts: longer than anything they compute here.
    assert ours.decode == pytest.approx(64 * 3 * fast.layer_seconds)


@pytest.mark.parametrize(
    ("name", "gib"), [("24GB", 24), ("h100", 79.1), ("A100-40gb", 39.4), ("NVIDIA L4", 22.0)]
)
def test_names_of_gpus(name: str, gib: float) -> None:
    # Error correction takes a sixteenth of an L4's 24 GB.
    assert named_device(name).memory == int(gib * GIB)


def test_unknown_gpus_are_told() -> None:
    with pytest.raises(UserError, match=r"did you mean h100\?.*give its memory, as 24GB"):
        named_device("H1000")


def test_this_machine_has_memory() -> None:
    assert this_device().usable > GIB


def test_the_repeated_form_is_refused() -> None:
    settings = load_settings("counting", ["policy.engine=repeated", "data.train_limit=5"])
    with pytest.raises(UserError, match=r"only the shared-prefix form: policy\.engine=repeated"):
        Planner(settings, named_device("24GB"))


def test_no_weights_are_needed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    source = Path(get_model_source("embedded"))
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    status, out, _ = run(
        capsys, "plan", "counting", f"model={folder}", "data.train_limit=20", "--gpu", "24GB"
    )
    assert status == 0
    assert "1,210,304 weights" in out  # those of the embedded model
    assert "prompt     34 / 34 / 34 tokens" in out
    assert "fits       yes" in out
    assert "time" not in out.split()  # of 24 GB alone no rate is known


def test_an_image_that_cannot_be_seen_is_named(tmp_path: Path) -> None:
    noise_example("thin", [(900, 3)]).images[0].load().save(tmp_path / "thin.png")
    row = {"id": "t1", "images": ["thin.png"], "question": "How many?", "answer": 1}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    settings = load_settings("counting", [f"data.train={tmp_path / 'data.jsonl'}"])
    with pytest.raises(UserError, match="t1: absolute aspect ratio"):
        plan(settings, "24GB")


def test_a_wrong_name_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not in the table" in fails(capsys, "plan", "counting", "--gpu", "X9")
    missing = fails(capsys, "plan", "counting", "model=./nowhere", "data.train_limit=2")
    assert "model ./nowhere cannot be loaded" in missing


def test_devices_share_the_prompts() -> None:
    settings = load_settings("counting")
    assert [estimate_work(settings, 40, 36, 0, n).prompts for n in (1, 4, 5)] == [32, 8, 7]
