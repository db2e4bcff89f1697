"""Settings of the objective: advantages, loss, KL, and the combinations that are valid.

Names and meanings follow TRL's ``GRPOConfig``.
"""

import math
from typing import Annotated, Literal

from pydantic import Field

from vlm_grpo.config.methods import (
    DistillationSettings,
    PerceptionSettings,
    ReplaySettings,
    find_method_settings,
)
from vlm_grpo.config.section import LOCKED, Frozen

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
ScaleRewards = Literal["group", "batch", "none"]
KLEstimator = Literal["k1", "k2", "k3"]
Level = Literal["token", "sequence"]
SamplerCorrection = Literal["none", "token", "sequence", "token_mask", "sequence_mask"]

GROUP_ESTIMATORS = ("grpo", "rloo")
"""Estimators whose advantages depend on the rewards of the group alone."""


class ObjectiveSettings(Frozen):
    """The objective of one step: its advantages, its loss, and its KL to a reference policy."""

    loss_type: LossType = "grpo"
    """How per-token losses are reduced: ``grpo`` and ``sapo`` mean over completions of the mean
    over tokens; ``dr_grpo`` sum over tokens / (completions × max_completion_length); ``luspo`` mean
    over completions of the sum over tokens; ``dapo``, ``bnpo``, ``cispo`` and ``vespo`` mean over
    all active tokens of the step. ``cispo`` also replaces the clipped ratio with a capped, detached
    weight on the log-probability, ``vespo`` with a smooth weight of the completion, and ``sapo``
    with a smooth function of the ratio."""
    loss: str | None = None
    """Function that computes the policy loss of each token, ``FILE.py:NAME``; ``loss_type`` then
    sets only how the losses are reduced. None: that of ``loss_type``."""
    sapo_temperature_pos: float = Field(default=1.0, gt=0.0)
    """Temperature of ``sapo`` where the advantage is positive; higher ones weaken gradients of
    ratios far from 1 more."""
    sapo_temperature_neg: float = Field(default=1.05, gt=0.0)
    """Temperature of ``sapo`` where the advantage is not positive."""
    vespo_k_pos: float = Field(default=2.0, ge=0.0)
    """Power of the completion's ratio in ``vespo`` where the advantage is not negative, which
    lowers the weight of ratios below 1. 0: it does not."""
    vespo_lambda_pos: float = Field(default=3.0, ge=1e-4)
    """Rate of decay in ``vespo`` where the advantage is not negative, which lowers the weight of
    ratios above 1."""
    vespo_k_neg: float = Field(default=3.0, ge=0.0)
    """As ``vespo_k_pos``, where the advantage is negative. 0: no power."""
    vespo_lambda_neg: float = Field(default=2.0, ge=1e-4)
    """As ``vespo_lambda_pos``, where the advantage is negative."""
    advantage_estimator: str = "grpo"
    """Baseline of a reward: ``grpo`` the mean of its group; ``rloo`` the mean of the group's other
    rewards. ``reinforce_plus_plus``: none, and the returns are normalized over all tokens of the
    step; ``reinforce_plus_plus_baseline``: the same minus the group mean. Or a function that
    computes the advantages, ``FILE.py:NAME``."""
    scale_rewards: ScaleRewards = "group"
    """Scale of an advantage: the standard deviation of the rewards in its ``group``, in the
    ``batch``, or 1 (``none``)."""
    normalize_each_reward: bool = False
    """True (GDPO): normalize each reward in its group before the weighted sum, then divide the sum
    by its standard deviation over the batch. False: normalize the weighted sum."""
    beta: Annotated[float, LOCKED] = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference policy. 0: no KL and no reference policy."""
    kl_estimator: KLEstimator = "k3"
    """Per-token KL estimator; see ``vlm_grpo.training.objective.kl``."""
    kl_in: Literal["loss", "reward"] = "loss"
    """``loss``: add the KL to each token's loss. ``reward``: subtract a completion's sum from its
    reward, before the advantages; only ``k1`` is unbiased there."""
    use_bias_correction_kl: bool = True
    """True: multiply the KL in the loss by the importance ratio, whose gradient counts even where
    its value is 1; k1 and k3 then have the gradient of KL(policy ‖ reference). False: the KL term
    of the GRPO paper."""
    reference_refresh_every: Annotated[int | Literal["never"], LOCKED] = 1
    """Copy the policy to the reference before every k-th step. 1: the reference is the policy at
    the start of the step, at no cost. ``never``: it stays the initial policy."""
    reference_device: Literal["model", "cpu"] = "model"
    """Device of the reference's snapshot: the ``model``'s, or the ``cpu``, from which it is copied
    to the model's device for the reference pass. There is a snapshot only with beta above 0 and
    reference_refresh_every other than 1."""
    num_iterations: int = Field(default=1, ge=1)
    """Updates on each mini-batch of a rollout (μ). 1: with ``optim.mini_batches=1``, the importance
    ratio is identically 1 and no old log-probabilities are computed."""
    replay: ReplaySettings | None = None
    """Train once more on a recent group, with the ratio to the policy that sampled it, for each
    group whose rewards are all equal; None: each group is trained on in its own step only."""
    distillation: DistillationSettings | None = None
    """Approach a teacher's distribution beside, or instead of, the rewards; None: no teacher."""
    perception: PerceptionSettings | None = None
    """Score each completion with masked images too, to train what depends on the image; None:
    with the images only."""
    epsilon: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The ratio is clipped below at 1 − epsilon, and above at 1 + epsilon unless ``epsilon_high``
    is set."""
    epsilon_high: float | None = Field(default=None, gt=0.0)
    """The ratio is clipped above at 1 + epsilon_high (clip-higher); None: at 1 + epsilon. With
    ``cispo`` it is the upper bound of the weight itself, at least 1, and required (ScaleRL uses
    5)."""
    delta: float | None = Field(default=None, gt=1.0)
    """Two-sided clip: cap the ratio itself, which bounds the loss of a completion with negative
    advantage. None: no cap."""
    importance_sampling_level: Level = "token"
    """``token``: one ratio per token. ``sequence`` (GSPO): one ratio per completion, the geometric
    mean of its tokens' ratios."""
    advantage_clip: float | None = Field(default=None, gt=0.0)
    """Bound of the absolute value of advantages; None: no bound."""
    top_entropy_quantile: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the step's tokens that the policy loss keeps: those with the highest entropy when
    they were sampled. 1: all."""
    entropy_coef: float = 0.0
    """Weight of the mean token entropy, which is maximized; below 0 it is minimized, as in PAPO and
    VPPO. 0: neither."""
    mask_truncated_completions: bool = False
    """True: leave completions that reached the length limit out of the loss."""
    sampler_correction: SamplerCorrection = "none"
    """Weight of the policy loss where the sampler's distribution differs from the trained one: the
    trainer's probability divided by the sampler's, of each ``token`` or of the completion
    (``sequence``), clipped to its bounds; ``token_mask`` and ``sequence_mask`` set it to 0 beyond
    them instead. ``none``: no weight; the difference is still logged. With
    ``rollout.sampler=vllm`` the default is ``sequence_mask``, as in TRL, and ``none`` is refused.
    """
    sampler_correction_cap: float | None = Field(default=3.0, ge=1.0)
    """Upper bound of the sampler correction's weight; None: no bound."""
    sampler_correction_floor: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Lower bound of the sampler correction's weight; None: no bound."""

    @property
    def upper_epsilon(self) -> float:
        """Upper clip bound: the ratio is clipped at 1 + this value (``cispo``: at this value)."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def sampler_correction_bounds(self) -> tuple[float, float]:
        low, high = self.sampler_correction_floor, self.sampler_correction_cap
        return 0.0 if low is None else low, math.inf if high is None else high

    @property
    def needs_reference(self) -> bool:
        """True if a separate reference policy must be kept and evaluated."""
        return self.beta > 0 and self.reference_refresh_every != 1

    @property
    def method_terms(self) -> frozenset[str]:
        return frozenset(own.term for own in find_method_settings(self) if own.term is not None)

    @property
    def can_skip_zero_advantages(self) -> bool:
        """True if a completion with advantage 0 has no gradient, so that the update may skip it."""
        in_loss = self.beta > 0 and self.kl_in == "loss"
        by_methods = any(own.trains_all for own in find_method_settings(self))
        return not (self.entropy_coef or in_loss or by_methods or self.loss)
