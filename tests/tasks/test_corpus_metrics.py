"""Corpus metrics against their definitions; test_reward_hacking.py has uninformed answers."""

from __future__ import annotations

import numpy as np
import pytest

from vlm_grpo.task.coordinates import PERMILLE
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example, ImageRef

IMAGE = ImageRef("image", size=(640, 480), resized_size=(640, 480))


def make_examples(*answers) -> list[Example]:
    return [Example(str(i), (IMAGE,), "?", answer) for i, answer in enumerate(answers)]


def test_counting_reports_rmse_accuracy_by_count_and_the_majority_baseline():
    examples = make_examples(3, 3, 3, 5, 8)
    found = load_task("counting").corpus_metrics([3, 4, None, 5, 4], examples)
    assert found == pytest.approx(
        {
            "majority_baseline": 3 / 5,  # three of five rows say 3
            "rmse": np.sqrt(np.mean([0, 1, 0, 16])),  # the row without an answer has no error
            "exact_of_3": 1 / 3,
            "exact_of_5": 1.0,
            "exact_of_8": 0.0,
        }
    )
    assert load_task("counting").corpus_metrics([], []) == {}
    assert "rmse" not in load_task("counting").corpus_metrics([None], make_examples(3))


def test_points_are_counted():
    task, examples = load_task("counting", points=True), make_examples(2, 2, 0)
    texts = ['[{"point_2d": [5, 5]}, [9, 9]]', "[[5, 5]]", "[]"]
    answers = [task.read(text, e) for text, e in zip(texts, examples, strict=True)]
    assert answers == [((5.0, 5.0), (9.0, 9.0)), ((5.0, 5.0),), ()]
    found = task.corpus_metrics(answers, examples)
    assert (found["exact_of_2"], found["exact_of_0"]) == (0.5, 1.0)
    assert found["rmse"] == pytest.approx(np.sqrt(1 / 3))  # one of three is off by one


def test_grounding_reports_accuracy_by_size():
    small, medium, large = [0, 0, 30, 30], [0, 0, 90, 90], [0, 0, 200, 200]
    examples = make_examples(*({"boxes": [box]} for box in (small, small, medium, large)))
    answers = [((0.0, 0.0, 30.0, 30.0),), None, ((50.0, 50.0, 90.0, 90.0),), None]
    assert load_task("grounding").corpus_metrics(answers, examples) == {
        "accuracy_50_small": 0.5,  # 900 pixels, at most 32²
        "iou_small": 0.5,  # one exact box and one missing answer
        "accuracy_50_medium": 0.0,  # 8,100 pixels, at most 96²
        "iou_medium": pytest.approx(40**2 / 90**2),  # a corner of the box
        "accuracy_50_large": 0.0,
        "iou_large": 0.0,
    }
    only = load_task("grounding").corpus_metrics(answers[:1], examples[:1])
    assert only == {"accuracy_50_small": 1.0, "iou_small": 1.0}


def test_detection_reports_average_precision():
    gold = {"boxes": [[0, 0, 100, 100], [200, 0, 300, 100]], "labels": ["cat", "dog"]}
    task, examples = load_task("detection"), make_examples(gold, gold)
    cat, dog = task.gold_answer(examples[0])
    found = task.corpus_metrics([(cat, dog), None], examples)
    # For both classes, recall 1/2 at precision 1 reaches 51 of the 101 recall levels.
    assert found == pytest.approx({"ap": 51 / 101, "ap_50": 51 / 101, "ap_75": 51 / 101})


def test_f1_uses_the_maximum_matching():
    """Two boxes that both overlap two gold boxes: a greedy matching would match only one."""
    gold = {"boxes": [[0, 0, 100, 100], [0, 0, 100, 60]], "labels": ["a", "a"]}
    example = make_examples(gold)[0]
    answer = '[{"bbox_2d": [0,0,100,80], "label": "a"}, {"bbox_2d": [0,0,100,110], "label": "a"}]'
    # The first overlaps both gold boxes (0.80, 0.75), the second 0.91 and 0.55.
    score = load_task("detection").score(answer, example)
    assert score.metrics["f1_50"] == 1.0
    # Both boxes match at the six thresholds up to 0.75. At 0.80, 0.85 and 0.90 only one box
    # matches (0.80 and 0.55 cannot both be reached), and none does at 0.95.
    assert score.rewards["f1_mean"] == pytest.approx((6 * 1.0 + 3 * 0.5 + 0.0) / 10)


def test_unknown_ocr_normalizations_are_errors():
    for wrong in [("upper",), "case"]:
        with pytest.raises(ValueError, match="normalize"):
            type(load_task("ocr"))(normalize=wrong)  # type: ignore[call-arg]


def test_rounding_does_not_change_a_hit_at_the_threshold():
    """Half of a box has an IoU of 0.5, even if the frame's scale is no binary fraction."""
    task = load_task("grounding", frame=PERMILLE)
    image = ImageRef("image", size=(836, 960), resized_size=(836, 960))
    gold = PERMILLE.to_pixels((204, 342, 576, 667), image.size, image.resized_size)
    score = task.score("[204, 342, 390, 667]", Example("1", (image,), "?", {"boxes": [gold]}))
    iou = score.rewards["iou"]
    assert iou is not None
    assert 0.5 - 1e-12 < iou < 0.5  # the sizes are chosen so that rounding gives less than 0.5
    assert score.metrics["accuracy_50"] == 1.0
