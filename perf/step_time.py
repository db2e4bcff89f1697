"""Time and memory of full GRPO steps, ours and TRL's, on the same model, images and settings.

    python perf/step_time.py --size 35m --image 448 --generations 8 --tokens 64 --prompts 4
    python perf/step_time.py --engines shared repeated --dtype bfloat16

Every engine runs in separate processes, which alternate so that drifts in the machine's speed
affect all engines alike. Memory is the peak above the memory of the interpreter with the loaded
model. The share of the matmul rate divides the FLOP/s of the counted matrix products by the rate
of one large matrix product in the same precision, measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ENGINES = ("shared", "repeated", "trl")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="35m", help="a name in perf/random_models.py")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--image", type=int, default=448, help="side of the images in pixels")
    parser.add_argument("--prompts", type=int, default=4, help="prompts per step")
    parser.add_argument("--generations", type=int, default=8, help="completions per prompt, G")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per completion")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=2, help="processes per engine")
    parser.add_argument(
        "--steps", type=int, default=2, help="timed steps per process, after one warm-up step"
    )
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--full", action="store_true", help="full weights instead of LoRA")
    parser.add_argument(
        "--max-tokens", type=int, default=16384, help="tokens per micro-batch (ours)"
    )
    parser.add_argument(
        "--trl-batch", type=int, help="completions per micro-batch (TRL); default: all"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    results: dict[str, list[dict]] = {engine: [] for engine in options.engines}
    for _ in range(options.rounds):
        for engine in options.engines:
            module = "step_time_trl.py" if engine == "trl" else "step_time_vlm_grpo.py"
            script = str(Path(__file__).with_name(module))
            command = [sys.executable, script, *sys.argv[1:], "--child", engine]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[engine].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{engine}: {results[engine][-1]['seconds']}", file=sys.stderr)
    report = {
        "settings": {
            k: v for k, v in vars(options).items() if k not in ("out", "child") and v is not None
        },
        "machine": results[options.engines[0]][0]["machine"],
        "versions": {n: version(n) for n in ("torch", "transformers", "trl", "peft")},
        "engines": {engine: summarize(runs) for engine, runs in results.items()},
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)


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
        "matmul_rate": statistics.median([run["matmul_rate"] for run in runs]),
    }


def print_table(report: dict) -> None:
    slowest = max(e["step_seconds"] for e in report["engines"].values())
    most = max(e["peak_memory_bytes"] for e in report["engines"].values())
    print("| engine | s per step | speedup | peak MB | share of memory | of matmul rate |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, engine in report["engines"].items():
        seconds, memory = engine["step_seconds"], engine["peak_memory_bytes"]
        share = "—"
        if engine["flops"]:
            share = f"{engine['flops'] / seconds / engine['matmul_rate']:.0%}"
        print(
            f"| {name} | {seconds:.2f} | {slowest / seconds:.1f} | {memory / 1e6:.0f} "
            f"| {memory / most:.2f} | {share} |"
        )
    for name, engine in report["engines"].items():
        phases = ", ".join(f"{k} {v:.2f}" for k, v in engine["phases"].items())
        if phases:
            print(f"\n{name}: {phases}")


if __name__ == "__main__":
    main()
