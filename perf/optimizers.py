"""Full weights by the form of their master weights and by optimizer: what they learn and occupy.

    python perf/optimizers.py --learn
    python perf/optimizers.py --bytes

``--learn`` trains the recipe ``quickstart`` with computation in bfloat16, and prints the share of
right sampled answers in the last ten steps by seed. ``bfloat16, nearest`` replaces stochastic by
ordinary rounding, which is the reason for it. ``--bytes`` measures the optimizer's state of the
embedded model and of a random one of 100 million weights beside what ``vlm-grpo plan`` counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch import nn

from vlm_grpo.config.optim import OptimizerName, OptimSettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.dist import optimizer as optimizers
from vlm_grpo.dist.optimizer import build_optimizer, describe_state, get_kind
from vlm_grpo.model.loading import load_model
from vlm_grpo.training.trainer import train

FORMS = {
    "float32": [],
    "bfloat16": ["policy.master_weights=bfloat16"],
    "bfloat16, nearest": ["policy.master_weights=bfloat16"],
}
LAYER = {"attention": (768, 768), "up": (3072, 768), "down": (768, 3072), "norm": (768,)}
"""Shapes of a layer's weights in the random model, whose 12 layers have four of the first."""


def learn(form: str, seed: int, steps: int) -> float:
    """Return the share of right answers in the last ten steps of a run."""
    with tempfile.TemporaryDirectory() as folder:
        stochastic = optimizers.round_stochastically
        if form.endswith("nearest"):
            optimizers.round_stochastically = lambda values, _: values.to(torch.bfloat16)
        settings = load_settings(
            "quickstart",
            [
                *(f"output_dir={folder}", f"seed={seed}", f"optim.max_steps={steps}"),
                *("policy.dtype=bfloat16", "data.eval=null", "evaluation.every=0"),
                *("logging.trackers=[]", "logging.samples_every=0", *FORMS[form]),
            ],
        )
        try:
            train(settings)
        finally:
            optimizers.round_stochastically = stochastic
        lines = (settings.run_dir / "metrics.jsonl").read_text().splitlines()[-10:]
    return sum(json.loads(line)["rewards/exact/mean"] for line in lines) / len(lines)


def measure_bytes(shapes: list[tuple[str, torch.Size]], name: Any, dtype: Any) -> tuple[int, int]:
    """Return the bytes of an optimizer's state after a step, measured and counted."""
    weights = [(key, nn.Parameter(torch.zeros(shape, dtype=dtype))) for key, shape in shapes]
    optimizer = build_optimizer(weights, OptimSettings(name=name))
    for _, weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    counted = sum(
        torch.Size(size).numel() * kind.itemsize
        for key, shape in shapes
        for field, (size, kind) in describe_state(get_kind(key, shape, name), shape, dtype).items()
        if not field.startswith("qmap")
    )
    return sum(storages.values()), counted


def list_models() -> Iterator[tuple[str, list[tuple[str, torch.Size]]]]:
    """Yield the names and the weights' shapes of the embedded and of a random model."""
    model = load_model(load_settings("quickstart")).model
    yield "embedded", [(key, weight.shape) for key, weight in model.named_parameters()]
    layers = [
        (f"layers.{layer}.{key}.{number}", torch.Size(shape))
        for layer in range(12)
        for key, shape in LAYER.items()
        for number in range(4 if key == "attention" else 1)
    ]
    yield "100M", [("embed.weight", torch.Size((20_000, 768))), *layers]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    for seed in options.seeds if options.learn else ():
        for form in options.forms:
            right = learn(form, seed, options.steps)
            print(f"| {form} | seed {seed} | {right:.3f} |", flush=True)
    for model, shapes in list_models() if options.bytes else ():
        for name in get_args(OptimizerName):
            for dtype in (torch.float32, torch.bfloat16):
                measured, counted = measure_bytes(shapes, name, dtype)
                share = f"{measured / sum(shape.numel() for _, shape in shapes):.2f}"
                cells = f"{name} | {dtype} | {measured:,} | {counted:,} | {share}"
                print(f"| {model} | {cells} | {counted / measured - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
