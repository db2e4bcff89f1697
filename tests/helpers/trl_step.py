# ruff: noqa: SLF001 (TRL's own arithmetic is in private methods)
"""TRL's loss and advantages on given tensors.

TRL's methods run unchanged: in place of a trainer they get an object with the attributes they
read, so no formula of TRL is copied.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from vlm_grpo.config.objective import ObjectiveSettings

LENGTHS = (5, 3, 1, 4, 5, 2)  # ragged, with a completion of one token and two of the full length
MAX_LENGTH = 7  # longer than any completion, so that dr_grpo's normalizer differs


@dataclass(frozen=True)
class Case:
    """Padded tensors (completions, tokens) in TRL's layout."""

    logps: Tensor
    mask: Tensor
    advantages: Tensor
    entropies: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    sampler: Tensor | None = None

    def select(self, rows: slice) -> Case:
        given = {name: value for name, value in vars(self).items() if value is not None}
        return Case(**{name: value[rows] for name, value in given.items()})


def make_case(settings: ObjectiveSettings, inactive: tuple[int, ...] = ()) -> Case:
    shape = (len(LENGTHS), max(LENGTHS))
    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
    mask[list(inactive)] = 0
    logps = -3 * torch.rand(shape)
    # Differences of 0.4 nats: ratios from about 0.5 to 2, on both sides of every clip used here.
    near = [logps + 0.4 * torch.randn(shape) for _ in range(3)]
    return Case(
        logps.requires_grad_(),
        mask,
        torch.randn(shape[0]),
        torch.rand(shape).requires_grad_(),
        old=near[0] if settings.num_iterations > 1 else None,
        ref=near[1] if settings.beta > 0 else None,
        sampler=near[2] if settings.sampler_correction != "none" else None,
    )


def make_trl_trainer(settings: ObjectiveSettings, accumulation: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        # The settings have TRL's names.
        args=SimpleNamespace(**settings.model_dump(), steps_per_generation=accumulation),
        accelerator=SimpleNamespace(
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x, sync_gradients=True
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.importance_sampling_level,
        beta=settings.beta,
        loss_type=settings.loss_type,
        epsilon_low=settings.epsilon,
        epsilon_high=settings.upper_epsilon,
        use_vllm=settings.sampler_correction != "none",
        vllm_importance_sampling_correction=True,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        current_gradient_accumulation_steps=accumulation,
        max_completion_length=MAX_LENGTH,
        entropy_coef=settings.entropy_coef,
        _entropy_bonus_enabled=settings.entropy_coef > 0,
        use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
    )


def run_trl_loss(
    case: Case, settings: ObjectiveSettings, micro_batches: tuple[slice, ...] = (slice(None),)
) -> tuple[Tensor, dict[str, list[float]]]:
    """Compute the step's loss by TRL's ``_compute_loss``, summed over micro-batches of rows."""
    trainer = make_trl_trainer(settings, accumulation=len(micro_batches))
    total = torch.zeros(())
    for rows in micro_batches:
        part = case.select(rows)
        result = (part.logps, part.entropies, None)
        trainer._get_per_token_logps_and_entropies = lambda *a, result=result, **k: result
        blank = torch.zeros_like(part.mask)
        inputs = {
            "prompt_ids": blank[:, :1],
            "prompt_mask": blank[:, :1],
            "completion_ids": blank,
            "completion_mask": part.mask,
            "advantages": part.advantages,
            "num_items_in_batch": case.mask.sum(),
        }
        if part.old is not None:
            inputs["old_per_token_logps"] = part.old
        if part.ref is not None:
            inputs["ref_per_token_logps"] = part.ref
        if part.sampler is not None:
            inputs["importance_sampling_ratio"] = compute_trl_sampler_ratio(part, settings)
        total = total + GRPOTrainer._compute_loss(cast(Any, trainer), None, inputs)
    return total, trainer._metrics["train"]


def run_trl_scoring(
    rewards: Tensor,
    *,
    num_generations: int = 1,
    scale_rewards: str = "group",
    weights: Tensor | None = None,
    each: bool = False,
    case: Case | None = None,
    settings: ObjectiveSettings | None = None,
) -> tuple[dict[str, Tensor], dict[str, list[float]]]:
    """Run TRL's ``_generate_and_score_completions`` on rewards (completions, functions)."""
    count, functions = rewards.shape
    correction = settings.sampler_correction if settings else "none"
    lengths = LENGTHS[:count] if case is not None else (1,) * count
    ids = [[7] * length for length in lengths]
    sampled = None
    if case is not None and case.sampler is not None:
        sampled = [row[:n].tolist() for row, n in zip(case.sampler.detach(), lengths, strict=True)]
    names = [f"reward{i}" for i in range(functions)]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), process_index=0, gather=lambda x: x
        ),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        args=SimpleNamespace(
            per_device_train_batch_size=count,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
        ),
        environment_factories=None,
        environments=None,
        tools=None,
        _generate=lambda prompts: ([[1]] * count, ids, None, [""] * count, sampled, {}, None, None),
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            None if case is None else case.logps.detach() if case.old is None else case.old,
            None,
            None,
        ),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        num_iterations=1,
        use_vllm=correction != "none",
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=correction
        if correction.endswith("_mask")
        else f"{correction}_truncate",
        vllm_importance_sampling_clip_min=settings.sampler_correction_floor if settings else None,
        vllm_importance_sampling_clip_max=settings.sampler_correction_cap if settings else None,
        beta=0.0,
        _calculate_rewards=lambda *a: rewards,
        num_generations=num_generations,
        multi_objective_aggregation="normalize_then_sum" if each else "sum_then_normalize",
        reward_weights=torch.ones(functions) if weights is None else weights,
        reward_funcs=names,
        reward_func_names=names,
        scale_rewards=scale_rewards,
        log_multimodal=False,
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    inputs = [{"prompt": "?"} for _ in range(count)]
    output = GRPOTrainer._generate_and_score_completions(cast(Any, trainer), inputs)
    return output, trainer._metrics["train"]


def compute_trl_sampler_ratio(case: Case, settings: ObjectiveSettings) -> Tensor:
    scores, _ = run_trl_scoring(torch.zeros(len(case.mask), 1), case=case, settings=settings)
    return scores["importance_sampling_ratio"]
