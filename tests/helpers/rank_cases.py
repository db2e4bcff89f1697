"""The cases that the processes of a launch run in ``tests/dist/test_ranks.py``.

A launch is named ``STRATEGY-RANKS``, such as ``fsdp-2``, or if it makes a single run, with a third
part (``list_cases``). Its first rank writes the results of its cases to ``FOLDER/LAUNCH.pt``.
"""

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_ranks
from gpu_standins import GpuMemory
from PIL import Image
from safetensors.torch import load_file
from small_environments import Peek
from small_environments import __file__ as ENVIRONMENTS
from small_runs import change_blocks, save_tiny_model, small_run
from small_shapes import SHAPE
from steps import record_updates
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transfer_server import GPU, run_transfer_server

from vlm_grpo.config.run import Settings
from vlm_grpo.data.loading import load_run
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.dist.launch import build_accelerator
from vlm_grpo.dist.weights import gather_full
from vlm_grpo.errors import Stopped, UserError
from vlm_grpo.eval import models
from vlm_grpo.eval.evaluate import HeldOutEvaluator, evaluate, evaluate_model
from vlm_grpo.model import prompts
from vlm_grpo.model.engine.packing import MicroBatch
from vlm_grpo.model.policy import load_policy
from vlm_grpo.serve import weights as serve_weights
from vlm_grpo.serve.server import Server
from vlm_grpo.serve.weights import DirectTransfer, IpcChannel
from vlm_grpo.training import memory_probe, trainer
from vlm_grpo.training.checkpoint.files import write_checkpoint
from vlm_grpo.training.run_dir import lock_run
from vlm_grpo.training.stopping import StepInterrupted, StopRequest
from vlm_grpo.training.trainer import Trainer, train
from vlm_grpo.training.update import Updater, build_updater
from vlm_grpo.types import EpisodeTurn


def send_weights(folder: Path, launch: str) -> None:
    """Send them to a server of this process, then to one of the first process only."""
    os.environ |= STRATEGIES[launch]
    serve_weights.get_device_id = lambda device: GPU
    serve_weights.PART_BYTES = 1 << 16
    settings = make_settings(folder, launch)
    accelerator = build_accelerator(settings)
    policy = load_policy(settings)
    expected = load_file(folder / "model" / "model.safetensors")
    strategy = build_updater(policy, settings, accelerator).strategy
    assert any(isinstance(w, DTensor) for w in strategy.weights().values())
    transfer = DirectTransfer(strategy, IpcChannel(torch.device("cpu")), may_load=True)
    for every_rank in (True, False):
        with run_transfer_server() as server:
            has_server = every_rank or accelerator.is_main_process
            servers = [Server(server.url, 60)] if has_server else []
            assert transfer.send(servers) == {}
            accelerator.wait_for_everyone()
            assert len(server.weights) == (len(expected) if has_server else 0)
            for name, found in server.weights.items():
                assert torch.equal(found, expected[name]), name


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
FSDP |= {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
FSDP |= {"FSDP_RESHARD_AFTER_FORWARD": "true"}
TWO_BY_TWO = {f"PARALLELISM_CONFIG_DP_{name}_SIZE": "2" for name in ("REPLICATE", "SHARD")}
STRATEGIES = {
    "ddp": {},
    "fsdp": FSDP,
    "fsdp_held": {**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"},
    "fsdp_offload": {**FSDP, "FSDP_OFFLOAD_PARAMS": "true"},
    "hsdp": {**FSDP, **TWO_BY_TWO, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
}
"""The environment variables of each strategy, as ``accelerate launch`` sets them. ``fsdp_held``
keeps the layers gathered in the update; ``…_offload`` keeps weights and optimizer state in main
memory."""

STEPS = {"full": 3, "frozen_vision": 2, "lora": 2}
"""Number of steps of each kind of weights. The second follows an update; the third follows an
update with the optimizer's state, and starts the next epoch."""
WEIGHTS: dict[str, Any] = {"full": {}, "frozen_vision": {"freeze": ["vision"]}}
WEIGHTS |= {"lora": {"lora": {"r": 4, "alpha": 8}}}
KINDS = {"ddp-4": ("full",), "hsdp-4": ("full",), "fsdp_held-2": ("full", "lora")}
"""The kinds of weights of the launches that do not have all."""
BFLOAT16 = ("full", "lora")
"""The kinds of weights that ``ddp-2`` and ``fsdp-2`` also run in bfloat16. Both forms of FSDP2 cast
weights alike."""
WITH_ONEDNN = ("steps, frozen_vision", "steps, lora")
"""The cases with oneDNN's products, which each process compiles for every number of rows."""
UNEVEN: dict[str, dict[str, Any]] = {
    "resampled groups": {
        "rollout": {"dynamic_sampling": True, "num_generations": 2},
        "objective": {"loss_type": "dapo"},
    },
    "a reference and two updates": {
        "objective": {"beta": 0.05, "reference_refresh_every": 2, "num_iterations": 2}
    },
    "a reference in the reward": {
        "objective": {
            **{"beta": 0.05, "reference_refresh_every": "never", "kl_in": "reward"},
            # Advantages of tokens, normalized over all ranks.
            **{"kl_estimator": "k1", "advantage_estimator": "reinforce_plus_plus"},
        }
    },
    # A supervised step, whose examples without an image are one group, and the first rollout.
    "a warm start": {"warm_start": {"steps": 1, "lr": 1e-4}},
    # Two sources with other prompts and rewards. Updates would magnify the rounding of gradients
    # that are almost 0, as Adam divides each by its own size.
    # The weights of completions and of tokens depend on those of all ranks.
    "a mixture": {
        "task": "mixed",
        "optim": {"lr": 0.0},
        "objective": {
            "perception": {"min_scale": 0.5, "patch_size": 14},
            "top_entropy_quantile": 0.8,
        },
    },
    "a curriculum and replay": {
        "data": {"curriculum": {"pool": 2}},
        "objective": {"replay": {}},
        "rollout": {"num_generations": 2},
    },
    "revised groups": {
        "methods": [{"file": "revision", "options": {"below": 0.06}}],
        "objective": {"loss_type": "dr_grpo"},
        "rollout": {"stop": [*"abcdefghijklmnopqrst"]},
    },
    "crops for a part of each group, and credit": {
        "methods": ["crop_rollouts", {"file": "visual_credit", "options": {"hide_object": True}}]
    },
    # The first row has no image, so no rank ever has one; every rank has the same example.
    "one example": {"data": {"train_limit": 1}},
    # Completions of one token that stop at once have equal rewards: no group has an advantage.
    "nothing to learn": {"rollout": {"max_completion_length": 1, "temperature": 0.01}},
}
"""Settings under which ranks differ in their number of groups, passes or images, and each type of
loss that has a normalizer of its own."""
_IN_THE_UPDATE = ("a reference and two updates", "a warm start", "one example", "nothing to learn")
EPISODES: dict[str, Any] = {
    "task_options": {"environment": {"name": f"{ENVIRONMENTS}:{Peek.__name__}", "max_turns": 3}},
    "rollout": {"max_completion_length": 5},
    "optim": {"prompts_per_step": 3},
    "data": {"eval_limit": 5},
    "evaluation": {"temperature": 1.0},
}
"""Episodes with unequal numbers of turns; those of rows without an image observe texts alone."""
UNEVEN_CASES = {
    **dict.fromkeys(("ddp-1", "ddp-2"), tuple(UNEVEN)),
    "fsdp-2": ("resampled groups", "revised groups", *_IN_THE_UPDATE),
    "ddp-4": ("resampled groups", "nothing to learn"),
    "hsdp-4": ("nothing to learn",),
}
"""The cases of ``UNEVEN`` by launch. A strategy of each library has those that differ in the
update; on four ranks it has those in which some ranks have none."""
ONE_STEP = ("a mixture", "one example", "nothing to learn")
"""The cases in which a second step would show nothing new."""
WITH_EPISODES = "ddp-2", "fsdp-2"
BEGUN_BY = {"fsdp-2-resumed": "fsdp-2", "fsdp_held-2-resumed": "ddp-1"}
BEGUN_BY |= {"ddp-1-resumed": "fsdp_held-2"}
"""The launch whose run each launch resumes. ``ddp-1`` has made two steps of its run; the others
were terminated in the middle of the third."""


def prepare(folder: Path) -> None:
    """Write the model, the task, and twelve rows, every third without an image."""
    model = save_tiny_model(folder / "model", seed=0)  # of whose groups some have no spread
    for name in ("without-weights", "broken"):
        shutil.copytree(model, folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "broken" / "model.safetensors").write_bytes(b"no weights")
    random = np.random.default_rng(0)
    rows = []
    for index in range(12):
        size = (56 + 28 * (index % 4), 56)
        pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        images = [] if index % 3 == 0 else [f"{index}.png"]
        row = {"id": str(index), "images": images, "question": "Write.", "answer": "abc"}
        marks = {"evidence": [[0, 0, 28, 28]], "boxes": [[0, 0, 40, 28]]} if images else {}
        rows.append(row | marks)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_settings(folder: Path, name: str, **changes: Any) -> Settings:
    """Build the settings of a run on the files of ``prepare``; ``changes`` override its blocks."""
    rows: Any = str(folder / "rows.jsonl")
    if changes.get("task") == "mixed":
        own = {"source": rows, "task": str(folder / "letters.py")}
        options = {"weights": {"letters": 0.5}, "instruction": "Use letters."}
        half = {**own, "name": "half", "task_options": options, "limit": 5}
        rows = [{**own, "name": "plain", "weight": 2.0}, half]
    values: dict[str, Any] = {
        "name": name,
        "data": {"train": rows, "train_limit": None},
        # Stop strings make the lengths differ, and with them the types of loss.
        "rollout": {"max_completion_length": 5, "stop": list("aeiourstln")},
        # Five prompts are uneven on two and on four ranks; a micro-batch holds one or two groups.
        "optim": {"lr": 1e-5, "prompts_per_step": 5, "max_steps": 6, "max_tokens_per_batch": 100},
        "logging": {"samples_every": 0, "trackers": []},
    }
    return small_run(folder, folder / "model", **change_blocks(values, changes))


def make_run_settings(folder: Path, launch: str, **changes: Any) -> Settings:
    """Build the settings of a run of four steps that depend on the weights, the optimizer's state
    and a reference. Launches of ``fsdp_held`` write sharded checkpoints."""
    return make_settings(
        folder,
        launch,
        **{
            "objective": {"num_iterations": 2, "beta": 0.1, "reference_refresh_every": "never"},
            # Adam's first steps enlarge what rounding differs in; a larger rate changes samples.
            "optim": {"lr": 2e-4, "max_steps": 4},
            "checkpoint": {"sharded": launch.startswith("fsdp_held")},
            **changes,
        },
    )


class SelfTermination(StopRequest):
    """A request that sends this process a SIGTERM while it samples the third step."""

    steps = 0

    @property
    def reason(self) -> str | None:
        self.steps += 1
        return super().reason

    def check(self) -> None:
        if self.steps == 3 and self.signal is None:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.signal is not None:
            raise StepInterrupted


def train_and_read(folder: Path, launch: str, **changes: Any) -> list[dict[str, float]]:
    """Train, and return the metrics. The end destroys the process group: a launch makes one run."""
    train(settings := make_run_settings(folder, launch, **changes))
    return [json.loads(line) for line in (settings.run_dir / "metrics.jsonl").open()]


def begin_run(folder: Path, launch: str) -> None:
    """Make the part of a run after which other launches resume it."""
    if launch == "ddp-1":
        train(make_run_settings(folder, launch, optim={"lr": 2e-4, "max_steps": 2}))
        return
    # Only the last rank receives the signal.
    stop_request = SelfTermination() if _is_last_rank() else StopRequest()
    trainer.StopRequest = lambda *_: stop_request  # type: ignore[assignment, misc]
    with pytest.raises(Stopped):
        train(make_run_settings(folder, launch))


def resume_run(folder: Path, launch: str) -> list[dict[str, float]]:
    """Resume the run that another launch has begun."""
    accelerator = build_accelerator(make_run_settings(folder, launch))
    if accelerator.is_main_process:
        shutil.copytree(folder / "runs" / BEGUN_BY[launch], folder / "runs" / launch)
    accelerator.wait_for_everyone()
    return train_and_read(folder, launch, resume=True)


def fail_to_write_a_part(folder: Path, launch: str) -> list[Any]:
    """Write a checkpoint whose last part cannot be written; return this rank's error, and files."""
    accelerator = build_accelerator(make_settings(folder, launch))
    checkpoints = folder / "failed"

    def write_weights(part: Path) -> None:
        (part / "weights").touch()
        if accelerator.is_last_process:
            raise OSError("no space")

    try:
        write_checkpoint(accelerator, checkpoints, 1, ({}, {}), write_weights, sharded=True)
    except (OSError, UserError) as error:
        return [str(error), [path.name for path in checkpoints.iterdir()]]
    return []


def rename_run(settings: Settings) -> list[str]:
    """Rename the run's folder before a step; return the errors of all ranks."""
    trainer, error = build_trainer(settings), "none"
    with closing(trainer.sampler), lock_run(settings, trainer.accelerator):
        if trainer.accelerator.is_main_process:
            settings.run_dir.rename(settings.output_dir / "renamed")
        try:
            trainer.step()
        except UserError as caught:
            error = str(caught)
    return gather_object([error])


def run_out_of_memory(folder: Path, launch: str) -> list[str]:
    """Train until the last rank runs out of memory in its second step; return this rank's error."""
    settings = make_run_settings(folder, launch, checkpoint={"every": 1})
    is_last, backward = _is_last_rank(), Updater._backward  # noqa: SLF001

    def fail_in_second_step(self: Updater, micro: MicroBatch, *rest: Any) -> Any:
        if is_last and self.scheduler.last_epoch == 1 and len(micro.rows) > 1:
            torch.empty(1 << 50)  # a real failure to allocate
        return backward(self, micro, *rest)

    Updater._backward = fail_in_second_step  # type: ignore[method-assign] # noqa: SLF001
    with pytest.raises(UserError) as caught:
        train(settings)
    (folder / f"{launch}.{'last' if is_last else 'first'}").write_text(str(caught.value))
    return [str(caught.value)]


def read_by_the_first(folder: Path, launch: str) -> list[Any]:
    """Load a model whose weights the first rank alone has, and one with broken weights; return sums
    of each rank's weights before they are placed and after it, and all errors."""
    is_first, messages = os.environ["RANK"] == "0", []
    names = "model" if is_first else "without-weights", "broken"
    settings, broken = (make_settings(folder, launch, model=str(folder / n)) for n in names)
    accelerator = build_accelerator(settings)
    policy = load_policy(settings)

    def add_up(weights: dict[str, Any]) -> list[dict[str, float]]:
        return gather_object([{n: w.double().sin().sum().item() for n, w in weights.items()}])

    before = add_up(dict(policy.model.named_parameters()))
    weights = build_updater(policy, settings, accelerator).strategy.weights()
    after = add_up(gather_full(weights, weights))
    try:
        load_policy(broken)
    except UserError as error:
        messages = [str(error)]
    return [before, after, gather_object(messages)]


def _is_last_rank() -> bool:
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


CHECKED: set[str] = set()
"""Policy settings of the trainers of this process."""


def build_trainer(settings: Settings) -> Trainer:
    """Build a trainer. Only the first of its policy settings compares the forms of the prompt."""
    task, examples, _ = load_run(settings)
    accelerator = build_accelerator(settings)
    torch.manual_seed(0)
    policy, kind = load_policy(settings), settings.policy.model_dump_json()
    if kind in CHECKED:
        policy.sharing_check = None
    CHECKED.add(kind)
    return Trainer(settings, policy, task, examples, [], accelerator)


def run_steps(trainer: Trainer, count: int) -> list[dict[str, Any]]:
    """Run steps; return the metrics and the reduced gradients of each."""
    with pytest.MonkeyPatch.context() as patch:
        _, grads = record_updates(patch, trainer.strategy)
        return [{"metrics": trainer.step(), "grads": grads[-1]} for _ in range(count)]


def build_and_run(settings: Settings, count: int) -> list[dict[str, Any]]:
    """Run the first steps of a new trainer; return what ``run_steps`` does."""
    trainer = build_trainer(settings)
    steps = run_steps(trainer, count)
    trainer.sampler.close()
    return steps


def retry_after_out_of_memory(settings: Settings) -> list[dict[str, Any]]:
    """Run two steps. In the first, the first rank runs out of memory near the end of a backward
    pass and repeats it. The second finds the size of micro-batches on GPUs; the first GPU has twice
    the memory of the others."""
    trainer = build_trainer(settings)
    failures = [trainer.accelerator.is_main_process]

    def fail_once(_: Tensor) -> None:
        if any(failures):
            failures.clear()
            raise torch.OutOfMemoryError("out of memory")

    layer = trainer.policy.model.get_decoder().layers[0]
    next(layer.parameters()).register_post_accumulate_grad_hook(fail_once)
    steps = run_steps(trainer, 1)
    assert not any(failures)
    parts = {"layer": SHAPE.layer, "block": SHAPE.block}  # measuring them takes seconds
    memory_probe.measure_layers = lambda shape, *_, **__: replace(shape, **parts)
    size = 21 if trainer.accelerator.process_index else 42
    with GpuMemory(trainer.updater, size * 2**30, token=2**20)():
        trainer.step()
    steps[0]["budgets"] = gather_object([trainer.updater.budget.limit])
    trainer.sampler.close()
    return steps


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
    """Count the communication of one step, and the weights from which the guide derives it. The
    first step of a trainer would also gather weights and create the optimizer's state."""
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
    layers = model.get_decoder().layers

    def count(weights: Iterable[Tensor]) -> int:
        return sum(weight.numel() for weight in weights if id(weight) not in ignored)

    return [
        {
            "calls": dict(counter.calls),
            "bytes": dict(counter.bytes),
            "passes": len(passes),
            "trained": sum(weight.numel() for _, weight in strategy.trainable),
            "base": count(model.parameters()),
            "layers": count(layers.parameters()),
        }
    ]


def is_offloaded(strategy: Any) -> bool:
    state = strategy.streamed[0]._get_fsdp_state()  # noqa: SLF001
    policy = state._fsdp_param_group.offload_policy  # noqa: SLF001
    return isinstance(policy, CPUOffloadPolicy)


def evaluate_held_out(settings: Settings) -> list[Any]:
    """Evaluate examples that several ranks share; return all scores, and how many are this rank's.
    Then let the image be missing that only the second of two ranks reads; return the error."""
    trainer, scored, found = build_trainer(settings), list[str](), list[Any]()
    models.CHUNK_EXAMPLES = 1

    def count(task: Any, texts: Any, examples: Any, **options: Any) -> Any:
        scored.extend(texts)
        return trainer.sampler.scorer(task, texts, examples, **options)

    scorer: Any = count
    *others, last = trainer.train_examples
    missing = replace(last, images=(replace(last.images[0], path=Path("missing.png")),))
    for example in (last, missing):
        try:
            with trainer.strategy.gathered():
                model = models.LocalModel(trainer.policy, trainer.settings)
                rows = evaluate_model(model, trainer.task, [*others, example], scorer).rows
            found.append([[(row["id"], row["rewards"]["letters"]) for row in rows], len(scored)])
        except UserError as error:
            found.append([str(error)])
    trainer.sampler.close()
    return found


def train_on_episodes(folder: Path, launch: str) -> list[dict[str, Any]]:
    """Evaluate episodes as the command does and as a run does, with and without tools; then run
    a step. Return it with both evaluations and the numbers of turns."""
    data = {**EPISODES["data"], "eval": str(folder / "rows.jsonl")}
    settings = make_settings(folder, launch, **EPISODES | {"data": data})
    models.CHUNK_EXAMPLES = 1
    prompts.TOOLS = "Look."  # what the tools are is nine tenths of the prompts
    trainer = build_trainer(settings)
    arguments = trainer.train_examples[:5], settings, trainer.sampler.scorer
    evaluator = HeldOutEvaluator(trainer.strategy, trainer.task, *arguments)
    found = [evaluator.evaluate(0), evaluate(settings)]
    (step,) = run_steps(trainer, 1)
    trainer.sampler.close()
    write = partial(json.dumps, default=EpisodeTurn.to_json)
    evaluations = [[write(scored.rows), scored.metrics] for scored in found if scored]
    return [{**step, "evaluations": evaluations}]


def list_cases(folder: Path, launch: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the names and functions of the cases that all ranks of a launch run together."""
    runs = {"uninterrupted": train_and_read, "oom": run_out_of_memory, "resumed": resume_run}
    if name := "".join(launch.split("-")[2:]):
        yield "run", lambda: runs[name](folder, launch)
        return

    def steps(count: int, **changes: Any) -> Callable[[], Any]:
        return partial(build_and_run, make_settings(folder, launch, **changes), count)

    if "offload" in launch:
        trainer = build_trainer(make_settings(folder, launch))
        yield "steps, full", partial(run_steps, trainer, STEPS["full"])
        yield "offloaded", lambda: [is_offloaded(trainer.strategy)]
        return
    yield from list_cases_of_weights(folder, launch)
    for name in UNEVEN_CASES.get(launch, ()):
        changes = UNEVEN[name]
        is_long = any(word in str(changes) for word in ("refresh", "replay"))
        yield name, steps(1 if name in ONE_STEP else 2 + is_long, **changes)
    if launch in ("ddp-2", "fsdp-2"):
        yield "one reader", lambda: read_by_the_first(folder, launch)
    if launch in ("ddp-1", *WITH_EPISODES):
        yield "episodes", lambda: train_on_episodes(folder, launch)
    if launch in ("ddp-1", "ddp-2"):
        yield "out of memory", partial(retry_after_out_of_memory, make_settings(folder, launch))
        yield "evaluation", lambda: evaluate_held_out(make_settings(folder, launch))
    if launch == "fsdp_held-2":
        yield "failed part", lambda: fail_to_write_a_part(folder, launch)
        yield "renamed run", lambda: rename_run(make_settings(folder, launch))
    if not launch.endswith("-4"):
        yield "begun run", lambda: begin_run(folder, launch)


def list_cases_of_weights(folder: Path, launch: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the cases that differ in which weights are trained, and in their precision. A case goes
    on with the trainer of the one before it."""
    for kind in KINDS.get(launch, WEIGHTS):
        settings = make_settings(folder, launch, policy=WEIGHTS[kind])
        trainer = build_trainer(settings)
        yield f"steps, {kind}", partial(run_steps, trainer, STEPS[kind])
        if kind != "frozen_vision":
            yield f"communication, {kind}", partial(count_communication, trainer)
        trainer.sampler.close()
        if kind not in BFLOAT16 or launch not in ("ddp-2", "fsdp-2"):
            continue
        bfloat16 = {"dtype": "bfloat16", "gradient_checkpointing": "auto", **WEIGHTS[kind]}
        settings = make_settings(folder, launch, policy=bfloat16)
        yield f"bfloat16, {kind}", partial(build_and_run, settings, 2)


def run_rank(folder: Path, launch: str) -> None:
    os.environ |= STRATEGIES[launch.split("-")[0]]
    rank, results = os.environ.get("RANK", "0"), {}
    for name, run_case in list_cases(folder, launch):
        torch.backends.mkldnn.set_flags(name in WITH_ONEDNN)
        results[name] = run_case()
    if rank == "0":
        torch.save(results, folder / f"{launch}.pt")


def run_launch(folder: Path, launch: str) -> None:
    if not (folder / "rows.jsonl").exists():
        prepare(folder)
    count = int(launch.split("-")[1])
    run_ranks(folder / f"{launch}.log", count, run_rank, folder, launch)
