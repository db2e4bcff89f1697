"""Less memory for the activations that a backward pass needs: recomputing or offloading them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from vlm_grpo.config.policy import Checkpointing
from vlm_grpo.errors import UserError

MIN_BYTES = 2**20
"""Smaller tensors stay on the device: their copies would cost more time than they save memory."""


def enable_gradient_checkpointing(model: Any, part: Checkpointing = "full") -> None:
    """Recompute the activations of a part of each layer in the backward pass.

    Raises:
        UserError: the part is ``mlp`` and the model has no modules of the names known for it.
    """
    if part == "mlp":
        names = (".mlp", ".feed_forward")
        modules = [module for name, module in model.named_modules() if name.endswith(names)]
        if not modules:
            raise UserError(
                "policy.gradient_checkpointing=mlp: this model's feed-forward layers are not "
                "known: use full"
            )
        for module in modules:
            _recompute(module)
    elif part == "full":
        # Renamed in transformers 5.23, where the old name warns.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        # A checkpointed segment needs an input with gradient, which frozen embeddings do not have.
        model.enable_input_require_grads()


def _recompute(module: nn.Module) -> None:
    """Recompute a module's activations in the backward pass."""
    kind = type(module)

    def forward(self: Any, *inputs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return kind.forward(self, *inputs)
        return torch.utils.checkpoint.checkpoint(kind.forward, self, *inputs, use_reentrant=False)

    # A subclass instead of an attribute, so that a copy of the module calls itself.
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})


@contextlib.contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Set evaluation mode: no dropout, and no checkpointing, which would disable the cache."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class _Parked:
    """A saved tensor in the host's memory.

    Attributes:
        host: its values.
        previous: the tensor saved before it, which the backward pass needs after it.
        fetched: its values on the device, copied ahead of their use.
        used: its values on the device after their use, as long as something holds them.
        ready: recorded after the copy to the device.
    """

    def __init__(self, host: Tensor, previous: weakref.ref[_Parked] | None) -> None:
        self.host, self.previous = host, previous
        self.fetched: Tensor | None = None
        self.used: weakref.ref[Tensor] | None = None
        self.ready: Any = None


class ActivationOffloader:
    """Keeps saved activations in pinned host memory until the backward pass needs them.

    On CUDA, copies run on a stream of their own: to the host behind the computation, and back one
    tensor ahead of it. Weights and small tensors stay on the device.

    Args:
        model: the model.
        device: its device.
        min_bytes: size of the smallest tensor that is moved.
    """

    def __init__(self, model: nn.Module, device: torch.device, min_bytes: int = MIN_BYTES) -> None:
        self.model, self.device, self.min_bytes = model, device, min_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def offload(self) -> Iterator[None]:
        """Move the activations that are saved inside."""
        kept = {_identify(weight) for weight in self.model.parameters()}
        # A tensor may be saved several times. The weak references keep identities unique.
        known: dict[tuple, tuple[_Parked, StorageWeakRef]] = {}
        latest: weakref.ref[_Parked] | None = None

        def pack(tensor: Tensor) -> Tensor | _Parked:
            nonlocal latest
            identity = _identify(tensor)
            is_small = tensor.nbytes < self.min_bytes
            if is_small or identity in kept or tensor.device.type != self.device.type:
                return tensor
            view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            key = (identity, tensor._version, view)  # noqa: SLF001
            if key not in known:
                parked = _Parked(self._copy_to_host(tensor), latest)
                known[key] = parked, StorageWeakRef(tensor.untyped_storage())
                latest = weakref.ref(parked)
            return known[key][0]

        with saved_tensors_hooks(pack, self._unpack):
            yield

    def _copy_to_host(self, tensor: Tensor) -> Tensor:
        if self._stream is None:
            return tensor.clone()
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return host

    def _unpack(self, saved: Tensor | _Parked) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        value = self._fetch(saved)
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(saved.ready)
            value.record_stream(current)
        saved.fetched, saved.used = None, weakref.ref(value)
        if saved.previous is not None and (previous := saved.previous()) is not None:
            previous.fetched = self._fetch(previous)
        return value

    def _fetch(self, parked: _Parked) -> Tensor:
        """Return a tensor's values on the device, which may still be on their way."""
        value = parked.fetched
        if value is None and parked.used is not None:
            value = parked.used()
        if value is not None:
            return value
        if self._stream is None:
            return parked.host.clone()
        with torch.cuda.stream(self._stream):
            value = parked.host.to(self.device, non_blocking=True)
            parked.ready = self._stream.record_event()
        return value


def _identify(tensor: Tensor) -> int:
    """Return a number that only tensors with the same memory share."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001
