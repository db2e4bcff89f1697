"""Cost of a GRPO step by group size in three kinds of families, with shared and repeated prompts.

    python perf/family_steps.py --out perf/results/family_steps.json

One group of one 448 × 448 image: sampling, scoring with gradient and the backward pass, on one
thread. The models are those of the tests, widened: InternVL (full attention), Gemma 3 (3 of 4
layers in a window, image tokens that see each other) and Qwen3.5 (3 of 4 layers recurrent). The
forms and group sizes take turns, and a ratio compares two steps of the same turn. CPU is the
process's own time, which other processes affect less than wall-clock time.

Expected before the first measurement, for 16 times the completions: with repeated prompts up to 16
times the cost. With a shared prompt, the FLOPs of V image and P ≈ 340 prompt tokens (V is worth
about 250 more) stay, those of 16 · G completion tokens grow: (590 + 512) / (590 + 32) = 1.8 times.
Sampling takes as many calls for 2 rows as for 32, which lowers the ratio; small products and
attention over the copied window raise it: 1.8 to 2.5 for InternVL, 2 to 3 for Gemma 3. Qwen3.5's
recurrence pads each completion to a block of 64 tokens in the update: 3 to 4.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

import torch
from family_models import BUILDERS, VISION
from step_time_vlm_grpo import build_policy
from tiny_models import make_prompt, noise_example, pack_groups, sample_groups
from transformers import AutoModelForImageTextToText

from vlm_grpo.config.run import Settings
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Prompt

QUESTION = "What is in the image? Describe every object that you can see in a few words."
EDGE = 448
"""Side of the image in pixels: 256 tokens in InternVL and Gemma 3, 196 in Qwen3.5."""
FORMS = ("shared", "repeated")
PHASES = ("rollout", "update")
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
WIDTHS = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "head_dim": 32}
TOWER = {**VISION, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
GRID = {"depth": 4, "hidden_size": 128, "intermediate_size": 512, "out_hidden_size": 256}
WIDER: dict[str, dict[str, dict[str, Any]]] = {
    "internvl": {
        "text": {**WIDTHS, "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4},
        "vision": TOWER,
    },
    "gemma3": {
        "text": {**WIDTHS, "sliding_window": 128, "query_pre_attn_scalar": 32},
        "vision": TOWER,
    },
    "qwen3_5": {
        "text": {**WIDTHS, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
        "vision": GRID,
    },
}
"""Settings of each family's configuration that make its small model larger."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--families", nargs="+", default=list(WIDER), choices=list(WIDER))
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 8, 32], help="G")
    parser.add_argument("--tokens", type=int, default=16, help="tokens per completion")
    parser.add_argument("--turns", type=int, default=3, help="timed turns")
    parser.add_argument("--warmups", type=int, default=1, help="turns before them")
    parser.add_argument("--edge", type=int, default=EDGE, help="side of the image in pixels")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args()


def widen(name: str, edge: int) -> tuple[Any, Any]:
    """Build a family's small model with larger layers and images, and its processor."""
    small, processor = BUILDERS[name]()
    config, wider, tokens = small.config, WIDER[name], (edge // 28) ** 2
    is_square = name != "qwen3_5"  # every image is resized to the same square
    sizes = {"vision_config": {"image_size": edge}} if is_square else {}
    lengths = {"internvl": "image_seq_length", "gemma3": "mm_tokens_per_image"}
    for part, more in (("text_config", wider["text"]), ("vision_config", wider["vision"])):
        values = getattr(config, part).to_dict() | more | sizes.get(part, {})
        setattr(config, part, type(getattr(config, part))(**values))
    config = type(config)(**config.to_dict() | ({lengths[name]: tokens} if is_square else {}))
    images = processor.image_processor
    if is_square:
        images.size = type(images.size)(height=edge, width=edge)
        processor.image_seq_length = tokens
    else:
        images.size = type(images.size)(shortest_edge=edge**2, longest_edge=edge**2)
    if name == "internvl":
        images.max_patches = 1
    if name == "gemma3":
        token = processor.tokenizer.image_token
        marked = processor.full_image_sequence
        processor.full_image_sequence = marked.replace(token * 4, token * tokens)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    model.generation_config = small.generation_config
    return model, processor


def build(name: str, form: str, options: argparse.Namespace) -> tuple[Policy, Prompt]:
    """Build a policy of the family's model and a prompt."""
    settings = Settings.model_validate(
        {
            "task": "none",
            "model": "random",
            "data": {"train": "none"},
            "rollout": {"min_new_tokens": options.tokens},
        }
    )
    policy = build_policy(settings, *widen(name, options.edge), shared=form == "shared")
    return policy, make_prompt(policy, noise_example("a", [(options.edge,) * 2], QUESTION))


def run_step(policy: Policy, prompt: Prompt, size: int, tokens: int) -> dict[str, float]:
    """Sample a group, score it and compute the gradient; return CPU and wall-clock seconds."""
    policy.engine.clear_image_features()
    marks = [{name: clock() for name, clock in CLOCKS.items()}]
    groups = sample_groups(policy, [prompt], size, length=tokens)
    marks.append({name: clock() for name, clock in CLOCKS.items()})
    policy.engine.clear_image_features()
    policy.score(pack_groups([prompt], groups)).logprobs.mean().backward()
    marks.append({name: clock() for name, clock in CLOCKS.items()})
    policy.model.zero_grad()
    policy.engine.release()
    assert all(len(completion.token_ids) == tokens for completion in groups[0])
    return {
        f"{phase} {name}": after[name] - before[name]
        for phase, (before, after) in zip(PHASES, itertools.pairwise(marks), strict=True)
        for name in CLOCKS
    }


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of all turns by form and group size."""
    built = {form: build(name, form, options) for form in FORMS}
    steps: dict[str, dict[str, list[dict[str, float]]]] = {
        form: {str(size): [] for size in options.sizes} for form in FORMS
    }
    for turn in range(-options.warmups, options.turns):
        for size in options.sizes:
            for form in FORMS:
                step = run_step(*built[form], size, options.tokens)
                if turn >= 0:
                    steps[form][str(size)].append(step)
    policy, prompt = built["shared"]
    weights = sum(weight.numel() for weight in policy.model.parameters())
    return {"prompt tokens": len(prompt.token_ids), "weights": weights, "steps": steps}


def find_processor() -> str:
    """Return the name of the processor, where Linux tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()


def format_table(families: dict[str, dict[str, Any]]) -> str:
    """Return a table of median seconds, and of the ratios of the last group size to the first."""
    sizes = list(next(iter(families.values()))["steps"][FORMS[0]])
    header = ["family", "prompt", *(f"G = {size}: rollout + update, CPU s" for size in sizes)]
    header += [f"G {sizes[-1]} / G {sizes[0]}, {clock}" for clock in CLOCKS]
    rows = [header, ["---"] * len(header)]
    for (name, found), form in itertools.product(families.items(), FORMS):
        steps = found["steps"][form]
        cells = []
        for turns in steps.values():
            medians = [statistics.median(t[f"{phase} cpu"] for t in turns) for phase in PHASES]
            cells.append(" + ".join(f"{seconds:.2f}" for seconds in medians))
        for clock in CLOCKS:
            first, last = (
                [sum(turn[f"{phase} {clock}"] for phase in PHASES) for turn in steps[size]]
                for size in (sizes[0], sizes[-1])
            )
            ratios = [b / a for a, b in zip(first, last, strict=True)]
            spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
            cells.append(f"{statistics.median(ratios):.1f} ({spread})")
        rows.append([name, form, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    families = {name: measure(name, options) for name in options.families}
    report = {
        "settings": {k: v for k, v in vars(options).items() if k != "out"},
        "machine": {"processor": find_processor(), "threads": 1, "load": os.getloadavg()},
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "families": families,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(format_table(families))


if __name__ == "__main__":
    main()
