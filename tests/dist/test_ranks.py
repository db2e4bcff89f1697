"""Launches of one, two and four processes make the same steps under every strategy."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gradients import relative_distance
from rank_cases import BFLOAT16, WITH_EPISODES, run_launch
from safetensors.torch import load_file
from small_runs import assert_same_weights, read_metrics

from vlm_grpo.model.loading import load_model
from vlm_grpo.model.resolve import resolve_model
from vlm_grpo.training.checkpoint.checksums import CorruptCheckpoint, verify_checkpoint
from vlm_grpo.training.export import export

TWO = ["ddp-2", "fsdp-2", "fsdp_held-2"]
FOUR = ["ddp-4", "hsdp-4"]
RESUMED = ["fsdp-2-resumed", "fsdp_held-2-resumed", "ddp-1-resumed"]
CASES = {"ddp-2": 15, "fsdp-2": 10, "fsdp_held-2": 2, "ddp-4": 3, "hsdp-4": 2}
"""Number of float32 cases of each launch, of the 15 of ``ddp-1``."""
OF_EXAMPLES = ("sources/", "rewards/", "curriculum/", "replay/", "visual_credit/", "revision/")
"""Beginnings of the names of metrics of a run's examples."""

Step = dict[str, Any]
Results = dict[str, dict[str, list[Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all launches."""
    return tmp_path_factory.mktemp("ranks")


def run_launches(folder: Path, launches: list[str]) -> Results:
    """Return the results of each launch by case. Launches without results in the folder are run."""
    for name in launches:
        if not (folder / f"{name}.pt").exists():
            run_launch(folder, name)
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in launches}


def select_steps(results: dict[str, Any]) -> dict[str, list[Step]]:
    """Select the float32 cases with the metrics and gradients of each step."""
    return {
        case: steps
        for case, steps in results.items()
        if "bfloat16" not in case and steps and isinstance(steps[0], dict) and "grads" in steps[0]
    }


def compare_with_one_process(results: Results) -> None:
    expected = select_steps(results["ddp-1"])
    assert len(expected) == CASES["ddp-2"]
    for launch in results.keys() - {"ddp-1"}:
        found = select_steps(results[launch])
        assert expected.keys() >= found.keys()
        assert len(found) == CASES[launch]
        for case, steps in found.items():
            for a, b in zip(expected[case], steps, strict=True):
                # float32 sums in another order; after a few steps of Adam at most 5e-6.
                assert relative_distance(b["grads"], a["grads"]) < 1e-5, (launch, case)
                names = ("reward", "reward_std", "frac_reward_zero_std", "loss", "entropy")
                # What the sources of a mixture earned, what a curriculum chose, what was replayed.
                of_examples = [n for n in a["metrics"] if n.startswith(OF_EXAMPLES)]
                names = {*names, "mean_token_accuracy", "grad_norm"} & a["metrics"].keys()
                for name in [*names, *of_examples]:
                    least = 1e-4 if name.endswith("gain_without_object") else 1e-6  # a difference
                    value = pytest.approx(a["metrics"][name], rel=1e-4, abs=least)
                    assert b["metrics"][name] == value, (launch, case, name)


def assert_equal_steps(expected: list[Step], found: list[Step]) -> None:
    for a, b in zip(expected, found, strict=True):
        assert b["metrics"]["reward"] == a["metrics"]["reward"]
        assert relative_distance(b["grads"], a["grads"]) < 1e-5


def test_two_processes_make_the_steps_of_one(folder):
    results = run_launches(folder, ["ddp-1", *TWO])
    compare_with_one_process(results)
    steps = {name: [s["metrics"] for s in cases["steps, full"]] for name, cases in results.items()}
    decodes = {name: sum(row["work/image_decodes"] for row in rows) for name, rows in steps.items()}
    # Groups were moved: the ranks that got them read their images again.
    assert all(decodes[launch] > decodes["ddp-1"] for launch in TWO)
    # Micro-batches are as large as the smallest of the devices allows.
    budgets = {n: r["out of memory"][0]["budgets"] for n, r in results.items() if "ddp" in n}
    assert budgets == {"ddp-1": [33 * 1024], "ddp-2": [16 * 1024] * 2}


@pytest.mark.parametrize("launch", ["ddp-2", "fsdp-2"])
def test_the_first_process_reads_the_weights_of_all_or_ends_all(folder, launch):
    (first, second), after, messages = run_launches(folder, [launch])[launch]["one reader"]
    assert first != second
    assert after == [first, first]
    assert "broken cannot be loaded" in messages[0]
    assert messages[1].startswith("the first process cannot read the model")


def test_two_processes_share_an_evaluation_and_its_errors(folder):
    results = run_launches(folder, ["ddp-1", "ddp-2"])
    (alone, all_twelve), failed = results["ddp-1"]["evaluation"]
    assert (len(alone), all_twelve) == (12, 12)
    assert "missing.png" in failed[0]
    (shared, six), failed = results["ddp-2"]["evaluation"]
    assert (shared, six) == (alone, 6)  # each output is scored by one process
    # The first process, whose results these are, has read its own examples.
    assert "another process of this run has failed" in failed[0]


def test_processes_with_unequal_turns_evaluate_as_one(folder):
    results = run_launches(folder, ["ddp-1", *WITH_EPISODES])
    (step,) = results["ddp-1"]["episodes"]
    (rows, metrics), by_command = step["evaluations"]
    assert by_command == [rows, metrics]
    assert metrics["tools/calls"] > 0
    assert len(json.loads(rows)) == 5
    counts = {len(row["turns"]) for row in json.loads(rows)}
    assert len(counts) > 1
    assert {"tools/gain", "letters_without_tools"} <= metrics.keys()
    assert step["metrics"]["tokens/observed"] > 0
    for launch in WITH_EPISODES:
        assert results[launch]["episodes"][0]["evaluations"] == step["evaluations"], launch


@pytest.mark.slow
def test_four_processes_make_the_steps_of_one(folder):
    results = run_launches(folder, ["ddp-1", *FOUR])
    compare_with_one_process(results)
    traffic = results["hsdp-4"]["communication, full"][0]  # two replicas of two shards
    assert traffic["passes"] > 1
    scattered = 4 * (traffic["passes"] * traffic["layers"] + traffic["base"] - traffic["layers"])
    assert traffic["bytes"]["_reduce_scatter_base_"] == scattered
    assert 0 <= traffic["bytes"]["allreduce_"] - scattered // 2 < 100


def test_the_cases_are_uneven(folder):
    results = run_launches(folder, ["ddp-1"])["ddp-1"]
    mixed = [step["metrics"] for step in results["a mixture"]]
    assert all(row["sources/plain/reward"] > 0 < row["sources/half/reward"] for row in mixed)
    assert any(step["metrics"]["replay/groups"] for step in results["a curriculum and replay"])
    cropped = [s["metrics"] for s in results["crops for a part of each group, and credit"]]
    assert any(0 < row.get("visual_credit/in_boxes", 0) < 1 for row in cropped)
    assert all("crop/reward" in row for row in cropped)
    shares = [step["metrics"]["revision/share"] for step in results["revised groups"]]
    assert any(0 < share < 1 for share in shares)
    steps = [step["metrics"] for steps in select_steps(results).values() for step in steps]
    metrics = [row for row in steps if "frac_reward_zero_std" in row]  # not of supervised steps
    # Groups with and without spread in one step: on four ranks some rank has no useful group.
    assert any(0 < row["frac_reward_zero_std"] < 1 for row in metrics)
    assert any(row["frac_reward_zero_std"] == 1 for row in metrics)
    assert any(row["resampled_groups"] for row in metrics)
    lengths = [row["completions/max_length"] - row["completions/min_length"] for row in metrics]
    assert max(lengths) > 0  # otherwise all types of loss would be equal
    assert len({row["reward"] for row in metrics}) > 3


@pytest.mark.parametrize("kind", BFLOAT16)
def test_sharded_weights_compute_in_bfloat16_as_replicated_weights_do(folder, kind):
    results = run_launches(folder, ["ddp-1", *TWO])
    case = f"bfloat16, {kind}"
    # The same values are rounded in the same places and summed in another order. With norms or
    # a residual stream in bfloat16 other tokens are sampled, and the distance is 1.
    assert_equal_steps(results["ddp-2"][case], results["fsdp-2"][case])


def test_weights_and_state_in_main_memory_make_the_same_steps(folder):
    """On a CPU nothing is copied; that the strategy was asked to is in its results."""
    results = run_launches(folder, ["ddp-1", "fsdp-2", "fsdp_offload-2"])
    plain, offloaded = results["fsdp-2"], results["fsdp_offload-2"]
    assert offloaded["offloaded"] == [True]
    # The gradient's norm is summed in another order.
    assert_equal_steps(plain["steps, full"], offloaded["steps, full"])


def test_out_of_memory_on_one_rank_with_sharded_weights_ends_all(folder):
    run_launches(folder, ["fsdp-2-oom"])
    last, first = ((folder / f"fsdp-2-oom.{rank}").read_text() for rank in ("last", "first"))
    advice = r"resume=true optim\.max_tokens_per_batch=\d+$"
    assert re.search(f"process 1: out of memory .* {advice}", last)
    assert first.startswith("another process of this run has died")
    checkpoints = folder / "runs" / "fsdp-2-oom" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-1"]
    verify_checkpoint(checkpoints / "step-1")


def test_communication_is_what_the_guide_states(folder):
    results = run_launches(folder, ["ddp-1", *TWO])
    small = 20_000  # bytes of pickled rewards, metrics and flags
    for kind in ("full", "lora"):
        traffic = {name: results[name][f"communication, {kind}"][0] for name in results}
        assert not traffic["ddp-1"]["calls"]
        for launch in TWO:
            counts = traffic[launch]
            base, layers, sent = counts["base"], counts["layers"], counts["bytes"]
            is_full, is_streamed = kind == "full", launch == "fsdp-2"
            passes = counts["passes"] if is_streamed else 0
            # Frozen weights outside the layers stay gathered from one step to the next.
            gathered_again = base - layers if is_streamed and is_full else 0
            gathered = base + gathered_again + 2 * passes * layers
            if launch == "ddp-2" or (launch == "fsdp_held-2" and not is_full):
                gathered = 0  # never sharded, or unchanged since the first step
            is_sharded = is_full and launch != "ddp-2"
            scattered = (passes * layers + base - layers if is_streamed else base) * is_sharded
            reduced = 0 if is_sharded else counts["trained"]
            assert 0 <= sent.get("_allgather_base_", 0) - 4 * gathered < small, launch
            assert sent.get("_reduce_scatter_base_", 0) == 4 * scattered, launch
            # In addition the step's totals, and the flags of errors and stop requests.
            assert 0 <= sent["allreduce_"] - 4 * reduced < 100, launch


def test_a_run_resumes_with_any_number_of_processes(folder):
    """Resumed runs have the steps and final weights of an uninterrupted one."""
    run_launches(folder, ["ddp-1", *TWO])  # each leaves the beginning of a run
    results = run_launches(folder, ["ddp-1-uninterrupted", *RESUMED])
    uninterrupted = results["ddp-1-uninterrupted"]["run"]
    assert len(uninterrupted) == 4
    expected = load_weights(folder, "ddp-1-uninterrupted", step=4)
    change = relative_distance(load_weights(folder, "ddp-1", step=2), expected)
    for name in RESUMED:
        for a, b in zip(uninterrupted, results[name]["run"], strict=True):
            for key in ("reward", "loss", "kl", "grad_norm"):
                assert b[key] == pytest.approx(a[key], rel=1e-3, abs=1e-6), (name, key)
        # Rounding makes 2e-5 of the change in the last two steps; a lost optimizer state, 1.3.
        assert relative_distance(load_weights(folder, name, step=4), expected) < 1e-3 * change, name


def load_weights(folder: Path, run: str, step: int) -> dict[str, torch.Tensor]:
    """Load the weights of a checkpoint as evaluations and exports do."""
    choice = resolve_model(f"{folder / 'runs' / run}@{step}")
    model = load_model(choice.settings, choice.checkpoint, training=False).model
    return {name: weight.detach() for name, weight in model.named_parameters()}


def test_sharded_runs_interrupted_in_a_rollout_resume_bit_for_bit(folder):
    names = ["fsdp-2-resumed", "fsdp-2-uninterrupted"]
    run_launches(folder, ["ddp-1", *TWO, *names])
    begun, resumed, expected = (folder / "runs" / name for name in ("fsdp-2", *names))
    assert [path.name for path in (begun / "checkpoints").iterdir()] == ["step-2"]
    for a, b in zip(read_metrics(expected), read_metrics(resumed), strict=True):
        # A resumed run decodes images again that the other has in its cache.
        assert {**b, "work/image_decodes": a["work/image_decodes"]} == a
    assert_same_weights(expected / "checkpoints" / "step-4", resumed / "checkpoints" / "step-4")


def test_a_sharded_checkpoint_can_be_used_as_a_model(folder, tmp_path):
    run_launches(folder, ["ddp-1", *TWO])
    runs = "fsdp_held-2", "ddp-2"
    sharded, full = (folder / "runs" / run / "checkpoints" / "step-2" for run in runs)
    names = {path.name for path in sharded.iterdir()}
    parts = [f"0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    for kind in ("model", "optimizer", "reference"):
        files = [f"{kind}-{part}" for part in parts]
        assert names >= set(files)
        sizes = [(sharded / file).stat().st_size for file in files]
        assert max(sizes) < 1.1 * min(sizes)  # the largest weight is a tenth of the tiny model
        full_size = (full / f"{kind}.safetensors").stat().st_size
        assert sum(sizes) == pytest.approx(full_size, rel=0.02)  # each tensor once, and headers
    assert "model.safetensors" not in names
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    expected = load_file(full / "model.safetensors")
    assert sorted(index["weight_map"]) == sorted(expected)
    exported = load_file(next(export(str(sharded), tmp_path / "out").glob("*.safetensors")))
    change = relative_distance(load_file(folder / "model" / "model.safetensors"), expected)
    found = {name: exported[name] for name in expected}
    assert relative_distance(found, expected) < 1e-3 * change
    (sharded / f"optimizer-{parts[1]}").write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match=parts[1]):
        verify_checkpoint(sharded)


def test_a_part_that_one_of_two_processes_cannot_write_leaves_no_checkpoint(folder):
    error, files = run_launches(folder, ["fsdp_held-2"])["fsdp_held-2"]["failed part"]
    assert error.startswith("another process of this run has failed")
    assert files == []


def test_a_renamed_run_ends_on_all_ranks(folder):
    errors = run_launches(folder, ["fsdp_held-2"])["fsdp_held-2"]["renamed run"]
    assert "was renamed or removed: this run ends" in errors[0]
    assert errors[1].startswith("another process of this run has failed")
