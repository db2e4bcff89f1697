"""DeepSpeed's ZeRO stages 2 and 3."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from functools import partial
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

from vlm_grpo.dist.collectives import BUCKET_BYTES, Deferred, full_shape, shard_like
from vlm_grpo.dist.optimizer import describe_state, state_by_weight
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments in AdamW's state."""


class DeepSpeedZero2(Strategy):
    """ZeRO-2: every rank holds all weights and 1/R of the optimizer state.

    Gradients stay unsharded on their rank until the step's last micro-batch; then DeepSpeed
    reduces and shards them, each rank updates its shard, and the weights are gathered again. Ranks
    with more, fewer or no micro-batches therefore never wait for each other in the middle of a
    step."""

    def __init__(self, policy: Policy, accelerator: Accelerator, config: dict[str, Any]) -> None:
        super().__init__(policy, accelerator)
        self.config = config
        self.engine: Any = None
        self._failed: contextlib.ExitStack | None = None

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        if type(optimizer) is not torch.optim.AdamW:
            raise UserError(
                "DeepSpeed shards the state of optim.name=adamw with policy.master_weights=float32 "
                "only: set both, or launch with configs/accelerate/ddp.yaml"
            )
        super().attach_optimizer(optimizer, max_norm)
        logger.setLevel(logging.WARNING)
        zero = {
            "reduce_bucket_size": BUCKET_BYTES // 4,
            "stage3_param_persistence_threshold": 0,  # shard small weights too
            **{k: v for k, v in self.config["zero_optimization"].items() if v != "auto"},
        }
        config = {
            **self.config,
            "zero_optimization": zero,
            # Required, but not used: the update makes the micro-batches itself.
            "train_batch_size": self.accelerator.num_processes,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": max_norm if max_norm < float("inf") else 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # torch's AdamW also updates in main memory
        }
        self.engine = deepspeed.initialize(
            model=self._module(), optimizer=optimizer, config=config
        )[0]
        for group in optimizer.param_groups:
            for part in group["params"]:  # DeepSpeed's flat shards of this rank
                # DeepSpeed links the state of all groups once, after the first group's first step.
                moments = {moment: torch.zeros_like(part) for moment in MOMENTS}
                steps = torch.zeros((), dtype=torch.float32, device=part.device)
                optimizer.state[part] = {"step": steps, **moments}

    def _module(self) -> nn.Module:
        return self.policy.model

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.gathered())
            stack.enter_context(self.engine.coalesce_grad_reduction())  # reduces on leaving
            try:
                yield
            except BaseException:
                # Leaving would start collectives, in which this rank would wait for the others.
                self._failed = stack.pop_all()
                raise
            for _, weight in self.trainable:
                if weight.grad is None:  # all ranks reduce the same weights in the same order
                    weight.grad = torch.zeros_like(weight)
                else:  # DeepSpeed's mean over ranks is then the sum
                    weight.grad *= self.accelerator.num_processes

    def step(self) -> float:
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def reset_optimizer(self) -> None:
        for state in self.optimizer.state.values():  # which DeepSpeed does not create again
            for value in state.values():
                value.zero_()

    def optimizer_tensors(self) -> dict[str, Tensor | Deferred]:
        steps = next((float(state["step"]) for state in self.optimizer.state.values()), 0.0)
        if not steps:
            return {}
        tensors: dict[str, Tensor | Deferred] = {}
        for name, weight in self.trainable:
            tensors[f"{name}/step"] = torch.tensor(steps)
            for moment in MOMENTS:
                gather: Any = partial(safe_get_full_optimizer_state, weight, moment)
                tensors[f"{name}/{moment}"] = Deferred(full_shape(weight), torch.float32, gather)
        return tensors

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        weights = dict(self.trainable)
        expected = {
            name: describe_state("adamw", full_shape(weight), torch.float32)
            for name, weight in self.trainable
        }
        self._create_state()
        for name, state in state_by_weight(tensors, expected):
            weight = weights[name]
            for moment in MOMENTS:
                self._set_moment(weight, state[moment].to(weight.device), moment)
            for held in self.optimizer.state.values():
                held["step"].copy_(state["step"])  # of all weights

    def _set_moment(self, weight: nn.Parameter, value: Tensor, moment: str) -> None:
        safe_set_full_optimizer_state(weight, value, moment)

    def _create_state(self) -> None:
        """Make a step with learning rate 0; before its first step, DeepSpeed can load no state."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        with self.accumulate():
            pass
        self.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class DeepSpeedZero3(DeepSpeedZero2):
    """ZeRO-3: every rank also keeps only 1/R of each weight.

    All weights are gathered at once for a rollout, an evaluation, a reference pass and the
    micro-batches of a step, so that no pass communicates. With DeepSpeed's own gathering, module
    by module, ranks with different batches would wait for each other.
    """

    def _module(self) -> nn.Module:
        self.policy.engine.use_capture(None)  # weights are gathered to other addresses each time
        module = nn.ModuleList([self.policy.model])
        set_z3_leaf_module(module, True)  # no hooks inside; the list itself is never called
        return module

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        with deepspeed.zero.GatheredParameters(list(self.policy.model.parameters())):
            yield

    def weights(self) -> dict[str, Tensor | Deferred]:
        module = self.policy.adapters or self.policy.model
        full: dict[str, Tensor | Deferred] = {
            name: Deferred(full_shape(weight), weight.dtype, partial(self._gather, weight))
            for name, weight in module.named_parameters()
        }
        # A tied weight has several names and one tensor.
        tied = {id(weight): full[name] for name, weight in module.named_parameters()}
        for name, weight in module.named_parameters(remove_duplicate=False):
            full[name] = tied[id(weight)]
        return {name: full.get(name, value) for name, value in self.policy.weights().items()}

    def _gather(self, weight: nn.Parameter) -> Tensor:
        with deepspeed.zero.GatheredParameters([weight]):
            return weight.detach().clone()

    def _set_moment(self, weight: nn.Parameter, value: Tensor, moment: str) -> None:
        safe_set_local_optimizer_state(weight, shard_like(value, weight), moment)
