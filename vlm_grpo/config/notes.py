"""Remarks about the objective's settings, which are printed when a run starts."""

from __future__ import annotations

from vlm_grpo.config.objective import ObjectiveSettings


def list_notes(objective: ObjectiveSettings, updates_per_step: int = 1) -> list[str]:
    """Return what is biased or has no effect in these settings, one sentence each."""
    return [
        *_list_kl_notes(objective, updates_per_step),
        *_list_ratio_notes(objective, updates_per_step),
    ]


def _list_kl_notes(objective: ObjectiveSettings, updates_per_step: int) -> list[str]:
    if objective.beta == 0:
        names = ("kl_estimator", "kl_in", "use_bias_correction_kl", "reference_refresh_every")
        unused = [name for name in names if not objective.is_default(name)]
        return [f"beta=0: no KL is computed, {', '.join(unused)} unused"] if unused else []
    notes = []
    fresh = objective.reference_refresh_every == 1
    if fresh and (updates_per_step == 1 or objective.kl_in == "reward"):
        notes.append(
            f"beta={objective.beta:g} has no effect: with reference_refresh_every=1 the reference "
            "is the policy itself whenever the KL is computed, so the KL is 0 and so is its "
            "gradient (k1 in the loss: on average); set reference_refresh_every above 1 or "
            "to never, or beta=0"
        )
    if objective.kl_in == "reward" and objective.kl_estimator != "k1":
        notes.append(
            f"kl_in=reward with {objective.kl_estimator} does not follow the gradient of the KL; "
            "kl_estimator=k1 does"
        )
    if (
        objective.kl_in == "loss"
        and objective.use_bias_correction_kl
        and objective.kl_estimator == "k2"
    ):
        notes.append(
            "k2 times the importance ratio follows the gradient of half the mean squared "
            "log-ratio, not of the KL; use k1 or k3, or use_bias_correction_kl=false"
        )
    if objective.kl_in == "loss" and not objective.use_bias_correction_kl:
        if updates_per_step > 1:
            notes.append(
                "use_bias_correction_kl=false: after the first of a step's updates the samples "
                "no longer come from the policy, and the KL's gradient is biased"
            )
        if objective.kl_estimator == "k3":
            notes.append(
                "use_bias_correction_kl=false: k3 alone follows the gradient of "
                "KL(reference ‖ policy), not of KL(policy ‖ reference)"
            )
    if objective.kl_in == "loss" and objective.sampler_correction != "none":
        notes.append(
            "sampler_correction weights only the policy loss: the KL is estimated on the "
            "sampler's tokens without a weight"
        )
    if objective.kl_in == "loss" and objective.importance_sampling_level == "sequence":
        notes.append(
            "importance_sampling_level=sequence: the KL is weighted by the completion's ratio, "
            "so its gradient is not exact"
        )
    return notes


def _list_ratio_notes(objective: ObjectiveSettings, updates_per_step: int) -> list[str]:
    notes = []
    if updates_per_step == 1 and objective.replay is None:
        notes.append(
            "one update per rollout: the importance ratio is 1 and the advantages of a group "
            "sum to 0, so a policy loss near 0 is normal; watch the reward"
        )
        if objective.importance_sampling_level == "sequence":
            notes.append("one update per rollout: sequence-level ratios equal token-level ones")
        equal = {"cispo": "dapo", "sapo": "grpo"}.get(objective.loss_type)
        if equal and objective.loss is None:
            notes.append(
                f"one update per rollout: {objective.loss_type} has the same gradient as {equal}"
            )
    per_completion = ("grpo", "sapo", "luspo")  # the ratio counts once, or by the length on purpose
    by_sequence = objective.importance_sampling_level == "sequence"
    if by_sequence and objective.loss_type not in per_completion:
        notes.append(
            f"importance_sampling_level=sequence with loss_type={objective.loss_type} counts a "
            "completion's ratio once per token; GSPO is loss_type=grpo"
        )
    if objective.loss_type == "bnpo":
        notes.append(
            "loss_type=bnpo equals dapo here: both divide by the active tokens of the step"
        )
    if objective.advantage_estimator == "rloo" and objective.scale_rewards != "none":
        notes.append(
            "rloo is unbiased only without scaling: set scale_rewards=none"
            if not objective.normalize_each_reward
            else "rloo with normalize_each_reward is scaled, hence not unbiased"
        )
    for name in ("sampler_correction_cap", "sampler_correction_floor"):
        if objective.sampler_correction == "none" and not objective.is_default(name):
            notes.append(f"sampler_correction=none: {name} is unused")
    return notes
