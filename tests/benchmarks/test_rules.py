"""Scoring rules of benchmarks, against pycocotools and values computed by hand."""

from __future__ import annotations

import io
import random
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.benchmarks.rules import CORPUS_RULES, RULES, apply_rule, get_group
from vlm_grpo.types import Example, ImageRef


def make_example(answer: object, **meta: object) -> Example:
    image = ImageRef(name="a", size=(100, 100), resized_size=(100, 100), data=b"")
    return Example("a", (image,), "?", answer, meta)


@pytest.mark.parametrize(
    ("box", "at_least", "above", "mean_above"),
    [
        # Against [0, 0, 10, 10]: half of it has an IoU of exactly 0.5, which is not above 0.5.
        ([0, 0, 10, 5], 1, 0, 0.0),
        ([0, 0, 10, 5.1], 1, 1, 0.1),  # above one of ten thresholds, 0.5
        ([0, 0, 10, 10], 1, 1, 1.0),
        ([0, 0, 10, 7.5], 1, 1, 0.5),  # above 0.5, 0.55, 0.6, 0.65 and 0.7, not above 0.75
        ([50, 50, 60, 60], 0, 0, 0.0),
    ],
)
def test_accuracy_at_least_and_above(box, at_least, above, mean_above):
    row = make_example({"boxes": [[0, 0, 10, 10]]})
    task = load_benchmark("refcoco").load_task()
    answer = (tuple(map(float, box)),)
    assert task.score(f"{box}", row).metrics["accuracy_50"] == at_least
    assert apply_rule("accuracy_above_50", [answer], [row]) == [above]
    assert apply_rule("mean_accuracy_above", [answer], [row]) == pytest.approx([mean_above])


def test_a_missing_answer_earns_nothing_by_any_rule():
    golds = {True: {"boxes": [[0, 0, 10, 10]]}, False: ["b"]}
    for name in RULES.keys() - {"mae"}:
        row = make_example(
            golds[name.startswith(("accuracy", "mean_accuracy"))], type="science QA en"
        )
        assert apply_rule(name, [None], [row]) == [0.0]


def test_the_figure_of_cv_bench_is_the_mean_of_2d_and_3d():
    golds = [("2D", "ADE20K"), ("2D", "ADE20K"), ("2D", "COCO"), ("3D", "Omni3D"), ("3D", "Omni3D")]
    gold = {"options": ["a", "b"], "answer": "b"}
    rows = [make_example(gold, type=kind, source=source) for kind, source in golds]
    # 1/2 of ADE20K, COCO and 1/2 of Omni3D: ((1/2 + 1) / 2 + 1/2) / 2.
    assert CORPUS_RULES["cv_bench"]([1, None, 1, 0, 1], rows) == 0.625
    tasks = [make_example(gold, task=task) for task in ("Counting", "Jigsaw", "Jigsaw")]
    assert CORPUS_RULES["blink"]([1, 0, 1], tasks) == 0.75


def test_a_circle_is_right_if_all_its_rotations_are():
    turned = [["a", "b"], ["b", "a"]]
    rows = [
        make_example({"options": options, "answer": "b"}, circle=circle)
        for circle in (7, 8)
        for options in turned
    ]
    assert CORPUS_RULES["circular"]([1, 0, 1, 1], rows) == 0.5
    assert CORPUS_RULES["circular"]([1, None, 1, 0], rows) == 0.5


def test_error_rates_count_a_missing_answer_as_an_empty_text():
    rows = [make_example(["ab"]), make_example(["cd"])]
    assert CORPUS_RULES["cer_micro"](["ab", None], rows) == 0.5  # 2 deletions of 4 characters


def test_groups_of_examples_by_size_answer_and_meta():
    row = make_example({"boxes": [[0, 0, 32, 32]]}, split="val")
    assert [get_group(name, row) for name in ("size", "size_128", "split", "lost")] == [
        "small",  # 32² is COCO's largest small area
        "small",
        "val",
        "unknown",
    ]
    sides = {127: "small", 128: "medium", 256: "medium", 257: "large"}
    for side, size in sides.items():
        assert get_group("size_128", make_example({"boxes": [[0, 0, side, side]]})) == size
    assert get_group("answer", make_example(3)) == "3"
    assert get_group("size", make_example({"boxes": []})) == "0 boxes"


def compute_official_nms_ap(found: list, golds: list) -> float:
    """Compute NMS-AP as OVDEval does: suppress around each gold box, then run COCO's evaluation."""
    annotations, kept = [], []
    for image, (boxes, gold) in enumerate(zip(found, golds, strict=True)):
        for box, label in gold:
            wide = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image, "category_id": label}
                | {"bbox": wide, "area": wide[2] * wide[3], "iscrowd": 0}
            )
        removed, keep = set(), set()
        for box, _ in gold:
            near = [i for i, (other, _) in enumerate(boxes) if compute_iou(box, other) > 0.5]
            if near:
                keep.add(near[-1])  # of equal scores, a reversed argsort takes the last
                removed |= set(near[:-1])
        for i, (box, label) in enumerate(boxes):
            if i in removed - keep:
                continue
            wide = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            kept.append({"image_id": image, "category_id": label, "bbox": wide, "score": 1.0})
    with redirect_stdout(io.StringIO()):
        coco = COCO()
        dataset: Any = {
            "images": [{"id": i} for i in range(len(golds))],
            "categories": [{"id": i} for i in range(3)],
            "annotations": annotations,
        }
        coco.dataset = dataset
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(kept), "bbox")  # type: ignore[arg-type]
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


def compute_iou(first: list, second: list) -> float:
    sides = [min(first[i + 2], second[i + 2]) - max(first[i], second[i]) for i in (0, 1)]
    inner = max(0, sides[0]) * max(0, sides[1])
    areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in (first, second)]
    return inner / (sum(areas) - inner)


def test_nms_ap_agrees_with_the_official_computation_on_random_boxes():
    rng = random.Random(0)
    found, golds = [], []
    for _ in range(30):
        gold = [draw_box(rng) for _ in range(rng.randint(1, 4))]
        near = [(shift_randomly(rng, box), rng.randrange(3)) for box, _ in gold for _ in range(2)]
        found.append([*near, draw_box(rng)])
        golds.append(gold)
    rows = [
        make_example({"boxes": [b for b, _ in gold], "labels": [f"L{label}" for _, label in gold]})
        for gold in golds
    ]
    answers = [tuple((box, f"l{label}") for box, label in boxes) for boxes in found]
    expected = compute_official_nms_ap(found, golds)
    assert 0.05 < expected < 0.95, "neither trivially right nor wrong"
    assert CORPUS_RULES["nms_ap"](answers, rows) == pytest.approx(expected)


def test_nms_ap_does_not_reward_every_label_on_one_box():
    row = make_example({"boxes": [[0, 0, 10, 10]], "labels": ["red cup"]})
    box = (0.0, 0.0, 10.0, 10.0)
    # The wrong label comes last, so it is kept and the right one is suppressed.
    assert CORPUS_RULES["nms_ap"]([((box, "red cup"), (box, "blue cup"))], [row]) == 0
    right_last = CORPUS_RULES["nms_ap"]([((box, "blue cup"), (box, "red cup"))], [row])
    assert right_last == pytest.approx(1)


def draw_box(rng: random.Random) -> tuple[list[float], int]:
    x, y = rng.uniform(0, 60), rng.uniform(0, 60)
    return [x, y, x + rng.uniform(10, 40), y + rng.uniform(10, 40)], rng.randrange(3)


def shift_randomly(rng: random.Random, box: list[float]) -> list[float]:
    return np.add(box, [rng.uniform(-2, 2) for _ in box]).tolist()
