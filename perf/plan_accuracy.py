"""What ``vlm-grpo plan`` predicts of memory against what real steps took, on this machine's CPU.

Each setting runs in a process of its own: two steps of the trainer (the second has the optimizer's
moments), and the peak of resident memory in rollout and update above the interpreter with
everything imported. glibc keeps much of what is freed; the processes run under MALLOC_ settings
that make it give blocks back, so that what is measured is what is in use. Some settings are
measured without them too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RETURN_FREED = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
PLAIN = {
    "size": "35m", "dtype": "float32", "full": False, "checkpointing": False, "image": 448,
    "prompts": 4, "generations": 8, "tokens": 64, "max_tokens": 16384, "freeze": [],
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
    "small, full, 16 completions": {"size": "12m", "full": True, "generations": 16},
    "small, LoRA, 8 prompts": {"size": "12m", "generations": 16, "prompts": 8},
}
ALSO_DEFAULT = ("LoRA", "full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=Path, help="JSON to write; what it holds of others is kept.")
    options = parser.parse_args()
    held = json.loads(options.out.read_text()) if options.out and options.out.is_file() else {}
    for name in options.cases:
        for environment in (RETURN_FREED, {}) if name in ALSO_DEFAULT else (RETURN_FREED,):
            label = name if environment else f"{name} (glibc's defaults)"
            held[label] = figures = step(PLAIN | CASES[name], environment)
            print(row(label, figures), flush=True)
            if options.out:
                options.out.write_text(json.dumps(held, indent=1) + "\n")


def step(case: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """The figures of one process."""
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


def row(label: str, figures: dict[str, Any]) -> str:
    """A row of the table in docs/planning.md."""
    cells = [label]
    for name in ("rollout", "update"):
        predicted, measured = (figures[kind][name] for kind in ("predicted", "measured"))
        cells += [f"{predicted / 1e6:,.0f}", f"{measured / 1e6:,.0f}"]
    predicted, measured = (max(figures[kind].values()) for kind in ("predicted", "measured"))
    return f"| {' | '.join(cells)} | {predicted / measured - 1:+.0%} |"


if __name__ == "__main__":
    main()
