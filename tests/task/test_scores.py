"""Scores compared with other libraries or with direct computations of their definitions."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.ops import box_iou, generalized_box_iou

from vlm_grpo.task import scores
from vlm_grpo.task.scores import Box, error_rate, f1, iou, matched_mean
from vlm_grpo.tasks.graders.average_precision import coco_average_precision

# Few letters, so that most distances lie between the extremes.
WORDS = st.text(alphabet="abAB 你", max_size=12)


def random_boxes(rng: random.Random, count: int) -> list[Box]:
    corners = ((rng.uniform(-50, 500), rng.uniform(-50, 400)) for _ in range(count))
    return [(x, y, x + rng.uniform(0.5, 300), y + rng.uniform(0.5, 300)) for x, y in corners]


def test_iou_and_giou_equal_those_of_torchvision():
    rng = random.Random(0)
    predicted, gold = random_boxes(rng, 60), random_boxes(rng, 40)
    tensors = torch.tensor(predicted, dtype=torch.float64), torch.tensor(gold, dtype=torch.float64)
    # 1e-9: both are a few float64 operations on numbers of about 1,000.
    np.testing.assert_allclose(scores.iou_matrix(predicted, gold), box_iou(*tensors), atol=1e-9)
    giou_expected = generalized_box_iou(*tensors)
    np.testing.assert_allclose(scores.giou_matrix(predicted, gold), giou_expected, atol=1e-9)
    assert iou(predicted[0], gold[0]) == scores.iou_matrix(predicted, gold)[0, 0]


def test_scores_of_nothing():
    box = (0.0, 0.0, 1.0, 1.0)
    for matrix in (scores.iou_matrix, scores.giou_matrix):
        assert (matrix([], [box]).shape, matrix([box], []).shape) == ((0, 1), (1, 0))
    # Both say that there are none.
    assert matched_mean(np.zeros((0, 0))) == f1(0, 0, 0) == 1.0
    assert matched_mean(np.zeros((0, 3))) == matched_mean(np.zeros((3, 0))) == 0.0
    assert f1(0, 3, 0) == f1(0, 0, 3) == 0.0
    assert error_rate("", "") == 0.0
    assert error_rate("a", "") == error_rate(["a"], []) == 1.0


def edit_distance(first, second) -> int:
    """Return the Levenshtein distance, computed by dynamic programming."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    return row[-1]


@given(WORDS, WORDS.filter(lambda text: text.strip()))
def test_error_rates_equal_their_definition(predicted, gold):
    expected = min(1.0, edit_distance(predicted, gold) / len(gold))
    assert error_rate(predicted, gold) == pytest.approx(expected)
    words = gold.split()
    expected = min(1.0, edit_distance(predicted.split(), words) / len(words))
    assert error_rate(predicted.split(), words) == pytest.approx(expected)


@given(WORDS, st.lists(WORDS.filter(lambda text: text.strip()), min_size=1, max_size=3))
def test_anls_equals_the_definition_in_its_paper(predicted, gold):
    def plain(text: str) -> str:
        return " ".join(text.lower().split())

    best = 0.0
    for accepted in map(plain, gold):
        distance = edit_distance(plain(predicted), accepted)
        normalized = distance / max(len(plain(predicted)), len(accepted))
        best = max(best, 1 - normalized if normalized < 0.5 else 0.0)
    assert scores.anls(predicted, gold) == pytest.approx(best)


def test_coco_average_precision_of_special_cases(capsys):
    cat, dog = ((0.0, 0.0, 100.0, 100.0), "cat"), ((200.0, 0.0, 300.0, 100.0), "dog")
    half = ((200.0, 0.0, 300.0, 60.0), "dog")  # IoU 0.6: 0.50, 0.55 and 0.60 of ten thresholds
    far = ((500.0, 0.0, 600.0, 100.0), "dog")
    assert coco_average_precision([[cat]], [[]]) == {}
    assert coco_average_precision([[]], [[cat]]) == {"ap": 0.0, "ap_50": 0.0, "ap_75": 0.0}
    result = coco_average_precision([[cat], [half]], [[cat], [dog]])
    assert result == pytest.approx({"ap": (1 + 0.3) / 2, "ap_50": 1.0, "ap_75": 0.5})
    # A class without gold boxes is not part of the average.
    assert coco_average_precision([[cat, dog]], [[cat]])["ap"] == pytest.approx(1.0)
    # A box on a crowd region of its class is not an error: first in order, it would halve the AP.
    assert coco_average_precision([[cat, cat]], [[]], [[cat]]) == {}
    assert coco_average_precision([[half, far]], [[far]])["ap"] == pytest.approx(0.5)
    assert coco_average_precision([[half, far]], [[far]], [[half]])["ap"] == pytest.approx(1.0)
    assert capsys.readouterr().out == ""  # the table of pycocotools is not printed
