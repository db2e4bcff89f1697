"""Tests of the plan: sizes of prompts, the largest settings that fit, and changes to fit."""

import math
import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_environments
import torch
from commands import fails, run, write_jsonl
from family_models import ALIKE, BUILDERS
from family_policies import build_family_policy
from small_runs import make_trainer, save_tiny_model, small_run
from tiny_models import noise_example

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.episodes import begin_episodes
from vlm_grpo.model.loading import get_model_source, load_prompt_builder
from vlm_grpo.planning import plan as plans
from vlm_grpo.planning import suggestions
from vlm_grpo.planning.devices import CONTEXT, FRAGMENTATION, GIB, Device, find_device
from vlm_grpo.planning.known import KnownPlanner, build_known_settings
from vlm_grpo.planning.memory import GRAPH, Memory
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.plan import build_plan, plan
from vlm_grpo.planning.planner import Planner, with_changes
from vlm_grpo.planning.sizes import estimate_workload
from vlm_grpo.planning.suggestions import OFFLOADING, SHARDING
from vlm_grpo.task.episodes import EnvironmentRunner

H100 = find_device("H100")


@pytest.fixture(scope="module")
def planner() -> Planner:
    settings = load_settings("counting", ["data.train_limit=30"])
    return Planner(settings, Device("toy", GIB // 2, is_cpu=True))


def test_changes_are_valid_and_make_the_recipe_fit(planner):
    values = ["rollout.num_generations=64", "rollout.max_completion_length=64"]
    overrides = ["data.train_limit=30", "objective.beta=0.1", *values]
    overrides += ["objective.reference_refresh_every=never"]
    tight = Planner(load_settings("counting", overrides), Device("small", 210 << 20, is_cpu=True))
    assert not tight.fits(tight.settings)
    peaks = []
    for text, step in build_plan(tight).changes:
        overrides += text.split()
        assert load_settings("counting", overrides) == step.settings
        peaks.append(step.memory.peak)
    assert peaks == sorted(set(peaks), reverse=True)
    assert peaks[-1] <= tight.device.usable < peaks[0]
    lines = str(build_plan(tight)).splitlines()
    assert any(line.startswith("fits       no: ") for line in lines)


def test_only_examples_that_the_filter_accepts_are_planned(tmp_path):
    rows = [{"id": str(n), "question": "How many?", "answer": n, "rate": n} for n in range(6)]
    path = write_jsonl(tmp_path / "rows.jsonl", *rows)
    given = [f"data.train={path}", "data.eval=null", "evaluation.every=0", "data.filter=rate > 3"]
    chosen = Planner(load_settings("counting", given), Device("small", 1 << 30, is_cpu=True))
    assert [example.answer for example in chosen.prompts.examples] == [4, 5]


def test_a_wider_group_has_four_times_as_many_completions_and_nothing_fits_a_tiny_device(planner):
    found = build_plan(planner)
    assert found.wider is not None
    text, step = found.wider
    assert step.settings == load_settings("counting", ["data.train_limit=30", text])
    assert step.work.num_generations == 4 * found.step.work.num_generations
    assert f"wider      {text}" in str(found)
    assert step.memory.peak > found.step.memory.peak
    snug = build_plan(planner.on(Device("snug", found.step.memory.peak, is_cpu=True)))
    assert snug.fits
    assert snug.wider is None  # four times as many do not fit
    tiny = planner.on(Device("tiny", 1 << 20, is_cpu=True))
    found = build_plan(tiny)
    assert re.search(r"not even then.*--devices 8", str(found).splitlines()[-1])
    assert (found.faster, found.wider, tiny.find_largest_group(64)) == (None, None, 0)


def copy_without_weights(folder: Path) -> Path:
    weights = shutil.ignore_patterns("*.safetensors")
    return shutil.copytree(get_model_source("embedded"), folder / "model", ignore=weights)


def big(model: Path, *overrides: str) -> Settings:
    given = [f"model={model}", "data.train_limit=4", "policy.dtype=bfloat16"]
    return load_settings("counting", [*given, *overrides])


@pytest.fixture(scope="module")
def seven_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of Qwen2.5-VL-7B and the embedded model's processor."""
    folder = copy_without_weights(tmp_path_factory.mktemp("model"))
    known = KnownPlanner(build_known_settings("Qwen/Qwen2.5-VL-7B-Instruct"), H100)
    known.config.save_pretrained(folder)
    return folder


def estimate(settings: Settings, gib: int = 80, weights: Any = None, devices: int = 1) -> Any:
    """Estimate a step on GPUs with this much memory."""
    return Planner(settings, Device("GPU", gib * GIB), devices).estimate_step(settings, weights)


def test_a_model_that_fits_sharded_only_gets_the_launch(seven_billion):
    settings = big(seven_billion)
    weights = "8,292,166,656 weights"  # of Qwen2.5-VL-7B
    launch = "fsdp2.yaml --num_processes 8 -m vlm_grpo.cli train"
    for card, devices, expected, absent in (
        ("H100", 8, (weights, f"  {SHARDING}", launch), "policy.lora"),
        ("24GB", 8, (f"  {OFFLOADING}", launch), "policy.lora"),
        ("H100", 1, ("policy.lora.r=64",), SHARDING),
    ):
        text = str(plan(settings, card, devices=devices))
        assert all(part in text for part in expected)
        assert absent not in text


def test_changes_are_combined_where_one_is_not_enough(planner, monkeypatch):
    def take(name: str, place: str) -> Any:
        """Return a proposal of this name, which takes away this part of the memory."""
        return lambda _, step: (name, replace(step, memory=replace(step.memory, **{place: 0})))

    step = planner.estimate_step(planner.settings)
    zero: dict[str, Any] = dict.fromkeys(vars(step.memory), 0)
    step = replace(step, memory=Memory(**{**zero, "cache": 9, "update": 9}))
    proposals = [take("a", "cache"), take("b", "host"), take("c", "update")]
    monkeypatch.setattr(suggestions, "CHANGES", proposals)
    tiny = planner.on(Device("tiny", 5, is_cpu=True))
    assert [text for text, _ in suggestions.suggest_changes(tiny, step)] == ["a c"]


def test_sharded_and_offloaded_memory_have_the_formulas_of_the_scaling_guide(seven_billion):
    settings = big(seven_billion, "optim.max_tokens_per_batch=64")
    step, sharded = (estimate(settings, 80, form, 8) for form in ("offloaded", "sharded"))
    sharded, shape = sharded.memory, step.shape
    layers = shape.text.layers * shape.text.layer_weights
    n, h = shape.num_weights, shape.num_weights - layers
    rollout = sharded.weights + sharded.optimizer + sharded.folded
    # The guide has 2 N of casts; exactly, the embedding is not one of the linear modules.
    assert rollout == pytest.approx(2 * shape.num_linear + 4 * h + 12 * n / 8, rel=1e-6)
    two = 2 * shape.text.layer_weights * 2
    update = sharded.weights + sharded.optimizer + sharded.gradients + 2 * h + two
    assert update == pytest.approx(10 * h + 16 * n / 8 + two, rel=1e-6)
    memory, passes = step.memory, step.work.num_micro_batches
    assert passes > 1
    assert memory.host == pytest.approx(16 * n / 8, rel=1e-6)
    # The gathered weights and gradients outside the layers are left; nothing is lost on the way.
    assert memory.weights + memory.gradients == pytest.approx(8 * h, rel=1e-6)
    assert memory.optimizer == 0
    gone = sharded.persistent + sharded.gradients - memory.persistent - memory.gradients
    assert gone == memory.host
    down, back = 8 * h + 4 * (1 + 2 * passes) * layers, 4 * (h + passes * layers)
    assert memory.copied == pytest.approx((down + back) / 8, rel=1e-6)
    adapters = big(seven_billion, "policy.lora.r=16", "optim.lr=1e-5")
    memory = estimate(adapters, 80, "offloaded", 8).memory
    assert memory.optimizer > 0  # adapters are never sharded
    assert memory.host == pytest.approx(2 * n / 8, rel=1e-6)
    text = str(plan(settings, "H100", 8, "offloaded"))
    seconds = (down + back) / 8 / 25e9
    assert f"GB per step between main memory and device: {seconds:.2g} s at 25 GB/s" in text


def test_a_model_that_does_not_fit_gets_every_way_to_hold_it_with_its_figure():
    settings = build_known_settings("Qwen/Qwen2.5-VL-32B-Instruct")
    found = build_plan(KnownPlanner(settings, find_device("80GB"), 8))
    peaks = {text: step.memory.peak for text, step in found.others}
    # 64 GiB of weights in bfloat16 leave no room beside their shards.
    assert [text for text, _ in found.changes] == [SHARDING, OFFLOADING]
    vllm = (SHARDING, "rollout.sampler=vllm")
    for way in (("adamw_8bit",), vllm, (*vllm, "master_weights=bfloat16")):
        assert any(all(part in text for part in way) for text in peaks), way
    assert all(peak < found.step.memory.peak for peak in peaks.values())
    text = str(found)
    for name, peak in peaks.items():
        mark = "fits" if found.device.holds(peak) else "too large"
        assert f"  or {peak / GIB:.2f} GiB ({mark}): {name}\n" in text
    # Shards of 16 bytes per weight on eight devices, which hold 536 GB in all.
    host = plans.count_host_bytes(found.changes[-1][1], 0)
    shards = pytest.approx(16 * 33.45e9 / 8, rel=0.01)
    assert host["weights, gradients and optimizer"] == shards


def test_the_least_that_fits_is_recomputed():
    settings = build_known_settings("Qwen/Qwen2.5-VL-3B-Instruct", ["policy.lora.r=16"])
    parts = ("none", "mlp", "full")
    automatic, *fixed = (
        with_changes(settings, "policy", gradient_checkpointing=part) for part in ("auto", *parts)
    )
    planner = KnownPlanner(automatic, H100)
    peaks = [planner.estimate_step(changed).memory.peak for changed in fixed]
    assert peaks == sorted(set(peaks), reverse=True)
    for part, peak in zip(parts, peaks, strict=True):
        device = Device("GPU", int((peak + CONTEXT) / (1 - FRAGMENTATION)) + 2)
        found = build_plan(planner.on(device))
        assert (found.fits, found.step.shape.checkpointing) == (True, part)
        assert f"with policy.gradient_checkpointing={part}\n" in str(found)
    sharded = KnownPlanner(automatic, H100, 8, "sharded").estimate_step(automatic)
    assert sharded.shape.checkpointing == "full"


def test_captured_steps_weights_in_four_bits_and_a_server_beside_are_planned(seven_billion):
    """Bytes of these are compared with a model's in ``tests/model/test_quantization.py``."""
    settings = big(seven_billion, "policy.lora.r=16", "optim.lr=1e-5", "policy.load_in=4bit")
    step = estimate(settings)
    places = step.work.concurrent_prompts * step.work.num_generations
    # The cache shrinks to a quarter of its places.
    assert step.memory.graphs == (1 + math.floor(math.log(places, 4))) * GRAPH
    assert estimate(with_changes(settings, "rollout", cuda_graphs=False)).memory.graphs == 0
    large, small = (estimate(settings, size).memory for size in (80, 24))
    layers = 28 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18944)
    assert large.folded == 2 * layers  # restored for the rollout: there is room
    assert small.folded == 0
    assert small.sampling > 2 * 3584 * 18944  # one matrix at a time
    text = str(plan(settings, "24GB", reserved=0.25))
    assert "policy.load_in=4bit: 6,525,288,448 weights in 3.14 GiB" in text
    with pytest.raises(UserError, match="quantized weights cannot be sharded"):
        plan(settings, "24GB", devices=2, weights="sharded")
    # 18 GiB, less 5 % and 1 GiB.
    assert "16.1 GiB usable, 25% of its memory left to others" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "int3"}, "must be one of replicated, sharded, offloaded"),
        ({"weights": "sharded"}, "over one device: give --devices 2"),
        ({"reserved": 1.0}, "a share of the memory"),
        ({"devices": 33}, r"optim\.prompts_per_step=32 is less than"),
        *(({"devices": n}, "must be a whole number of at least 1") for n in (0, "2", 1.5, True)),
    ],
)
def test_a_wrong_argument_is_an_error(planner, arguments, message):
    with pytest.raises(UserError, match=message):
        plan(planner.settings, "24GB", **arguments)


PLANNED = ("qwen3_5_moe", "gemma4", "mllama", "lfm2_vl", "paligemma", "internvl")
"""Families with each kind of layer that a plan measures, and each kind of image."""


# FastVLM's configuration does not have the sizes of its tower. HunyuanOCR's images have a token at
# the end of each row.
@pytest.mark.parametrize("name", sorted(set(BUILDERS) - {"fast_vlm", *ALIKE} | {"hunyuan_vl"}))
def test_families_that_do_not_share_prompts_are_planned(name, tmp_path):
    policy = build_family_policy(name)
    policy.model.config.save_pretrained(tmp_path)
    policy.processor.save_pretrained(tmp_path)
    overrides = [f"model={tmp_path}", "data.train_limit=5", "optim.prompts_per_step=4"]
    planner = Planner(load_settings("counting", overrides), find_device("24GB"))
    examples = map(policy.prompts.with_resized_sizes, planner.prompts.examples)
    prompts = [policy.prompts.build(example, planner.task) for example in examples]
    own = planner.settings.policy
    lengths = [len(prompt.token_ids) for prompt in prompts]
    sizes, shape = planner.count_prompts(own), read_model_shape(planner.config, own)
    assert [size.tokens for size in sizes] == sorted(lengths)
    linear = [m for m in policy.model.modules() if isinstance(m, torch.nn.Linear)]
    assert shape.num_linear == sum(module.weight.numel() for module in linear)
    values, vision = prompts[0].vision["pixel_values"].numel(), policy.model.config.vision_config
    edge = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    patches = values // (3 * getattr(vision, "temporal_patch_size", 1) * edge**2)
    work = estimate_workload(planner.settings, sizes[-1], shape)
    assert work.patches == patches
    if name == "internvl":  # whose configuration does not name the patches of a token
        token = policy.model.config.image_token_id
        # Its start and its end have a token each.
        assert work.image_tokens == prompts[0].token_ids.count(token) + 2 > 2
    if name in PLANNED:
        found = build_plan(planner)
        assert (found.step.prompts, found.step.work.patches) == (sizes, patches)
        assert "fits       yes" in str(found)


def test_the_plan_needs_no_weights_but_the_configuration_and_the_tokenizer(capsys, tmp_path):
    folder = copy_without_weights(tmp_path)
    words = "plan", "counting", f"model={folder}", "data.train_limit=20", "--gpu", "24GB"
    status, out, _ = run(capsys, *words)
    assert status == 0
    # The weights are those of the embedded model.
    for text in ("1,209,536 weights", "prompt     34 / 34 / 34 tokens", "fits       yes"):
        assert text in out
    assert "time" not in out.split()  # the rates of a GPU given by its memory are unknown
    shutil.copy(folder / "config.json", tmp_path)
    message = fails(capsys, "plan", "counting", f"model={tmp_path}", "data.train_limit=2")
    assert "a folder with the model's config.json and the files of its tokenizer" in message
    sizes = SimpleNamespace(hidden_size=64)
    config = SimpleNamespace(model_type="new", get_text_config=lambda: sizes, vision_config=sizes)
    with pytest.raises(UserError, match=r"model type 'new' lacks a size that a plan needs: .*size"):
        read_model_shape(config, load_settings("counting").policy)


def test_automatic_rollouts_and_micro_batches_take_the_free_memory_of_a_gpu(seven_billion):
    settings = big(seven_billion, "policy.lora.r=16", "optim.prompts_per_step=2000")
    planner = Planner(settings, Device("GPU", 80 * GIB))
    step = planner.estimate_step(settings)
    memory, work = step.memory, step.work
    free = planner.device.usable - memory.persistent - memory.folded
    # 57,344 bytes per token, and 38 per logit of each of the rows sampled at once.
    rows = work.rollout_budget / work.completion_tokens
    assert work.rollout_budget * 57_344 + rows * 152_064 * 38 == pytest.approx(0.8 * free, rel=1e-4)
    assert planner.device.holds(memory.rollout)
    small = estimate(settings, 24)
    assert small.work.rollout_budget < work.rollout_budget / 5
    fixed = with_changes(settings, "rollout", max_tokens_per_batch=65_536)
    assert planner.estimate_step(fixed).work.rollout_budget == 65_536
    sizes = {}
    for memory in (16, 24, 32, 80, 192):
        planner = Planner(settings, Device("GPU", memory * GIB))
        step = planner.estimate_step(settings)
        sizes[memory] = step.work.update_budget
        assert planner.device.holds(step.memory.backward) == (memory > 16)
    assert f"micro-batches of at most {sizes[192]:,}" in str(build_plan(planner))
    assert sizes[16] == 1024 < sizes[32] < sizes[80] < 16_384 < sizes[192]
    # Four fifths of what the rest of the step leaves, gradients of all weights included.
    for own, size in ((settings, 80), (with_changes(settings, "policy", lora=None), 192)):
        planner = Planner(own, Device("GPU", size * GIB))
        memory = planner.estimate_step(own).memory
        free = planner.device.usable - memory.persistent - memory.gradients
        assert 0.7 < (memory.activations + memory.update) / free < 0.9
    full = with_changes(settings, "policy", gradient_checkpointing="full")
    assert estimate(full, 192).work.update_budget == 65_536  # the most
    recomputing = with_changes(settings, "policy", gradient_checkpointing="auto")
    for size, part in ((80, "none"), (24, "full")):  # rather than less than 4,096 tokens
        chosen = estimate(recomputing, size)
        assert (chosen.shape.checkpointing, chosen.work.update_budget >= 4096) == (part, True)
    work = Planner(settings, Device("CPU", 80 * GIB, is_cpu=True)).estimate_step(settings).work
    assert (work.rollout_budget, work.update_budget) == (65_536, 16_384)


OWN = "rollout.vllm.python=/opt/vllm/bin/python"
GPU = Device("GPU", 80 * GIB)
SERVER = int(0.3 * GPU.memory)  # what ``rollout.vllm.gpu_memory_utilization`` is by default


def make_settings(*overrides: str) -> Settings:
    return load_settings("counting", ["data.train_limit=4", *overrides])


@pytest.mark.parametrize(
    ("overrides", "server", "level"),
    [
        ((OWN,), SERVER, 2),
        ((OWN, "policy.lora.r=8"), SERVER, 0),
        ((OWN, "rollout.steps_ahead=1"), SERVER, None),
        ((OWN, "rollout.vllm.gpu_memory_utilization=0.5"), GPU.memory // 2, 2),
        (("rollout.vllm.urls=[http://a:1]",), 0, None),  # servers elsewhere take nothing here
    ],
)
def test_a_server_takes_its_share_while_it_samples(overrides, server, level):
    planner = Planner(make_settings("rollout.sampler=vllm", *overrides), GPU)
    step = planner.estimate_step(planner.settings)
    weights = step.shape.num_weights * 4  # bytes in float32, the precision of the recipe
    assert step.memory.server == server
    left = {None: server, 0: CONTEXT + weights, 1: CONTEXT, 2: CONTEXT}[level]
    assert step.memory.resting == left
    assert step.memory.rollout == step.memory.persistent + server
    without = (override for override in overrides if "rollout" not in override)
    alone = planner.estimate_step(make_settings(*without)).memory
    assert step.memory.backward == alone.backward + left


def test_the_plan_names_the_server():
    settings = make_settings("rollout.sampler=vllm", OWN)
    text = str(plan(settings, "80GB"))
    assert "server          24.00  rollout: a vLLM server on this device" in text
    assert "resting          1.00  update: what that server keeps" in text
    assert "23.0 GiB for keys" in text
    assert "time       not estimated with vLLM" in text
    small = make_settings("rollout.sampler=vllm", OWN, "rollout.vllm.gpu_memory_utilization=0.01")
    assert "raise rollout.vllm.gpu_memory_utilization" in str(plan(small, "80GB"))


def test_results_of_an_environment_match_those_of_a_run(tmp_path):
    options = {"environment": {"name": f"{small_environments.__file__}:Peek", "max_turns": 3}}
    rollout = {"max_completion_length": 30}
    source = save_tiny_model(tmp_path / "model")
    settings = small_run(tmp_path, source, task_options=options, rollout=rollout)
    found = build_plan(Planner(settings, Device("toy", GIB, is_cpu=True)))
    trainer = make_trainer(settings)
    with closing(trainer.sampler):
        groups = trainer.sampler.sample(0).groups
    seen = [c.observations for group in groups for c in group.completions]
    counts = [[len(o.prompt.token_ids) for o in own] for own in seen if len(own) == 2]
    assert counts
    size = found.step.prompts[-1]
    # The second result is an image of two tokens, as the environment says, and the first of one.
    assert all(own == [size.result_tokens - 1, size.result_tokens] for own in counts)
    pixels = seen[0][1].prompt.vision["pixel_values"]
    assert (size.results, size.result_values) == (2, pixels.numel())
    assert found.step.work.path_tokens == 30 + max(map(sum, counts)) + 1
    assert found.step.work.result_image_tokens == 2
    assert f"up to 2 results of {size.result_tokens} tokens per completion, 2 of" in str(found)


def test_what_an_environment_shows_first_is_part_of_planned_prompts(planner):
    settings = load_settings("counting", ["data.train_limit=5", "task_options.environment=maze"])
    own = Planner(settings, Device("toy", GIB, is_cpu=True))
    prompts, task = load_prompt_builder(settings), own.task
    with EnvironmentRunner() as runner:
        first = planner.prompts.examples[:5]
        rows = [begin_episodes(prompts, runner, example, task)[0] for example in first]
    sizes = own.count_prompts(settings.policy)
    expected = sorted(len(prompts.build(row, task).token_ids) for row in rows)
    assert sorted(size.tokens for size in sizes) == expected


def test_an_image_that_cannot_be_resized_is_an_error(tmp_path):
    noise_example("thin", [(900, 3)]).images[0].load().save(tmp_path / "thin.png")
    row = {"id": "t1", "images": ["thin.png"], "question": "How many?", "answer": 1}
    data = write_jsonl(tmp_path / "data.jsonl", row)
    settings = load_settings("counting", [f"data.train={data}"])
    with pytest.raises(UserError, match="t1: absolute aspect ratio"):
        plan(settings, "24GB")
