"""The measurements in perf/: what they compare, whether it fits a GPU, and what they print."""

import argparse
import itertools
import json
import math
import os
import re
import select
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from family_policies import POLICIES, build_batch, build_policy, build_prompt, move_to_meta

from vlm_grpo.model.engine import kernels

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "perf/gpu.py"
RUN = {"phases": {"rollout": [1.0]}, "memory": 4, "tokens": 512, "matmul_rate": 1.0, "flops": {}}
RUN |= {"peak_rate": 1e3, "machine": {"device": "H100"}}
OURS = RUN | {"seconds": [2.0], "memory": 1, "flops": {"decode": 50.0, "update": 450.0}}
OURS |= {"phases": {"vision": [0.25], "decode": [0.25], "update": [1.0]}}
ENGINES = {"shared": OURS, "trl": RUN | {"seconds": [10.0]}, "trl-vllm": RUN | {"seconds": [4.0]}}


@pytest.fixture
def perf(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "perf")
    return import_module


def test_parts_compare_what_the_goals_are_stated_for_in_order_of_value(perf):
    gpu, parse = perf("gpu"), perf("step_time").parse_arguments
    grid = set()
    for name, part in gpu.PARTS.items():
        assert 0 < gpu.expect_seconds(part) < 60 * gpu.MINUTES, name
        if name.startswith("3b-"):
            options = parse(part.arguments.split())
            assert (options.size, options.dtype, options.full) == ("qwen2.5-vl-3b", "bfloat16", 0)
            # One group per micro-batch of either engine.
            prompt = options.image**2 // 28**2 + 17  # tokens around the image
            answers = options.generations * options.tokens
            assert options.trl_batch == options.generations
            assert prompt + answers <= options.max_tokens < 2 * prompt + answers
            assert part.engines[0] == "shared"
            grid.add((options.image, options.generations, options.tokens, part.engines[1]))
    names, seconds = list(gpu.PARTS), map(gpu.expect_seconds, gpu.PARTS.values())
    assert names[:3] == ["correctness", "gpu-tests", "3b-1008-g8-512"]
    ends = dict(zip(names, itertools.accumulate(seconds), strict=True))
    assert ends["step-512-eager"] < 30 * 60  # the first half hour
    sizes = [(i, g, t) for i in (448, 1008) for g in (8, 16) for t in (64, 512)]
    assert grid == {(*size, other) for size in sizes for other in ("trl", "trl-vllm")}


def test_an_engine_that_fails_leaves_the_figures_of_the_others(perf, monkeypatch, capsys, tmp_path):
    gpu, step_time = perf("gpu"), perf("step_time")
    monkeypatch.setattr(step_time, "version", lambda name: "1.0")  # TRL and vLLM are installed

    def run(command: list[str], output: Any, seconds: float, temporary: str) -> bool:
        def run_engine(engine: str, arguments: list[str]) -> dict[str, Any]:
            if engine == "trl-vllm":
                raise subprocess.CalledProcessError(3, [])
            return ENGINES[engine]

        monkeypatch.setattr(step_time, "run_engine", run_engine)
        output.write("the end of the output\n")
        return step_time.main(command[1:]) == 0

    monkeypatch.setattr(gpu, "run_process", run)
    names = ["3b-448-g8-64", "3b-448-g8-64-vllm"]
    assert gpu.run_parts(names, tmp_path, False, math.inf) == 1
    shown = capsys.readouterr()
    assert "trl-vllm: exit status 3" in shown.err
    assert f"failed: {names[1]}; another call runs them again" in shown.err
    results = gpu.load_results([tmp_path])
    found = [results[name]["figures"]["engines"].keys() for name in names]
    assert found == [{"shared", "trl"}, {"shared"}]
    assert [gpu.is_complete(results[name], gpu.PARTS[name]) for name in names] == [True, False]
    assert results[names[1]]["log"][-1:] == ["the end of the output"]
    assert gpu.is_complete(results[names[1]], gpu.PARTS["vision"])  # of ours alone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "summary.md"]
    table = (tmp_path / "summary.md").read_text()
    assert "| 3b-448-g8-64 | shared / trl | 2.00 / 10.00 | 5.0 |" in table
    filled = gpu.fill_table("a\n" + gpu.START + "old\n" + gpu.END + "b\n", results)
    assert filled == "a\n" + gpu.START + "\n" + table + "\n" + gpu.END + "b\n"


def test_a_step_that_runs_out_of_memory_is_a_result(perf):
    options = perf("step_time").parse_arguments(["--smoke"])

    def run(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    found = perf("measurement").measure(options, run)
    assert (found["failed"], found["seconds"]) == ("out of memory", [])


def test_a_part_that_takes_too_long_ends_with_all_its_processes(perf, tmp_path, monkeypatch):
    wait, (read, write) = subprocess.Popen.wait, os.pipe()
    reader = os.fdopen(read, "rb")

    def wait_for_worker(process: Any, seconds: float | None = None) -> int:
        if seconds is None:
            return wait(process)
        assert reader.readline() == b"worker\n"
        return wait(process, 0.01 * seconds)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_worker)
    worker = "import sys, time; print('worker', file=sys.stderr, flush=True); time.sleep(60)"
    part = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    with os.fdopen(write, "w") as output:
        assert not perf("gpu").run_process(["-c", part], output, 1, str(tmp_path))
    # The pipe ends with the last process that can write to it.
    assert select.select([reader], [], [], 10)[0]
    with reader:
        assert reader.read() == b""


def test_attention_without_varlen_needs_no_kernel_of_a_cpu(perf, monkeypatch):
    for module, name in ((kernels, "has_varlen"), (kernels, "is_cpu")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored after the test
    perf("step_time_vlm_grpo").use_dense_attention()
    policy, _ = build_policy("qwen2_5_vl", POLICIES["lora-bfloat16"], text=2)
    move_to_meta(monkeypatch, policy, prompt := build_prompt(policy))
    with torch.profiler.profile() as profiler:
        policy.score(build_batch(prompt)).logprobs.sum().backward()
    names = {event.key for event in profiler.key_averages()}
    assert "aten::scaled_dot_product_attention" in names
    assert not [name for name in names if "for_cpu" in name or "varlen" in name]


def measure_all(folder: Path) -> str:
    """Run all parts with a tiny model, and return what is printed."""
    log = folder.with_suffix(".log")
    log.unlink(missing_ok=True)
    process = forked.start(log, forked.run_program, PROGRAM, "--smoke", "--out", str(folder))
    process.join(forked.TIMEOUT)
    assert process.exitcode == 0, log.read_text()
    return log.read_text()


@pytest.mark.slow
def test_all_parts_run_with_a_tiny_model_and_are_not_run_again(perf, tmp_path):
    readme, folder = (ROOT / "perf/README.md").read_bytes(), tmp_path / "results"
    assert "step-64" in measure_all(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["results.json", "summary.md"]
    results, parts = perf("gpu").load_results([folder]), perf("gpu").PARTS
    assert results.keys() == {n for n, part in parts.items() if not part.missing} - {"gpu-tests"}
    assert len([name for name in results if name.startswith("3b-")]) >= 8
    for result in results.values():
        assert all((result["passed"], result["output"], result["versions"]["torch"]))
    checks = {"sampling, bfloat16", "step of tiny: gradient of a step"}
    assert checks <= results["correctness"]["figures"].keys()
    engines = results["step-64"]["figures"]["engines"]
    assert engines["shared"]["phases"]["decode"] > 0
    assert engines.keys() == {"shared", "trl"}
    assert all(engine["mfu"]["step"] > 0 for engine in engines.values())
    assert "| idle in phase |" in "".join(results["profile"]["output"])
    assert "step-64" not in measure_all(folder)
    assert (ROOT / "perf/README.md").read_bytes() == readme


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_message(perf, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(PROGRAM)])
    assert perf("gpu").main() == 2
    message = "perf/gpu.py: PyTorch finds no CUDA GPU here; --smoke runs anywhere"
    assert capsys.readouterr().err.strip() == message


def test_a_step_of_another_family_is_timed_by_phase_and_form(perf):
    program, name = perf("family_steps"), "internvl"
    options = argparse.Namespace(sizes=[2], tokens=2, turns=1, warmups=0, edge=224)
    found = program.measure(name, options)
    # A quarter of the pixels that the recorded steps have: 64 tokens of the image.
    assert found["prompt tokens"] == 161
    for form in ("shared", "repeated"):
        (step,) = found["steps"][form]["2"]
        assert min(step.values()) > 0
        assert set(step) == {f"{p} {c}" for p in ("rollout", "update") for c in ("cpu", "wall")}
    rows = program.format_table({name: found}).splitlines()
    assert [row.split(" | ")[1] for row in rows[2:]] == ["shared", "repeated"]
    # Of the first group size to itself.
    assert all(row.endswith("| 1.0 (1.0 to 1.0) | 1.0 (1.0 to 1.0) |") for row in rows[2:])


def test_the_guide_has_the_recorded_steps_and_the_expected_seconds_of_the_recorded_counts(perf):
    readme, program = (ROOT / "perf/README.md").read_text(), perf("expected_seconds")
    for name in ("family_steps", "family_steps-64"):
        found = json.loads((ROOT / f"perf/results/{name}.json").read_text())["families"]
        assert perf("family_steps").format_table(found) in readme
    recorded = json.loads(program.RECORDED.read_text())
    assert program.format_all(recorded) in readme
    counts = program.Counts(**next(iter(recorded.values()))["ours"])
    fewer = counts._replace(layer=counts.layer / 2)
    tables = [
        [row.split(" | ")[1:4] for row in program.format_table(c, counts, 0, 16384, True)][2:]
        for c in (counts, fewer)
    ]
    for (rollout, update, _), (faster, same, _) in zip(*tables, strict=True):
        assert update == same
        assert float(faster) < float(rollout)


def test_the_study_compares_with_plain_grpo_at_equal_samples_and_at_equal_time(perf):
    study = perf("study")

    def run(method: str, seconds: float, values: list[float], right: str) -> dict[str, Any]:
        curve = [[10 * index, value] for index, value in enumerate(values)]
        given = {"task": "words", "method": method, "seed": 0, "held_out": curve, "right": right}
        return {**given, "cpu_seconds": seconds}

    plain = run("grpo", 20.0, [0.25, 0.5, 0.5], "1100")
    slow = run("papo", 40.0, [0.25, 0.5, 1.0], "1111")
    # After the 20 s of the plain run, the slow one is in the middle of its steps.
    assert [study.value_at(slow, seconds) for seconds in (20.0, 30.0)] == [0.5, 0.75]
    assert study.value_at(plain, 40.0) == 0.5
    table = study.format_table([plain, slow]).splitlines()
    assert table[2] == "| words | grpo | 25.0 → 50.0 | – | – | 20 s |"
    # Two of four examples more are right; the bounds are quantiles of means of four values.
    change = re.escape("| words | papo | 25.0 → 100.0 | +50.0 [")
    assert re.fullmatch(change + r"\+0\.0, \+100\.0\] \| \+0\.0 \| × 2\.00 \|", table[3])
    assert study.format_table([slow]).count("\n") == 1  # nothing to compare it with
    page = (ROOT / "docs/study.md").read_text("utf-8")
    recorded = json.loads((ROOT / "perf/results/study.json").read_text())
    assert study.format_table(recorded) in page
    parts = json.loads((ROOT / "perf/results/seen_parts.json").read_text())
    table = perf("rare_success").format_table(parts, ("relations",), ("grpo", "supervised"))
    assert set(table.splitlines()) <= set(page.splitlines())
