"""Remarks about settings that have no effect or are biased."""

from __future__ import annotations

import re

import pytest

from vlm_grpo.config.notes import list_notes
from vlm_grpo.config.objective import ObjectiveSettings


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({}, "a policy loss near 0 is normal"),
        ({"beta": 0.04}, "beta=0.04 has no effect"),
        ({"beta": 0.04, "kl_in": "reward", "num_iterations": 4}, "beta=0.04 has no effect"),
        ({"kl_in": "reward", "reference_refresh_every": "never"}, "kl_in, reference_refresh_every"),
        (
            {"beta": 0.04, "kl_in": "reward", "reference_refresh_every": 10},
            "kl_estimator=k1 does",
        ),
        (
            {"beta": 0.04, "kl_estimator": "k2", "reference_refresh_every": "never"},
            "half the mean squared log-ratio",
        ),
        (
            {"beta": 0.04, "use_bias_correction_kl": False, "num_iterations": 2},
            "samples no longer come from the policy",
        ),
        (
            {"beta": 0.04, "use_bias_correction_kl": False},
            "KL\\(reference ‖ policy\\)",
        ),
        ({"advantage_estimator": "rloo"}, "set scale_rewards=none"),
        ({"loss_type": "bnpo"}, "equals dapo"),
        ({"importance_sampling_level": "sequence"}, "equal token-level"),
        (
            {"importance_sampling_level": "sequence", "loss_type": "dapo", "num_iterations": 2},
            "GSPO is loss_type=grpo",
        ),
        (
            {
                "beta": 0.1,
                "importance_sampling_level": "sequence",
                "num_iterations": 2,
                "reference_refresh_every": "never",
            },
            "gradient is not exact",
        ),
        (
            {"beta": 0.1, "reference_refresh_every": 5, "sampler_correction": "token"},
            "weights only the policy loss",
        ),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "same gradient as dapo"),
        ({"normalize_each_reward": True, "advantage_estimator": "rloo"}, "hence not unbiased"),
        ({"sampler_correction_cap": 2.0}, "sampler_correction_cap is unused"),
        ({"sampler_correction_floor": 0.5}, "sampler_correction_floor is unused"),
    ],
)
def test_settings_that_are_unused_or_biased_are_noted(fields, note):
    objective = ObjectiveSettings(**fields)
    notes = "\n".join(list_notes(objective, objective.num_iterations))
    assert re.search(note, notes)


def test_a_sound_recipe_has_no_note():
    recipe = ObjectiveSettings(
        loss_type="dapo",
        num_iterations=2,
        epsilon_high=0.28,
        beta=0.01,
        reference_refresh_every="never",
    )
    assert list_notes(recipe, updates_per_step=2) == []


def test_with_replay_the_ratio_is_not_1():
    replayed = ObjectiveSettings(replay={}, epsilon=0.1, epsilon_high=0.28, delta=4.0)
    assert (replayed.find_ratio_problems(1), list_notes(replayed)) == ([], [])
    with pytest.raises(ValueError, match="dropout"):
        replayed.check_dropout(0.1)
