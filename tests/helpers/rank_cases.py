"""What several processes do in the tests of ``test_ranks.py``: one program, launched once.

``python tests/rank_cases.py FOLDER LAUNCH…`` imports everything, then makes the processes of one
launch after the other by forking, so that their number costs no imports. A launch is
``PLACEMENT-PROCESSES``, with ``-rest`` or ``-whole`` for runs alone; its first process leaves what
each case found in a file of the launch's name.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}

import numpy as np
import torch
from PIL import Image
from small_runs import TASK
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlm_grpo import trainer
from vlm_grpo.checkpoint.sharded import write_sharded_checkpoint
from vlm_grpo.checkpoint.store import CheckpointState, CheckpointStep
from vlm_grpo.config.run import Settings
from vlm_grpo.data import load_examples
from vlm_grpo.distributed.base import Strategy
from vlm_grpo.distributed.launch import build_accelerator
from vlm_grpo.distributed.sharding import full_shape
from vlm_grpo.engine.batch import MicroBatch
from vlm_grpo.errors import Stopped, UserError
from vlm_grpo.grpo.update import Updater
from vlm_grpo.model.policy import load_policy
from vlm_grpo.registry import load_task
from vlm_grpo.trainer import Trainer, train
from vlm_grpo.utils.signals import StopRequest

SECONDS = 240
"""After which a launch counts as hanging: about ten times what it takes on a busy machine."""

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
}
PLACEMENTS = {
    "replicas": {},
    "streamed": {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "true"},
    "held": {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"},
    "hybrid": {
        **FSDP,
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    },
    "zero2": {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}


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
UNEVEN: dict[str, dict[str, Any]] = {
    "resampled groups": {"rollout": {"dynamic_sampling": True, "num_generations": 2}},
    "a reference and two updates": {
        "objective": {"beta": 0.05, "reference_refresh_every": 2, "num_iterations": 2}
    },
    "a reference in the reward": {
        "objective": {"beta": 0.05, "reference_refresh_every": "never", "kl_in": "reward"}
    },
    # The first row has no image, so no rank ever has one; every rank has the same example.
    "one example": {"data": {"train_limit": 1}},
    # Completions of one token that stop at once earn the same: no group has an advantage.
    "nothing to learn": {"rollout": {"max_completion_length": 1, "temperature": 0.01}},
}
BRIEF = ("held-4", "hybrid-4")
"""Launches that make ten steps of each kind of weights, and count what they exchange."""
ZERO = ("a reference and two updates", "one example", "nothing to learn")
"""Those of them that DeepSpeed makes; the others differ in what comes before the update."""

BEGUN_BY = {
    "replicas-2-rest": "held-2",
    "streamed-2-rest": "streamed-2",
    "held-2-rest": "replicas-1",
    "replicas-1-rest": "held-2",
    "streamed-4-rest": "held-2",
    "zero2-2-rest": "streamed-2",
    "zero3-2-rest": "zero2-2",
    "streamed-2-zero3": "zero3-2",
    "replicas-1-zero2": "zero2-2",
}
"""Whose run a launch goes on with: replicas-1 has made two steps of it, the others have been
terminated in the middle of the third."""


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


def build(settings: Settings) -> Trainer:
    task = load_task(settings.task)
    examples = load_examples(str(settings.data.train), task, settings.data, "train")
    accelerator = build_accelerator(settings)
    torch.manual_seed(0)
    return Trainer(settings, load_policy(settings), task, examples, [], accelerator)


def steps(settings: Settings, count: int) -> list[dict[str, Any]]:
    """Run steps; return the metrics and the reduced gradients of each."""
    return run_steps(build(settings), count)


def run_steps(trainer: Trainer, count: int) -> list[dict[str, Any]]:
    """Run steps of the trainer; return the metrics and the reduced gradients of each."""
    strategy, steps, grads = trainer.strategy, [], {}
    optimizer_step = strategy.step

    def record_and_step() -> float:
        grads.update({name: _gradient(weight) for name, weight in strategy.trainable})
        return optimizer_step()

    strategy.step = record_and_step  # type: ignore[method-assign]
    for _ in range(count):
        metrics = trainer.step()
        steps.append({"metrics": metrics, "grads": dict(grads)})
    trainer.sampler.close()
    return steps


def memory_runs_out(settings: Settings) -> list[dict[str, Any]]:
    """A step that the first rank begins anew in smaller micro-batches, alone."""
    trainer = build(settings)
    score, left = trainer.policy.score, [trainer.accelerator.is_main_process]

    def out_of_memory_once(*args: Any) -> Any:
        if any(left) and torch.is_grad_enabled():
            left.clear()
            raise torch.OutOfMemoryError("out of memory")
        return score(*args)

    trainer.policy.score = out_of_memory_once  # type: ignore[method-assign]
    found = run_steps(trainer, 1)
    assert not any(left)
    return found


def not_finite(settings: Settings) -> list[Any]:
    """Run a step in which one rank's gradient is infinite, and a normal one.

    Returns:
        The number of skipped updates of the first step, whether it left the weights unchanged, and
        the number of skipped updates of the second.
    """
    trainer = build(settings)
    strategy = trainer.strategy
    before, passes = _weights(strategy), strategy.passes

    def spoil_after_passes(batches: Any) -> Iterator[Any]:
        yield from passes(batches)
        if trainer.accelerator.is_main_process:
            for _, weight in strategy.trainable:
                weight.grad = torch.full_like(weight, torch.inf)

    strategy.passes = spoil_after_passes  # type: ignore[method-assign]
    spoiled = trainer.step()["skipped_updates"]
    after = _weights(strategy)
    strategy.passes = passes  # type: ignore[method-assign]
    next_one = trainer.step()["skipped_updates"]
    trainer.sampler.close()
    same = all(torch.equal(before[name], after[name]) for name in before)
    return [spoiled, same, next_one]


def _weights(strategy: Strategy) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in strategy.weights().items()}


def _gradient(weight: nn.Parameter) -> Tensor:
    """The whole gradient, wherever a placement keeps it."""
    grad = weight.grad
    if grad is None:  # DeepSpeed's
        grad = importlib.import_module("deepspeed.utils").safe_get_full_grad(weight)
    assert grad is not None
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()


class Traffic(TorchDispatchMode):
    """Counts what collectives are given inside: calls and bytes by the collective's name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            # The whole tensor of a gather or a scatter is the largest one among its arguments.
            sizes = [t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor)]
            self.calls[name] += 1
            self.bytes[name] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def traffic(settings: Settings) -> list[dict[str, Any]]:
    """What the ranks exchange in one step, and what the estimate is made of."""
    trainer = build(settings)
    trainer.step()  # gathers for the first time, and makes the optimizer's state
    passes = []
    run = trainer.strategy.passes

    def counted(batches: Any) -> Iterator[Any]:
        for batch in run(batches):
            passes.append(batch)
            yield batch

    trainer.strategy.passes = counted  # type: ignore[method-assign]
    with Traffic() as seen:
        trainer.step()
    trainer.sampler.close()
    strategy, model = trainer.strategy, trainer.policy.model
    # With adapters the vision tower is frozen and, like the adapters, never cut.
    whole = {id(weight) for _, weight in strategy.trainable} if trainer.policy.adapters else set()
    parts = list(model.model.visual.parameters()) if whole else []
    whole |= {id(weight) for weight in parts}
    layers = trainer.policy.family.language_model(model).layers

    def count(weights: Iterable[Tensor]) -> int:
        kept = (weight for weight in weights if id(weight) not in whole)
        return sum(full_shape(weight).numel() for weight in kept)

    return [
        {
            "calls": dict(seen.calls),
            "bytes": dict(seen.bytes),
            "passes": len(passes),
            "all": sum(full_shape(weight).numel() for weight in model.parameters()),
            "trained": sum(full_shape(weight).numel() for _, weight in strategy.trainable),
            "base": count(model.parameters()),
            "layers": count(layers.parameters()),
        }
    ]


def run_of(folder: Path, launch: str, **changes: Any) -> Settings:
    """A run of four steps that depend on all that a checkpoint holds: the weights, the optimizer's
    state, and the first weights as the reference. Held weights are saved in parts."""
    return settings_of(
        folder,
        launch,
        **{
            "objective": {"num_iterations": 2, "beta": 0.1, "reference_refresh_every": "never"},
            "optim": {"lr": 1e-3, "max_steps": 4},
            "checkpoint": {"sharded": launch.startswith("held")},
            **changes,
        },
    )


class Terminated(StopRequest):
    """The process gets a SIGTERM when the run asks for the n-th time whether to stop."""

    def __init__(self, asked: int) -> None:
        super().__init__()
        self.left = asked

    @property
    def reason(self) -> str | None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().reason


def beginning(folder: Path, launch: str) -> list[dict[str, float]]:
    """The part of a run that others go on with."""
    settings = run_of(folder, launch)
    if launch == "replicas-1":
        return rows(run_of(folder, launch, optim={"lr": 1e-3, "max_steps": 2}))
    # A run asks before each step and before each of its two updates: three times a step. The
    # signal reaches the last rank alone.
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    stop = Terminated(9) if is_last else StopRequest()
    trainer.StopRequest = lambda *_: stop  # type: ignore[assignment, misc]
    try:
        rows(settings)
    except Stopped as stopped:
        return [{"steps": int("2 and 1 of 2 updates of the next" in str(stopped))}]
    raise AssertionError("the run was not stopped")


def rest_of(folder: Path, launch: str) -> list[dict[str, float]]:
    """The rest of a run that another launch has begun."""
    settings = run_of(folder, launch, resume=True)
    accelerator = build_accelerator(settings)
    if accelerator.is_main_process:
        shutil.copytree(settings.output_dir / BEGUN_BY[launch], settings.run_dir)
    accelerator.wait_for_everyone()
    return rows(settings)


def rows(settings: Settings) -> list[dict[str, float]]:
    """A run's metrics; it ends the process group, so a launch makes one at most."""
    train(settings)
    return [json.loads(line) for line in (settings.run_dir / "metrics.jsonl").open()]


def one_fails(folder: Path, launch: str) -> list[Any]:
    """What the first rank is told where the last cannot write its part, and what is left of it."""
    accelerator = build_accelerator(settings_of(folder, launch))
    place = folder / "failed"

    def write_weights(part: Path) -> None:
        (part / "weights").touch()
        if accelerator.is_last_process:
            raise OSError("no space")

    try:
        write_sharded_checkpoint(
            accelerator, place, CheckpointStep(1), CheckpointState({}, {}), write_weights
        )
    except (OSError, UserError) as error:
        return [str(error), [path.name for path in place.iterdir()]]
    return []


def out_of_memory(folder: Path, launch: str) -> list[str]:
    """What a run tells on this rank where the last one runs out of memory in its second step."""
    settings = run_of(folder, launch, checkpoint={"every": 1})
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    backward, passed = Updater._backward, []  # noqa: SLF001

    def fail(self: Updater, micro: MicroBatch, *rest: Any) -> Any:
        passed.append(micro)
        if is_last and self.scheduler.last_epoch == 1 and len(micro.rows) > 1:
            torch.empty(1 << 50)  # a real failure to allocate
        return backward(self, micro, *rest)

    Updater._backward = fail  # type: ignore[method-assign] # noqa: SLF001
    try:
        train(settings)
    except UserError as error:
        rank = "last" if is_last else "first"
        (folder / f"{launch}.{rank}").write_text(str(error))
        return [str(error)]
    raise AssertionError("the run went on")


def cases(folder: Path, launch: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """By name, what all processes of a launch do together."""
    if launch.endswith("-whole"):
        yield "run", lambda: rows(run_of(folder, launch))
        return
    if launch.endswith("-oom"):
        yield "told", lambda: out_of_memory(folder, launch)
        return
    if launch in BEGUN_BY:
        yield "run", lambda: rest_of(folder, launch)
        return
    for kind, policy in WEIGHTS.items():
        settings = settings_of(folder, launch, policy=policy)
        yield f"ten steps, {kind}", lambda settings=settings: steps(settings, 10)
    if launch in BRIEF:
        yield "traffic, full", lambda: traffic(settings_of(folder, launch))
        return
    is_zero = launch.startswith("zero")  # its placements know nothing of losses
    for loss, objective in () if is_zero else LOSSES.items():
        objective = {"loss_type": loss, **objective}
        settings = settings_of(folder, launch, objective=objective)
        yield f"loss {loss}", lambda settings=settings: steps(settings, 1)
    for name, changes in UNEVEN.items():
        if is_zero and name not in ZERO:
            continue
        settings = settings_of(folder, launch, **changes)
        yield name, lambda settings=settings: steps(settings, 3)
    for kind in ("full", "lora"):
        if launch in ("replicas-2", "streamed-2", "held-2", "zero2-2", "zero3-2"):
            bfloat16 = {"dtype": "bfloat16", "gradient_checkpointing": True, **WEIGHTS[kind]}
            settings = settings_of(folder, launch, policy=bfloat16)
            yield f"bfloat16, {kind}", lambda settings=settings: steps(settings, 2)
        settings = settings_of(folder, launch, policy=WEIGHTS[kind])
        yield f"traffic, {kind}", lambda settings=settings: traffic(settings)
    if is_zero or launch.startswith("replicas"):
        settings = settings_of(folder, launch)
        yield "memory runs out", lambda: memory_runs_out(settings)
        yield "not finite", lambda: not_finite(settings)
    if launch == "held-2":
        yield "one fails", lambda: one_fails(folder, launch)
    yield "beginning", lambda: beginning(folder, launch)


def _rank(folder: Path, launch: str, rank: int, world: int, port: int) -> None:
    os.environ |= PLACEMENTS[launch.split("-")[0]]
    if "ACCELERATE_USE_DEEPSPEED" in os.environ:
        # It would compile, for a minute, an exchange through shared memory that is not used here.
        importlib.import_module("deepspeed.ops").__compatible_ops__ = {}  # type: ignore[attr-defined]
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
