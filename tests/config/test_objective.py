"""The objective's settings: invalid combinations, notes, and what a step needs."""

from __future__ import annotations

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
        ({"advantage_estimator": "gae"}, "unknown: choose grpo, rloo, .* or FILE.py:NAME"),
        (
            {"advantage_estimator": "reinforce_plus_plus", "scale_rewards": "batch"},
            "would be ignored: remove them",
        ),
        ({"advantage_estimator": "my.py:f", "normalize_each_reward": True}, "remove them"),
        ({"advantage_estimator": "my.py:f", "replay": {}}, "remove replay"),
        ({"distillation": {"teacher": "a"}, "replay": {}}, "remove replay"),
        ({"perception": {}}, "set its kl_coef \\(PAPO\\), or its top_share"),
        ({"perception": {"kl_coef": 0.01}, "replay": {}}, "remove replay"),
        (
            {"perception": {"top_share": 0.4}, "distillation": {"teacher": "a", "only": True}},
            "perception would change: remove them, or only",
        ),
        (
            {"top_entropy_quantile": 0.2, "distillation": {"teacher": "a", "only": True}},
            "top_entropy_quantile would change",
        ),
        (
            {"advantage_clip": 2.0, "distillation": {"teacher": "a", "only": True}},
            "advantage_clip would change",
        ),
        ({"top_entropy_quantile": 0.2, "replay": {}}, "remove replay"),
        ({"reference_refresh_every": 0}, "at least 1"),
        ({"reference_refresh_every": "sometimes"}, "never"),
        ({"beta": float("nan")}, "beta"),
        ({"learning_rate": 1e-6}, "learning_rate"),
    ],
)
def test_an_invalid_combination_is_refused_with_its_remedy(fields, remedy):
    with pytest.raises(UserError, match=remedy):
        ObjectiveSettings(**fields)


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
