"""Two and four processes make the steps of one, wherever the weights lie."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from accelerate import DeepSpeedPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from hypothesis import given
from hypothesis import strategies as st
from rank_cases import BRIEF, prepare, settings_of
from safetensors.torch import load_file
from small_runs import assert_same_weights, read_metrics

from vlm_grpo.checkpoint.store import CorruptCheckpoint, verify_checkpoint
from vlm_grpo.deploy.export import export
from vlm_grpo.deploy.resolve import resolve_model
from vlm_grpo.distributed import collectives
from vlm_grpo.distributed import launch as launch_module
from vlm_grpo.distributed.collectives import balance_by_cost
from vlm_grpo.distributed.launch import build_accelerator
from vlm_grpo.errors import UserError
from vlm_grpo.model.loading import load_model

PROGRAM = Path(__file__).parents[1] / "helpers" / "rank_cases.py"
TWO, FOUR = (
    ["replicas-2", "streamed-2", "held-2"],
    ["replicas-4", "streamed-4", "held-4", "hybrid-4"],
)
RESUMED = ["replicas-2-rest", "streamed-2-rest", "held-2-rest", "replicas-1-rest"]
RESUMED += ["streamed-2-whole"]  # to compare with the rest of its like
ZERO = ["zero2-2", "zero3-2"]
ZERO_RESUMED = ["zero2-2-rest", "replicas-1-zero2", "zero3-2-rest", "streamed-2-zero3"]
CASES = {"zero2": 7, "zero3": 7, "replicas": 15}
"""How many of the cases each placement makes; 14 where nothing else is said."""
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed, an extra, is not installed"
)

Step = dict[str, Any]
Found = dict[str, dict[str, list[Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def launched(folder: Path, launches: list[str]) -> Found:
    """What each case found in each launch; the program ends those that hang."""
    if todo := [name for name in launches if not (folder / f"{name}.pt").exists()]:
        command = [sys.executable, str(PROGRAM), str(folder), *todo]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-5000:]
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in launches}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """‖a − b‖ / ‖a‖ over all weights' gradients."""
    assert a.keys() == b.keys()
    error = sum(float((a[name] - b[name]).double().square().sum()) for name in a)
    norm = sum(float(value.double().square().sum()) for value in a.values())
    return (error / norm) ** 0.5 if norm else error


def steps_of(found: dict[str, Any]) -> dict[str, list[Step]]:
    """The cases in float32 that note each step's metrics and gradients."""
    noted = {case: steps for case, steps in found.items() if isinstance(steps[0], dict)}
    with_grads = {case: steps for case, steps in noted.items() if "grads" in steps[0]}
    return {case: steps for case, steps in with_grads.items() if "bfloat16" not in case}


def compare(found: Found) -> None:
    alone = steps_of(found["replicas-1"])
    assert len(alone) == 15
    for launch in found.keys() - {"replicas-1"}:
        together = steps_of(found[launch])
        assert alone.keys() >= together.keys()
        kinds = {launch: CASES.get(launch.split("-")[0], 14) for launch in found}
        kinds |= dict.fromkeys(BRIEF, 3)
        assert len(together) == kinds[launch]
        for case, steps in together.items():
            for a, b in zip(alone[case], steps, strict=True):
                # Float32 sums in another order; a few steps of Adam make it 5e-6 at most here.
                assert distance(a["grads"], b["grads"]) < 1e-5, (launch, case)
                names = ("reward", "reward_std", "frac_reward_zero_std", "loss", "entropy")
                for name in (*names, "grad_norm"):
                    expected = pytest.approx(a["metrics"][name], rel=1e-4, abs=1e-6)
                    assert b["metrics"][name] == expected, (launch, case, name)


def test_two_processes_make_the_steps_of_one(folder: Path) -> None:
    compare(launched(folder, ["replicas-1", *TWO]))


@pytest.mark.slow
@needs_deepspeed
def test_two_processes_of_deepspeed_make_the_steps_of_one(folder: Path) -> None:
    compare(launched(folder, ["replicas-1", *ZERO]))


@pytest.mark.parametrize(
    "launch",
    [
        *("streamed-2", "held-2"),
        *(pytest.param(launch, marks=[pytest.mark.slow, needs_deepspeed]) for launch in ZERO),
    ],
)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_cut_weights_compute_in_bfloat16_as_whole_ones_do(
    folder: Path, launch: str, kind: str
) -> None:
    found = launched(folder, ["replicas-1", *TWO, launch])
    case = f"bfloat16, {kind}"
    pairs = list(zip(found["replicas-2"][case], found[launch][case], strict=True))
    # DeepSpeed clips with another rounding: weights that differ in their last bit after a step,
    # of which bfloat16 makes 2 % in the next gradient.
    for a, b in pairs[:1] if launch in ZERO else pairs:
        assert b["metrics"]["reward"] == a["metrics"]["reward"]
        # The same values rounded in the same places, and sums in another order. Norms or a
        # residual stream in bfloat16 draw other tokens, and the distance is 1.
        assert distance(a["grads"], b["grads"]) < 1e-5


def goes_on(folder: Path, launches: list[str]) -> None:
    """Runs that other launches have begun come to the steps and the weights of one that was never
    interrupted."""
    launched(folder, ["replicas-1", *TWO])  # each leaves the beginning of a run
    found = launched(folder, ["replicas-1-whole", *launches])
    whole = found["replicas-1-whole"]["run"]
    assert len(whole) == 4
    expected = trained(folder, "replicas-1-whole", 4)
    way = distance(expected, trained(folder, "replicas-1", 2))
    for name in launches:
        for a, b in zip(whole, found[name]["run"], strict=True):
            for key in ("reward", "loss", "kl", "grad_norm"):
                assert b[key] == pytest.approx(a[key], rel=1e-3, abs=1e-6), (name, key)
        # Rounding makes it 2e-5 of the way; a lost optimizer state, 1.3.
        assert distance(expected, trained(folder, name, 4)) < 1e-3 * way, name


def trained(folder: Path, run: str, step: int) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, through what reads it for evaluations and exports."""
    choice = resolve_model(str(folder / "runs" / run), step=step)
    model = load_model(choice.settings, choice.checkpoint, training=False).model
    return {name: weight.detach() for name, weight in model.named_parameters()}


def test_a_run_goes_on_with_any_number_of_processes(folder: Path) -> None:
    goes_on(folder, RESUMED)


def test_cut_weights_that_are_stopped_within_a_step_go_on_bit_for_bit(folder: Path) -> None:
    launched(folder, ["replicas-1", *TWO])
    names = ["streamed-2-rest", "streamed-2-whole"]
    launched(folder, names)
    begun, rest, whole = (folder / "runs" / name for name in ("streamed-2", *names))
    assert [path.name for path in (begun / "checkpoints").iterdir()] == ["step-2-1"]
    for a, b in zip(read_metrics(whole), read_metrics(rest), strict=True):
        assert {**b, "work/image_decodes": a["work/image_decodes"]} == a  # kept ones are lost
    assert_same_weights(whole / "checkpoints" / "step-4", rest / "checkpoints" / "step-4")


@pytest.mark.slow
@needs_deepspeed
def test_a_run_goes_on_with_deepspeed_and_after_it(folder: Path) -> None:
    launched(folder, ZERO)
    goes_on(folder, ZERO_RESUMED)


def test_memory_that_runs_out_on_one_of_ranks_that_share_weights_ends_all(folder: Path) -> None:
    names = ["streamed-2-oom", "held-2-oom"]
    launched(folder, names)
    for name in names:
        last, first = ((folder / f"{name}.{rank}").read_text() for rank in ("last", "first"))
        assert re.search(r"out of memory .* resume=true optim\.max_tokens_per_batch=\d+$", last)
        assert first.startswith("another process of this run has died")
        checkpoints = folder / "runs" / name / "checkpoints"
        assert [path.name for path in checkpoints.iterdir()] == ["step-1"]
        verify_checkpoint(checkpoints / "step-1")


@pytest.mark.slow
def test_a_run_of_two_goes_on_with_four(folder: Path) -> None:
    goes_on(folder, ["streamed-4-rest"])


def test_a_checkpoint_in_parts_is_a_model_like_any_other(folder: Path, tmp_path: Path) -> None:
    launched(folder, ["replicas-1", *TWO])
    parts, whole = (
        folder / "runs" / run / "checkpoints" / "step-2-1" for run in ("held-2", TWO[0])
    )
    names = {path.name for path in parts.iterdir()}
    both = [f"0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    for kind in ("model", "optimizer", "reference"):
        files = [f"{kind}-{part}" for part in both]
        assert names >= set(files)
        sizes = [(parts / file).stat().st_size for file in files]
        assert max(sizes) < 1.1 * min(sizes)  # the tiny model's largest weight is a tenth of it
        alone = (whole / f"{kind}.safetensors").stat().st_size
        assert sum(sizes) == pytest.approx(alone, rel=0.02)  # each tensor once, and headers
    assert "model.safetensors" not in names
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(load_file(whole / "model.safetensors"))
    found = load_file(next(export(str(parts), tmp_path / "out").glob("*.safetensors")))
    expected = load_file(whole / "model.safetensors")
    way = distance(expected, load_file(folder / "model" / "model.safetensors"))
    assert distance(expected, {name: found[name] for name in expected}) < 1e-3 * way
    (parts / f"optimizer-{both[1]}").write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match=both[1]):
        verify_checkpoint(parts)


def test_a_part_that_cannot_be_written_leaves_no_checkpoint(folder: Path) -> None:
    told, left = launched(folder, ["held-2"])["held-2"]["one fails"]
    assert told.startswith("another process of this run has failed")
    assert left == []


@pytest.mark.parametrize(
    ("world", "sizes", "named"),
    [
        ("8", {"DP_REPLICATE": "2", "DP_SHARD": "2"}, "dp_shard_size=2 must be the number"),
        ("4", {"DP_REPLICATE": "4"}, "dp_shard_size more than 1"),
        ("4", {"DP_SHARD": "2", "TP": "2"}, "tp_size, cp_size and sp_size must be 1"),
    ],
)
def test_other_parallelism_is_refused(
    world: str, sizes: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("WORLD_SIZE", world)
    for name, size in sizes.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", size)
    with pytest.raises(UserError, match=named):
        launch_module.get_dp_replicate_size()


def test_parts_of_whole_weights_are_refused(tmp_path: Path) -> None:
    prepare(tmp_path)
    settings = settings_of(tmp_path, "run", checkpoint={"sharded": True})
    with pytest.raises(UserError, match=r"checkpoint\.sharded=true is for weights that FSDP2 cuts"):
        build_accelerator(settings)


def test_what_is_exchanged_is_what_the_guide_says(folder: Path) -> None:
    found = launched(folder, ["replicas-1", *TWO])
    for kind in ("full", "lora"):
        seen = {name: found[name][f"traffic, {kind}"][0] for name in found}
        assert not seen["replicas-1"]["calls"]
        small = 20_000  # pickled rewards, metrics and agreements
        for launch in ("replicas-2", "streamed-2", "held-2"):
            t = seen[launch]
            trained, base = t["trained"], t["base"]
            layers, held = t["layers"], base - t["layers"]
            full, streamed = kind == "full", launch == "streamed-2"
            passes = t["passes"] if streamed else 0
            # Frozen weights outside the layers stay gathered from one step to the next.
            again = held if streamed and full else 0
            gathered = base + again + 2 * passes * layers
            if launch == "replicas-2" or (launch == "held-2" and not full):
                gathered = 0  # never cut, or never changed since the first step
            cut = full and launch != "replicas-2"
            scattered = (passes * layers + held if streamed else base) if cut else 0
            added = 0 if cut else trained
            assert 0 <= t["bytes"].get("_allgather_base_", 0) - 4 * gathered < small, launch
            assert t["bytes"].get("_reduce_scatter_base_", 0) == 4 * scattered, launch
            # Besides, the step's totals and flags that say whether to go on.
            assert 0 <= t["bytes"]["allreduce_"] - 4 * added < 100, launch


@pytest.mark.slow
@needs_deepspeed
def test_what_deepspeed_exchanges_is_what_the_guide_says(folder: Path) -> None:
    found = launched(folder, ZERO)
    small = 20_000  # pickled rewards, metrics and agreements, and parts filled up
    for kind in ("full", "lora"):
        for launch in ZERO:
            t = found[launch][f"traffic, {kind}"][0]
            is_3 = launch == "zero3-2"
            # All of a model is gathered for the rollout and again for the update.
            gathered = 2 * t["all"] if is_3 else t["trained"]
            added, scattered = (0, t["trained"]) if is_3 else (t["trained"], 0)
            assert 0 <= t["bytes"]["_allgather_base_"] - 4 * gathered < small, launch
            assert 0 <= t["bytes"].get("_reduce_scatter_base_", 0) - 4 * scattered < small, launch
            # Besides, the step's totals and flags that say whether to go on, and the norm's parts.
            assert 0 <= t["bytes"]["allreduce_"] - 4 * added < 100, launch


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("launch", ["replicas-1", *ZERO])
def test_an_infinite_gradient_changes_nothing(folder: Path, launch: str) -> None:
    assert launched(folder, [launch])[launch]["not finite"] == [1, True, 0]


@pytest.mark.slow
def test_four_processes_make_the_steps_of_one(folder: Path) -> None:
    found = launched(folder, ["replicas-1", *FOUR])
    compare(found)
    t = found["hybrid-4"]["traffic, full"][0]  # two copies, each cut in two
    assert t["passes"] > 1
    scattered = 4 * (t["passes"] * t["layers"] + t["base"] - t["layers"])
    assert t["bytes"]["_reduce_scatter_base_"] == scattered
    assert 0 <= t["bytes"]["allreduce_"] - scattered // 2 < 100


def test_the_cases_are_uneven(folder: Path) -> None:
    alone = launched(folder, ["replicas-1"])["replicas-1"]
    steps = [step["metrics"] for steps in steps_of(alone).values() for step in steps]
    # Groups with and without spread in one step: on four ranks some rank has no useful group.
    assert any(0 < metrics["frac_reward_zero_std"] < 1 for metrics in steps)
    assert any(metrics["frac_reward_zero_std"] == 1 for metrics in steps)
    assert any(metrics["resampled_groups"] for metrics in steps)
    lengths = [m["completions/max_length"] - m["completions/min_length"] for m in steps]
    assert max(lengths) > 0  # else all kinds of loss would be one
    assert len({metrics["reward"] for metrics in steps}) > 3


LAUNCHER = (sys.executable, "-m", "accelerate.commands.launch")
FILES = Path(__file__).parents[2] / "configs" / "accelerate"


def command(folder: Path, name: str, processes: int, *overrides: str, restarts: int = 0) -> Any:
    """The arguments of a run as users launch it."""
    file = FILES / "cpu.yaml"
    return {
        "args": [
            *(*LAUNCHER, "--config_file", str(file), "--num_processes", str(processes)),
            *("--main_process_port", "0", "--max_restarts", str(restarts)),
            *("-m", "vlm_grpo.cli", "train", "counting", f"name={name}", f"output_dir={folder}"),
            *("optim.prompts_per_step=4", "evaluation.every=0", "optim.warmup_steps=0"),
            *overrides,
        ],
        "env": {**os.environ, "OMP_NUM_THREADS": "1"},
        "stderr": subprocess.PIPE,
        "text": True,
    }


def launch(folder: Path, name: str, processes: int, *overrides: str) -> list[dict[str, Any]]:
    """A run of two steps; its metrics by step."""
    call = command(folder, name, processes, "optim.max_steps=2", *overrides)
    done = subprocess.run(**call, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return read_metrics(folder / name)


@pytest.mark.slow
def test_after_a_killed_process_the_launcher_goes_on(tmp_path: Path) -> None:
    settings = ("data.eval=null", "data.eval_limit=null", "checkpoint.keep_best=false")
    settings += ("optim.max_steps=6", "checkpoint.every=2", "resume=true")
    call = command(tmp_path, "killed", 2, *settings, restarts=1)
    with subprocess.Popen(**call) as launcher:
        checkpoints = tmp_path / "killed" / "checkpoints"
        while not (checkpoints / "step-2").exists():
            assert launcher.poll() is None
            time.sleep(0.2)
        ranks = psutil.Process(launcher.pid).children()
        assert len(ranks) == 2
        ranks[1].kill()
        _, told = launcher.communicate(timeout=400)
    assert "another process of this run has died" in told
    assert launcher.returncode == 0
    assert [row["step"] for row in read_metrics(tmp_path / "killed")] == list(range(6))
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-4", "step-6"]


def test_launch_files_are_accelerates() -> None:
    guide = (FILES.parents[1] / "docs" / "scaling.md").read_text()
    named = set(re.findall(r"configs/accelerate/(\w+\.yaml)", guide))
    assert named == {path.name for path in FILES.glob("*.yaml")}
    for name in named:  # an unknown key is an error
        assert load_config_from_file(str(FILES / name)).mixed_precision == "no"


def test_processes_without_an_accelerator_find_each_other(tmp_path: Path) -> None:
    # On its own accelerate's state leaves the processes of a launch on CPUs to themselves.
    script = tmp_path / "who.py"
    script.write_text(
        "from vlm_grpo.distributed.launch import initialize_distributed\n"
        "state = initialize_distributed()\n"
        f"open({str(tmp_path)!r} + f'/{{state.process_index}}-of-{{state.num_processes}}', 'w')\n"
    )
    line = [*LAUNCHER, "--config_file", str(FILES / "cpu.yaml"), "--num_processes", "2"]
    subprocess.run([*line, "--main_process_port", "0", str(script)], check=True, timeout=200)
    assert {path.name for path in tmp_path.glob("*-of-*")} == {"0-of-2", "1-of-2"}


@pytest.mark.slow
def test_the_launcher_divides_an_evaluation(tmp_path: Path) -> None:
    # 70 held-out examples are two parts of an evaluation, of which each rank takes one.
    held_out = ("data.eval=embedded:counting", "data.eval_limit=70")
    one, two = launch(tmp_path, "one", 1, *held_out), launch(tmp_path, "two", 2, *held_out)
    for a, b in zip(one, two, strict=True):
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert b["reward"] == pytest.approx(a["reward"], abs=1e-6)
    before = [tmp_path / name / "evaluation" / "step-000000.jsonl" for name in ("one", "two")]
    rows = [path.read_text() for path in before]
    assert rows[0] == rows[1]
    assert len(rows[0].splitlines()) == 70
    assert two[-1]["eval/exact"] == pytest.approx(one[-1]["eval/exact"], abs=0.03)  # two of 70


@pytest.mark.slow
def test_an_evaluation_that_was_killed_goes_on_with_other_ranks() -> None:
    # 130 examples are three parts: one is on disk at the kill, two are left for the two ranks.
    script = Path(__file__).parents[2] / "perf" / "resumed_evaluation.py"
    line = [sys.executable, str(script), "--count", "130", "--tasks", "counting"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed on 2 ranks: identical to the byte" in done.stdout


@pytest.mark.parametrize(
    ("plugin", "problem"),
    [
        ({"zero_stage": 1}, "zero_stage must be 2 or 3"),
        ({"offload_optimizer_device": "cpu"}, "offload_optimizer_device"),
        ({"zero_stage": 3, "zero3_init_flag": True}, "zero3_init_flag must be false"),
        ({"gradient_clipping": 1.0}, "optim.max_grad_norm says it"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps must be 1"),
        ({"hf_ds_config": {"optimizer": {}}}, "optimizer and scheduler must be left out"),
        ({"hf_ds_config": {"bf16": {"enabled": True}}}, "policy.dtype says"),
        ({"hf_ds_config": {"stage3_max_live_parameters": 1}}, "stage3_… must be left out"),
    ],
)
def test_settings_of_deepspeed_that_are_not_kept_are_refused(
    plugin: dict[str, Any], problem: str
) -> None:
    if "hf_ds_config" in plugin:
        more = plugin["hf_ds_config"]
        zero = {"stage": 2, **{key: more[key] for key in more if key.startswith("stage3")}}
        plugin = {"hf_ds_config": {**more, "zero_optimization": zero}}
    accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=DeepSpeedPlugin(**plugin)),
        distributed_type=DistributedType.DEEPSPEED,
    )
    with pytest.raises(UserError, match=problem):
        launch_module.get_deepspeed_config(cast(Any, accelerator))


def test_a_launch_with_deepspeed_needs_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(launch_module, "is_deepspeed_available", lambda: False)
    # As a launcher starts a process on a GPU, where accelerate itself would raise first.
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"pip install 'vlm-grpo\[deepspeed\]'"):
        build_accelerator(settings_of(folder, "none"))


def test_a_launch_on_cpus_stays_there_beside_an_accelerator() -> None:
    script = (
        "import torch\ntorch.accelerator.is_available = lambda: True\n"
        "from vlm_grpo.distributed.launch import initialize_distributed\n"
        "assert initialize_distributed().device.type == 'cpu'\n"
    )
    env = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=200)


@given(
    costs=st.lists(st.integers(1, 5000), max_size=60),
    world=st.integers(1, 9),
)
def test_shares_are_even(costs: list[int], world: int) -> None:
    shares = balance_by_cost(costs, world)
    assert sorted(place for share in shares for place in share) == list(range(len(costs)))
    loads = [sum(costs[place] for place in share) for share in shares]
    # Graham 1969: the longest-processing-time rule is at most 4/3 of the best cut, which is at
    # least the mean and at least the dearest item.
    best = max([sum(costs) / world, *costs, 0])
    pairs = sorted(costs, reverse=True)
    if len(costs) > world:  # two of the world + 1 dearest items share a rank
        best = max(best, pairs[world - 1] + pairs[world])
    assert max(loads) <= 4 / 3 * best + 1e-9
    if len(costs) >= world:
        assert all(shares)


def test_buckets_hold_every_tensor_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []

    def double(flat: torch.Tensor) -> None:  # what two ranks with the same values add up to
        sent.append(flat.clone())
        flat *= 2

    monkeypatch.setattr(torch.distributed, "all_reduce", double)
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 40)  # ten float32
    sizes = [(2, 3), (4,), (1,), (30,), (2,)]
    tensors = [torch.randn(size) for size in sizes] + [torch.ones(3, dtype=torch.float64)]
    before = [tensor.clone() for tensor in tensors]
    two = type("Two", (), {"num_processes": 2})()
    collectives.sum_over_ranks(cast(Any, two), tensors)
    assert [len(flat) for flat in sent] == [10, 1, 30, 2, 3]
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, 2 * old)
