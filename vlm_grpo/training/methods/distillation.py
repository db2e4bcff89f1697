"""On-policy distillation: a teacher scores the policy's completions.

What the teacher is, another model or a copy of the policy, and what it sees are two choices. With a
copy that sees the part of the image that the answer needs (Vision-OPD, arXiv:2605.18740) the policy
learns to see in the whole image what it sees in the part.
"""

import math
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vlm_grpo.config.methods import DistillationSettings
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.boxes import (
    crop_to_boxes,
    list_boxes,
    list_evidence,
    mask_beyond_boxes,
    read_boxes,
    replace_image,
)
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.task.coordinates import Box
from vlm_grpo.training.methods import Method, Passes, Run
from vlm_grpo.training.objective.kl import k3
from vlm_grpo.training.objective.losses import LossInputs, Shares
from vlm_grpo.training.objective.token_batch import PerToken, TokenBatch
from vlm_grpo.training.snapshot import Snapshot
from vlm_grpo.training.step_batch import Rollout, Values, is_masked
from vlm_grpo.types import Example, Group

_IMAGE_SETTINGS = (
    *("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"),
    *("do_normalize", "do_rescale", "rescale_factor"),
)
"""What the teacher's image processor must share with the policy's, which prepares the images."""
_LEAST, _NO_REST = -100.0, -1e-6
"""Smallest log-prob that is compared, and the largest of all candidates together: the logarithms
and gradients of tokens and rests without probability stay finite."""


class Distillation(Method):
    """The divergence of the policy from a teacher, on the policy's completions."""

    name, phase, block = "distillation", "teacher", "objective.distillation"
    own: DistillationSettings
    teacher: Policy | None = None  # another model; None: the snapshot is the teacher

    def start(self, run: Run) -> None:
        super().start(run)
        if self.own.teacher is not None:
            self.teacher = load_teacher(run.settings, self.own.teacher, run.policy)
        else:
            self.snapshot = Snapshot(run.strategy)
        prompt = self.own.teacher_prompt
        if prompt != "same" and not any(map(self._find_row_boxes, run.stream.examples)):
            column = "evidence" if prompt == "crop" else "evidence or an answer"
            raise UserError(
                f"objective.distillation.teacher_prompt={prompt} has no effect: no training "
                f"example has {column} with boxes in pixels of its image"
            )
        gold = (run.task.gold_answer(e) for e in run.stream.examples if self._find_row_boxes(e))
        if self.own.boxes == "own" and not any(map(read_boxes, gold)):
            raise UserError(
                "objective.distillation.boxes=own has no effect: no gold answer of the task is "
                "boxes, as those of grounding are"
            )

    def begin(self, rollout: Rollout, scheduler: Any) -> None:
        """Move the teacher towards the policy of the last step; at first, to it."""
        if self.snapshot is not None:
            is_first = rollout.step == self.run.settings.supervised_steps
            self.snapshot.move(1.0 if is_first else self.own.teacher_update_rate)

    def _find_row_boxes(self, example: Example) -> tuple[Box, ...]:
        if not example.images or self.run.task.target_image(example).kind != "image":
            return ()
        takes_answer = self.own.teacher_prompt == "mask"
        return list_evidence(example) or (list_boxes(example) if takes_answer else ())

    def _find_boxes(self, group: Group) -> tuple[Box, ...]:
        boxes = self._find_row_boxes(group.prompt.example)
        if not boxes or self.own.boxes == "gold":
            return boxes
        found = [(s.total, read_boxes(s.answer)) for s in group.scores if s.total is not None]
        return max((pair for pair in found if pair[1]), key=itemgetter(0), default=(0, ()))[1]

    def covers(self, group: Group) -> bool:
        return self.own.teacher_prompt == "same" or bool(self._find_boxes(group))

    def _change(self, group: Group) -> Example | None:
        """Return the group's example as the teacher sees it; None: it has no teacher."""
        example = group.prompt.example
        if not (boxes := self._find_boxes(group)):
            return None
        target = self.run.task.target_image(example)
        show = crop_to_boxes if self.own.teacher_prompt == "crop" else mask_beyond_boxes
        return replace_image(example, target, show(target, boxes, self.own.margin))

    def score(self, passes: Passes) -> Values:
        is_same = self.own.teacher_prompt == "same"
        slices = passes.slices if is_same else passes.behind(self._change)
        weights = None if self.snapshot is None else self.snapshot.in_place()
        count = self.own.topk if self.own.loss == "jensen_shannon" else 0
        sampled = passes.rollout.sampler_logprobs
        found = passes.score(slices, sampled, weights, self.teacher, count)
        if self.teacher is not None:
            self.teacher.engine.clear_image_features()
        values = {"teacher_logprobs": found.logprobs}
        if found.others is not None and found.likeliest is not None:  # some have a teacher's prompt
            values = {"teacher_logprobs": found.others, "candidates": found.likeliest.int()}
        if self.own.high_share:
            gains = found.logprobs.cpu() - sampled
            values["distillation_factors"] = self._balance(passes.rollout, gains)
        return values

    def _balance(self, rollout: Rollout, gains: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the factors with which the means over the tokens of high and of low gain count
        equally; the term has no weight without a teacher. All ranks call it."""
        objective = self.run.settings.objective
        groups = (*rollout.groups, *rollout.recalled)
        has_loss = [
            self.covers(g) and not is_masked(c, objective) for g in groups for c in g.completions
        ]
        counted = torch.tensor(has_loss).repeat_interleave(torch.from_numpy(rollout.layout.lengths))
        every = np.array(gather_object(gains[counted].tolist()))
        threshold = float(np.quantile(every, 1 - self.own.high_share)) if len(every) else 0.0
        share = float(np.mean(every >= threshold)) if len(every) else 1.0
        if share == 1:  # the smallest gain is that of most tokens, or there is none
            return torch.ones_like(gains)
        return torch.where(gains >= threshold, 0.5 / share, 0.5 / (1 - share))

    def add_weights(
        self, weights: dict[str, Tensor], shares: Shares, objective: ObjectiveSettings
    ) -> None:
        if self.own.only:
            del weights["policy"]
        weights["distillation"] = self.own.coef * shares.kept / shares.tokens

    def term(self, inputs: LossInputs) -> PerToken:
        """Compute the loss of each token.

        ``reverse_kl`` is ρ·(log π_old − log π_teacher), whose gradient is through ρ alone. At ρ = 1
        the expected gradient is that of the reverse KL(policy ‖ teacher) of each token, given the
        tokens before it: log π_old − log π_teacher is a reward of the token itself (Lu and Thinking
        Machines Lab, "On-Policy Distillation", 2025; Gu et al., MiniLLM, arXiv:2306.08543).
        ``jensen_shannon`` is the divergence times min(ρ, is_clip), without gradient through ρ
        (Vision-OPD, arXiv:2605.18740).
        """
        batch = inputs.batch
        ratio = (batch.logprobs - inputs.old).exp()
        if self.own.loss == "reverse_kl":
            values = ratio * (inputs.old - batch.scores["teacher_logprobs"])
        else:
            values = self._diverge(batch) * ratio.detach().clamp(max=self.own.is_clip)
        if "distillation_factors" in batch.scores:
            values = values * batch.scores["distillation_factors"]
        return values if inputs.correction is None else values * inputs.correction

    def _diverge(self, batch: TokenBatch) -> PerToken:
        own = batch.candidate_logprobs
        if own is None:  # no completion of this rank has a teacher
            return batch.logprobs * 0
        return mixed_divergence(own, batch.scores["teacher_logprobs"], self.own.alpha)

    def metrics(self, batch: TokenBatch, old: Tensor) -> dict[str, Tensor]:
        teacher = batch.scores.get("teacher_logprobs")
        if teacher is None:
            return {}
        if self.own.loss == "jensen_shannon":
            has_teacher = batch.weights["distillation"] != 0
            return {"distillation/divergence": self._diverge(batch) * has_teacher}
        return {"distillation/kl": k3(batch.logprobs, teacher) * (batch.logprobs - old).exp()}


def mixed_divergence(
    policy: Float[Tensor, "M k"], teacher: Float[Tensor, "M k"], alpha: float
) -> PerToken:
    """Return (1 − α)·KL(S ‖ M) + α·KL(T ‖ M) with M = (1 − α)·S + α·T, in nats.

    S and T are the distributions of policy and teacher over k candidates, whose log-probs are
    given, and all other tokens as one.
    """
    own, other = _add_rest(policy), _add_rest(teacher)
    mixture = torch.logaddexp(own + math.log(1 - alpha), other + math.log(alpha))
    divergences = [(part.exp() * (part - mixture)).sum(-1) for part in (own, other)]
    return (1 - alpha) * divergences[0] + alpha * divergences[1]


def _add_rest(logprobs: Float[Tensor, "M k"]) -> Float[Tensor, "M k+1"]:
    logprobs = logprobs.clamp(min=_LEAST)
    every = logprobs.logsumexp(-1, keepdim=True).clamp(max=_NO_REST)
    return torch.cat([logprobs, torch.log(-torch.expm1(every))], dim=-1)


def load_teacher(settings: Settings, name: str, policy: Policy) -> Policy:
    """Load a model as the teacher, frozen, on the policy's device."""
    same = {key: getattr(settings.policy, key) for key in ("dtype", "engine", "trust_remote_code")}
    changed = {"model": name, "model_revision": None, "policy": PolicySettings(**same)}
    teacher = load_policy(settings.model_copy(update=changed), training=False)
    for what, is_equal in (
        ("family", type(teacher.family) is type(policy.family)),
        ("vocabulary", teacher.tokenizer.get_vocab() == policy.tokenizer.get_vocab()),
        ("preparation of images", _describe_images(teacher) == _describe_images(policy)),
    ):
        if not is_equal:
            raise UserError(
                f"objective.distillation.teacher={name}: its {what} is not that of model "
                f"{settings.model}, so it cannot score the policy's tokens: choose a model of the "
                "same family"
            )
    teacher.model.to(policy.device).eval().requires_grad_(False)
    return teacher


def _describe_images(policy: Policy) -> list[object]:
    processor = policy.processor.image_processor
    return [getattr(processor, name, None) for name in _IMAGE_SETTINGS]
