"""Run the CUDA tests and the measurements of a GPU, in parts of at most eight minutes.

    make gpu                                  all parts that have no result yet
    python perf/gpu.py --parts step-512       one part, again
    python perf/gpu.py --smoke                all measurements with a tiny model, on any machine

A part writes ``perf/results/gpu/NAME.json`` when it has finished, so that another call continues
after an interruption; ``--parts`` repeats a part. All of them fill the table in ``perf/README.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import runpy
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch

PERF = Path(__file__).parent
README = PERF / "README.md"
START, END = "<!-- results of perf/gpu.py -->\n", "<!-- end of the results -->\n"
MINUTES = 8
PACKAGES = ("torch", "transformers", "peft", "trl", "vllm")
STEP = "--size qwen2.5-vl-7b --dtype bfloat16 --image 1008 --checkpointing --rounds 1"
GROUPS = "--prompts 8 --generations 8"


@dataclass(frozen=True)
class Part:
    """One measurement.

    Attributes:
        what: what it shows.
        script: a script of this folder; ``pytest`` for the tests.
        arguments: its arguments.
        needs: a package without which it is skipped; "" for none.
    """

    what: str
    script: str
    arguments: str
    needs: str = ""


def _step(what: str, arguments: str, engines: str = "shared", needs: str = "trl") -> Part:
    needs = "" if engines == "shared" else needs
    return Part(what, "step_time.py", f"{STEP} {arguments} --engines {engines}", needs)


PARTS = {
    "cuda-tests": Part("the tests marked gpu pass", "pytest", "-m gpu"),
    "step-64": _step("a step with short answers", f"{GROUPS} --tokens 64"),
    "step-64-trl": _step("the same with TRL", f"{GROUPS} --tokens 64 --trl-batch 8", "trl"),
    "step-512": _step("a step with long answers", f"{GROUPS} --tokens 512"),
    "step-512-eager": _step(
        "the same without CUDA graphs", f"{GROUPS} --tokens 512 --no-cuda-graphs"
    ),
    "step-512-compiled": _step(
        "the same with compiled decode steps", f"{GROUPS} --tokens 512 --torch-compile"
    ),
    "step-512-trl": _step(
        "the same with TRL", f"{GROUPS} --tokens 512 --steps 1 --trl-batch 8", "trl"
    ),
    "update-mlp": _step(
        "recomputing the feed-forward layers only", f"{GROUPS} --tokens 512 --checkpointing mlp"
    ),
    "step-2048": _step(
        "attention over long completions", "--prompts 2 --generations 16 --tokens 2048 --steps 1"
    ),
    "vision": _step("a step dominated by images", f"{GROUPS} --tokens 16"),
    "profile": _step(
        "a profiler trace of one step",
        f"{GROUPS} --tokens 64 --steps 1 --profile {{out}}/step",
    ),
    "plan": Part("planned and measured memory", "plan_accuracy.py", "--gpu"),
    "24gb": Part(
        "a step of a 3B model that fits into 24 GB",
        "step_time.py",
        f"{STEP} {GROUPS} --tokens 256 --size qwen2.5-vl-3b --max-tokens 16384 --engines shared",
    ),
    "rollout-64": _step("decoding 64 rows", f"{GROUPS} --tokens 256"),
    "rollout-256": _step("decoding 256 rows", "--prompts 16 --generations 16 --tokens 256"),
    "rollout-64-vllm": _step(
        "the same 64 rows in TRL with vLLM", f"{GROUPS} --tokens 256 --trl-batch 8", "trl-vllm",
        needs="vllm",
    ),
    "rollout-256-vllm": _step(
        "the same 256 rows in TRL with vLLM",
        "--prompts 16 --generations 16 --tokens 256 --steps 1 --trl-batch 8", "trl-vllm",
        needs="vllm",
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="only these, again")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, without the tests")
    parser.add_argument("--out", type=Path, default=PERF / "results/gpu", help="folder of results")
    options = parser.parse_args()
    if not (options.smoke or torch.cuda.is_available()):
        print("perf/gpu.py: PyTorch finds no CUDA GPU here; --smoke runs anywhere", file=sys.stderr)
        return 2
    if options.smoke and options.out.resolve() == (PERF / "results/gpu").resolve():
        parser.error("--smoke measures nothing: name another folder with --out")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.parts or PARTS:
        path, part = options.out / f"{name}.json", PARTS[name]
        if (path.is_file() and not options.parts) or (options.smoke and part.script == "pytest"):
            continue
        if part.needs and find_version(part.needs) is None:
            print(f"{name}: skipped, {part.needs} is not installed", flush=True)
            continue
        print(f"{name}: {part.what}", flush=True)
        result = run_part(part, path, options.smoke)
        if result is None:
            failed.append(name)
            continue
        path.write_text(json.dumps(result, indent=1) + "\n")
        if not options.smoke:
            README.write_text(fill_table(README.read_text(), options.out))
    if failed:
        print(f"failed: {', '.join(failed)}; another call runs them again", file=sys.stderr)
    return 1 if failed else 0


def run_part(part: Part, path: Path, smoke: bool) -> dict[str, Any] | None:
    """Run a part and return its result; None if it failed or took too long."""
    started = time.perf_counter()
    figures, log = path.with_suffix(".figures.json"), path.with_suffix(".log")
    arguments = part.arguments.format(out=path.parent).split()
    if part.script == "pytest":
        command = ["-m", "pytest", "-q", *arguments]
    else:
        arguments += ["--out", str(figures), *(["--smoke"] if smoke else [])]
        command = [str(PERF / part.script), *arguments]
    with log.open("w") as file:
        has_passed = run_fork(part.script, arguments, file) if smoke else run_process(command, file)
    if not has_passed:
        print(f"  failed or took over {MINUTES} minutes; its output is in {log}", file=sys.stderr)
        return None
    result = {
        "what": part.what,
        "command": " ".join(["python", *command]).replace(f"{PERF.parent}/", ""),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: found for name in PACKAGES if (found := find_version(name))},
        "seconds": round(time.perf_counter() - started, 1),
        "output": log.read_text().splitlines(),
        "figures": json.loads(figures.read_text()) if figures.is_file() else None,
    }
    figures.unlink(missing_ok=True)
    log.unlink()
    return result


def run_process(command: list[str], output: IO[str]) -> bool:
    """Run a Python command within the time limit; return whether it succeeded."""
    try:
        subprocess.run([sys.executable, *command], stdout=output, timeout=60 * MINUTES, check=True)
    except subprocess.SubprocessError:
        return False
    return True


def run_fork(script: str, arguments: list[str], output: IO[str]) -> bool:
    """Run a script in a fork of this process, which imports the libraries only once."""

    def run() -> None:
        sys.argv = [script, *arguments]
        with contextlib.redirect_stdout(output):
            runpy.run_path(str(PERF / script), run_name="__main__")
        output.flush()

    modules = ["step_time_vlm_grpo", "plan_accuracy_step"]
    for module in [*modules, *(["step_time_trl"] if find_version("trl") else [])]:
        import_module(module)
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode == 0


def find_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def fill_table(text: str, folder: Path) -> str:
    """Return the README with a section for each result in the folder, in the order of the parts."""
    sections = []
    for name in PARTS:
        path = folder / f"{name}.json"
        if path.is_file():
            result = json.loads(path.read_text())
            versions = ", ".join(f"{name} {found}" for name, found in result["versions"].items())
            title = f"**{name}**: {result['what']}. `{result['command']}`, {result['gpu']}"
            sections.append("\n".join([f"{title}, {versions}.", "", *result["output"], ""]))
    before, rest = text.split(START)
    return before + START + "\n" + "\n".join(sections) + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    sys.exit(main())
