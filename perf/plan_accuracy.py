"""Memory predicted by ``vlm-grpo plan`` and measured in real steps, on the CPU or on a GPU.

Each case runs two steps of the trainer (the second has the optimizer's moments) in a separate
process. The measurement is the peak in rollout and update: on a CPU of the resident memory above
that of the interpreter after all imports, with ``--gpu`` of the tensors on the GPU. glibc retains
much of the memory that is freed on a CPU, so the processes use MALLOC_ settings that return it to
the system; some cases are also measured without them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

RETURN_FREED = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
DEFAULTS = {
    "size": "35m", "dtype": "float32", "full": False, "checkpointing": False, "image": 448,
    "prompts": 4, "generations": 8, "tokens": 64, "max_tokens": 16384, "freeze": [],
    "policy": {}, "optimizer": "adamw",
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "LoRA, bfloat16": {"dtype": "bfloat16"},
    "full": {"full": True},
    "full, bfloat16": {"full": True, "dtype": "bfloat16"},
    "full, vision frozen": {"full": True, "freeze": ["vision", "projector"]},
    "full, checkpointing": {"full": True, "checkpointing": True},
    "LoRA, checkpointing": {"checkpointing": True},
    "LoRA, 16 completions": {"generations": 16, "prompts": 2},
    "LoRA, 896 × 896": {"image": 896, "prompts": 2, "generations": 4},
    "LoRA, micro-batches of 800": {"max_tokens": 800},
    "LoRA, 4 bits, bfloat16": {"dtype": "bfloat16", "policy": {"load_in": "4bit"}},
    "LoRA, 8 bits, bfloat16": {"dtype": "bfloat16", "policy": {"load_in": "8bit"}},
    "LoRA, 4 bits, float32": {"policy": {"load_in": "4bit"}},
    "full, weights in bfloat16": {
        "dtype": "bfloat16", "full": True, "policy": {"master_weights": "bfloat16"},
    },
    "full, 8-bit optimizer": {"dtype": "bfloat16", "full": True, "optimizer": "adamw_8bit"},
    "full, Adafactor": {"dtype": "bfloat16", "full": True, "optimizer": "adafactor"},
    "full, Muon": {"dtype": "bfloat16", "full": True, "optimizer": "muon"},
    "small, full, 16 completions": {"size": "12m", "full": True, "generations": 16},
    "small, LoRA, 8 prompts": {"size": "12m", "generations": 16, "prompts": 8},
}  # fmt: skip
SMOKE = {"size": "tiny", "image": 56, "prompts": 1, "generations": 2, "tokens": 3}
GPU_CASES = {
    "3B, full, checkpointing": {"size": "qwen2.5-vl-3b", "full": True, "checkpointing": True},
    "3B, LoRA": {"size": "qwen2.5-vl-3b"},
    "3B, LoRA, mlp recomputed": {"size": "qwen2.5-vl-3b", "checkpointing": "mlp"},
    "7B, LoRA, checkpointing": {"size": "qwen2.5-vl-7b", "checkpointing": True},
}
"""GPU cases, in bfloat16 with images of 1008 × 1008."""
ALSO_WITH_GLIBC_DEFAULTS = ("LoRA", "full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--out", type=Path, help="JSON file for the results; other cases in it are kept"
    )
    parser.add_argument("--gpu", action="store_true", help="the cases of a GPU")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model in this process: does it run at all?"
    )
    options = parser.parse_args()
    if options.gpu:
        measure_gpu_cases(options)
        return
    results = json.loads(options.out.read_text()) if options.out and options.out.is_file() else {}
    for name in options.cases:
        for environment in (
            (RETURN_FREED, {}) if name in ALSO_WITH_GLIBC_DEFAULTS else (RETURN_FREED,)
        ):
            label = name if environment else f"{name} (glibc's defaults)"
            results[label] = figures = measure_case(DEFAULTS | CASES[name], environment)
            print(format_row(label, figures), flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")


def measure_gpu_cases(options: argparse.Namespace) -> None:
    results = {}
    print("| setting | rollout, planned | measured | update, planned | measured | peak |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, changes in GPU_CASES.items():
        case = DEFAULTS | {"dtype": "bfloat16", "image": 1008} | changes
        if options.smoke:
            module = import_module("plan_accuracy_step")
            found = {"case": case, **module.run_case(case | SMOKE)}
        else:
            found = measure_case(case, {})
        results[name] = found
        print(format_row(name, found), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def measure_case(case: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Run a case in a separate process and return its figures."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("plan_accuracy_step.py")),
        json.dumps(case),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return {"case": case, **json.loads(done.stdout.splitlines()[-1])}


def format_row(label: str, figures: dict[str, Any]) -> str:
    """Format a row of the table in docs/planning.md."""
    cells = [label]
    for name in ("rollout", "update"):
        predicted, measured = (figures[kind][name] for kind in ("predicted", "measured"))
        cells += [f"{predicted / 1e6:,.0f}", f"{measured / 1e6:,.0f}"]
    predicted, measured = (max(figures[kind].values()) for kind in ("predicted", "measured"))
    return f"| {' | '.join(cells)} | {predicted / measured - 1:+.0%} |"


if __name__ == "__main__":
    main()
