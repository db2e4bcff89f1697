"""Tests of the word images: reproducible, inside the image, written as canonical JSONL."""

from __future__ import annotations

import numpy as np
import pytest

from vlm_grpo.data_scripts import make_words
from vlm_grpo.data_scripts.make_words import DIGITS, LENGTHS, LETTERS, draw_examples
from vlm_grpo.errors import UserError


def test_the_word_fits_into_the_image():
    rows = draw_examples("ocr", 300, seed=1)
    for row in rows:
        gray = np.asarray(row.images[0].load().convert("L"), dtype=int)
        border = np.concatenate([gray[0], gray[-1], gray[:, 0], gray[:, -1]])
        assert row.images[0].size == gray.shape[::-1] == (84, 28)
        # Text pixels at the border would mean a cropped letter; antialiasing may shade one lightly.
        assert np.ptp(border) < 40, row.answer
    assert {len(row.answer) for row in rows} == set(range(LENGTHS[0], LENGTHS[1] + 1))


@pytest.mark.parametrize(
    ("world", "alphabet"), [("words:hard", LETTERS), ("handwriting:hard", DIGITS)]
)
def test_a_text_of_the_evaluation_has_one_pair_that_training_never_has(world, alphabet):
    if alphabet == DIGITS:
        pytest.importorskip("sklearn")
    seen = {}
    for split, expected in (("train", 0), ("eval", 1)):
        rows = draw_examples(world, 600, 1, split)
        pairs = [[*zip(row.answer, row.answer[1:], strict=False)] for row in rows]
        held_out = [
            [p for p in text if (alphabet.index(p[0]) + alphabet.index(p[1])) % 4 == 0]
            for text in pairs
        ]
        assert {len(text) for text in held_out} == {expected}
        assert {letter for row in rows for letter in row.answer} == set(alphabet)
        seen[split] = {pair for text in held_out for pair in text}
    assert len(seen["eval"]) > 0.9 * len(alphabet) ** 2 / 4  # nearly every fourth pair


def test_handwriting_of_the_evaluation_is_that_of_other_images():
    pytest.importorskip("sklearn")
    load = make_words.load_digits
    train, other = (
        {glyph.tobytes() for glyphs in load(is_new) for glyph in glyphs} for is_new in (False, True)
    )
    assert not train & other
    assert (len(train), len(other)) == (1437, 360)  # 4/5 of 1,797 and the rest
    assert all(len(load(is_new)[value]) > 30 for is_new in (False, True) for value in range(10))


def test_handwriting_without_scikit_learn_names_the_extra(monkeypatch):
    def refuse(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(make_words, "import_module", refuse)
    make_words.load_digits.cache_clear()
    with pytest.raises(UserError, match=r"scikit-learn: pip install 'vlm-grpo\[handwriting\]'"):
        draw_examples("handwriting", 1)


def measure_text(row) -> dict[str, float]:
    """Return numbers of a line of text that its dials change, each rising with its dial."""
    pixels = np.asarray(row.images[0].load(), dtype=float)
    gray = pixels.mean(axis=-1) - np.median(pixels)
    ys, xs = np.nonzero(gray > 30)
    return {
        "noise": gray[-3:].std(),
        "clutter": (abs(gray[:, -10:]) > 20).sum(),
        "contrast": gray.max(),
        "longest": len(row.answer),
        "tilt": abs(np.polyfit(xs, ys, 1)[0]),
    }


@pytest.mark.parametrize(
    ("dial", "low", "high"),
    [
        ("noise", 0, 40),
        ("clutter", 0, 10),
        ("contrast", 0.5, 1),
        ("longest", 3, 5),
        ("tilt", 0, 15),
    ],
)
def test_a_dial_changes_what_it_names(dial, low, high):
    means = [
        np.mean([measure_text(r)[dial] for r in draw_examples(f"words:easy,{dial}={v}", 60)])
        for v in (low, high)
    ]
    assert means[1] > 1.2 * means[0]


def test_more_fonts_draw_other_letters():
    images = [
        {
            row.images[0].load().convert("L").tobytes()
            for row in draw_examples(f"words:easy,fonts={n}", 9)
        }
        for n in (1, 6)
    ]
    assert len(images[0] & images[1]) < 5  # the first font is one of six
