"""Time and memory of full GRPO steps, ours and TRL's, on the same model, images and settings.

    python perf/step_time.py --size 35m --image 448 --generations 8 --tokens 64 --prompts 4
    python perf/step_time.py --engines shared repeated --dtype bfloat16

Every engine runs in separate processes, which alternate so that drifts in the machine's speed
affect all engines alike. Memory is the peak above the memory of the interpreter with the loaded
model. MFU divides the FLOP/s of the products that a step needs, with each prompt once per group and
without recomputation, by the GPU's peak rate, or elsewhere by the rate of one large matrix product
in the same precision, measured in the same process. An engine that runs out of memory has a row
that says so; one that fails otherwise has none, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from trace_gaps import print_gaps

from vlm_grpo.cli.app import WAITING

ENGINES = {"shared": [], "repeated": [], "trl": ["trl"], "trl-vllm": ["trl", "vllm"]}
"""The engines, and the packages that each needs."""
PACKAGES = ("torch", "transformers", "peft", "trl", "vllm")
ROLLOUT = ("rollout", "prompts", "vision", "prefill", "decode")
"""Phases of the rollout. TRL has only the first, the whole rollout."""
SMOKE = ["--size", "tiny", "--image", "56", "--prompts", "2", "--generations", "2"]
SMOKE += ["--tokens", "3", "--rounds", "1", "--steps", "1", "--trl-batch", "4"]
SMOKE += ["--max-tokens", "16384", "--no-cuda-graphs", "--no-torch-compile"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="35m", help="a name in perf/random_models.py")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--image", type=int, default=448, help="side of the images in pixels")
    parser.add_argument("--prompts", type=int, default=4, help="prompts per step")
    parser.add_argument("--generations", type=int, default=8, help="completions per prompt, G")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per completion")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES)[:3], choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=2, help="processes per engine")
    parser.add_argument(
        "--steps", type=int, default=2, help="timed steps per process, after one warm-up step"
    )
    parser.add_argument(
        "--checkpointing", nargs="?", const="full", default="none", choices=["none", "mlp", "full"],
        help="policy.gradient_checkpointing; TRL knows only full",
    )  # fmt: skip
    for name in ("cuda_graphs", "torch_compile"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=f"rollout.{name}")
    parser.add_argument(
        "--dense", action="store_true", help="attention (ours) without PyTorch's varlen kernel"
    )
    parser.add_argument("--profile", type=Path, help="trace of one more step (ours), without .json")
    parser.add_argument("--full", action="store_true", help="full weights instead of LoRA")
    parser.add_argument(
        "--max-tokens", type=int, default=16384, help="tokens per micro-batch (ours)"
    )
    parser.add_argument(
        "--trl-batch", type=int, help="completions per micro-batch (TRL); default: all"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model in this process: does it run at all?"
    )
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = sys.argv[1:] if arguments is None else arguments
    smoke = SMOKE if "--smoke" in arguments else []
    options = parser.parse_args([*arguments, *smoke])
    for engine in options.engines:
        if missing := [name for name in ENGINES[engine] if find_version(name) is None]:
            parser.error(f"{engine} needs {', '.join(missing)}, not installed: leave {engine} out")
    return options


def find_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_versions() -> dict[str, str]:
    return {name: found for name in PACKAGES if (found := find_version(name)) is not None}


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    results: dict[str, list[dict]] = {engine: [] for engine in options.engines}
    failed, report = set(), {}
    for _ in range(options.rounds):
        for engine in options.engines:
            try:
                results[engine].append(run_engine(engine, arguments))
            except subprocess.CalledProcessError as error:
                print(f"{engine}: exit status {error.returncode}", file=sys.stderr)
                failed.add(engine)
                continue
            print(f"{engine}: {results[engine][-1]['seconds']}", file=sys.stderr)
            measured = {e: runs for e, runs in results.items() if runs and e not in failed}
            report = build_report(options, measured)
            if options.out:  # now, in case that the next engine takes too long
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    if report:
        print_table(report)
    if options.profile and not failed:
        print_gaps(Path(f"{options.profile}.json.gz"))
    return 1 if failed else 0


def run_engine(engine: str, arguments: list[str]) -> dict:
    """Run an engine in a new process, or with --smoke in this one, and return its figures."""
    name = "step_time_trl" if engine.startswith("trl") else "step_time_vlm_grpo"
    arguments = [*arguments, "--child", engine]
    if "--smoke" in arguments:
        module = import_module(name)
        return module.measure(parse_arguments(arguments), module.run_steps)
    command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *arguments]
    waiting = {} if engine.startswith("trl") else WAITING  # as in our commands
    environment = waiting | os.environ
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def build_report(options: argparse.Namespace, results: dict[str, list[dict]]) -> dict[str, Any]:
    """Return the settings and the figures of the engines that have run.

    Speedup and share of memory are relative to TRL's engine, or without one to the slowest engine
    and to the one with most memory. MFU is relative to the GPU's peak rate or, where that is
    unknown, to the measured matmul rate. All engines need the same FLOPs.
    """
    engines = {name: summarize(runs) for name, runs in results.items()}
    complete = {name: engine for name, engine in engines.items() if "failed" not in engine}
    flops = next((engine["flops"] for engine in complete.values() if engine["flops"]), {})
    theirs = [engine for name, engine in complete.items() if name.startswith("trl")]
    for engine in complete.values():
        base = theirs[:1] or complete.values()
        seconds, rate = engine["step_seconds"], engine["peak_rate"] or engine["matmul_rate"]
        engine["speedup"] = max(other["step_seconds"] for other in base) / seconds
        most = max(other["peak_memory_bytes"] for other in base)
        engine["memory_share"] = engine["peak_memory_bytes"] / most
        engine["mfu"] = {"step": sum(flops.values()) / seconds / rate} | {
            name: flops[name] / spent / rate
            for name, spent in engine["phases"].items()
            if name in flops and spent
        }
        rollout = sum(engine["phases"].get(name, 0.0) for name in ROLLOUT)
        engine["rollout_tokens_per_second"] = engine["tokens"] / rollout if rollout else None
    hidden = ("out", "child", "profile", "smoke")
    settings = {k: v for k, v in vars(options).items() if k not in hidden and v is not None}
    machine = next(iter(results.values()))[0]["machine"]
    return {
        "settings": settings, "machine": machine, "versions": find_versions(), "engines": engines,
    }  # fmt: skip


def summarize(runs: list[dict]) -> dict[str, Any]:
    if failed := [run["failed"] for run in runs if "failed" in run]:
        return {"failed": failed[0]}
    steps = [seconds for run in runs for seconds in run["seconds"]]
    phases = runs[0]["phases"]
    return {
        "step_seconds": statistics.median(steps),
        "all_step_seconds": steps,
        "peak_memory_bytes": max(run["memory"] for run in runs),
        "phases": {
            name: statistics.median([s for run in runs for s in run["phases"][name]])
            for name in phases
        },
        "flops": runs[0]["flops"],
        "tokens": runs[0]["tokens"],
        "matmul_rate": statistics.median([run["matmul_rate"] for run in runs]),
        "peak_rate": runs[0]["peak_rate"],
    }


def print_table(report: dict) -> None:
    """Print seconds, memory and MFU of each engine, and of its phases."""
    print("| engine | s per step | speedup | tokens/s | peak MB | share of memory | MFU |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, engine in report["engines"].items():
        if "failed" in engine:
            print(f"| {name} | {engine['failed']} | – | – | – | – | – |")
            continue
        seconds, memory = engine["step_seconds"], engine["peak_memory_bytes"]
        print(
            f"| {name} | {seconds:.2f} | {engine['speedup']:.1f} "
            f"| {engine['tokens'] / seconds:,.0f} | {memory / 1e6:.0f} "
            f"| {engine['memory_share']:.2f} | {format_share(engine['mfu']['step'])} |"
        )
    for name, engine in report["engines"].items():
        if engine.get("phases"):
            print(f"\n| {name}: phase | s | TFLOP | MFU |\n| --- | --- | --- | --- |")
        for phase, seconds in engine.get("phases", {}).items():
            work, mfu = engine["flops"].get(phase, 0.0), engine["mfu"].get(phase, 0.0)
            shown = f"{work / 1e12:.3g}" if work else "—"
            print(f"| {phase} | {seconds:.3f} | {shown} | {format_share(mfu)} |")


def format_share(value: float) -> str:
    return f"{value:.1%}" if value else "—"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
