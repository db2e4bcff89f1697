"""Estimators of KL(policy ‖ reference), each from one sampled token."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vlm_grpo.training.objective.token_batch import PerToken

# With x ~ policy and d = log policy(x) − log reference(x) (J. Schulman, "Approximating KL
# Divergence", 2020):
#
# * ``k1 = d``: unbiased, may be negative, high variance;
# * ``k2 = d² / 2``: biased, never negative;
# * ``k3 = exp(−d) + d − 1``: unbiased, never negative (DeepSeekMath, arXiv:2402.03300, eq. 4).
#
# "Unbiased" refers to the value. docs/objective.md derives the gradients. The sum of k1 over a
# completion o is log policy(o) − log reference(o): with β times it subtracted from the reward, the
# policy gradient is that of E[r] − β·KL over completions (Ziegler et al., arXiv:1909.08593, eq. 2).


def k1(logprobs: PerToken, reference: PerToken) -> PerToken:
    """Return log policy − log reference, in nats."""
    return logprobs - reference


def k2(logprobs: PerToken, reference: PerToken) -> PerToken:
    """Return half the squared log-ratio."""
    return (logprobs - reference) ** 2 / 2


def k3(logprobs: PerToken, reference: PerToken) -> PerToken:
    """Return exp(log reference − log policy) − (log reference − log policy) − 1, in nats."""
    difference = reference - logprobs
    return torch.expm1(difference) - difference


def image_dependency(logprobs: PerToken, masked: PerToken) -> PerToken:
    """Return k3 of log-probs behind an image and behind its masked copy, in nats, at most 10.

    The bound, and that of ±20 on the difference, are those of PAPO's and VPPO's code.
    """
    difference = (masked - logprobs).clamp(-20, 20)
    return (torch.expm1(difference) - difference).clamp(max=10)


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
