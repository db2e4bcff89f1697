"""Where a GPU waits in a profiled step, and its kernels: those that take most of the time.

    python perf/trace_gaps.py perf/results/gpu/step.json.gz

A place is a phase and the kernel that ends the wait; a decode step meets it once per token. Without
kernels, in a trace of a CPU, the time between operations is counted instead.
"""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import dataclass
from pathlib import Path

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
PLACES, KINDS = 5, 15


@dataclass
class Place:
    """Waits in one phase for one kernel: their number, and seconds in all and of the longest."""

    phase: str
    kernel: str
    count: int = 0
    total: float = 0.0
    longest: float = 0.0


def find_gaps(events: list[dict]) -> tuple[list[Place], float]:
    """Return the places, those with most idle time first, and the seconds that they are part of."""
    spans = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in spans if event.get("cat") in KERNELS]
    busy = sorted(
        kernels or [event for event in spans if event.get("cat") == "cpu_op"],
        key=lambda event: event["ts"],
    )
    phases = [event for event in spans if event.get("cat") == "user_annotation"]
    phases = [event for event in phases if not event["name"].startswith("ProfilerStep")]
    places: dict[tuple[str, str], Place] = {}
    end = busy[0]["ts"]
    for event in busy:
        gap = (event["ts"] - end) / 1e6
        if gap > 0:
            around = [p for p in phases if p["ts"] <= end <= p["ts"] + p["dur"]]
            phase = min(around, key=lambda p: p["dur"])["name"] if around else "between phases"
            key = phase, event["name"]
            place = places.setdefault(key, Place(*key))
            place.count += 1
            place.total += gap
            place.longest = max(place.longest, gap)
        end = max(end, event["ts"] + event["dur"])
    ranked = sorted(places.values(), key=lambda place: -place.total)
    return ranked, (end - busy[0]["ts"]) / 1e6


def print_gaps(path: Path) -> None:
    """Print the tables of a trace of ``logging.profile_steps`` or of ``step_time.py --profile``."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    places, seconds = find_gaps(events)
    idle = sum(place.total for place in places)
    print(f"\n| idle in phase | before | s, of {seconds:.2f} | waits | longest, s |")
    print("| --- | --- | --- | --- | --- |")
    print(f"| all | | {idle:.3f} | {sum(place.count for place in places)} | |")
    for place in places[:PLACES]:
        name = place.kernel[:80].replace("|", " ")
        times = f"{place.total:.3f} | {place.count} | {place.longest:.4f}"
        print(f"| {place.phase} | `{name}` | {times} |")
    kinds: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") in KERNELS:
            kinds.setdefault(event["name"], []).append(event["dur"] / 1e6)
    if kinds:
        print("\n| kernel | s | calls |\n| --- | --- | --- |")
    for name, spent in sorted(kinds.items(), key=lambda kind: -sum(kind[1]))[:KINDS]:
        print(f"| `{name[:80].replace('|', ' ')}` | {sum(spent):.4f} | {len(spent)} |")


if __name__ == "__main__":
    print_gaps(Path(sys.argv[1]))
