"""The optimizer, its state in checkpoints, and its weights in bfloat16.

bfloat16 has 8 significant bits, so rounding to the nearest loses every update below 1/512 of its
weight, and a second moment that decays by 1/1000 never falls. Stochastic rounding is right in the
mean: a value between two bfloat16 numbers becomes the upper one with the probability that keeps
its expectation (Gupta et al., 2015, arXiv:1502.02551).
"""

import importlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer
from transformers.optimization import Adafactor

from vlm_grpo.config.optim import OptimizerName, OptimSettings
from vlm_grpo.dist.weights import find_layer, local_shard, shard_like, unshard_like
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.packing import ROUNDED_AT_ONCE
from vlm_grpo.model.engine.sampling import derive_seed
from vlm_grpo.model.families.family import find_part


def build_optimizer(
    trainable: Sequence[tuple[str, nn.Parameter]], optim: OptimSettings, seed: int = 0
) -> Optimizer:
    """Build the optimizer, with weight decay on matrices but not on vectors (norms and biases).

    Its groups of weights have two keys more: ``kind``, the name of their optimizer, and ``part``,
    the part of the model if it has a learning rate of its own. Weights in bfloat16 are rounded
    stochastically, with the seed.
    """
    rates = optim.part_rates
    if unused := sorted(rates.keys() - {find_part(name) for name, _ in trainable}):
        raise UserError(
            f"optim.lr_{unused[0]} has no effect: no weight of the {unused[0]} part is trained; "
            "remove it, or train that part (policy.freeze, policy.lora.target)"
        )
    if optim.name != "adamw" and any(isinstance(weight, DTensor) for _, weight in trainable):
        raise UserError(
            f"optim.name={optim.name} cannot update sharded weights: set optim.name=adamw (with "
            "policy.master_weights=bfloat16 to save memory), train adapters, or launch with "
            "configs/accelerate/ddp.yaml"
        )
    found: dict[tuple[str, bool, OptimizerName], list[nn.Parameter]] = {}
    for name, weight in trainable:
        part, is_vector = find_part(name), weight.dim() < 2
        key = (part if part in rates else "", is_vector, get_kind(name, weight.shape, optim.name))
        found.setdefault(key, []).append(weight)
    groups: dict[OptimizerName, list[dict[str, Any]]] = {}
    for (part, is_vector, kind), weights in sorted(found.items(), key=lambda item: item[0]):
        decay = 0.0 if is_vector else optim.weight_decay
        group = {"params": weights, "kind": kind, "part": part, "weight_decay": decay}
        groups.setdefault(kind, []).append(group)
    optimizers = [_build_one(kind, members, optim) for kind, members in groups.items()]
    if len(optimizers) == 1 and all(w.dtype == torch.float32 for _, w in trainable):
        return optimizers[0]
    return JointOptimizer(optimizers, seed)


def get_kind(name: str, shape: torch.Size, chosen: OptimizerName) -> OptimizerName:
    """Return the optimizer of a weight: Muon is for the matrices of numbered layers only."""
    is_hidden = len(shape) == 2 and find_layer(name) != name
    return "adamw" if chosen == "muon" and not is_hidden else chosen


def _build_one(
    kind: OptimizerName, groups: list[dict[str, Any]], optim: OptimSettings
) -> Optimizer:
    moments = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    if kind == "muon":  # learning rates are those of AdamW (Liu et al., 2025, arXiv:2502.16982)
        return Muon(groups, lr=optim.lr, adjust_lr_fn="match_rms_adamw")
    if kind == "adafactor":  # as in TRL; otherwise it would multiply and decay the rate
        return Adafactor(groups, lr=optim.lr, scale_parameter=False, relative_step=False)
    if kind == "adamw":
        return AdamW(groups, **moments, fused=True)
    try:
        bitsandbytes = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise UserError(
            f"optim.name={kind} needs bitsandbytes, which is not installed: pip install "
            "'vlm-grpo[quantization]', or set optim.name=adafactor, which needs less memory still"
        ) from error
    return bitsandbytes.optim.AdamW8bit(groups, **moments, is_paged=kind.startswith("paged"))


def describe_state(
    kind: OptimizerName, shape: torch.Size, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each tensor that an optimizer keeps for a weight of a shape and
    dtype, which is that of moments that are not in 8 bits."""
    count, scalar = shape.numel(), ((), torch.int64)
    moment, state = (tuple(shape), dtype), {}
    if dtype != torch.float32:
        state["updates"] = scalar
    if kind == "muon":
        return {**state, "momentum_buffer": moment}
    if kind == "adafactor":
        state |= {"step": scalar, "RMS": ((), torch.float32)}
        if len(shape) < 2:
            return {**state, "exp_avg_sq": moment}
        row, column = (*shape[:-1],), (*shape[:-2], shape[-1])
        state["exp_avg_sq_row"] = row, torch.float32
        state["exp_avg_sq_col"] = column, torch.float32
        return state
    if kind == "adamw":
        return {**state, "step": ((), torch.float32), "exp_avg": moment, "exp_avg_sq": moment}
    state["step"] = scalar
    for number in (1, 2):
        state[f"state{number}"] = moment
        if count >= 4096:  # bitsandbytes keeps the moments of smaller ones in float32
            state[f"state{number}"] = (tuple(shape), torch.uint8)
            state[f"qmap{number}"] = ((256,), torch.float32)
            state[f"absmax{number}"] = ((-(-count // 256),), torch.float32)  # of each block
    return state


def count_state(
    name: str, shape: torch.Size, chosen: OptimizerName, dtype: torch.dtype = torch.float32
) -> int:
    """Count the bytes of the state of a weight, as ``describe_state``."""
    state = describe_state(get_kind(name, shape, chosen), shape, dtype)
    # 8-bit moments share their code tables.
    tensors = (tensor for key, tensor in state.items() if not key.startswith("qmap"))
    return sum(math.prod(size) * held.itemsize for size, held in tensors)


def optimizer_tensors(
    optimizer: Optimizer, trainable: Sequence[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    """Return the optimizer's state by ``weight/key``, such as ``….q_proj.weight/exp_avg``."""
    tensors = {
        f"{name}/{key}": torch.as_tensor(value)
        for name, weight in trainable
        for key, value in optimizer.state.get(weight, {}).items()
    }
    # A table of 8-bit codes is one tensor for all weights, which a file has several times.
    return {key: v.clone() if "/qmap" in key else v for key, v in tensors.items()}


def load_optimizer_tensors(
    optimizer: Any, trainable: Sequence[tuple[str, nn.Parameter]], tensors: Mapping[str, Tensor]
) -> None:
    """Load what ``optimizer_tensors`` returned; ``UserError``: it belongs to other weights."""
    if not tensors:  # saved before the first update
        return
    held = dict(trainable)
    kinds = {id(w): group["kind"] for group in optimizer.param_groups for w in group["params"]}
    expected = {
        name: describe_state(kinds[id(weight)], weight.shape, weight.dtype)
        for name, weight in trainable
    }
    keys: dict[str, list[str]] = {}
    for key in tensors:
        keys.setdefault(key.rpartition("/")[0], []).append(key)
    if missing := sorted(expected.keys() - keys.keys()):
        raise UserError(
            f"the checkpoint holds no optimizer state for {len(missing)} of the weights that these "
            f"settings train, such as {missing[0]}: resume with the settings that wrote it"
        )
    for name, own in keys.items():  # only the tensors of one weight at a time are read
        state = {key.rpartition("/")[2]: tensors[key] for key in own}
        shapes = {key: shape for key, (shape, _) in expected.get(name, {}).items()}
        for key, value in state.items():
            if shapes.get(key) != value.shape:
                raise UserError(
                    f"the checkpoint's optimizer state {name}/{key} of shape {list(value.shape)} "
                    "fits no weight that these settings train: resume with the settings that wrote "
                    "it"
                )
        if lost := shapes.keys() - state.keys():
            raise UserError(f"the checkpoint's optimizer state of {name} lacks {min(lost)}")
        weight = held[name]
        optimizer.state[weight] = {k: _place(optimizer, weight, v) for k, v in state.items()}


def _place(optimizer: Any, weight: nn.Parameter, value: Tensor) -> Tensor | int:
    if not value.is_floating_point() and not value.dim():
        return int(value)
    if value.shape != weight.shape or not value.dim():
        return value.to(weight.device)
    for part in getattr(optimizer, "parts", [optimizer]):
        if getattr(part, "is_paged", False):
            return part.get_state_buffer(weight, value.dtype).copy_(value)
    return shard_like(value, weight)


class JointOptimizer(Optimizer):
    """Optimizers of different weights as one, which has the groups and the state of all.

    Weights in bfloat16 and their moments are widened to float32, one weight at a time, updated
    there, and rounded stochastically. The random bits depend on the run's seed, the weight and the
    number of its updates alone, so that a resumed run rounds as an uninterrupted one."""

    def __init__(self, parts: Sequence[Optimizer], seed: int) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts, self.seed = parts, seed
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        number = 0
        for part in self.parts:
            groups = part.param_groups
            if all(w.dtype == torch.float32 for group in groups for w in group["params"]):
                part.step()
                continue
            for group in groups:
                for weight in group["params"]:
                    self._step_in_float32(part, group, weight, number)
                    number += 1
            part.param_groups, part.state = groups, self.state

    def _step_in_float32(
        self, part: Optimizer, group: dict[str, Any], weight: Tensor, number: int
    ) -> None:
        state = self.state[weight]
        updates = state.pop("updates", 0)
        copy = nn.Parameter(weight.float())
        copy.grad = None if weight.grad is None else weight.grad.float()
        part.param_groups = [{**group, "params": [copy]}]
        is_rounded = {k: getattr(v, "dtype", None) == torch.bfloat16 for k, v in state.items()}
        wide = {key: v.float() if is_rounded[key] else v for key, v in state.items()}
        part.state = defaultdict(dict, {copy: wide})
        part.step()
        seed = derive_seed((self.seed, number, updates))
        generator = torch.Generator(local_shard(weight).device).manual_seed(seed)
        local_shard(weight).copy_(round_stochastically(local_shard(copy), generator))
        narrow = self.state[weight] = {"updates": updates + 1, **part.state[copy]}
        for key, value in narrow.items():
            is_moment = isinstance(value, Tensor) and value.dim() and value.shape == weight.shape
            if is_moment and value.dtype == torch.float32:
                rounded = round_stochastically(local_shard(value), generator)
                narrow[key] = unshard_like(rounded, weight)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round finite float32 numbers to one of the two nearest in bfloat16, right in the mean.

    A bfloat16 number is the upper half of a float32 number's bits. Random bits are added to the
    lower half: they carry into the upper half with the probability that the lower half states.
    """
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    chunks = values.reshape(-1).split(ROUNDED_AT_ONCE)
    for chunk, target in zip(chunks, rounded.view(-1).split(ROUNDED_AT_ONCE), strict=True):
        bits = torch.randint(
            1 << 16, chunk.shape, generator=generator, device=chunk.device, dtype=torch.int32
        )
        bits.add_(chunk.view(torch.int32)).bitwise_and_(-(1 << 16))
        target.copy_(bits.view(torch.float32))
    return rounded
