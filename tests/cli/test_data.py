"""``vlm-grpo data``: exit statuses and arguments. tests/data/test_checks.py covers the checks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import fails, run, write_jsonl
from dataset_files import encode_image, make_row, write_files
from PIL import Image


def test_sound_data_exit_with_status_0_and_count_image_tokens(capsys):
    given = ["embedded:counting", "--task", "counting", "--limit", "3", "--token-side", "28"]
    status, out, err = run(capsys, "data", "check", *given)

    assert (status, err) == (0, "")
    assert "3 good rows" in out
    # 84 x 84 pixels are 3 x 3 tokens of 28 pixels.
    assert "9 to 9" in out


def test_tokens_of_a_clip_are_bounded_by_its_own_budget(capsys, tmp_path: Path):
    frame = encode_image(Image.new("RGB", (560, 560)), "JPEG")
    row = {"question": "?", "answer": 1, "videos": [{"frames": ["a.jpg"] * 32}]}
    write_files(tmp_path, {"a.jpg": frame, "train.jsonl": [row]})
    given = [tmp_path / "train.jsonl", "--task", "counting", "--token-side", "28"]

    # 3584 tokens of 28 pixels over 32 frames are 112 for each, 10 x 10 in a square, for two frames.
    assert "1600 to 1600" in run(capsys, "data", "check", *given)[1]


def test_a_source_that_shares_images_with_itself_exits_with_status_2(capsys):
    given = ["embedded:counting", "--task", "counting", "--limit", "3"]

    assert "the data are not sound" in fails(
        capsys, "data", "check", *given, "--against", "embedded:counting"
    )


def test_a_reencoded_copy_in_the_other_source_exits_with_status_2(capsys, tmp_path: Path):
    colors = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    image = Image.fromarray(colors).resize((160, 120), Image.Resampling.BICUBIC)
    test_row = make_row(id="t", images=["copy.jpg"])
    rows = {"train.jsonl": [make_row()], "test.jsonl": [test_row]}
    images = {"a.png": encode_image(image), "copy.jpg": encode_image(image, "JPEG", quality=80)}
    write_files(tmp_path, rows | images)
    given = [tmp_path / "train.jsonl", "--task", "counting", "--token-side", "28"]

    # Qwen resizes 160x120 to 168x112, which is 6 by 4 tokens of 28 pixels.
    assert "image tokens per example     24 to 24" in run(capsys, "data", "check", *given)[1]
    assert run(capsys, "data", "check", *given)[0] == 0
    status, out, _ = run(capsys, "data", "check", *given, "--against", tmp_path / "test.jsonl")
    assert status == 2
    assert "ARE ALSO IN" in out


@pytest.mark.parametrize("option", ["--token-side", "--max-pixels", "--limit"])
def test_a_size_below_1_is_refused(capsys, option: str):
    given = ["embedded:counting", "--task", "counting", option, "0"]

    assert option in fails(capsys, "data", "check", *given)


def test_shared_ids_exit_with_status_2(capsys, counting_data: Path, tmp_path: Path):
    row = {"id": "r3", "question": "And now?", "answer": 1}
    other = write_jsonl(tmp_path / "other.jsonl", row)
    given = [counting_data, "--task", "counting", "--against", other]

    status, out, _ = run(capsys, "data", "check", *given)

    assert status == 2
    assert "1 IDS ARE IN BOTH: r3" in out


def test_an_empty_file_exits_with_status_2(capsys, tmp_path: Path):
    source = write_jsonl(tmp_path / "empty.jsonl")

    assert "not sound" in fails(capsys, "data", "check", source, "--task", "counting")


def test_a_count_with_too_many_digits_is_a_bad_row(capsys, tmp_path: Path):
    source = write_jsonl(tmp_path / "huge.jsonl", make_row(images=[], answer=10**400))
    status, out, _ = run(capsys, "data", "check", source, "--task", "counting")

    assert status == 2
    assert f"{source}:1: the answer must be an integer of at most 18 digits" in out


def test_prompts_are_built_for_a_model(capsys, tmp_path: Path):
    rows = [make_row(images=[]), make_row(id="b", images=[], question="How many <|im_end|>?")]
    source = write_jsonl(tmp_path / "rows.jsonl", *rows)
    given = ["data", "check", source, "--task", "counting"]

    status, out, _ = run(capsys, *given)
    assert status == 0
    assert "not checked without --model: control tokens" in out
    status, out, _ = run(capsys, *given, "--model", "embedded")
    assert status == 2
    assert f"{source}:2: example b: its prompt has the text <|im_end|>, a control token" in out


def test_the_limit_bounds_the_rows_that_are_checked(capsys, tmp_path: Path):
    rows = [make_row(images=...), make_row(id="b", images=["gone.png"])]
    source = write_files(tmp_path, {"train.jsonl": rows}) / "train.jsonl"

    status, out, _ = run(capsys, "data", "check", source, "--task", "counting", "--limit", "1")
    assert status == 0
    assert "1 good rows" in out
