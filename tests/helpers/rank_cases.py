"""The cases that the processes of a launch run in ``tests/dist/test_ranks.py``.

``rank_setup.py`` explains the names of launches. The first rank of each writes the results of its
cases to ``FOLDER/LAUNCH.pt``.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forked import run_ranks
from rank_runs import (
    begin_run,
    evaluate_on_ranks,
    fail_to_write_a_part,
    remove_image,
    resume_run,
    run_out_of_memory,
    run_with_a_late_rank,
    train_and_read,
)
from rank_setup import (
    BEGUN_BY,
    BFLOAT16,
    COMMUNICATION,
    KINDS,
    LOSSES,
    STEPS,
    STRATEGIES,
    UNEVEN,
    UNEVEN_CASES,
    WEIGHTS,
    WITH_INFINITE_GRADIENT,
    WITH_ONEDNN,
    make_run_settings,
    make_settings,
    prepare,
)
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlm_grpo.config.run import Settings
from vlm_grpo.data import load_run_task
from vlm_grpo.data.loading import load_split
from vlm_grpo.dist import strategy as strategies
from vlm_grpo.dist.launch import build_accelerator
from vlm_grpo.dist.sharding import full_shape, gather_full
from vlm_grpo.dist.strategy import DataParallel, Strategy
from vlm_grpo.model.policy import load_policy
from vlm_grpo.training.trainer import Trainer

CHECKED: set[str] = set()
"""Policy settings of the trainers of this process."""


def build_trainer(settings: Settings) -> Trainer:
    """Build a trainer. Only the first of its policy settings compares the forms of the prompt."""
    task = load_run_task(settings)
    examples = load_split(settings, task, "train")
    accelerator = build_accelerator(settings)
    torch.manual_seed(0)
    policy, kind = load_policy(settings), settings.policy.model_dump_json()
    if kind in CHECKED:
        policy.form_check = None
    CHECKED.add(kind)
    return Trainer(settings, policy, task, examples, [], accelerator)


def run_steps(trainer: Trainer, count: int) -> list[dict[str, Any]]:
    """Run steps; return the metrics and the reduced gradients of each."""
    strategy, steps, grads = trainer.strategy, [], {}
    optimizer_step = strategy.step

    def record_and_step() -> float:
        grads.update({name: full_gradient(weight) for name, weight in strategy.trainable})
        return optimizer_step()

    strategy.step = record_and_step  # type: ignore[method-assign]
    for _ in range(count):
        metrics = trainer.step()
        steps.append({"metrics": metrics, "grads": dict(grads)})
    strategy.step = optimizer_step  # type: ignore[method-assign]
    return steps


def build_and_run(settings: Settings, count: int) -> list[dict[str, Any]]:
    """Run the first steps of a new trainer; return what ``run_steps`` does."""
    trainer = build_trainer(settings)
    steps = run_steps(trainer, count)
    trainer.sampler.close()
    return steps


def full_gradient(weight: nn.Parameter) -> Tensor:
    """Return the unsharded gradient under any strategy."""
    grad = weight.grad
    if grad is None:  # held by DeepSpeed
        grad = importlib.import_module("deepspeed.utils").safe_get_full_grad(weight)
    assert grad is not None
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()


def retry_after_out_of_memory(settings: Settings) -> list[dict[str, Any]]:
    """Run a step that the first rank alone repeats in smaller micro-batches.

    It fails near the end of a backward pass, when other gradients may have been sent.
    """
    trainer = build_trainer(settings)
    failures = [trainer.accelerator.is_main_process]

    def fail_once(_: Tensor) -> None:
        if any(failures):
            failures.clear()
            raise torch.OutOfMemoryError("out of memory")

    layer = trainer.policy.family.language_model(trainer.policy.model).layers[0]
    next(layer.parameters()).register_post_accumulate_grad_hook(fail_once)
    steps = run_steps(trainer, 1)
    trainer.sampler.close()
    assert not any(failures)
    return steps


def compare_with_one_exchange(settings: Settings) -> list[Any]:
    """Run a step whose gradients are sent in the backward pass, and one that sends them after it.

    Returns:
        Whether the gradients are equal bit for bit, and the number of buckets sent in the pass.
    """
    sent, reduce_gradients = [], DataParallel.reduce_gradients

    def count_and_reduce(self: DataParallel) -> None:
        sent.append(len(self._sums))
        reduce_gradients(self)

    DataParallel.reduce_gradients = count_and_reduce
    (overlapped,) = build_and_run(settings, 1)
    DataParallel.reduce_gradients = Strategy.reduce_gradients
    DataParallel.passes, passes = Strategy.passes, DataParallel.passes
    (after,) = build_and_run(settings, 1)
    DataParallel.passes, DataParallel.reduce_gradients = passes, reduce_gradients
    pairs = ((overlapped["grads"][name], grad) for name, grad in after["grads"].items())
    return [all(torch.equal(a, b) for a, b in pairs), sent[0]]


def skip_infinite_gradient(trainer: Trainer) -> list[Any]:
    """Run a step in which one rank's gradient is infinite, and a normal one.

    Returns:
        The number of skipped updates of the first step, whether it left the weights unchanged, and
        the number of skipped updates of the second.
    """
    strategy = trainer.strategy
    before, passes = _copy_weights(strategy), strategy.passes

    def spoil(batches: Any) -> Iterator[Any]:
        if trainer.accelerator.is_main_process:
            for _, weight in strategy.trainable:
                weight.grad = torch.full_like(weight, torch.inf)
        yield from passes(batches)

    strategy.passes = spoil  # type: ignore[method-assign]
    skipped = trainer.step()["skipped_updates"]
    after = _copy_weights(strategy)
    strategy.passes = passes  # type: ignore[method-assign]
    skipped_later = trainer.step()["skipped_updates"]
    is_unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return [skipped, is_unchanged, skipped_later]


def _copy_weights(strategy: Strategy) -> dict[str, Tensor]:
    weights = strategy.weights()
    return {name: weight.clone() for name, weight in gather_full(weights, weights).items()}


class CommunicationCounter(TorchDispatchMode):
    """Counts the calls and bytes of each collective by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            # The full tensor of a gather or a scatter is the largest of its arguments.
            sizes = [t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor)]
            self.calls[name] += 1
            self.bytes[name] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def count_communication(trainer: Trainer) -> list[dict[str, Any]]:
    """Count the communication of one step, and the weights from which the guide derives it.

    Args:
        trainer: one that has made a step, since the first step also gathers the weights and creates
            the optimizer's state.

    Returns:
        One dict: calls and bytes by collective, the number of passes, and numbers of weights: of
        the model, of the trained ones, of the sharded ones, and of those in the layers.
    """
    passes = []
    make_passes = trainer.strategy.passes

    def count_passes(batches: Any) -> Iterator[Any]:
        for batch in make_passes(batches):
            passes.append(batch)
            yield batch

    trainer.strategy.passes = count_passes  # type: ignore[method-assign]
    with CommunicationCounter() as counter:
        trainer.step()
    trainer.strategy.passes = make_passes  # type: ignore[method-assign]
    strategy, model = trainer.strategy, trainer.policy.model
    # Adapters, and the vision tower, which is frozen then, are never sharded.
    unsharded: list[Tensor] = []
    if trainer.policy.adapters:
        unsharded = [weight for _, weight in strategy.trainable]
        unsharded += model.model.visual.parameters()
    ignored = {id(weight) for weight in unsharded}
    layers = trainer.policy.family.language_model(model).layers

    def count(weights: Iterable[Tensor]) -> int:
        return sum(full_shape(weight).numel() for weight in weights if id(weight) not in ignored)

    return [
        {
            "calls": dict(counter.calls),
            "bytes": dict(counter.bytes),
            "passes": len(passes),
            "all": sum(full_shape(weight).numel() for weight in model.parameters()),
            "trained": sum(full_shape(weight).numel() for _, weight in strategy.trainable),
            "base": count(model.parameters()),
            "layers": count(layers.parameters()),
        }
    ]


def is_offloaded(strategy: Any) -> bool:
    """Return whether the library that shards the weights keeps them or their state on the host."""
    if hasattr(strategy, "engine"):
        return strategy.engine.zero_use_cpu_optimizer()
    state = strategy.streamed[0]._get_fsdp_state()  # noqa: SLF001
    policy = state._fsdp_param_group.offload_policy  # noqa: SLF001
    return isinstance(policy, CPUOffloadPolicy)


def evaluate_held_out(settings: Settings) -> list[Any]:
    """Evaluate the run's examples, and again with one that only the second of two ranks reads."""
    trainer = build_trainer(settings)
    examples = trainer.train_examples
    results = [evaluate_on_ranks(trainer, part) for part in (examples, remove_image(examples, 11))]
    trainer.sampler.close()
    return results


def list_cases(folder: Path, launch: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the names and functions of the cases that all ranks of a launch run together."""
    if launch.endswith("-uninterrupted"):
        yield "run", lambda: train_and_read(make_run_settings(folder, launch))
        return
    if launch.endswith("-oom"):
        yield "error", lambda: run_out_of_memory(folder, launch)
        return
    if launch.endswith("-late"):
        yield "end", lambda: run_with_a_late_rank(folder, launch)
        return
    if launch in BEGUN_BY:
        yield "run", lambda: resume_run(folder, launch)
        return

    def steps(count: int, **changes: Any) -> Callable[[], Any]:
        return partial(build_and_run, make_settings(folder, launch, **changes), count)

    if "offload" in launch:
        trainer = build_trainer(make_settings(folder, launch))
        yield "steps, full", partial(run_steps, trainer, STEPS["full"])
        yield "offloaded", lambda: [is_offloaded(trainer.strategy)]
        return
    yield from list_cases_of_weights(folder, launch)
    # Neither sharding nor the number of ranks changes a loss.
    for loss, objective in LOSSES.items() if launch in ("ddp-1", "ddp-2") else ():
        yield f"loss {loss}", steps(1, objective={"loss_type": loss, **objective})
    for name in UNEVEN_CASES.get(launch, ()):
        changes = UNEVEN[name]
        is_long = any(word in str(changes) for word in ("refresh", "replay", "mixed"))
        yield name, steps(3 if is_long else 2, **changes)
    if launch.startswith(("ddp", "zero")):
        yield "out of memory", partial(retry_after_out_of_memory, make_settings(folder, launch))
    if launch in ("ddp-1", "ddp-2"):
        yield "evaluation", lambda: evaluate_held_out(make_settings(folder, launch))
    if launch == "fsdp_held-2":
        yield "failed part", lambda: fail_to_write_a_part(folder, launch)
    if not launch.endswith("-4"):
        yield "begun run", lambda: begin_run(folder, launch)


def list_cases_of_weights(folder: Path, launch: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the cases that differ in which weights are trained, and in their precision.

    Each must run before the next one is asked for, because they go on with the same trainer.
    """
    for kind in KINDS.get(launch, WEIGHTS):
        settings = make_settings(folder, launch, policy=WEIGHTS[kind])
        trainer = build_trainer(settings)
        yield f"steps, {kind}", partial(run_steps, trainer, STEPS[kind])
        if kind in COMMUNICATION.get(launch, ("full", "lora")):
            yield f"communication, {kind}", partial(count_communication, trainer)
        if kind == "full" and launch in WITH_INFINITE_GRADIENT:
            yield "infinite gradient", partial(skip_infinite_gradient, trainer)
        trainer.sampler.close()
        if launch == "ddp-2" and kind != "frozen_vision":
            yield f"overlap, {kind}", partial(compare_with_one_exchange, settings)
        if kind not in BFLOAT16.get(launch, ()):
            continue
        bfloat16 = {"dtype": "bfloat16", "gradient_checkpointing": True, **WEIGHTS[kind]}
        settings = make_settings(folder, launch, policy=bfloat16)
        count = 1 if launch.startswith("zero") else 2
        yield f"bfloat16, {kind}", partial(build_and_run, settings, count)


def run_rank(folder: Path, launch: str) -> None:
    """Run the cases of a launch in this process."""
    os.environ |= STRATEGIES[launch.split("-")[0]]
    strategies.OVERLAP_BYTES = 1 << 14  # several buckets of the tiny model
    rank, results = os.environ.get("RANK", "0"), {}
    if launch.endswith("-late"):  # its ranks end without results
        if rank == "0":
            torch.save(results, folder / f"{launch}.pt")
        os.dup2(os.open(folder / f"{launch}.{rank}", os.O_WRONLY | os.O_CREAT), 2)
    for name, run_case in list_cases(folder, launch):
        torch.backends.mkldnn.set_flags(name in WITH_ONEDNN)
        results[name] = run_case()
    if rank == "0":
        torch.save(results, folder / f"{launch}.pt")


def run_launch(folder: Path, launch: str) -> None:
    """Run the processes of a launch."""
    if not (folder / "rows.jsonl").exists():
        prepare(folder)
    status = 2 if launch.endswith("-late") else 0
    count = int(launch.split("-")[1])
    run_ranks(folder / f"{launch}.log", count, run_rank, folder, launch, status=status)
