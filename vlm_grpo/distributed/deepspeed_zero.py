"""Weights whose gradients and optimizer are DeepSpeed's, cut over the ranks (ZeRO)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from deepspeed.utils import (
    logger,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
    set_z3_leaf_module,
)
from torch import Tensor, nn

from vlm_grpo.distributed.fsdp import DataParallel
from vlm_grpo.distributed.launch import BUCKET_BYTES
from vlm_grpo.distributed.optimizer import state_by_weight
from vlm_grpo.distributed.sharding import full_shape, shard_like
from vlm_grpo.engine.batch import MicroBatch
from vlm_grpo.model.policy import Policy

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each weight, besides the count of its steps."""


class DeepSpeedZero2(DataParallel):
    """Every rank holds all weights, and 1/R of the optimizer's state (ZeRO-2).

    The micro-batches' gradients stay whole on their rank until the step's last one, whose end
    adds them up and cuts them, each rank keeping its part; a step of the optimizer on the parts,
    and the weights are gathered again. So ranks with more, fewer or no micro-batches never wait
    for each other in the middle of a step.

    Args:
        policy: as for ``DataParallel``.
        accelerator: the ranks.
        config: DeepSpeed's settings.
    """

    def __init__(self, policy: Policy, accelerator: Accelerator, config: dict[str, Any]) -> None:
        super().__init__(policy, accelerator)
        self.config = config
        self.accumulating: contextlib.ExitStack | None = None

    def take(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        super().take(optimizer, max_norm)
        logger.setLevel(logging.WARNING)
        world = self.accelerator.num_processes
        sizes = {"train_batch_size": world, "train_micro_batch_size_per_gpu": 1}
        zero = {
            "reduce_bucket_size": BUCKET_BYTES // 4,
            "stage3_param_persistence_threshold": 0,  # none is always whole
            **{k: v for k, v in self.config["zero_optimization"].items() if v != "auto"},
        }
        config = {
            **self.config,
            "zero_optimization": zero,
            **sizes,  # which it asks for and does not use: the trainer makes the micro-batches
            "gradient_accumulation_steps": 1,
            "gradient_clipping": max_norm if max_norm < float("inf") else 0.0,
            "zero_allow_untested_optimizer": True,
        }
        self.engine: Any = deepspeed.initialize(
            model=self._module(), optimizer=optimizer, config=config
        )[0]
        for group in optimizer.param_groups:
            for part in group["params"]:  # DeepSpeed's, of this rank
                # It finds states where they are at the end of the first group's first step alone.
                moments = {moment: torch.zeros_like(part) for moment in MOMENTS}
                steps = torch.zeros((), dtype=torch.float32, device=part.device)
                optimizer.state[part] = {"step": steps, **moments}

    def _module(self) -> nn.Module:
        """What DeepSpeed looks after."""
        return self.policy.model

    def passes(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch | None]:
        if self.accumulating is None:  # else memory ran out, and the step begins anew
            self.accumulating = contextlib.ExitStack()
            self.accumulating.enter_context(self.gathered())
            self.accumulating.enter_context(self.engine.coalesce_grad_reduction())
        yield from batches

    def finish(self) -> None:
        for _, weight in self.trainable:
            if weight.grad is None:  # the ranks add up the same weights in the same order
                weight.grad = torch.zeros_like(weight)
            else:  # DeepSpeed takes the mean over the ranks where the sum is asked for
                weight.grad *= self.accelerator.num_processes
        if self.accumulating is not None:
            self.accumulating.close()  # the gradients' exchange
        self.accumulating = None

    def step(self) -> float:
        self.finish()
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def optimizer_tensors(self) -> dict[str, Tensor]:
        steps = next((float(state["step"]) for state in self.optimizer.state.values()), 0.0)
        if not steps:
            return {}
        is_main = self.accelerator.is_main_process
        found = {}
        for name, weight in self.trainable:
            found[f"{name}/step"] = torch.tensor(steps)
            for moment in MOMENTS:
                value: Any = safe_get_full_optimizer_state(weight, moment)
                found[f"{name}/{moment}"] = value.cpu() if is_main else torch.empty(0)
        return found

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        shapes = {name: full_shape(weight) for name, weight in self.trainable}
        state = state_by_weight(tensors, shapes)
        self._make_state()
        for name, weight in self.trainable:
            for moment in MOMENTS:
                self._set_moment(weight, state[name][moment].to(weight.device), moment)
        steps = state[self.trainable[0][0]]["step"]
        for held in self.optimizer.state.values():
            held["step"].copy_(steps)

    def _set_moment(self, weight: nn.Parameter, value: Tensor, moment: str) -> None:
        safe_set_full_optimizer_state(weight, value, moment)

    def _make_state(self) -> None:
        """A step that changes no weight: DeepSpeed has no place for a state before the first."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for _ in self.passes([]):
            pass
        self.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class DeepSpeedZero3(DeepSpeedZero2):
    """Every rank keeps 1/R of each weight, too, between its uses (ZeRO-3).

    All weights are gathered for a rollout, an evaluation, a reference pass and the micro-batches
    of a step, so that nothing in the middle of a pass is collective: DeepSpeed's own gathering,
    module by module, would have ranks with other batches wait for each other.
    """

    def _module(self) -> nn.Module:
        module = nn.ModuleList([self.policy.model])
        set_z3_leaf_module(module, True)  # hooks on nothing inside; this is never called
        return module

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        with deepspeed.zero.GatheredParameters(list(self.policy.model.parameters())):
            yield

    def weights(self) -> dict[str, Tensor]:
        module = self.policy.adapters or self.policy.model
        # A tied weight has several names and one tensor, which it keeps in the file.
        named = dict(module.named_parameters(remove_duplicate=False))
        made: dict[int, Tensor] = {}
        held = {}
        for name, value in self.policy.weights().items():
            weight = named.get(name)
            held[name] = value
            if weight is not None:
                if id(weight) not in made:
                    made[id(weight)] = self._whole(weight)
                held[name] = made[id(weight)]
        return held

    def _whole(self, weight: nn.Parameter) -> Tensor:
        """The weight in the first rank's main memory; nothing elsewhere."""
        with deepspeed.zero.GatheredParameters([weight]):
            is_main = self.accelerator.is_main_process
            return weight.detach().to("cpu", copy=True) if is_main else torch.empty(0)

    def _set_moment(self, weight: nn.Parameter, value: Tensor, moment: str) -> None:
        safe_set_local_optimizer_state(weight, shard_like(value, weight), moment)
