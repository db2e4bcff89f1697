"""The number of tokens per micro-batch that fit into a GPU: estimated as ``plan`` does, then
measured in the first update."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from vlm_grpo.config.optim import DEFAULT_UPDATE_TOKENS
from vlm_grpo.config.policy import Checkpointing
from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.model.engine.kv_cache import count_free_bytes
from vlm_grpo.model.engine.packing import MicroBatch
from vlm_grpo.planning.layer_memory import measure_layers
from vlm_grpo.planning.memory import estimate_memory, fit_update_tokens
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.sizes import PromptSize, estimate_workload
from vlm_grpo.training.out_of_memory import TokenBudget
from vlm_grpo.training.step_batch import StepBatch


@dataclass
class MemoryProbe:
    """A probe of the memory of the first update on a GPU, which sets the budget once."""

    budget: TokenBudget
    strategy: Strategy
    settings: Settings
    device: torch.device
    token: float = 0.0  # bytes that a token of a micro-batch takes, as estimated, then as measured
    planned: float = 0.0  # the estimate
    started: int = 0  # the budget at the start of the update
    gradients: int | None = None  # bytes of all gradients; None: no micro-batch was measured

    def begin(self, batch: StepBatch, checkpointing: Checkpointing, least: int) -> None:
        """Lower the budget, to ``least`` at the least, if by plan the step's longest prompt with
        its completions does not fit otherwise."""
        if self.budget.is_found or not batch.slices:
            return
        strategy, policy = self.strategy, self.settings.policy
        shape = read_model_shape(strategy.policy.model.config, policy)
        shape = replace(
            measure_layers(shape, policy, on_cpu=False),
            checkpointing=checkpointing,
            offloads=policy.activation_offloading,
        )
        prompt = max((piece.prompt for piece in batch.slices), key=lambda p: len(p.token_ids))
        pixels = (x.numel() for name, x in prompt.vision.items() if name.startswith("pixel_values"))
        size, ranks = len(prompt.token_ids), strategy.accelerator.num_processes
        work = estimate_workload(self.settings, PromptSize(size, 0, sum(pixels), 0), shape, ranks)
        memory = estimate_memory(shape, work)
        self.token = self.planned = (memory.activations + memory.update) / work.micro_tokens
        coming = (memory.gradients + memory.optimizer) // (1 if strategy.may_retry else ranks)
        fitting = fit_update_tokens(count_free_bytes(self.device) - coming, self.token, least)
        self.budget.tokens = self.started = min(fitting, DEFAULT_UPDATE_TOKENS)

    @contextlib.contextmanager
    def measure(self, batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Measure what the micro-batches of an update that run inside take."""
        if self.budget.is_found or not batches:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        after = torch.cuda.memory_allocated(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        # The gradients of a single micro-batch replace, layer by layer, what it saved. Those of
        # several are there while the last one saves.
        low, high = peak - after, peak - (before if len(batches) == 1 else after)
        tokens = max(batch.num_tokens for batch in batches)
        self.token = min(max(self.token * tokens, low), high) / tokens
        self.gradients = after - before

    def end(self, least: int) -> None:
        """Set the budget of all ranks to the smallest of theirs, after the optimizer's step of a
        measured update. All ranks must call it."""
        if self.budget.is_found:
            return
        free, own = count_free_bytes(self.device), None
        if self.gradients is not None:
            own = fit_update_tokens(free - self.gradients, self.token, least)
            # Memory ran out; or it must not later, because no rank could repeat its update.
            if self.budget.limit < self.started or not self.strategy.may_retry:
                own = min(own, self.budget.limit)
        found = [tokens for tokens in gather_object([own]) if tokens is not None]
        if not found:
            return
        self.budget.tokens, self.budget.is_found = min(found), True
        measured, planned = (f"{size / 2**20:.2f}" for size in (self.token, self.planned))
        if self.gradients is None:
            measured = planned = "unknown"  # other processes had micro-batches
        self.strategy.accelerator.print(
            f"memory     optim.max_tokens_per_batch={self.budget.tokens} from now on: "
            f"{measured} MiB per token measured, {planned} planned, {free / 2**30:.1f} GiB free"
        )
