"""What several processes do in the tests of ``test_ranks.py``: one program, launched once.

``python tests/rank_cases.py FOLDER LAUNCH…`` imports everything, then makes the processes of one
launch after the other by forking, so that their number costs no imports. A launch is
``PLACEMENT:PROCESSES``; its first process leaves ``PLACEMENT-PROCESSES.pt`` in the folder, with
what each case found.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}

import numpy as np
import torch
from PIL import Image
from tiny_models import tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from vlm_grpo.config import Settings
from vlm_grpo.data import load_examples
from vlm_grpo.policy import load_policy
from vlm_grpo.ranks import build_accelerator
from vlm_grpo.registry import load_task
from vlm_grpo.trainer import Trainer

SECONDS = 240
"""After which a launch counts as hanging: about ten times what it takes on a busy machine."""

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
PLACEMENTS = {
    "replicas": {},
    "streamed": {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "true"},
    "held": {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"},
}

TASK = '''
from vlm_grpo.task import Task, reward

class Letters(Task):
    """Write many different small letters: a reward that a random model meets now and then."""

    headline = "letters"

    def parse(self, text, example):
        return text

    def write(self, answer, example):
        return answer

    @reward()
    def letters(self, answer, example):
        return len(set(answer) & set("abcdefghijklmnopqrstuvwxyz")) / 26
'''

WEIGHTS = {
    "full": {},
    "frozen_vision": {"freeze": ["vision"]},
    "lora": {"lora": {"r": 4, "alpha": 8}},
}
LOSSES = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "cispo": {"epsilon_high": 5.0},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}


def prepare(folder: Path) -> None:
    """The model, the task, and rows of which every third has no image."""
    model, processor = tiny_model("qwen2_5_vl")
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
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


def settings_of(folder: Path, name: str, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "name": name,
        "task": str(folder / "letters.py"),
        "model": str(folder / "model"),
        "output_dir": str(folder / "runs"),
        "data": {"train": str(folder / "rows.jsonl")},
        "policy": {"dtype": "float32"},
        # Stop strings make the lengths differ, and with them the kinds of loss.
        "rollout": {"num_generations": 4, "max_completion_length": 8, "stop": list("aeiourstln")},
        # Five prompts are uneven on two and on four ranks; micro-batches hold one or two groups.
        "optim": {"lr": 1e-5, "prompts_per_step": 5, "max_steps": 3, "max_tokens_per_batch": 100},
        "logging": {"samples_every": 0, "trackers": []},
    }
    for block, held in changes.items():
        known = values.get(block)
        values[block] = {**known, **held} if isinstance(known, dict) else held
    return Settings.model_validate(values)


def steps(settings: Settings, count: int) -> list[dict[str, Any]]:
    """So many steps; for each its metrics, and the gradient after the exchange."""
    task = load_task(settings.task)
    examples = load_examples(str(settings.data.train), task, settings.data, "train")
    accelerator = build_accelerator(settings)
    torch.manual_seed(0)
    trainer = Trainer(settings, load_policy(settings), task, examples, [], accelerator)
    placement, found, grads = trainer.placement, [], {}
    finish = placement.finish

    def finish_and_note() -> None:
        finish()
        grads.update({name: _whole(weight.grad) for name, weight in placement.trainable})

    placement.finish = finish_and_note  # type: ignore[method-assign]
    for _ in range(count):
        metrics = trainer.run_step()
        trainer.step += 1
        found.append({"metrics": metrics, "grads": dict(grads)})
    trainer.roll.close()
    return found


def _whole(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()


def cases(folder: Path, launch: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """By name, what all processes of a launch do together."""
    for kind, policy in WEIGHTS.items():
        settings = settings_of(folder, f"{launch}-{kind}", policy={"dtype": "float32", **policy})
        yield f"ten steps, {kind}", lambda settings=settings: steps(settings, 10)
    for loss, objective in LOSSES.items():
        objective = {"loss_type": loss, **objective}
        settings = settings_of(folder, f"{launch}-{loss}", objective=objective)
        yield f"loss {loss}", lambda settings=settings: steps(settings, 1)


def _rank(folder: Path, launch: str, rank: int, world: int, port: int) -> None:
    placement = launch.split("-")[0]
    os.environ |= PLACEMENTS[placement]
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world)}
    found = {}
    try:
        for name, case in cases(folder, launch):
            found[name] = case()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if rank == 0:
        torch.save(found, folder / f"{launch}.pt")
    sys.stdout.flush()
    os._exit(0)  # torch's exit handlers are not made for forked processes


def main(folder: Path, launches: list[str]) -> None:
    if not (folder / "rows.jsonl").exists():
        prepare(folder)
    fork = multiprocessing.get_context("fork")
    for launch in launches:
        world = int(launch.split("-")[1])
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        ranks = [
            fork.Process(target=_rank, args=(folder, launch, rank, world, port))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(SECONDS)
        late = [rank for rank in ranks if rank.is_alive()]
        for rank in late:
            rank.kill()
        if late or any(rank.exitcode for rank in ranks):
            raise SystemExit(f"{launch}: {len(late)} of its processes hang, or one failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
