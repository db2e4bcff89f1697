"""Time and memory of full GRPO steps, ours and TRL's, on the same model, images and settings.

    python perf/step_time.py --size 35m --image 448 --generations 8 --tokens 64 --prompts 4
    python perf/step_time.py --engines shared repeated --dtype bfloat16

Every engine runs in separate processes, which alternate so that drifts in the machine's speed
affect all engines alike. Memory is the peak above the memory of the interpreter with the loaded
model. MFU divides the FLOP/s of the products that a step needs, with each prompt once per group and
without recomputation, by the GPU's peak rate, or elsewhere by the rate of one large matrix product
in the same precision, measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ENGINES = ("shared", "repeated", "trl", "trl-vllm")
SMOKE = ["--size", "tiny", "--image", "56", "--prompts", "2", "--generations", "2"]
SMOKE += ["--tokens", "3", "--rounds", "1", "--steps", "1", "--trl-batch", "4"]
SMOKE += ["--no-cuda-graphs", "--no-torch-compile"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="35m", help="a name in perf/random_models.py")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--image", type=int, default=448, help="side of the images in pixels")
    parser.add_argument("--prompts", type=int, default=4, help="prompts per step")
    parser.add_argument("--generations", type=int, default=8, help="completions per prompt, G")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per completion")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES[:3]), choices=ENGINES)
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
    if "trl-vllm" in options.engines and find_spec("vllm") is None:
        parser.error("trl-vllm needs vLLM: pip install vllm, or leave it out of --engines")
    return options


def main(arguments: list[str]) -> None:
    options = parse_arguments(arguments)
    results: dict[str, list[dict]] = {engine: [] for engine in options.engines}
    for _ in range(options.rounds):
        for engine in options.engines:
            results[engine].append(run_engine(engine, arguments))
            print(f"{engine}: {results[engine][-1]['seconds']}", file=sys.stderr)
    report = {
        "settings": {
            k: v
            for k, v in vars(options).items()
            if k not in ("out", "child", "profile", "smoke") and v is not None
        },
        "machine": results[options.engines[0]][0]["machine"],
        "versions": {n: version(n) for n in ("torch", "transformers", "trl", "peft")},
        "engines": {engine: summarize(runs) for engine, runs in results.items()},
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)


def run_engine(engine: str, arguments: list[str]) -> dict:
    """Run an engine in a new process, or with --smoke in this one, and return its figures."""
    name = "step_time_trl" if engine.startswith("trl") else "step_time_vlm_grpo"
    arguments = [*arguments, "--child", engine]
    if "--smoke" in arguments:
        module = import_module(name)
        return module.measure(parse_arguments(arguments), module.run_steps)
    command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def summarize(runs: list[dict]) -> dict:
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
    """Print seconds, memory and MFU of each engine, and of the phases of ours.

    MFU is relative to the GPU's peak rate or, where that is unknown, to the measured matmul rate.
    All engines need the same FLOPs.
    """
    engines = report["engines"]
    slowest = max(engine["step_seconds"] for engine in engines.values())
    most = max(engine["peak_memory_bytes"] for engine in engines.values())
    flops = next((engine["flops"] for engine in engines.values() if engine["flops"]), {})

    def share(flops: float, seconds: float, engine: dict) -> str:
        rate = engine["peak_rate"] or engine["matmul_rate"]
        return f"{flops / seconds / rate:.1%}" if flops and seconds else "—"

    print("| engine | s per step | speedup | tokens/s | peak MB | share of memory | MFU |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, engine in engines.items():
        seconds, memory = engine["step_seconds"], engine["peak_memory_bytes"]
        tokens, mfu = engine["tokens"] / seconds, share(sum(flops.values()), seconds, engine)
        print(
            f"| {name} | {seconds:.2f} | {slowest / seconds:.1f} | {tokens:,.0f} "
            f"| {memory / 1e6:.0f} | {memory / most:.2f} | {mfu} |"
        )
    for name, engine in engines.items():
        if engine["phases"]:
            print(f"\n| {name}: phase | s | TFLOP | MFU |\n| --- | --- | --- | --- |")
        for phase, seconds in engine["phases"].items():
            work = engine["flops"].get(phase, 0.0)
            shown = f"{work / 1e12:.3g} | {share(work, seconds, engine)}" if work else "— | —"
            print(f"| {phase} | {seconds:.3f} | {shown} |")


if __name__ == "__main__":
    main(sys.argv[1:])
