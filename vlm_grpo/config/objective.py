"""Settings of the objective: which advantages, loss and KL, and which combinations make sense.

Names and meanings are those of TRL's ``GRPOConfig`` wherever it has one. What would be ignored is
an error that says what to set; what works but is biased or idle is a line in ``notes()``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
ScaleRewards = Literal["group", "batch", "none"]
Estimator = Literal["grpo", "rloo"]
KLEstimator = Literal["k1", "k2", "k3"]
Level = Literal["token", "sequence"]

_DEFAULT_EPSILON = 0.2


class ObjectiveSettings(BaseModel):
    """What is maximised in one step. Frozen; an unknown field or an ignored one is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    loss_type: LossType = "grpo"
    """How per-token losses become one number: ``grpo`` mean over completions of the mean over
    tokens; ``dr_grpo`` sum over tokens / (completions × max_completion_length); ``dapo``, ``bnpo``
    and ``cispo`` mean over all active tokens of the step. ``cispo`` also replaces the clipped
    ratio by a capped, detached weight on the log-probability."""

    advantage_estimator: Estimator = "grpo"
    """Baseline of a reward: ``grpo`` the mean of its group; ``rloo`` the mean of the others."""

    scale_rewards: ScaleRewards = "group"
    """What an advantage is divided by: the standard deviation of its ``group``, of the whole
    ``batch``, or nothing (``none``)."""

    normalize_each_reward: bool = False
    """True (GDPO): every reward is normalised in its group before the weighted sum, which is then
    divided by its standard deviation over the batch. False: the weighted sum is normalised."""

    beta: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the KL to the reference policy. 0: no KL and no reference policy at all."""

    kl_estimator: KLEstimator = "k3"
    """Per-token KL estimator, see ``vlm_grpo.objective.kl``."""

    kl_in: Literal["loss", "reward"] = "loss"
    """``loss``: added to each token's loss. ``reward``: the completion's sum is subtracted from its
    reward before the advantages; only ``k1`` is unbiased there."""

    use_bias_correction_kl: bool = True
    """True: the KL in the loss is multiplied by the importance ratio, whose gradient counts even
    where its value is 1; k1 and k3 then have the gradient of KL(policy ‖ reference). False: the
    KL term of the GRPO paper."""

    reference_refresh_every: int | Literal["never"] = 1
    """The reference becomes the policy before every k-th step. 1: it is the policy at the start of
    this step, and costs nothing. ``never``: it stays the initial policy."""

    reference_device: Literal["model", "cpu"] = "model"
    """Where a snapshot of the reference is kept: beside the ``model``, or on the ``cpu``, from
    where it is moved in for the reference's pass. Only where there is a snapshot: beta above 0
    and reference_refresh_every other than 1."""

    num_iterations: int = Field(default=1, ge=1)
    """Updates on one rollout (μ). 1: the importance ratio is identically 1 and no old
    log-probabilities are computed."""

    epsilon: float = Field(default=_DEFAULT_EPSILON, gt=0.0, lt=1.0)
    """The ratio is clipped below at 1 − epsilon, and above at 1 + epsilon unless ``epsilon_high``
    is set."""

    epsilon_high: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """The ratio is clipped above at 1 + epsilon_high (clip-higher); None: at 1 + epsilon. With
    ``cispo`` it is the absolute upper bound of the weight, at least 1, and must be given (ScaleRL
    uses 5)."""

    delta: float | None = Field(default=None, gt=1.0, allow_inf_nan=False)
    """Two-sided clip: the ratio itself is capped here, which bounds the loss of a completion with
    negative advantage. None: no cap."""

    importance_sampling_level: Level = "token"
    """``token``: one ratio per token. ``sequence`` (GSPO): its geometric mean over a completion."""

    entropy_coef: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the mean token entropy, which is maximised. 0: no bonus."""

    mask_truncated_completions: bool = False
    """True: a completion that hit the length limit contributes nothing to the loss."""

    sampler_correction: Literal["none", "token", "sequence"] = "none"
    """Multiply each token's policy loss by min(trainer's / sampler's probability, cap), of the
    token or of the whole completion, where the sampler's distribution differs from the one
    that is trained. ``none``: no weight; the difference is still measured."""

    sampler_correction_cap: float = Field(default=3.0, ge=1.0, allow_inf_nan=False)
    """Upper bound of the sampler correction's weight."""

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> ObjectiveSettings:
        for refused, remedy in [*self._clip_refusals(), *self._kl_refusals()]:
            if refused:
                raise ValueError(remedy)
        return self

    def _clip_refusals(self) -> list[tuple[bool, str]]:
        cispo = self.loss_type == "cispo"
        idle = {
            "epsilon_high": self.epsilon_high is not None,
            "epsilon": self.epsilon != _DEFAULT_EPSILON,
            "delta": self.delta is not None,
        }
        single = self.num_iterations == 1 and not cispo
        return [
            (
                cispo and (self.epsilon_high is None or self.epsilon_high < 1.0),
                "loss_type=cispo caps the importance weight at epsilon_high itself, not at "
                "1 + epsilon_high: set epsilon_high to 1 or more, for example 5",
            ),
            (
                cispo and (idle["epsilon"] or idle["delta"]),
                "loss_type=cispo has one bound, epsilon_high: leave out epsilon and delta",
            ),
            *(
                (
                    single and given,
                    f"with num_iterations=1 the importance ratio is always 1, so {name} clips "
                    "nothing: leave it out, or set num_iterations to 2 or more",
                )
                for name, given in idle.items()
            ),
            (
                self.delta is not None and self.delta <= 1.0 + self.upper_epsilon,
                "delta caps the ratio below the clip at 1 + epsilon_high and would replace it: "
                "set delta above 1 + epsilon_high",
            ),
            (
                self.normalize_each_reward and self.scale_rewards != "group",
                "normalize_each_reward scales each reward by its group and the sum by the batch, "
                "so scale_rewards would be ignored: leave it at group",
            ),
        ]

    def _kl_refusals(self) -> list[tuple[bool, str]]:
        every, corrected = self.reference_refresh_every, self.use_bias_correction_kl
        in_loss = self.beta > 0 and self.kl_in == "loss"
        in_reward = self.beta > 0 and self.kl_in == "reward"
        return [
            (
                every != "never" and int(every) < 1,
                "reference_refresh_every counts steps and must be at least 1, or never",
            ),
            (
                self.reference_device == "cpu" and not self.needs_reference,
                "reference_device=cpu says where a snapshot is kept, and these settings keep none: "
                "leave it out, or set beta above 0 and reference_refresh_every above 1 or to never",
            ),
            (
                self.normalize_each_reward and in_reward,
                "normalize_each_reward would normalise the KL penalty like a reward, so beta would "
                "be ignored: set kl_in to loss",
            ),
            (
                in_reward and not corrected,
                "use_bias_correction_kl=false is about the KL in the loss and would be ignored: "
                "leave it out with kl_in=reward",
            ),
            (
                in_loss and self.kl_estimator == "k1" and not corrected,
                "kl_estimator=k1 in the loss without the importance ratio has an expected "
                "gradient of zero: set use_bias_correction_kl=true, or kl_in=reward",
            ),
        ]

    @property
    def upper_epsilon(self) -> float:
        """The ratio is clipped above at 1 + this (for ``cispo``: at this)."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy must be kept apart from the policy and run."""
        return self.beta > 0 and self.reference_refresh_every != 1

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether log-probabilities before the first update must be stored."""
        return self.num_iterations > 1

    @property
    def can_skip_zero_advantages(self) -> bool:
        """Whether a completion with advantage 0 has no gradient, so that it may be skipped."""
        return self.entropy_coef == 0 and (self.beta == 0 or self.kl_in == "reward")

    def notes(self) -> list[str]:
        """What the user should know of these settings, one sentence each, to print at the start."""
        return [*self._kl_notes(), *self._ratio_notes()]

    def _kl_notes(self) -> list[str]:
        if self.beta == 0:
            ignored = [
                name
                for name in (
                    "kl_estimator",
                    "kl_in",
                    "use_bias_correction_kl",
                    "reference_refresh_every",
                )
                if getattr(self, name) != type(self).model_fields[name].default
            ]
            return [f"beta=0: no KL is computed, {', '.join(ignored)} unused"] if ignored else []
        notes = []
        fresh = self.reference_refresh_every == 1
        if fresh and (self.num_iterations == 1 or self.kl_in == "reward"):
            notes.append(
                f"beta={self.beta:g} has no effect: with reference_refresh_every=1 the reference "
                "is the policy itself whenever the KL is taken, so the KL is 0 and so is its "
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
            if self.num_iterations > 1:
                notes.append(
                    "use_bias_correction_kl=false: after the first of the num_iterations updates "
                    "the samples are no longer the policy's, and the KL's gradient is biased"
                )
            if self.kl_estimator == "k3":
                notes.append(
                    "use_bias_correction_kl=false: k3 alone follows the gradient of "
                    "KL(reference ‖ policy), not of KL(policy ‖ reference)"
                )
        if self.kl_in == "loss" and self.sampler_correction != "none":
            notes.append(
                "sampler_correction weights the policy's loss alone: the KL is that at the tokens "
                "which the sampler's distribution gave"
            )
        if self.kl_in == "loss" and self.importance_sampling_level == "sequence":
            notes.append(
                "importance_sampling_level=sequence: the KL is weighted by the completion's ratio, "
                "for which its gradient is not exact"
            )
        return notes

    def _ratio_notes(self) -> list[str]:
        notes = []
        if self.num_iterations == 1:
            notes.append(
                "num_iterations=1: the importance ratio is 1 and the advantages of a group sum to "
                "0, so a policy loss near 0 is normal; watch the reward"
            )
            if self.importance_sampling_level == "sequence":
                notes.append("num_iterations=1: sequence-level ratios equal token-level ones")
            if self.loss_type == "cispo":
                notes.append("num_iterations=1: cispo has the same gradient as dapo")
        if self.importance_sampling_level == "sequence" and self.loss_type != "grpo":
            notes.append(
                f"importance_sampling_level=sequence with loss_type={self.loss_type} counts a "
                "completion's ratio once for each of its tokens; GSPO is loss_type=grpo"
            )
        if self.loss_type == "bnpo":
            notes.append(
                "loss_type=bnpo equals dapo here: the normaliser is the whole step's active tokens"
            )
        if self.advantage_estimator == "rloo" and self.scale_rewards != "none":
            notes.append(
                "rloo is unbiased only without scaling: set scale_rewards=none"
                if not self.normalize_each_reward
                else "rloo with normalize_each_reward is scaled, hence not unbiased"
            )
        if self.sampler_correction == "none" and self.sampler_correction_cap != 3.0:
            notes.append("sampler_correction=none: sampler_correction_cap is unused")
        return notes

    def check_sampling(self, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> None:
        """Refuse sampling settings for which the importance ratio would be wrong.

        Args:
            top_p: nucleus of the sampler; 1 keeps the whole vocabulary.
            top_k: size of the sampler's shortlist; 0 keeps the whole vocabulary.
            min_p: least probability relative to the most likely token; 0 keeps all.

        Raises:
            ValueError: the sampler is not the policy and no correction is set.
        """
        cut = top_p < 1.0 or top_k > 0 or min_p > 0.0
        if cut and self.sampler_correction == "none":
            raise ValueError(
                "top_p, top_k and min_p make the sampler another distribution than the policy "
                "whose log-probabilities are trained: leave them off, or set sampler_correction "
                "to token or sequence"
            )

    def check_dropout(self, dropout: float) -> None:
        """Refuse dropout where log-probabilities of two passes are compared.

        Args:
            dropout: the largest dropout probability in the model that is trained.

        Raises:
            ValueError: stored log-probs would be compared with ones under another dropout mask.
        """
        compared = self.needs_old_logprobs or self.sampler_correction != "none" or self.beta > 0
        if dropout > 0.0 and compared:
            raise ValueError(
                f"dropout of {dropout:g} changes log-probabilities between two passes, so the "
                "importance ratios and the KL would measure the dropout mask"
            )
