"""The objective's settings: what a step needs."""

from __future__ import annotations

from typing import Any

import pytest

from vlm_grpo.config.objective import ObjectiveSettings


def test_settings_survive_a_round_trip():
    """A run's resolved settings give every field; no default may be refused."""
    for settings in (ObjectiveSettings(), ObjectiveSettings(loss_type="cispo", epsilon_high=5.0)):
        assert ObjectiveSettings(**settings.model_dump()) == settings


def test_dropout_is_refused_where_two_passes_are_compared():
    ObjectiveSettings().check_dropout(0.1)
    with pytest.raises(ValueError, match=r"dropout of 0\.1"):
        ObjectiveSettings().check_dropout(0.1, updates_per_step=2)
    with_two_passes: list[dict[str, Any]] = [
        {"sampler_correction": "token"},
        {"beta": 0.1, "reference_refresh_every": "never"},
        {"replay": {}},
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
