"""Step time by group size, for the shared-prefix and the repeated engine.

    python perf/group_size.py

runs ``step_time.py`` for each group size, writes ``results/group-size-35m-448.json`` and plots it
to ``docs/images/group_size.svg``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "group-size-35m-448.json"
PLOT = HERE.parent / "docs" / "images" / "group_size.svg"
ENGINES = ("shared", "repeated")


def measure(sizes: list[int]) -> list[dict]:
    """Return the report of ``step_time.py`` for each group size."""
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            out = Path(folder, f"{size}.json")
            command = [sys.executable, str(HERE / "step_time.py"), "--generations", str(size)]
            command += ["--rounds", "1", "--steps", "1", "--engines", *ENGINES, "--out", str(out)]
            subprocess.run(command, check=True)
            reports.append(json.loads(out.read_text()))
    return reports


def plot(reports: list[dict]) -> None:
    """Plot seconds per step over completions per prompt, on logarithmic axes."""
    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "vlm-grpo", "font.size": 9, "axes.grid": True})
    figure, axes = plt.subplots(figsize=(6, 4))
    sizes = [report["settings"]["generations"] for report in reports]
    for engine in ENGINES:
        seconds = [report["engines"][engine]["step_seconds"] for report in reports]
        axes.plot(sizes, seconds, marker="o", label=engine)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.yaxis.set_major_formatter(mpl.ticker.FormatStrFormatter("%g"))
    axes.set_xlabel("completions per prompt, G")
    axes.set_ylabel("seconds per step")
    axes.legend()
    figure.tight_layout()
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 4, 8, 16, 32])
    parser.add_argument("--draw", action="store_true", help="only plot the recorded results")
    options = parser.parse_args()
    if not options.draw:
        RESULTS.write_text(json.dumps(measure(options.sizes), indent=1) + "\n")
    reports = json.loads(RESULTS.read_text())
    plot(reports)
    first = reports[0]["engines"]
    print("| G | shared, s | relative to the first | repeated, s | relative to the first |")
    print("| --- | --- | --- | --- | --- |")
    for report in reports:
        cells = [str(report["settings"]["generations"])]
        for engine in ENGINES:
            seconds = report["engines"][engine]["step_seconds"]
            cells += [f"{seconds:.2f}", f"{seconds / first[engine]['step_seconds']:.1f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
