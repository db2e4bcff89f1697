"""Object keypoint similarity as pycocotools computes it."""

from typing import Any

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from vlm_grpo.task.registry import load_task
from vlm_grpo.tasks.keypoints import SIGMAS
from vlm_grpo.types import Example, ImageRef

IMAGE = ImageRef("image", (640, 480), (640, 480))
# COCO's order, in which pycocotools has the standard deviations.
PAIRS = ("shoulder", "elbow", "wrist", "hip", "knee", "ankle")
PARTS = [*list(SIGMAS)[:5], *(f"{side} {part}" for part in PAIRS for side in ("left", "right"))]


def compute_official(gold: Any, labeled: Any, area: float, found: Any) -> float:
    """Return the similarity that pycocotools computes for one person."""
    keypoints = np.column_stack([gold * labeled[:, None], 2 * labeled]).ravel().tolist()
    person: Any = {"id": 1, "image_id": 1, "category_id": 1, "iscrowd": 0, "area": area}
    person |= {"bbox": [0, 0, 640, 480], "keypoints": keypoints, "num_keypoints": labeled.sum()}
    coco: Any = COCO()
    coco.dataset = {"images": [{"id": 1}], "categories": [{"id": 1}], "annotations": [person]}
    coco.createIndex()
    answer = {"image_id": 1, "category_id": 1, "score": 1.0}
    answer["keypoints"] = np.column_stack([found, np.ones(17)]).ravel().tolist()
    results: Any = [answer]
    evaluation: Any = COCOeval(coco, coco.loadRes(results), "keypoints")
    evaluation._prepare()  # noqa: SLF001
    return float(evaluation.computeOks(1, 1)[0, 0])


def test_the_similarity_is_that_of_coco():
    rng, task = np.random.default_rng(0), load_task("keypoints")
    for number in range(500):
        gold = rng.uniform(20, 400, (17, 2)).round(1)
        labeled = rng.random(17) < 0.6
        labeled[0] = True
        area = float(rng.uniform(500, 90_000))
        found = (gold + rng.normal(0, 15, (17, 2))).round(1)
        parts = zip(PARTS, gold, labeled, strict=True)
        points = {name: point.tolist() for name, point, seen in parts if seen}
        answer = {"names": PARTS, "points": points, "area": area}
        example = Example(str(number), (IMAGE,), "the person", answer)
        task.check(example)
        named = tuple((n, (float(x), float(y))) for n, (x, y) in zip(PARTS, found, strict=True))
        oks: Any = task
        expected = compute_official(gold, labeled, area, found)
        assert oks.oks(named, example) == pytest.approx(expected, rel=1e-9)
