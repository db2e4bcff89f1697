"""The objective's settings: invalid combinations, notes, and what a step needs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.errors import UserError


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"num_iterations": 2, "delta": 1.1}, "delta above 1 \\+ epsilon_high"),
        ({"loss_type": "cispo"}, "set epsilon_high to 1 or more"),
        ({"loss_type": "cispo", "epsilon_high": 0.2}, "set epsilon_high to 1 or more"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.1}, "one bound"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 6.0}, "one bound"),
        (
            {"normalize_each_reward": True, "scale_rewards": "none"},
            "scale_rewards would be ignored: remove it",
        ),
        (
            {"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False},
            "set use_bias_correction_kl=true",
        ),
        (
            {
                "beta": 0.1,
                "kl_in": "reward",
                "use_bias_correction_kl": False,
                "reference_refresh_every": 5,
            },
            "remove it with kl_in=reward",
        ),
        (
            {"normalize_each_reward": True, "beta": 0.1, "kl_in": "reward"},
            "set kl_in to loss",
        ),
        ({"reference_device": "cpu"}, "without a reference snapshot.*set beta above 0"),
        (
            {"reference_device": "cpu", "beta": 0.1},
            "without a reference snapshot.*reference_refresh_every above 1",
        ),
        ({"replay": {}, "beta": 0.1}, "replay needs beta=0"),
        ({"reference_refresh_every": 0}, "at least 1"),
        ({"reference_refresh_every": "sometimes"}, "never"),
        ({"beta": float("nan")}, "beta"),
        ({"learning_rate": 1e-6}, "learning_rate"),
    ],
)
def test_an_invalid_combination_is_refused_with_its_remedy(fields, remedy):
    with pytest.raises(UserError, match=remedy):
        ObjectiveSettings(**fields)


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
    notes = "\n".join(objective.notes(objective.num_iterations))
    assert re.search(note, notes)


def test_a_sound_recipe_has_no_note():
    recipe = ObjectiveSettings(
        loss_type="dapo",
        num_iterations=2,
        epsilon_high=0.28,
        beta=0.01,
        reference_refresh_every="never",
    )
    assert recipe.notes(updates_per_step=2) == []


def test_with_replay_the_ratio_is_not_1():
    replayed = ObjectiveSettings(replay={}, epsilon=0.1, epsilon_high=0.28, delta=4.0)
    assert (replayed.find_ratio_problems(1), replayed.notes(1)) == ([], [])
    with pytest.raises(ValueError, match="dropout"):
        replayed.check_dropout(0.1)


def test_settings_survive_a_round_trip():
    """A run's resolved settings give every field; no default may be refused."""
    for settings in (ObjectiveSettings(), ObjectiveSettings(loss_type="cispo", epsilon_high=5.0)):
        assert ObjectiveSettings(**settings.model_dump()) == settings


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}])
def test_a_truncated_sampler_is_refused_without_a_correction(sampling):
    with pytest.raises(ValueError, match="sampler_correction"):
        ObjectiveSettings().check_sampling(**sampling)
    ObjectiveSettings(sampler_correction="token").check_sampling(**sampling)


def test_dropout_is_refused_where_two_passes_are_compared():
    ObjectiveSettings().check_dropout(0.1)
    with pytest.raises(ValueError, match=r"dropout of 0\.1"):
        ObjectiveSettings().check_dropout(0.1, updates_per_step=2)
    with_two_passes: list[dict[str, Any]] = [
        {"sampler_correction": "token"},
        {"beta": 0.1, "reference_refresh_every": "never"},
    ]
    for fields in with_two_passes:
        ObjectiveSettings(**fields).check_dropout(0.0)
        with pytest.raises(ValueError, match=r"dropout of 0\.1"):
            ObjectiveSettings(**fields).check_dropout(0.1)


def test_the_settings_say_what_a_step_needs():
    default = ObjectiveSettings()
    assert not default.needs_reference
    assert default.can_skip_zero_advantages
    initial = ObjectiveSettings(beta=0.1, reference_refresh_every="never")
    assert initial.needs_reference
    assert not initial.can_skip_zero_advantages
    assert not ObjectiveSettings(beta=0.1).needs_reference  # the old log-probs are the reference's
    assert not ObjectiveSettings(entropy_coef=0.01).can_skip_zero_advantages
