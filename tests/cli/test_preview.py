"""The preview of rows: the prompt and the picture are those of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import fails, run
from published_formats import write_format

from vlm_grpo.cli.common import load_model_prompts
from vlm_grpo.cli.preview import build_preview
from vlm_grpo.config.data import DataSettings
from vlm_grpo.data import load_examples
from vlm_grpo.media.image_decode import decode_image
from vlm_grpo.task.registry import load_task

GIVEN = ("several=true", "--task", "grounding", "--rows", "2")


@pytest.mark.parametrize("suffix", [".html", ".png"])
def test_rows_are_shown_as_the_model_gets_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str
):
    source, out = write_format(tmp_path, "coco"), tmp_path / f"rows{suffix}"
    status, text, err = run(capsys, "data", "preview", source, *GIVEN, "--out", out)

    assert (status, err) == (0, "")
    assert f"{source}: image 1: example 7-2" in text
    assert "image a.png: 64x48, seen as 56x56, 4 tokens" in text
    assert "<|vision_start|><|image_pad|><|vision_end|>Locate every book." in text
    # Boxes at 20, 8 and 40, 8 of 64x48, in pixels of 56x56: 20 * 56 / 64 = 17.5, 8 * 56 / 48 = 9.3.
    assert '[{"bbox_2d": [18, 9, 32, 23]}, {"bbox_2d": [35, 9, 49, 24]}]' in text
    assert f"2 rows drawn in {out}" in text
    if suffix == ".html":
        page = out.read_text()
        assert page.count("data:image/png;base64,") == 2
        assert "&lt;|vision_start|&gt;" in page
    else:
        assert decode_image(out).width >= 56


def test_a_preview_is_the_prompt_of_training_and_draws_the_gold_answer(tmp_path: Path):
    source = write_format(tmp_path, "coco")
    data = DataSettings(train=source)
    prompts = load_model_prompts("embedded", None, data)
    task = prompts.adapt(load_task("grounding", several=True))
    _, example, _ = load_examples(source, task, data, "train")
    preview = build_preview(example, task, prompts)

    expected = prompts.build(prompts.with_resized_sizes(example), task)
    assert (preview.prompt.text, preview.prompt.token_ids) == (expected.text, expected.token_ids)
    (picture,) = preview.pictures
    assert picture.size == example.with_resized_sizes([(56, 56)]).images[0].resized_size
    # The image is red without green; the lines of the two boxes have green, blurred by the resize.
    rows, columns = np.nonzero(np.array(picture)[:, :, 1] > 60)
    assert (columns.min(), columns.max()) == pytest.approx((17.5, 49), abs=1.5)
    assert (rows.min(), rows.max()) == pytest.approx((9.3, 23.9), abs=1.5)


def test_settings_of_the_data_and_the_prompt_are_written_among_the_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    rows = tmp_path / "rows.csv"
    rows.write_text("ask,number\nHow many?,3\n")
    words = ["data.columns.question=ask", "data.columns.answer=number", "prompt.system=Count!"]
    given = [rows, *words, "--task", "counting", "--out", tmp_path / "rows.html"]
    status, text, err = run(capsys, "data", "preview", *given)
    assert (status, err) == (0, "")
    assert "Count!" in text
    assert "gold answer 3, which a model should write as:\n    3" in text
    assert run(capsys, "data", "check", rows, *words, "--task", "counting")[0] == 0


def test_bad_rows_and_options_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    source, out = write_format(tmp_path, "coco", {"b.png": None}), tmp_path / "rows.html"
    given = ["data", "preview", source, *GIVEN]
    message = fails(capsys, *given, "--rows", "9", "--out", out)
    assert f"1 bad rows:\n  - {source}: image 2: image b.png is missing in" in message
    assert out.exists()
    assert "give a file with the suffix .html or .png" in fails(capsys, *given, "--out", "a.pdf")
    assert f"--out {tmp_path / 'no/rows.png'} cannot be written: No such" in fails(
        capsys, *given, "--out", tmp_path / "no/rows.png"
    )
    assert "--split test: give train or eval" in fails(capsys, *given, "--split", "test")
