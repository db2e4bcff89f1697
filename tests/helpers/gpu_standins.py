"""Stand-ins for what only a GPU has: copies to and from it, packed attention, and its memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self
from unittest import mock

import pytest
import torch
from torch import Tensor

from vlm_grpo.model.engine import kernels
from vlm_grpo.model.engine.packing import MicroBatch
from vlm_grpo.training.memory_probe import MemoryProbe
from vlm_grpo.training.update import Updater


def plain_flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    seqused_k: Tensor | None = None,
) -> Any:
    """Compute each sequence with an explicit mask. A query sees the keys before and after its own
    that the window says, or all if negative; the last query's own key is the last one."""
    window = window_size_left, 0 if is_causal else window_size_right
    before, after = (n if n >= 0 else longest_key for n in window)
    assert not dropout
    assert query_starts.dtype == key_starts.dtype == torch.int32
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    queries = query.split(query_starts.diff().tolist())
    # If their numbers are given, a sequence of keys may begin before the last one ends.
    counts = key_starts.diff() if seqused_k is None else seqused_k
    assert counts.dtype == torch.int32
    if seqused_k is None:
        assert (longest_query, longest_key) == (max(map(len, queries)), counts.max())
    else:
        assert 0 < counts.min() <= counts.max() <= longest_key
    outputs, sums = [], []
    for q, first, count in zip(queries, key_starts.tolist()[:-1], counts.tolist(), strict=True):
        k, v = key[first : first + count], value[first : first + count]
        distance = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None]
        hidden = (distance > after) | (distance < -before)
        scores = torch.einsum("qhw,khw->hqk", q, k) * scale
        scores.masked_fill_(hidden, -torch.inf)
        outputs.append(torch.einsum("hqk,khw->qhw", scores.softmax(-1), v))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, dim=1), None, None, None


def use_plain_varlen(monkeypatch: pytest.MonkeyPatch, parts: int = 1) -> None:
    """Compute packed attention as on CUDA, with the plain kernel; a decode step splits prompts."""
    monkeypatch.setattr(kernels, "count_parts", lambda *_: parts)
    monkeypatch.setattr(kernels, "is_cpu", lambda query: False)
    monkeypatch.setattr(kernels, "has_varlen", lambda query: True)
    monkeypatch.setattr(kernels, "FLASH_VARLEN", plain_flash_varlen)


def record_copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Treat tensors as if they were on a GPU; return the list that records calls."""
    calls: list[Any] = []
    empty, methods = torch.empty, {name: getattr(Tensor, name) for name in ("copy_", "to")}

    def allocate(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        calls.extend(["pin"] * pin_memory)
        return empty(*args, **kwargs)

    def copy(name: str) -> Any:
        def call(x: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
            calls.append(f"{name}{' without waiting' * non_blocking}")
            return methods[name](x, *args, **kwargs)

        return call

    def pin(x: Tensor) -> Tensor:
        calls.append("pin")
        return x

    monkeypatch.setattr(torch, "empty", allocate)
    for name in methods:
        monkeypatch.setattr(Tensor, name, copy(name))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    return calls


class GpuMemory:
    """The memory of a GPU, whose way the updater takes: a micro-batch takes a number of bytes per
    token during its pass, and gradients take their bytes from the pass on."""

    def __init__(self, updater: Updater, size: int, token: int) -> None:
        self.updater, self.size, self.token = updater, size, token
        self.peak, self.tokens = 0, list[int]()  # of the passes
        self.score = updater.policy.score

    def count(self) -> int:
        grads = [weight.grad for _, weight in self.updater.strategy.trainable]
        return sum(grad.nbytes for grad in grads if grad is not None)

    def reset(self, device: torch.device) -> None:
        self.peak = self.count()

    def run(self, batch: MicroBatch, *rest: Any) -> Any:
        self.tokens.append(batch.num_tokens)
        needed = self.count() + batch.num_tokens * self.token
        if needed > self.size:
            raise torch.OutOfMemoryError("out of memory")
        self.peak = max(self.peak, needed)
        return self.score(batch, *rest)

    @contextmanager
    def __call__(self) -> Iterator[Self]:
        updater, device = self.updater, torch.device("cuda")
        updater.budget.is_found = False
        updater.probe = MemoryProbe(updater.budget, updater.strategy, updater.settings, device)
        functions: dict[str, Any] = {
            "mem_get_info": lambda _: (self.size - self.count(), self.size),
            "memory_reserved": lambda _: self.count(),
            "memory_allocated": lambda _: self.count(),
            "max_memory_allocated": lambda _: max(self.peak, self.count()),
            "reset_peak_memory_stats": self.reset,
        }
        with (
            mock.patch.multiple(torch.cuda, **functions),
            mock.patch.object(updater.policy, "score", self.run),
            mock.patch.object(updater.policy, "sharing_check", None),  # also calls ``score``
        ):
            yield self
