"""The helpers for error messages."""

from __future__ import annotations

import pytest

from vlm_grpo.errors import Stopped, bullets, nearest


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("groundign", " (did you mean grounding?)"), ("ocr", " (did you mean ocr?)"), ("", "")],
)
def test_nearest_suggests_the_closest_similar_name(name, suggestion):
    assert nearest(name, iter(["grounding", "counting", "ocr"])) == suggestion


def test_bullets_lists_the_first_problems_and_counts_the_others():
    problems = [f"problem {number}" for number in range(53)]
    lines = bullets(iter(problems)).splitlines()
    assert lines == [*(f"  - {problem}" for problem in problems[:50]), "  … and 3 more"]
    assert bullets([]) == ""


def test_a_stopped_run_carries_its_exit_status():
    stopped = Stopped("stopped by SIGTERM", 143)
    assert (str(stopped), stopped.status) == ("stopped by SIGTERM", 143)
