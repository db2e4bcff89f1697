"""Settings of the objective: advantages, loss, KL, and the combinations that are valid.

Names and meanings follow TRL's ``GRPOConfig``. A setting that would be ignored is an error that
says what to set instead; one that is biased or has no effect is a line in ``notes()``.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from vlm_grpo.config.base import Frozen

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
ScaleRewards = Literal["group", "batch", "none"]
Estimator = Literal["grpo", "rloo"]
KLEstimator = Literal["k1", "k2", "k3"]
Level = Literal["token", "sequence"]
SamplerCorrection = Literal["none", "token", "sequence", "token_mask", "sequence_mask"]


class ReplaySettings(Frozen):
    """The replay of earlier groups in steps in which some groups have equal rewards."""

    size: int = Field(default=64, ge=1)
    """Maximum number of groups that are kept; the oldest leave first."""
    max_age: int = Field(default=8, ge=1)
    """Number of steps after which a group is not replayed any more."""


class ObjectiveSettings(Frozen):
    """The objective of one step: its advantages, its loss, and its KL to a reference policy."""

    loss_type: LossType = "grpo"
    """How per-token losses are reduced: ``grpo`` mean over completions of the mean over tokens;
    ``dr_grpo`` sum over tokens / (completions × max_completion_length); ``dapo``, ``bnpo`` and
    ``cispo`` mean over all active tokens of the step. ``cispo`` also replaces the clipped ratio
    with a capped, detached weight on the log-probability."""

    advantage_estimator: Estimator = "grpo"
    """Baseline of a reward: ``grpo`` the mean of its group; ``rloo`` the mean of the group's other
    rewards."""

    scale_rewards: ScaleRewards = "group"
    """Scale of an advantage: the standard deviation of the rewards in its ``group``, in the
    ``batch``, or 1 (``none``)."""

    normalize_each_reward: bool = False
    """True (GDPO): normalize each reward in its group before the weighted sum, then divide the sum
    by its standard deviation over the batch. False: normalize the weighted sum."""

    beta: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference policy. 0: no KL and no reference policy."""

    kl_estimator: KLEstimator = "k3"
    """Per-token KL estimator; see ``vlm_grpo.objective.kl``."""

    kl_in: Literal["loss", "reward"] = "loss"
    """``loss``: add the KL to each token's loss. ``reward``: subtract a completion's sum from its
    reward, before the advantages; only ``k1`` is unbiased there."""

    use_bias_correction_kl: bool = True
    """True: multiply the KL in the loss by the importance ratio, whose gradient counts even where
    its value is 1; k1 and k3 then have the gradient of KL(policy ‖ reference). False: the KL term
    of the GRPO paper."""

    reference_refresh_every: int | Literal["never"] = 1
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

    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the mean token entropy, which is maximized. 0: no bonus."""

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

    @model_validator(mode="after")
    def _check_combinations(self) -> ObjectiveSettings:
        for invalid, message in [*self._clip_errors(), *self._kl_errors()]:
            if invalid:
                raise ValueError(message)
        return self

    def _is_default(self, name: str) -> bool:
        return getattr(self, name) == type(self).model_fields[name].default

    def _clip_errors(self) -> list[tuple[bool, str]]:
        cispo = self.loss_type == "cispo"
        changed = {name: not self._is_default(name) for name in ("epsilon", "delta")}
        return [
            (
                cispo and (self.epsilon_high is None or self.epsilon_high < 1.0),
                "loss_type=cispo caps the importance weight at epsilon_high itself, not at "
                "1 + epsilon_high: set epsilon_high to 1 or more, for example 5",
            ),
            (
                cispo and (changed["epsilon"] or changed["delta"]),
                "loss_type=cispo has one bound, epsilon_high: remove epsilon and delta",
            ),
            (
                self.delta is not None and self.delta <= 1.0 + self.upper_epsilon,
                "delta would cap the ratio below the upper clip bound and replace that bound: "
                "set delta above 1 + epsilon_high",
            ),
            (
                self.normalize_each_reward and self.scale_rewards != "group",
                "normalize_each_reward scales each reward by its group and the sum by the batch, "
                "so scale_rewards would be ignored: remove it",
            ),
        ]

    def _kl_errors(self) -> list[tuple[bool, str]]:
        every, corrected = self.reference_refresh_every, self.use_bias_correction_kl
        replayed = self.replay is not None and self.beta > 0
        in_loss = self.beta > 0 and self.kl_in == "loss"
        in_reward = self.beta > 0 and self.kl_in == "reward"
        return [
            (
                replayed,
                "replay needs beta=0: the KL is estimated on completions of the policy as it is, "
                "which replayed ones are not",
            ),
            (
                every != "never" and int(every) < 1,
                "reference_refresh_every counts steps and must be at least 1, or never",
            ),
            (
                self.reference_device == "cpu" and not self.needs_reference,
                "reference_device=cpu has no effect without a reference snapshot: remove it, or "
                "set beta above 0 and reference_refresh_every above 1 or to never",
            ),
            (
                self.normalize_each_reward and in_reward,
                "normalize_each_reward would normalize the KL penalty like a reward, so beta would "
                "be ignored: set kl_in to loss",
            ),
            (
                in_reward and not corrected,
                "use_bias_correction_kl=false applies to the KL in the loss and would be ignored: "
                "remove it with kl_in=reward",
            ),
            (
                in_loss and self.kl_estimator == "k1" and not corrected,
                "kl_estimator=k1 in the loss without the importance ratio has an expected "
                "gradient of zero: set use_bias_correction_kl=true, or kl_in=reward",
            ),
        ]

    @property
    def upper_epsilon(self) -> float:
        """Upper clip bound: the ratio is clipped at 1 + this value (``cispo``: at this value)."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def sampler_correction_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the sampler correction's weight."""
        low, high = self.sampler_correction_floor, self.sampler_correction_cap
        return 0.0 if low is None else low, math.inf if high is None else high

    @property
    def needs_reference(self) -> bool:
        """True if a separate reference policy must be kept and evaluated."""
        return self.beta > 0 and self.reference_refresh_every != 1

    @property
    def can_skip_zero_advantages(self) -> bool:
        """True if a completion with advantage 0 has no gradient, so that the update may skip it."""
        return self.entropy_coef == 0 and (self.beta == 0 or self.kl_in == "reward")

    def find_ratio_problems(self, updates_per_step: int) -> list[str]:
        """Return what has no effect because every ratio is 1 with one update per rollout."""
        if updates_per_step > 1 or self.replay is not None or self.loss_type == "cispo":
            return []
        return [
            f"with one update per rollout every importance ratio is 1, so objective.{name} has "
            "no effect: remove it, or set objective.num_iterations or optim.mini_batches to 2 or "
            "more"
            for name in ("epsilon_high", "epsilon", "delta")
            if not self._is_default(name)
        ]

    def notes(self, updates_per_step: int = 1) -> list[str]:
        """Return remarks about the settings, one sentence each, to print when a run starts."""
        return [*self._kl_notes(updates_per_step), *self._ratio_notes(updates_per_step)]

    def _kl_notes(self, updates_per_step: int) -> list[str]:
        if self.beta == 0:
            names = ("kl_estimator", "kl_in", "use_bias_correction_kl", "reference_refresh_every")
            unused = [name for name in names if not self._is_default(name)]
            return [f"beta=0: no KL is computed, {', '.join(unused)} unused"] if unused else []
        notes = []
        fresh = self.reference_refresh_every == 1
        if fresh and (updates_per_step == 1 or self.kl_in == "reward"):
            notes.append(
                f"beta={self.beta:g} has no effect: with reference_refresh_every=1 the reference "
                "is the policy itself whenever the KL is computed, so the KL is 0 and so is its "
                "gradient (k1 in the loss: on average); set reference_refresh_every above 1 or "
                "to never, or beta=0"
            )
        if self.kl_in == "reward" and self.kl_estimator != "k1":
            notes.append(
                f"kl_in=reward with {self.kl_estimator} does not follow the gradient of the KL; "
                "kl_estimator=k1 does"
            )
        if self.kl_in == "loss" and self.use_bias_correction_kl and self.kl_estimator == "k2":
            notes.append(
                "k2 times the importance ratio follows the gradient of half the mean squared "
                "log-ratio, not of the KL; use k1 or k3, or use_bias_correction_kl=false"
            )
        if self.kl_in == "loss" and not self.use_bias_correction_kl:
            if updates_per_step > 1:
                notes.append(
                    "use_bias_correction_kl=false: after the first of a step's updates the samples "
                    "no longer come from the policy, and the KL's gradient is biased"
                )
            if self.kl_estimator == "k3":
                notes.append(
                    "use_bias_correction_kl=false: k3 alone follows the gradient of "
                    "KL(reference ‖ policy), not of KL(policy ‖ reference)"
                )
        if self.kl_in == "loss" and self.sampler_correction != "none":
            notes.append(
                "sampler_correction weights only the policy loss: the KL is estimated on the "
                "sampler's tokens without a weight"
            )
        if self.kl_in == "loss" and self.importance_sampling_level == "sequence":
            notes.append(
                "importance_sampling_level=sequence: the KL is weighted by the completion's ratio, "
                "so its gradient is not exact"
            )
        return notes

    def _ratio_notes(self, updates_per_step: int) -> list[str]:
        notes = []
        if updates_per_step == 1 and self.replay is None:
            notes.append(
                "one update per rollout: the importance ratio is 1 and the advantages of a group "
                "sum to 0, so a policy loss near 0 is normal; watch the reward"
            )
            if self.importance_sampling_level == "sequence":
                notes.append("one update per rollout: sequence-level ratios equal token-level ones")
            if self.loss_type == "cispo":
                notes.append("one update per rollout: cispo has the same gradient as dapo")
        if self.importance_sampling_level == "sequence" and self.loss_type != "grpo":
            notes.append(
                f"importance_sampling_level=sequence with loss_type={self.loss_type} counts a "
                "completion's ratio once per token; GSPO is loss_type=grpo"
            )
        if self.loss_type == "bnpo":
            notes.append(
                "loss_type=bnpo equals dapo here: both divide by the active tokens of the step"
            )
        if self.advantage_estimator == "rloo" and self.scale_rewards != "none":
            notes.append(
                "rloo is unbiased only without scaling: set scale_rewards=none"
                if not self.normalize_each_reward
                else "rloo with normalize_each_reward is scaled, hence not unbiased"
            )
        for name in ("sampler_correction_cap", "sampler_correction_floor"):
            if self.sampler_correction == "none" and not self._is_default(name):
                notes.append(f"sampler_correction=none: {name} is unused")
        return notes

    def check_sampling(self, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> None:
        """Reject sampling settings with which the importance ratio would be wrong.

        Args:
            top_p: probability mass that the sampler keeps; 1 keeps the full vocabulary.
            top_k: number of tokens that the sampler keeps; 0 keeps the full vocabulary.
            min_p: minimum probability relative to the most likely token; 0 keeps all tokens.

        Raises:
            ValueError: the sampler's distribution is not the policy's and no correction is set.
        """
        truncated = top_p < 1.0 or top_k > 0 or min_p > 0.0
        if truncated and self.sampler_correction == "none":
            raise ValueError(
                "top_p, top_k and min_p change the sampler's distribution from the policy's, whose "
                "log-probabilities are trained: remove them, or set sampler_correction to token or "
                "sequence"
            )

    def check_dropout(self, dropout: float, updates_per_step: int = 1) -> None:
        """Reject dropout if log-probabilities of two passes are compared.

        Args:
            dropout: largest dropout probability in the trained model.
            updates_per_step: number of updates on one rollout.

        Raises:
            ValueError: log-probs under different dropout masks would be compared.
        """
        has_ratio = updates_per_step > 1 or self.replay is not None
        compared = has_ratio or self.sampler_correction != "none" or self.beta > 0
        if dropout > 0.0 and compared:
            raise ValueError(
                f"dropout of {dropout:g} changes log-probabilities between two passes, so the "
                "importance ratios and the KL would measure the dropout mask"
            )
