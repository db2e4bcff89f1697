"""``vlm-grpo data``: exit statuses and arguments. tests/data/test_checks.py covers the checks."""

from __future__ import annotations

from commands import fails, run


def test_sound_data_exit_with_status_0_and_count_image_tokens(capsys):
    given = ["embedded:counting", "--task", "counting", "--limit", "3", "--token-side", "28"]
    status, out, err = run(capsys, "data", "check", *given)

    assert (status, err) == (0, "")
    assert "3 good rows" in out
    # 84 x 84 pixels are 3 x 3 tokens of 28 pixels.
    assert "9 to 9" in out


def test_a_source_that_shares_images_with_itself_exits_with_status_2(capsys):
    given = ["embedded:counting", "--task", "counting", "--limit", "3"]

    assert "the data are not sound" in fails(
        capsys, "data", "check", *given, "--against", "embedded:counting"
    )


def test_a_limit_below_1_is_refused(capsys):
    given = ["embedded:counting", "--task", "counting", "--limit", "0"]

    assert "--limit" in fails(capsys, "data", "check", *given)
