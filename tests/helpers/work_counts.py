"""Work of fixed small steps, which does not depend on the machine. Run as a program, it writes
``tests/recorded/work.json``, with which ``tests/test_work.py`` compares the work of today."""

import json
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import meta_device
import pytest
import torch
from family_policies import POLICIES, build_batch, build_policy, build_prompt
from small_runs import make_embedded_trainer
from tiny_models import make_prompt, noise_example
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.model.engine.packing import GroupSlice, MicroBatch
from vlm_grpo.model.engine.sampling import build_sampling_settings
from vlm_grpo.model.engine.shared import SharedEngine
from vlm_grpo.model.policy import Policy

RECORDED = Path(__file__).parents[1] / "recorded/work.json"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
READS_OF_VALUES = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2"}
"""Operations for which the host waits for values from the device."""

Counts = dict[str, int]


class _Reads(TorchFunctionMode):
    """Counts of reads that are no operations on a CPU."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in ("tolist", "numpy", "__array__")
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """The names of dispatched operations, and how many of them compute, or read values."""

    kernels = reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names.append(name)
        self.kernels += not (func.is_view or name in ("_unsafe_view", "empty"))
        by_mask = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], list | tuple) else ())
        )
        self.reads += name in READS_OF_VALUES or by_mask
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self.names: list[str] = []
        return super().__enter__()


class _Memory(TorchDispatchMode):
    """Bytes of the storages that operations allocate, without those that kernels use inside."""

    live = peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = _find_storages((args, kwargs))
        result = func(*args, **kwargs)
        for key, storage in _find_storages(result).items():
            if key not in known:
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, size: int) -> None:
        self.live -= size


def _find_storages(values: Any) -> dict[int, torch.UntypedStorage]:
    tensors = [v for v in tree_leaves(values) if isinstance(v, Tensor) and not v.is_mkldnn]
    return {id(storage): storage for storage in (t.untyped_storage() for t in tensors)}


@contextmanager
def count_memory(counts: Counts) -> Iterator[None]:
    """Count the greatest number of bytes that the block's operations hold at once."""
    with _Memory() as memory:
        yield
    counts["peak_bytes"] = memory.peak


@contextmanager
def count_work() -> Iterator[Counts]:
    counts: Counts = {}
    with _Reads() as reads, Operations() as operations:
        yield counts
    counts |= {"operations": len(operations.names), "host_reads": operations.reads + reads.count}


def measure_saved_bytes(policy: Policy, batch: MicroBatch) -> int:
    """Return the bytes of all storages that autograd saves of a batch, without weights."""
    weights = [weight.untyped_storage() for weight in policy.model.parameters()]
    saved = {id(storage): storage for storage in weights}
    known = len(saved)

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        policy.score(batch)
    return sum(storage.nbytes() for storage in list(saved.values())[known:])


def measure_work(precision: str) -> dict[str, Counts]:
    """Return the counts of each fixed step with LoRA in a precision."""
    policy, _ = build_policy("qwen2_5_vl", POLICIES[f"lora-{precision}"])
    prompt = build_prompt(policy)
    found: dict[str, Counts] = {}
    with count_work() as found["vision"]:
        policy.encode_images([prompt])
    for tokens in (8, 16):
        length = f"rollout.max_completion_length={tokens}"
        rollout = load_settings("counting", [length, f"rollout.min_new_tokens={tokens}"]).rollout
        sampling = build_sampling_settings(policy.distribution, rollout)
        policy.sample([prompt], sampling, 4, [(0,)], 4096)  # libraries prepare themselves
        with count_work() as counts, count_memory(counts):
            policy.sample([prompt], sampling, 4, [(0,)], 4096)
        found[f"rollout of {tokens} tokens"] = counts
    short, long = (found[f"rollout of {tokens} tokens"] for tokens in (8, 16))
    found["8 decode steps"] = {name: long[name] - short[name] for name in short}
    policy.model.train()
    batch = build_batch(prompt)
    with count_work() as found["update"], count_memory(found["update"]):
        policy.score(batch).logprobs.sum().backward()
    found["update"]["saved_bytes"] = measure_saved_bytes(policy, batch)
    return found


def measure_kernels(targets: Sequence[str]) -> Counts:
    """Return the kernels of a decode step of 3 layers as on a GPU, in bfloat16, with the drawing of
    tokens and with LoRA on these layers."""
    with pytest.MonkeyPatch.context() as patch:
        meta_device.use_gpu_kernels(patch)
        policy = meta_device.build_policy("qwen2_5_vl", bool(targets), targets)
        policy.engine.use_capture(lambda step, inputs: step)
        counts, step = [], SharedEngine.step

        def count(*args: Any) -> Any:
            with Operations() as operations:
                drawn = step(*args)
            counts.append(operations.kernels)
            return drawn

        patch.setattr(SharedEngine, "step", count)
        meta_device.sample(policy, patch)
    return {"kernels": max(counts)}


def measure_layer() -> Counts:
    """Count the operations that Python dispatches per layer in the forward and backward pass of a
    micro-batch, in bfloat16 with LoRA as on a GPU: 3 layers minus 2."""
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        meta_device.use_gpu_kernels(patch)
        for layers in (2, 3):
            policy = meta_device.build_policy("qwen2_5_vl", True, PROJECTIONS, layers)
            policy.model.train()
            prompt = make_prompt(policy, noise_example("0", []))
            batch = MicroBatch((GroupSlice(prompt, ((5,) * 8,) * 4, (0, 1, 2, 3)),))
            policy.score(batch)  # constants are made once
            with Operations() as operations:
                policy.score(batch).logprobs.sum().backward()
            counts.append(len(operations.names))
    return {"operations": counts[1] - counts[0]}


def measure_step() -> Counts:
    """Return the work of a step of the embedded model that its trainer counts."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_embedded_trainer(Path(folder))
        metrics = trainer.step()
        trainer.sampler.close()
    return {name: int(value) for name, value in metrics.items() if name.startswith("work/")}


def measure_all(precisions: Sequence[str] = ("float32", "bfloat16")) -> dict[str, Counts]:
    found = {
        "step": measure_step(),
        "update of a layer on a GPU, bfloat16, with LoRA": measure_layer(),
        "decode step on a GPU, bfloat16": measure_kernels(()),
        "decode step on a GPU, bfloat16, with LoRA": measure_kernels(PROJECTIONS),
    }
    for precision in precisions:
        work = measure_work(precision)
        found |= {f"{name}, {precision}": counts for name, counts in work.items()}
    return found


def main() -> None:
    torch.set_num_threads(1)
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}
    work = {"versions": versions, "counts": measure_all()}
    RECORDED.write_text(json.dumps(work, indent=1) + "\n")
    print(RECORDED.read_text())


if __name__ == "__main__":
    main()
