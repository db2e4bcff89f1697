"""The loss of a training step from its raw groups, without the library's arithmetic: transformers'
own forward pass on each completion and its image, and formulas written once more, in float64."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.training.methods.perception import PatchMask
from vlm_grpo.types import Completion, Group, Prompt

BANNED = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")

Weights = Mapping[str, Tensor]
Pairs = Sequence[tuple[Prompt, Completion]]


class PlainModel:
    """The model of a folder as transformers and PEFT load it, in float64, and its distribution."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
        if settings.policy.lora is not None:
            lora = settings.policy.lora
            own = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=list(lora.target))
            get_peft_model(model, own)
        self.model: Any = model.double().eval()
        self.trained = {n: w for n, w in model.named_parameters() if w.requires_grad}
        self.rollout, self.teacher = settings.rollout, None
        distillation = settings.objective.distillation
        if distillation is not None and distillation.teacher is not None:
            full = settings.policy.model_copy(update={"lora": None})
            alone = settings.objective.model_copy(update={"distillation": None})
            alone_settings = settings.model_copy(update={"policy": full, "objective": alone})
            self.teacher = PlainModel(Path(distillation.teacher), alone_settings)
        self.banned = self.processor.tokenizer.convert_tokens_to_ids(list(BANNED))
        self.ends = model.generation_config.eos_token_id
        # Of the processor, by a prompt's text, its images and their change.
        self.inputs: dict[Any, Any] = {}
        self.rows: tuple[PlainStep | None, list[_Row]] = (None, [])  # of the last step

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        assert set(weights) == set(self.trained)
        for name, value in weights.items():
            self.trained[name].copy_(value)

    def _process(self, prompt: Prompt, change: Callable[[Any, int], Any] | None) -> Any:
        key = prompt.text, prompt.example.images, change
        if key not in self.inputs:
            images = [image.load() for image in prompt.example.images]
            if change is not None:
                images = [change(image, number) for number, image in enumerate(images)]
            inputs = self.processor(text=[prompt.text], images=images or None, return_tensors="pt")
            self.inputs[key] = inputs
        return self.inputs[key]

    def score(
        self,
        prompt: Prompt,
        completion: Completion,
        change: Callable[[Any, int], Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probs of a completion's tokens, the distribution's entropies, and all of
        its log-probs, (T, vocabulary), with a change of each image by its number."""
        inputs = dict(self._process(prompt, change))
        assert change or inputs["input_ids"][0].tolist() == list(prompt.token_ids)
        tokens, count = torch.tensor([completion.token_ids]), len(completion.token_ids)
        ends = [*(o.start for o in completion.observations), count]
        own = [torch.zeros_like(inputs["input_ids"], dtype=torch.bool)]
        inputs["mm_token_type_ids"] = inputs.get("mm_token_type_ids", own[0].long())
        for place, start in enumerate([0, *ends[:-1]]):
            sampled = tokens[:, start : ends[place]]
            more = {"input_ids": sampled, "mm_token_type_ids": torch.zeros_like(sampled)}
            own.append(torch.ones_like(sampled, dtype=torch.bool))
            inputs |= {n: torch.cat([inputs[n], values], dim=1) for n, values in more.items()}
            if place < len(completion.observations):
                seen = dict(self._process(completion.observations[place].prompt, None))
                own.append(torch.zeros_like(seen["input_ids"], dtype=torch.bool))
                types = seen.setdefault("mm_token_type_ids", own[-1].long())
                assert types.shape == seen["input_ids"].shape
                for name in ("input_ids", "mm_token_type_ids"):
                    inputs[name] = torch.cat([inputs[name], seen[name]], dim=1)
                for name in ("pixel_values", "image_grid_thw"):
                    both = [values[name] for values in (inputs, seen) if name in values]
                    inputs |= {name: torch.cat(both)} if both else {}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        self.model.model.rope_deltas = None  # transformers keeps those of the previous prompt
        predictors = torch.cat(own, dim=1)[0, 1:].nonzero()[:, 0]
        logits = self.model(**inputs).logits[0, predictors] / self.rollout.temperature
        allowed = torch.ones_like(logits, dtype=torch.bool)
        allowed[:, self.banned] = False
        for position in range(min(self.rollout.min_new_tokens, count)):
            allowed[position, self.ends] = False
        logprobs = logits.masked_fill(~allowed, -math.inf).log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs.masked_fill(~allowed, 0)).sum(-1)
        return logprobs[range(count), tokens[0]], entropies, logprobs


@dataclass(frozen=True)
class PlainStep:
    """A step's groups, and the trained weights at the points that its loss depends on."""

    groups: Sequence[Group]
    reward_weights: Mapping[str, float]
    before: Weights  # before the step's first update
    reference: Weights
    replayed: PlainStep | None = None  # groups of an earlier step
    average: Weights | None = None  # of the policies up to it
    number: int = 0  # of the steps before it


@dataclass(frozen=True)
class _Row:
    """A completion with the constants of its loss; log-probs are (T,)."""

    prompt: Prompt
    completion: Completion
    old: Tensor
    reference: Tensor
    advantage: Tensor  # of each token
    teacher: tuple[Tensor, ...] | None = None  # as ``PlainModel.score`` returns
    masked: Tensor | None = None
    factors: Tensor | float = 1.0
    balance: Tensor | float = 1.0  # factors of the divergence from the teacher


def compute_gradient(
    model: PlainModel, step: PlainStep, weights: Weights, settings: Settings, part: int = 0
) -> tuple[float, dict[str, Tensor]]:
    """Compute the loss of a step's mini-batch at ``weights``, and its gradient before any clipping
    of the norm."""
    objective = settings.objective
    if model.rows[0] is not step:
        model.rows = step, _collect_rows(model, step, objective)
    rows = model.rows[1]
    limit = settings.rollout.max_completion_length
    parts = settings.optim.mini_batches
    active = [
        (place * parts // len(rows), row)
        for place, row in enumerate(rows)
        if not _is_masked(row.completion, objective)
    ]
    tokens = sum(len(row.old) for _, row in active)
    model.load(weights)
    total = torch.zeros((), dtype=torch.float64)
    for row in [row for number, row in active if number == part]:
        logprobs, entropies, every = model.score(row.prompt, row.completion)
        divisors = {"grpo": len(rows) * len(row.old), "dr_grpo": len(rows) * limit}
        losses = _compute_token_losses(logprobs, row, objective)
        if objective.perception is not None and row.masked is not None:
            difference = row.masked - logprobs
            losses = losses - objective.perception.kl_coef * (difference.exp() - 1 - difference)
        teaching = objective.distillation
        if teaching is None or not teaching.only:
            total = total + losses.sum() / divisors.get(objective.loss_type, tokens)
        if teaching is not None and row.teacher is not None:
            ratio = (logprobs - row.old).exp()
            if teaching.loss == "reverse_kl":
                divergence = ratio * (row.old - row.teacher[0])
            else:
                divergence = _diverge(every, row.teacher[2], teaching)
                divergence = divergence * ratio.detach().clamp(max=teaching.is_clip)
            total = total + teaching.coef * (divergence * row.balance).sum() / tokens
        total = total - objective.entropy_coef * entropies.sum() / tokens
    total = total * parts
    names, trained = zip(*model.trained.items(), strict=True)
    found = torch.autograd.grad(total, trained, allow_unused=True, materialize_grads=True)
    return total.item(), dict(zip(names, found, strict=True))


def _is_masked(completion: Completion, objective: ObjectiveSettings) -> bool:
    return objective.mask_truncated_completions and completion.stop == "length"


@torch.no_grad()
def _collect_rows(model: PlainModel, step: PlainStep, objective: ObjectiveSettings) -> list[_Row]:
    pairs = [(group.prompt, c) for group in step.groups for c in group.completions]
    model.load(step.before)
    old = [model.score(*pair)[0] for pair in pairs]
    reference = old
    if objective.beta and step.reference is not step.before:
        model.load(step.reference)
        reference = [model.score(*pair)[0] for pair in pairs]
    penalties = [torch.zeros_like(logprobs) for logprobs in old]
    if objective.kl_in == "reward":
        kls = (_kl(*pair, objective.kl_estimator) for pair in zip(old, reference, strict=True))
        penalties = [objective.beta * kl for kl in kls]
    advantages = _compute_advantages(step, penalties, objective)
    for (prompt, completion), advantage in zip(pairs, advantages, strict=True):
        if prompt.start is None and completion.observations:  # a revision of an answer
            advantage[: completion.observations[0].start] = 0
    teacher = [_teach(model, step, pair, objective.distillation) for pair in pairs]
    balance = _balance(pairs, teacher, objective)
    if objective.advantage_clip is not None:
        bound = objective.advantage_clip
        advantages = [advantage.clamp(-bound, bound) for advantage in advantages]
    masked, factors = _score_masked(model, step, pairs, objective)
    if objective.top_entropy_quantile < 1:
        model.load(step.before)
        entropies = [model.score(*pair)[1] for pair in pairs]
        both = zip(entropies, pairs, strict=True)
        counted = [e for e, (_, completion) in both if not _is_masked(completion, objective)]
        threshold = torch.cat(counted).quantile(1 - objective.top_entropy_quantile)
        factors = [f * (e >= threshold) for f, e in zip(factors, entropies, strict=True)]
    constants = old, reference, advantages, teacher, masked, factors, balance
    rows = [_Row(*pair, *own) for pair, *own in zip(pairs, *constants, strict=True)]
    again = [] if step.replayed is None else _collect_rows(model, step.replayed, objective)
    return [*rows, *again]


def _teach(
    model: PlainModel, step: PlainStep, pair: tuple[Prompt, Completion], settings: Any
) -> tuple[Tensor, ...] | None:
    if model.teacher is not None:
        return model.teacher.score(*pair)
    evidence = pair[0].example.meta.get("evidence")
    if settings is None or not evidence:
        return None
    ((x1, y1, x2, y2),) = evidence

    def change(image: Any, number: int) -> Any:
        if settings.teacher_prompt == "crop":
            return image.crop((x1, y1, x2, y2))
        pixels = np.zeros_like(np.asarray(image))
        pixels[y1:y2, x1:x2] = np.asarray(image)[y1:y2, x1:x2]
        return Image.fromarray(pixels)

    assert step.average is not None
    model.load(step.average)
    return model.score(*pair, change)


def _balance(
    pairs: Pairs, teacher: Sequence[tuple[Tensor, ...] | None], objective: ObjectiveSettings
) -> list[Tensor | float]:
    """Return the factors of the divergence, with which the mean over the tokens that the teacher
    finds likeliest, beside the sampler, counts as much as that over the others."""
    share = 0 if objective.distillation is None else objective.distillation.high_share
    gains = {
        row: (scores[0] - torch.tensor(c.logprobs)).tolist()
        for row, ((_, c), scores) in enumerate(zip(pairs, teacher, strict=True))
        if scores and not _is_masked(c, objective)
    }
    factors: list[Tensor | float] = [1.0] * len(pairs)
    every = sorted(gain for row in gains.values() for gain in row)
    if not share or not every:
        return factors
    place = (1 - share) * (len(every) - 1)
    low, high = every[math.floor(place)], every[math.ceil(place)]
    bound = low + (place - math.floor(place)) * (high - low)
    count = sum(gain >= bound for gain in every)
    for row, values in gains.items():
        parts = [count if gain >= bound else len(every) - count for gain in values]
        factors[row] = torch.tensor([len(every) / 2 / part for part in parts], dtype=torch.float64)
    return factors


def _diverge(policy: Tensor, teacher: Tensor, settings: Any) -> Tensor:
    """Return the divergence of the distributions over the teacher's likeliest tokens and the rest,
    one place at a time."""
    values = []
    for own, other in zip(policy.exp(), teacher.exp(), strict=True):
        kept = sorted(range(len(other)), key=lambda token: -other[token])[: settings.topk]
        pairs = [(own[token], other[token]) for token in kept]
        pairs.append((1 - own[kept].sum(), 1 - other[kept].sum()))
        value, share = torch.zeros(()), settings.alpha
        for p, t in pairs:
            mixed = (1 - share) * p + share * t
            value = value + (1 - share) * p * (p / mixed).log() + share * t * (t / mixed).log()
        values.append(value)
    return torch.stack(values)


def _score_masked(
    model: PlainModel, step: PlainStep, pairs: Pairs, objective: ObjectiveSettings
) -> tuple[list[Tensor | None], list[Tensor | float]]:
    """Return the log-probs behind masked images, and the factors of the policy losses."""
    masked: list[Tensor | None] = [None] * len(pairs)
    factors: list[Tensor | float] = [1.0] * len(pairs)
    settings = objective.perception
    if settings is None:
        return masked, factors
    model.load(step.before)
    for row, (prompt, completion) in enumerate(pairs):
        if prompt.example.images:
            seed = 0, step.number, zlib.crc32(prompt.example.id.encode())
            masked[row] = model.score(
                prompt,
                completion,
                lambda image, number, seed=seed: PatchMask(
                    settings.mask_ratio, settings.patch_size, (*seed, number)
                )(image),
            )[0]
    with_image = [(row, own) for row, own in enumerate(masked) if own is not None]
    gaps = {row: torch.tensor(pairs[row][1].logprobs) - own for row, own in with_image}
    dependency = {row: ((-gap).exp() - 1 + gap).tolist() for row, gap in gaps.items()}
    means = {row: statistics.mean(values) for row, values in dependency.items()}
    low, spread = min(means.values()), max(means.values()) - min(means.values())
    average = statistics.mean((mean - low) / spread for mean in means.values())
    floor, share = settings.min_scale or 1.0, settings.top_share or 1.0
    for row, values in dependency.items():
        scale = floor + (1 - floor) * (means[row] - low) / spread / average
        kept = sorted(values)[-math.ceil(share * len(values)) :]
        factors[row] = torch.tensor([scale * (v in kept) for v in values], dtype=torch.float64)
    return masked, factors


def _compute_advantages(
    step: PlainStep, penalties: Sequence[Tensor], objective: ObjectiveSettings
) -> list[Tensor]:
    left, values = iter(penalties), []
    weights = step.reward_weights.items()
    rewards = [
        [sum(w * (score.rewards[name] or 0) for name, w in weights) for score in group.scores]
        for group in step.groups
    ]
    if objective.advantage_estimator == "reinforce_plus_plus_baseline":
        for group in rewards:
            for total in group:
                penalty = next(left).tolist()
                centered = total - statistics.mean(group)
                values.append([centered - sum(penalty[place:]) for place in range(len(penalty))])
        tokens = [value for row in values for value in row]
        mean, scale = statistics.mean(tokens), (statistics.variance(tokens) + 1e-8) ** 0.5
        return [(torch.tensor(row, dtype=torch.float64) - mean) / scale for row in values]
    groups = [[total - next(left).sum().item() for total in group] for group in rewards]
    spread = statistics.stdev([total for group in groups for total in group])
    for group in groups:
        for total in group:
            baseline = statistics.mean(group)
            if objective.advantage_estimator == "rloo":
                baseline = (sum(group) - total) / (len(group) - 1)
            scales = {"group": statistics.stdev(group), "batch": spread, "none": 1 - 1e-4}
            values.append((total - baseline) / (scales[objective.scale_rewards] + 1e-4))
    sizes = [len(penalty) for penalty in penalties]
    return [torch.full((n,), v, dtype=torch.float64) for n, v in zip(sizes, values, strict=True)]


def _compute_token_losses(logprobs: Tensor, row: _Row, objective: ObjectiveSettings) -> Tensor:
    difference = logprobs - row.old
    if objective.importance_sampling_level == "sequence":
        difference = difference.mean().expand(len(logprobs))
    ratio = difference.exp()
    high = objective.epsilon if objective.epsilon_high is None else objective.epsilon_high
    if objective.loss_type == "cispo":
        losses = -ratio.detach().clamp(max=high) * row.advantage * logprobs
    else:
        clipped = ratio.clamp(1 - objective.epsilon, 1 + high)
        losses = -torch.minimum(ratio * row.advantage, clipped * row.advantage)
    losses = losses * row.factors
    if objective.sampler_correction == "token":
        weight = (row.old - torch.tensor(row.completion.logprobs)).exp()
        cap = objective.sampler_correction_cap
        losses = losses * (1 if row.completion.variant else weight.clamp(max=cap))
    if objective.beta and objective.kl_in == "loss":
        kl = _kl(logprobs, row.reference, objective.kl_estimator)
        losses = losses + objective.beta * kl * (ratio if objective.use_bias_correction_kl else 1)
    return losses


def _kl(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    return (-difference).exp() - 1 + difference if estimator == "k3" else difference**2 / 2
