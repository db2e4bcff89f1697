"""Less memory for the activations that a backward pass needs: recomputing or offloading them."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from vlm_grpo.config.policy import Checkpointing
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.forwards import replace_forward, restore_forward

MIN_BYTES = 2**20
"""Smaller tensors stay on the device: their copies would cost more time than they save memory."""


def enable_gradient_checkpointing(
    model: Any, part: Checkpointing | Literal["auto"] = "full"
) -> None:
    """Recompute the activations of a part of each layer in the backward pass; auto: none yet."""
    if part == "mlp":
        modules = list(_find_feed_forward(model))
        if not modules:
            raise UserError(
                "policy.gradient_checkpointing=mlp: this model's feed-forward layers are not "
                "known: use full"
            )
        for module in modules:
            replace_forward(module, _recompute)
    elif part == "full":
        for module in _find_feed_forward(model):
            restore_forward(module, _recompute)
        # Renamed in transformers 5.23, where the old name warns.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        # A checkpointed segment needs an input with gradient, which frozen embeddings do not have.
        model.enable_input_require_grads()


def recompute_more(model: Any, part: Checkpointing) -> Checkpointing:
    """Recompute more than ``part``, which is recomputed now; return what is recomputed then."""
    more = "mlp" if part == "none" and any(_find_feed_forward(model)) else "full"
    enable_gradient_checkpointing(model, more)
    return more


def _find_feed_forward(model: nn.Module) -> Iterator[nn.Module]:
    names = (".mlp", ".feed_forward")
    return (module for name, module in model.named_modules() if name.endswith(names))


def _recompute(module: nn.Module, original: Any, *inputs: Any) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return original(module, *inputs)
    return checkpoint(original, module, *inputs, use_reentrant=False)


@contextlib.contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Set evaluation mode: no dropout, and no checkpointing, which would disable the cache."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextlib.contextmanager
def offload_activations(
    model: nn.Module, device: torch.device, min_bytes: int = MIN_BYTES
) -> Iterator[None]:
    """Keep activations that are saved inside in pinned memory until the backward pass needs them.

    PyTorch's ``save_on_cpu``, but weights and small tensors stay on the device, and what several
    operations save is copied once.
    """
    kept = {_identify(weight) for weight in model.parameters()}
    cpu = save_on_cpu(pin_memory=True)
    # The weak references keep identities unique.
    copies: dict[tuple[Any, ...], tuple[Any, StorageWeakRef]] = {}

    def pack(tensor: Tensor) -> Any:
        identity, is_elsewhere = _identify(tensor), tensor.device.type != device.type
        if tensor.nbytes < min_bytes or identity in kept or is_elsewhere:
            return tensor
        view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = identity, tensor._version, *view  # noqa: SLF001
        if key not in copies:
            copies[key] = cpu.pack_hook(tensor), StorageWeakRef(tensor.untyped_storage())
        return copies[key][0]

    def unpack(saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else cpu.unpack_hook(saved)

    with saved_tensors_hooks(pack, unpack):
        yield


def _identify(tensor: Tensor) -> int:
    # Only tensors with the same memory share it.
    return tensor.untyped_storage()._cdata  # noqa: SLF001
