"""An optimizer of several optimizers, which can keep its weights in bfloat16.

bfloat16 has 8 significant bits, so rounding to the nearest loses every update below 1/512 of its
weight, and a second moment that decays by 1/1000 never falls. Stochastic rounding is right in the
mean: a value between two bfloat16 numbers becomes the upper one with the probability that keeps
its expectation (Gupta et al., 2015, arXiv:1502.02551).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlm_grpo.dist.sharding import local_shard, unshard_like
from vlm_grpo.model.engine.limits import ROUNDED_AT_ONCE
from vlm_grpo.model.engine.sampling import derive_seed


class JointOptimizer(torch.optim.Optimizer):
    """Optimizers of different weights as one, which has the groups and the state of all.

    Weights in bfloat16 and their moments are widened to float32, one weight at a time, updated
    there, and rounded stochastically. The random bits depend on the run's seed, the weight and the
    number of its updates alone, so that a resumed run rounds as an uninterrupted one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], seed: int) -> None:
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
        self, part: torch.optim.Optimizer, group: dict[str, Any], weight: Tensor, number: int
    ) -> None:
        state = self.state[weight]
        updates = state.pop("updates", 0)
        copy = nn.Parameter(weight.float())
        copy.grad = None if weight.grad is None else weight.grad.float()
        part.param_groups = [{**group, "params": [copy]}]
        part.state = defaultdict(dict, {copy: {key: _widen(value) for key, value in state.items()}})
        part.step()
        seed = derive_seed((self.seed, number, updates))
        generator = torch.Generator(local_shard(weight).device).manual_seed(seed)
        local_shard(weight).copy_(round_stochastically(local_shard(copy), generator))
        moments = {
            key: _narrow(value, weight, generator) for key, value in part.state[copy].items()
        }
        self.state[weight] = {"updates": updates + 1, **moments}


def _widen(value: Any) -> Any:
    is_rounded = isinstance(value, Tensor) and value.dtype == torch.bfloat16
    return value.float() if is_rounded else value


def _narrow(value: Any, weight: Tensor, generator: torch.Generator) -> Any:
    """Round a value of the state to the weight's dtype if it is a moment of the weight's shape."""
    is_moment = isinstance(value, Tensor) and value.dim() and value.shape == weight.shape
    if not is_moment or value.dtype != torch.float32:
        return value
    return unshard_like(round_stochastically(local_shard(value), generator), weight)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round finite float32 numbers to one of the two nearest in bfloat16, right in the mean.

    A bfloat16 number is the upper half of a float32 number's bits. Random bits are added to the
    lower half: they carry into the upper half with the probability that the lower half states.
    """
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    parts = zip(
        values.reshape(-1).split(ROUNDED_AT_ONCE),
        rounded.view(-1).split(ROUNDED_AT_ONCE),
        strict=True,
    )
    for chunk, target in parts:
        bits = torch.randint(
            1 << 16, chunk.shape, generator=generator, device=chunk.device, dtype=torch.int32
        )
        bits.add_(chunk.view(torch.int32)).bitwise_and_(-(1 << 16))
        target.copy_(bits.view(torch.float32))
    return rounded
