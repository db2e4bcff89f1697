"""The launches of ``rank_cases.py``: their strategies, models, losses and settings.

A launch is named ``STRATEGY-RANKS``, such as ``fsdp-2``. A third part names a launch that makes a
single run: ``-uninterrupted``, ``-resumed`` (begun by the launch in ``BEGUN_BY``), ``-oom`` or
``-late``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from small_runs import TASK, save_tiny_model

from vlm_grpo.config.run import Settings

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"}
STRATEGIES = {
    "ddp": {},
    "fsdp": {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "true"},
    "fsdp_held": {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"},
    "hsdp": {
        **FSDP,
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    },
    "zero2": {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}
STRATEGIES["fsdp_offload"] = {**STRATEGIES["fsdp"], "FSDP_OFFLOAD_PARAMS": "true"}
for _stage, _parts in (("zero2", ("OPTIMIZER",)), ("zero3", ("OPTIMIZER", "PARAM"))):
    _devices = {f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE": "cpu" for part in _parts}
    STRATEGIES[f"{_stage}_offload"] = {**STRATEGIES[_stage], **_devices}
"""The environment variables of each strategy, as ``accelerate launch`` sets them. ``fsdp_held``
keeps the layers gathered in the update; ``…_offload`` keeps weights and optimizer state in main
memory."""

STEPS = {"full": 3, "frozen_vision": 2, "lora": 2}
"""Number of steps of each kind of weights. The second follows an update; the third follows an
update with the optimizer's state, and starts the next epoch."""
WEIGHTS = {
    "full": {},
    "frozen_vision": {"freeze": ["vision"]},
    "lora": {"lora": {"r": 4, "alpha": 8}},
}
KINDS = {
    "ddp-4": ("full",),
    "fsdp-4": ("full",),
    **dict.fromkeys(("hsdp-4", "zero2-2"), ("full", "lora")),
}
"""The kinds of weights of the launches that do not have all."""
COMMUNICATION = {"ddp-4": (), "fsdp-4": (), "hsdp-4": ("full",)}
"""The kinds of weights with which a launch counts its communication, if not both."""
BFLOAT16 = {
    **dict.fromkeys(("ddp-2", "fsdp-2", "zero3-2"), ("full", "lora")),
    **dict.fromkeys(("fsdp_held-2", "zero2-2"), ("full",)),
}
"""The kinds of weights of each launch that also run in bfloat16. Weights are cast alike by both
forms of FSDP2 and by both stages of DeepSpeed."""
WITH_ONEDNN = ("steps, frozen_vision", "steps, lora")
"""The cases with oneDNN's products, which each process compiles for every number of rows."""
WITH_INFINITE_GRADIENT = ("ddp-1", "zero2-2", "zero3-2")
LOSSES = {"grpo": {}, "bnpo": {}, "dr_grpo": {}, "dapo": {}}
"""The types of loss with normalizers of their own, over all ranks."""
UNEVEN: dict[str, dict[str, Any]] = {
    "resampled groups": {"rollout": {"dynamic_sampling": True, "num_generations": 2}},
    "a reference and two updates": {
        "objective": {"beta": 0.05, "reference_refresh_every": 2, "num_iterations": 2}
    },
    "a reference in the reward": {
        "objective": {"beta": 0.05, "reference_refresh_every": "never", "kl_in": "reward"}
    },
    # A supervised step, whose examples without an image are one group, and the first rollout.
    "a warm start": {"warm_start": {"steps": 1, "lr": 1e-4}},
    # Two sources with other prompts and rewards. Updates would magnify the rounding of gradients
    # that are almost 0, as Adam divides each by its own size.
    "a mixture": {"task": "mixed", "optim": {"lr": 0.0}},
    "a curriculum and replay": {
        "data": {"curriculum": {"pool": 2}},
        "objective": {"replay": {}},
        "rollout": {"num_generations": 2},
    },
    # The first row has no image, so no rank ever has one; every rank has the same example.
    "one example": {"data": {"train_limit": 1}},
    # Completions of one token that stop at once have equal rewards: no group has an advantage.
    "nothing to learn": {"rollout": {"max_completion_length": 1, "temperature": 0.01}},
}
"""Settings under which ranks differ in their number of groups, passes or images."""
_IN_THE_UPDATE = (
    *("a reference and two updates", "a warm start", "one example", "nothing to learn"),
)
_OF_EXAMPLES = ("a mixture", "a curriculum and replay")
_WITHOUT_GROUPS = ("one example", "nothing to learn")
UNEVEN_CASES = {
    **dict.fromkeys(("ddp-1", "ddp-2"), tuple(UNEVEN)),
    "fsdp-2": ("resampled groups", *_IN_THE_UPDATE),
    **dict.fromkeys(("fsdp_held-2", "zero2-2", "zero3-2"), _IN_THE_UPDATE),
    "ddp-4": ("resampled groups", "a warm start", *_WITHOUT_GROUPS, *_OF_EXAMPLES),
    "fsdp-4": _WITHOUT_GROUPS,
}
"""The cases of ``UNEVEN`` by launch. Each strategy has those that differ in the update; on four
ranks it has those in which some ranks have none, and DDP those that are dealt out differently."""
BEGUN_BY = {
    "fsdp-2-resumed": "fsdp-2",
    "fsdp_held-2-resumed": "ddp-1",
    "ddp-1-resumed": "fsdp_held-2",
    "fsdp_offload-2-resumed": "fsdp-2",
    "fsdp-4-resumed": "fsdp_held-2",
    "zero2-2-resumed": "fsdp-2",
    "zero3-2-resumed": "zero2-2",
    "fsdp-2-resumed_zero3": "zero3-2",
    "ddp-1-resumed_zero2": "zero2-2",
}
"""The launch whose run each launch resumes. ``ddp-1`` has made two steps of its run; the others
were terminated in the middle of the third."""


def prepare(folder: Path) -> None:
    """Write the model, the task, and twelve rows, every third without an image."""
    save_tiny_model(folder / "model")
    (folder / "letters.py").write_text(TASK)
    random = np.random.default_rng(0)
    rows = []
    for index in range(12):
        size = (56 + 28 * (index % 4), 56)
        pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        images = [] if index % 3 == 0 else [f"{index}.png"]
        rows.append({"id": str(index), "images": images, "question": "Write.", "answer": "abc"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_settings(folder: Path, name: str, **changes: Any) -> Settings:
    """Build the settings of a run on the files of ``prepare``; ``changes`` override its blocks."""
    values: dict[str, Any] = {
        "name": name,
        "task": str(folder / "letters.py"),
        "model": str(folder / "model"),
        "output_dir": str(folder / "runs"),
        "data": {"train": str(folder / "rows.jsonl")},
        "policy": {"dtype": "float32"},
        # Stop strings make the lengths differ, and with them the types of loss.
        "rollout": {"num_generations": 4, "max_completion_length": 5, "stop": list("aeiourstln")},
        # Five prompts are uneven on two and on four ranks; a micro-batch holds one or two groups.
        "optim": {"lr": 1e-5, "prompts_per_step": 5, "max_steps": 6, "max_tokens_per_batch": 100},
        "logging": {"samples_every": 0, "trackers": []},
    }
    for block, value in changes.items():
        default = values.get(block)
        values[block] = {**default, **value} if isinstance(default, dict) else value
    if values["task"] == "mixed":
        own = {"source": str(folder / "rows.jsonl"), "task": str(folder / "letters.py")}
        options = {"weights": {"letters": 0.5}, "instruction": "Use letters."}
        half = {**own, "name": "half", "task_options": options, "limit": 5}
        values["data"] = {"train": [{**own, "name": "plain", "weight": 2.0}, half]}
    return Settings.model_validate(values)


def make_run_settings(folder: Path, launch: str, **changes: Any) -> Settings:
    """Build the settings of a run of four steps that depend on everything in a checkpoint.

    These are the weights, the optimizer's state, and the first weights as the reference. Launches
    of ``fsdp_held`` and of DeepSpeed write sharded checkpoints.
    """
    return make_settings(
        folder,
        launch,
        **{
            "objective": {"num_iterations": 2, "beta": 0.1, "reference_refresh_every": "never"},
            # Adam's first steps enlarge what rounding differs in; a larger rate changes samples.
            "optim": {"lr": 2e-4, "max_steps": 4},
            "checkpoint": {"sharded": launch.startswith(("fsdp_held", "zero"))},
            **changes,
        },
    )
