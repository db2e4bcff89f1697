"""What a loss is computed from: the tokens of one micro-batch, and the totals of its step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """M completion tokens of N completions, each completion whole. Log-probs are in nats.

    Attributes:
        logprobs: of each token under the policy being trained, with gradient.
        completion: index in 0..N−1 of the completion each token belongs to.
        advantages: one per completion.
        lengths: tokens of each completion.
        old_logprobs: under the policy before the first of the step's updates, without gradient;
            None in the first update, where they are ``logprobs`` themselves.
        reference_logprobs: under the reference policy, without gradient; None where there is no
            KL in the loss, or where the reference is the policy before this step.
        sampler_logprobs: under the distribution that sampled, as recorded by the rollout.
        entropies: of the policy's distribution at each token, with gradient where there is an
            entropy bonus.
        active: False for a completion that is masked out (truncated); None: all are active.
        token_advantages: one per token, in place of ``advantages``, from an estimator that
            gives them.
    """

    logprobs: Float[Tensor, " M"]
    completion: Int[Tensor, " M"]
    advantages: Float[Tensor, " N"]
    lengths: Int[Tensor, " N"]
    old_logprobs: Float[Tensor, " M"] | None = None
    reference_logprobs: Float[Tensor, " M"] | None = None
    sampler_logprobs: Float[Tensor, " M"] | None = None
    entropies: Float[Tensor, " M"] | None = None
    active: Bool[Tensor, " N"] | None = None
    token_advantages: Float[Tensor, " M"] | None = None

    @property
    def per_token_advantages(self) -> Float[Tensor, " M"]:
        """The advantage of each token."""
        if self.token_advantages is not None:
            return self.token_advantages
        return self.advantages[self.completion]

    @property
    def active_tokens(self) -> Float[Tensor, " M"]:
        """1 for each token that counts, 0 for those of masked completions."""
        if self.active is None:
            return torch.ones_like(self.logprobs, requires_grad=False)
        return self.active[self.completion].to(self.logprobs.dtype)

    def completion_sum(self, values: Float[Tensor, " M"]) -> Float[Tensor, " N"]:
        """Sum over each completion's tokens."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.completion, values)

    def completion_mean(self, values: Float[Tensor, " M"]) -> Float[Tensor, " N"]:
        """Mean over each completion's tokens; 0 for one without tokens."""
        return self.completion_sum(values) / self.lengths.clamp(min=1)


@dataclass(frozen=True)
class StepTotals:
    """What a step's loss is divided by, counted over all its micro-batches and all ranks.

    With data-parallel training that averages gradients over R ranks, multiply each loss by R.

    Attributes:
        completions: all completions, masked ones included (as TRL counts).
        active_tokens: tokens of completions that are not masked out.
        max_completion_length: the longest completion that sampling allows, in tokens.
    """

    completions: int
    active_tokens: int
    max_completion_length: int

    @classmethod
    def from_lengths(
        cls,
        lengths: Int[Tensor, " n"],
        active: Bool[Tensor, " n"] | None,
        max_completion_length: int,
    ) -> StepTotals:
        """Count the completions of a whole step."""
        counted = lengths if active is None else lengths[active]
        return cls(len(lengths), int(counted.sum()), max_completion_length)
