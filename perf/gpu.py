"""Check and measure a GPU, from a checkout: no install, no network, the machine's own packages.

    python3 perf/gpu.py                                the parts without a result, in order of value
    python3 perf/gpu.py --out FOLDER --budget-minutes 9   only those that fit into nine minutes
    python3 perf/gpu.py --list                         the parts, with the seconds each should take
    python3 perf/gpu.py --parts step-512 --out FOLDER  one part, again
    python3 perf/gpu.py --smoke --out FOLDER           all of them with a tiny model, on any machine
    python3 perf/gpu.py --readme FOLDER …              put the results into perf/README.md

A call writes two small files, ``results.json`` after each part and ``summary.md``, to a folder
outside the checkout (default: in the folder of temporary files), and continues what is there.
``--after FOLDER …`` names folders of earlier calls whose parts are not run again. A part takes at
most nine minutes. Without TRL it measures ours alone, and parts with vLLM are skipped without it.
If an engine fails or the time is over, the result of the others is kept with the end of the output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import checkout
import torch
from step_time import ENGINES, find_version, find_versions, format_share, parse_arguments

PERF = checkout.ROOT / "perf"
README = PERF / "README.md"
START, END = "<!-- results of perf/gpu.py -->\n", "<!-- end of the results -->\n"
MINUTES = 9
LOG_LINES = 60  # of the output of a part that fails, which its result keeps
PIXELS, PROMPT = 28 * 28, 40
"""Pixels per image token, and tokens of the question, in these models' prompts."""
STEP = "--dtype bfloat16 --checkpointing --trl-batch 8 --rounds 1"
S3 = f"{STEP} --size qwen2.5-vl-3b --prompts 8"
S7 = f"{STEP} --size qwen2.5-vl-7b --prompts 8 --generations 8 --image 1008"
FITS = {
    "3b-full": f"{STEP} --size qwen2.5-vl-3b --full",
    "7b-lora": f"{STEP} --size qwen2.5-vl-7b",
}
OURS, TRL, VLLM = ("shared",), ("shared", "trl"), ("shared", "trl-vllm")


@dataclass(frozen=True)
class Part:
    """One measurement.

    Attributes:
        what: what it shows.
        arguments: the script's arguments.
        engines: engines of ``step_time.py``; those that are not installed are left out.
        script: a script of this folder; ``pytest`` for the tests.
        seconds: expected seconds of other scripts, not measured.
        packages: modules that it needs besides those of ``checkout.py``.
    """

    what: str
    arguments: str
    engines: tuple[str, ...] = ()
    script: str = "step_time.py"
    seconds: float = 0.0
    packages: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """The packages without which the part is skipped."""
        lacking = [name for name in self.packages if find_spec(name) is None]
        if self.engines and not self.available:
            lacking += [name for name in ENGINES[self.engines[-1]] if find_version(name) is None]
        return lacking

    @property
    def available(self) -> list[str]:
        """The engines whose packages are installed; none without vLLM where it is compared."""
        found = [name for name in self.engines if all(map(find_version, ENGINES[name]))]
        return found if "trl-vllm" in found or "trl-vllm" not in self.engines else []


def build_grid(engines: tuple[str, ...], name: str) -> dict[str, Part]:
    """Return the comparisons that the goals are stated for, with one group per micro-batch."""
    return {
        f"3b-{image}-g{group}-{tokens}{name}": Part(
            f"3B LoRA, {image} × {image} pixels, G {group}, {tokens} tokens",
            f"{S3} --image {image} --generations {group} --tokens {tokens} --trl-batch {group} "
            f"--max-tokens {image**2 // PIXELS + 2 * PROMPT + group * tokens}",
            engines,
        )
        for image in (448, 1008)
        for group in (8, 16)
        for tokens in (64, 512)
    }


def build_limits() -> dict[str, Part]:
    """Return steps of growing groups and images: the last one without "out of memory" fits."""
    prompt = "--prompts 1 --steps 1 --tokens 64"
    groups = {
        f"fits-{name}-g{group}": Part(
            f"does G {group} fit, with images of 448 × 448?",
            f"{step} {prompt} --image 448 --generations {group}",
            TRL,
        )
        for name, step in FITS.items()
        for group in (64, 128, 256, 512, 1024)
    }
    return groups | {
        f"fits-{name}-image{image}": Part(
            f"does an image of {image} × {image} fit, with G 8 and one completion per micro-batch?",
            f"{step} {prompt} --image {image} --generations 8 --trl-batch 1 --max-tokens 1024",
            TRL,
        )
        for name, step in FITS.items()
        for image in (1512, 2016, 3024, 4032)
    }


ALL = {
    "correctness": Part(
        "attention, sampling and a training step are as close to float64 as rounding allows",
        "", script="gpu_checks.py", seconds=150,
    ),
    "gpu-tests": Part(
        "the tests marked gpu pass", "-m gpu", script="pytest", seconds=180,
        packages=("pytest", "hypothesis", "beartype", "xdist", "pytest_timeout"),
    ),
    **build_grid(TRL, ""),
    "update-stored": Part(
        "3B LoRA, recomputing nothing: the MFU of an update",
        f"{S3} --image 1008 --generations 8 --tokens 512 --checkpointing none --max-tokens 8192",
        OURS,
    ),
    "profile": Part(
        "where the GPU waits in one step, and its kernels",
        f"{S7} --tokens 64 --steps 1 --profile {{temporary}}/step", OURS,
    ),
    "step-512": Part("7B LoRA, long answers", f"{S7} --tokens 512", TRL),
    "step-512-eager": Part("without CUDA graphs", f"{S7} --tokens 512 --no-cuda-graphs", OURS),
    "24gb": Part(
        "a step of a 3B model that fits into 24 GB",
        f"{S3} --image 1008 --generations 8 --tokens 256 --max-tokens 16384", OURS,
    ),
    "plan": Part(
        "planned and measured memory", "--gpu", script="plan_accuracy.py", seconds=300
    ),
    "step-64": Part("7B LoRA, short answers", f"{S7} --tokens 64", TRL),
    "step-512-compiled": Part(
        "with compiled decode steps", f"{S7} --tokens 512 --torch-compile", OURS
    ),
    "update-mlp": Part(
        "recomputing the feed-forward layers only", f"{S7} --tokens 512 --checkpointing mlp", OURS
    ),
    "update-dense": Part("attention without varlen_attn", f"{S7} --tokens 512 --dense", OURS),
    "step-2048": Part(
        "attention over long completions",
        f"{S7} --prompts 2 --generations 16 --tokens 2048 --steps 1", OURS,
    ),
    "vision": Part("a step dominated by images", f"{S7} --tokens 16", OURS),
    **build_grid(VLLM, "-vllm"),
    "rollout-64-vllm": Part("7B LoRA, decoding 64 rows", f"{S7} --tokens 256", VLLM),
    "rollout-256-vllm": Part(
        "7B LoRA, decoding 256 rows",
        f"{S7} --prompts 16 --generations 16 --tokens 256 --steps 1", VLLM,
    ),
    **build_limits(),
}  # fmt: skip
FIRST = (
    *("correctness", "gpu-tests", "3b-1008-g8-512", "3b-448-g8-64", "update-stored", "profile"),
    *("3b-1008-g16-512", "step-512", "step-512-eager", "24gb", "plan"),
)
"""What says most about a machine: right at all, its rates, then the goals and the plan."""
PARTS = {name: ALL[name] for name in dict.fromkeys((*FIRST, *ALL))}


def expect_seconds(part: Part) -> float:
    """Return the seconds that a part should take on an H100: estimates, none of them measured.

    A 7B LoRA step takes us 0.27 ms per token of completions and of one prompt per group, and TRL
    0.18 ms per token of completions and of their repeated prompts, and 45 ms per decoded token. A
    process takes a minute to import, to build the model and to draw images; vLLM takes 90 s to
    start and 15 s to sample.
    """
    if part.seconds:
        return part.seconds
    options = parse_arguments([*part.arguments.split(), "--engines", "shared"])
    share = (0.45 if "3b" in options.size else 1.0) * (1.5 if options.full else 1.0)
    prompt, answers = options.image**2 // PIXELS + PROMPT, options.generations * options.tokens
    total = 0.0
    for engine in part.engines:
        if engine == "shared":
            step = 0.27e-3 * share * options.prompts * (prompt + answers)
            step *= 2 if options.dense or options.cuda_graphs is False else 1
        else:
            tokens = options.prompts * (options.generations * prompt + answers)
            step = 0.18e-3 * share * tokens
            step += 0.045 * options.tokens if engine == "trl" else 15
        total += 60 + (options.steps + 1) * step
        total += 90 * (engine == "trl-vllm" or bool(options.torch_compile))
    return total


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(tempfile.gettempdir()) / "vlm-grpo-gpu"
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="only these, again")
    parser.add_argument("--list", action="store_true", help="print the parts, and run none")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, without the tests")
    parser.add_argument("--out", type=Path, default=default, help=f"folder of results: {default}")
    parser.add_argument("--after", type=Path, nargs="+", default=[], help="folders of other calls")
    parser.add_argument("--readme", type=Path, nargs="+", help="put their results into the README")
    parser.add_argument("--budget-minutes", type=float, default=24 * 60, help="of this call")
    options = parser.parse_args()
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:24}{expect_seconds(part):4.0f} s  {part.what}: {', '.join(part.engines)}")
        return 0
    if options.readme:
        README.write_text(fill_table(README.read_text(), load_results(options.readme)))
        return 0
    if not (options.smoke or torch.cuda.is_available()):
        print("perf/gpu.py: PyTorch finds no CUDA GPU here; --smoke runs anywhere", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.budget_minutes
    return run_parts(options.parts, options.out, options.smoke, deadline, options.after)


def load_results(folders: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the results of calls by part; a later one replaces an earlier one."""
    results: dict[str, dict[str, Any]] = {}
    for path in (folder / "results.json" for folder in folders):
        results |= json.loads(path.read_text()) if path.is_file() else {}
    return results


def run_parts(
    names: list[str] | None,
    folder: Path,
    smoke: bool,
    deadline: float,
    after: Iterable[Path] = (),
) -> int:
    """Run these parts, or those that are not complete; return the exit status.

    Before ``deadline`` a part is started if it should end until then, and is ended then.
    """
    failed, left, runs = [], [], {}
    results, known = load_results([folder]), load_results(after)
    print(f"results    {folder}", flush=True)
    for name in names or PARTS:
        part = PARTS[name]
        done = {**known, **results}.get(name)
        if (not names and is_complete(done, part)) or (smoke and part.script == "pytest"):
            continue
        if part.missing:
            print(f"{name}: skipped, {', '.join(part.missing)} not installed", flush=True)
            continue
        seconds = deadline - time.monotonic()
        if expect_seconds(part) > seconds and not smoke:
            left.append(name)
            continue
        print(f"{name}: {part.what} (about {expect_seconds(part) / 60:.0f} min)", flush=True)
        kind = get_kind(part) if smoke else name
        if kind not in runs:
            runs[kind] = run_part(part, smoke, min(60 * MINUTES, seconds))
        results[name] = runs[kind] | {"what": part.what}
        write_results(folder, results)
        if not is_complete(results[name], part):
            failed.append(name)
    if left:
        print(f"no time left for: {', '.join(left)}")
    if failed:
        print(f"failed: {', '.join(failed)}; another call runs them again", file=sys.stderr)
    return 1 if failed else 0


def write_results(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    path = folder / "results.json"
    other = path.with_suffix(".part")
    other.write_text(json.dumps(results, indent=1) + "\n")
    other.replace(path)
    (folder / "summary.md").write_text(format_results(results))


def is_complete(result: dict[str, Any] | None, part: Part) -> bool:
    """Return whether a part has passed, or has a result of every engine that is installed."""
    if result is None or not part.engines:
        return result is not None and result["passed"]
    return set(part.available) <= (result["figures"] or {}).get("engines", {}).keys()


def get_kind(part: Part) -> str:
    """Return what distinguishes a part from others with a tiny model."""
    if part.script != "step_time.py":
        return part.script
    arguments = [*part.arguments.split(), "--engines", *part.available, "--smoke"]
    return str(parse_arguments(arguments))


def run_part(part: Part, smoke: bool, seconds: float) -> dict[str, Any]:
    """Run a part for at most so many seconds, and return its result."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="vlm-grpo-") as temporary:
        figures, log = Path(temporary, "figures.json"), Path(temporary, "log")
        arguments = part.arguments.format(temporary=temporary).split()
        if part.script == "pytest":
            options = ["-q", "-p", "checkout", "-p", "no:cacheprovider", "--tb=short"]
            options += ["--rootdir", str(PERF.parent), "-c", str(PERF.parent / "pyproject.toml")]
            command = ["-m", "pytest", *options, *arguments, *find_gpu_tests()]
        else:
            arguments += ["--engines", *part.available] if part.engines else []
            arguments += ["--out", str(figures), *(["--smoke"] if smoke else [])]
            command = [str(PERF / part.script), *arguments]
        with log.open("w") as file:
            if smoke:
                has_passed = run_fork(part.script, arguments, file)
            else:
                has_passed = run_process(command, file, seconds, temporary)
        output = log.read_text(errors="replace").splitlines()
        found = json.loads(figures.read_text()) if figures.is_file() else None
    tables = [line for line in output if line.startswith("|") or not line]
    shown = part.arguments.format(temporary="FOLDER")
    script = "-m pytest" if part.script == "pytest" else f"perf/{part.script}"
    result = {
        "what": part.what,
        "command": f"python3 {script} {shown} {' '.join(arguments[len(shown.split()) :])}".replace(
            f" --out {figures}", ""
        ),
        "passed": has_passed,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {**find_versions(), "python": sys.version.split()[0]},
        "seconds": round(time.perf_counter() - started, 1),
        "output": tables if any(tables) else output[-1:],
        "figures": found,
    }
    if not has_passed:
        print("\n".join(output[-5:]), file=sys.stderr)
        print(f"  failed, or took over {seconds / 60:.1f} minutes", file=sys.stderr)
        result["log"] = output[-LOG_LINES:]
    return result


def find_gpu_tests() -> list[str]:
    """Return the files with tests of a GPU: to collect all tests takes most of a minute."""
    files = (PERF.parent / "tests").rglob("test_*.py")
    return sorted(str(file) for file in files if "mark.gpu" in file.read_text("utf-8"))


def run_process(command: list[str], output: IO[str], seconds: float, temporary: str) -> bool:
    """Run a Python command within the time limit; return whether it succeeded.

    Its working directory is a temporary one, and nothing is written beside the sources. The
    processes that it has started end with it, since they would hold the GPU's memory.
    """
    path = os.pathsep.join(filter(None, [str(PERF), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd=temporary,
        env=os.environ
        | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
        | {"HYPOTHESIS_STORAGE_DIRECTORY": temporary},
    )
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_fork(script: str, arguments: list[str], output: IO[str]) -> bool:
    """Run a script in a fork of this process, which imports the libraries only once."""

    def run() -> None:
        sys.argv = [script, *arguments]
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), output:
            runpy.run_path(str(PERF / script), run_name="__main__")

    modules = ["step_time_vlm_grpo", "plan_accuracy_step", "gpu_checks"]
    for module in [*modules, *(["step_time_trl"] if find_version("trl") else [])]:
        import_module(module)
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode == 0


def fill_table(text: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the README with these results."""
    before, rest = text.split(START)
    return before + START + "\n" + format_results(results) + "\n" + END + rest.split(END)[1]


def format_results(results: dict[str, dict[str, Any]]) -> str:
    """Format a table of the parts that have run two engines, and a section for each other."""
    rows, sections, machines = [], [], {}
    for name, result in sorted(results.items(), key=lambda pair: [*PARTS].index(pair[0])):
        engines = (result["figures"] or {}).get("engines", {})
        versions = ", ".join(f"{name} {found}" for name, found in result["versions"].items())
        machine = f"{result['gpu']}, {versions}"
        if len(engines) == 2:
            rows.append(format_comparison(name, engines))
            machines[machine] = None
        else:
            title = f"**{name}**: {result['what']}. `{result['command']}`, {machine}."
            mark = [] if result["passed"] else ["failed", ""]
            sections.append("\n".join([title, "", *mark, *result["output"], ""]))
    if rows:
        titles = ("s per step", "speedup", "MFU", "update's MFU", "rollout, tokens/s", "peak GB")
        titles = ("part", "engines", *titles, "share of memory")
        rule = "| --- " * len(titles) + "|"
        title = f"`python3 perf/gpu.py --parts PART`, {'; '.join(machines)}. Ours / the other's:"
        sections.insert(0, "\n".join([title, "", f"| {' | '.join(titles)} |", rule, *rows, ""]))
    return "\n".join(sections)


def format_comparison(name: str, engines: dict[str, dict[str, Any]]) -> str:
    """Format a row of two engines' figures; speedup and share of memory are ours."""
    cells = zip(*map(format_cells, engines.values()), strict=True)
    seconds, *others = [" / ".join(pair) for pair in cells]
    speedup, share = "–", "–"
    if not any("failed" in engine for engine in engines.values()):
        ours = engines["shared"]
        speedup, share = f"{ours['speedup']:.1f}", f"{ours['memory_share']:.2f}"
    return f"| {' | '.join((name, ' / '.join(engines), seconds, speedup, *others, share))} |"


def format_cells(engine: dict[str, Any]) -> list[str]:
    """Format an engine's seconds, MFU of the step and of the update, tokens/s and peak memory."""
    if "failed" in engine:
        return [engine["failed"], "–", "–", "–", "–"]
    mfu, rate = engine["mfu"], engine["rollout_tokens_per_second"]
    return [
        f"{engine['step_seconds']:.2f}",
        format_share(mfu["step"]),
        format_share(mfu.get("update", 0.0)),
        f"{rate:,.0f}" if rate else "–",
        f"{engine['peak_memory_bytes'] / 1e9:.1f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
