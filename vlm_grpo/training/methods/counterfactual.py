"""The dependency of tokens on what the policy looks at: a term of the loss.

CFPO (Yu et al., arXiv:2606.23206) raises the KL of the policy to a counterfactual of itself. There,
in every attention layer, a token after an image reads the mean of the values of all image tokens in
place of those that it attends to most: more than ``threshold`` standard deviations above the mean
weight of the image's tokens, over all heads and the tokens of prompt and completion after it but
the last, which predicts nothing. As in PAPO, the KL is k3 of the sampled tokens, and only the
policy has a gradient. Unlike in the authors' code (Raven-July/CFPO, 966c6b1; the paper's text was
not read), the mean is a vector for each head, not a number, and the weights are causal, within
prompt and completion, not over all packed tokens. Recurrent layers are not changed.
"""

import copy
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vlm_grpo.config.methods import MethodSettings
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.attention import PackedAttention, find_mask
from vlm_grpo.model.engine.kernels import Layer, build_window_mask
from vlm_grpo.model.engine.shared import SharedEngine
from vlm_grpo.model.policy import Policy
from vlm_grpo.training.methods import ImageMethod, Passes, Run
from vlm_grpo.training.step_batch import Values


class CounterfactualSettings(MethodSettings):
    """CFPO; the defaults are those of the authors' run with GRPO."""

    kl_coef: float = Field(default=0.02, gt=0)
    """Weight of the KL of the policy to its counterfactual, which is raised; 0.01 with DAPO."""
    threshold: float = Field(default=2.0, ge=0)
    """Standard deviations above the mean weight, from which on a token's values are replaced."""

    extra_passes: ClassVar[int] = 1
    term: ClassVar[str | None] = "counterfactual"


class Counterfactual(ImageMethod):
    """The KL of the policy to itself without the values that it attends to most."""

    name = "counterfactual"
    refused = "rollout.noise", "objective.replay", "objective.distillation.only"
    own: CounterfactualSettings

    def start(self, run: Run) -> None:
        super().start(run)
        self._build_view()

    def _build_view(self) -> Policy:
        """Return a policy of the same model that scores in the counterfactual. It is built anew for
        each step, because a form check may replace the policy's engine."""
        policy = self.run.policy
        token = getattr(policy.model.config, "image_token_id", None)
        if token is None or not isinstance(policy.engine, SharedEngine):
            raise UserError("methods: counterfactual needs policy.engine=shared and image tokens")
        view, engine, family = copy.copy(policy), copy.copy(policy.engine), copy.copy(policy.family)

        def run(model: Any, ids: Any, positions: Any, features: Any, attend: Any) -> Any:
            attend = CounterfactualAttention(attend, ids[0] == token, self.own.threshold)
            return policy.family.run(model, ids, positions, features, attend)

        view.engine, engine.family = engine, family
        family.run = run  # type: ignore[method-assign]
        return view

    def score(self, passes: Passes) -> Values:
        """Score each completion behind a prompt of its own, whose mean weight it changes."""
        slices = [
            piece.select(slice(place, place + 1))
            for piece in passes.slices
            if piece.prompt.example.images
            for place in range(len(piece.rows))
        ]
        others, view = passes.rollout.sampler_logprobs, self._build_view()
        with passes.strategy.gathered():
            return {self.name: passes.score(slices, others, model=view).logprobs}


class CounterfactualAttention:
    """Attention over a packed row in the counterfactual; ``is_image`` marks its image tokens."""

    def __init__(self, packed: PackedAttention, is_image: np.ndarray, threshold: float) -> None:
        self.packed, self.recur, self.threshold = packed, packed.recur, threshold
        edges = np.diff(np.pad(is_image, 1)).nonzero()[0]  # the start and stop of each image
        self.images = edges.reshape(-1, 2).tolist()

    def __call__(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = self.packed(layer, query, key, value)
        packed = self.packed
        for span, masks, paths in zip(packed.spans, packed.masks, packed.path_masks, strict=True):
            first, prompt = span.start, span.prompt_length
            row = slice(first, first + prompt + sum(span.completion_lengths))
            inside = (image for image in self.images if first <= image[0] < row.stop)
            if images := [slice(start - first, stop - first) for start, stop in inside]:
                part, size = (query[0, :, row], key[0, :, row], value[0, :, row]), row.stop - first
                visible = build_window_mask(size, size, layer.window, query.device)
                if (own := find_mask(masks, layer.kind)) is not None:
                    visible[:prompt, :prompt] = own
                if (own := find_mask(paths[0], layer.kind)) is not None:  # each group is one path
                    visible[prompt:] = own
                with torch.autocast(query.device.type, enabled=False):
                    output[0, row] += self._replace(layer, part, visible, images)
        return output

    def _replace(
        self, layer: Layer, row: tuple[Tensor, ...], visible: Tensor, images: list[slice]
    ) -> Tensor:
        """Return the change of a row's output, (T, heads, width), by the replaced values."""
        query, *others = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in row)
        key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in others)
        scores = query @ key.mT * layer.scaling
        if layer.cap is not None:
            scores = layer.cap * torch.tanh(scores / layer.cap)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        mean = torch.cat([value[:, image] for image in images], 1).mean(1, keepdim=True)
        change = torch.zeros_like(query)
        for image in images:
            found = weights[:, image.stop :, image]
            counted = found[found > 1e-8]  # as in the authors' code
            salient = found > counted.mean() + self.threshold * counted.std()
            change[:, image.stop :] += (found * salient) @ (mean - value[:, image])
        return change.transpose(0, 1).to(row[0].dtype)
