"""Masks of annotations, SAM 2's of answers, and the metrics of datasets."""

from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from dataset_files import png
from pycocotools import mask as coco
from transformers import Sam2Config, Sam2ImageProcessor, Sam2Model, Sam2Processor

from vlm_grpo.task.registry import load_task
from vlm_grpo.tasks import segmentation
from vlm_grpo.tasks.graders.masks import decode_mask, encode_mask, find_box, find_center, segment
from vlm_grpo.types import Example, ImageRef

SIZE = (64, 48)
IMAGE = ImageRef("image", SIZE, SIZE, data=png())


def block(x1: int, y1: int, x2: int, y2: int) -> np.ndarray:
    mask = np.zeros(SIZE[::-1], bool)
    mask[y1:y2, x1:x2] = True
    return mask


def test_every_form_of_a_mask_is_decoded():
    mask = block(10, 5, 30, 25) | block(12, 20, 50, 40)
    runs = [(bool(value), len([*group])) for value, group in groupby(mask.T.ravel())]
    lengths = [length for _, length in runs]  # the first pixel is outside
    for form in (encode_mask(mask), {"size": [48, 64], "counts": lengths}):
        assert (decode_mask(form, SIZE) == mask).all()
    polygons = [[10, 5, 30, 5, 30, 25, 10, 25], [40, 30, 50, 30, 50, 40, 40, 40]]
    floats: Any = [list(map(float, p)) for p in polygons]
    parts: Any = coco.frPyObjects(floats, 48, 64)
    expected = coco.decode(coco.merge(parts))
    assert (decode_mask(polygons, SIZE) == expected).all()
    assert find_box(mask) == (10, 5, 50, 40)
    assert find_center(block(10, 5, 30, 15)) in [(x, y) for x in range(14, 26) for y in (9, 10)]


def test_masks_give_the_points_that_are_missing():
    mask = block(0, 0, 4, 48) | block(0, 40, 64, 48)
    answer = {"boxes": [[0, 0, 64, 48]], "masks": [encode_mask(mask)]}
    task = load_task("segmentation")
    ((_, (x, y)),) = task.gold_answer(Example("1", (IMAGE,), "cup", answer))
    assert mask[int(y), int(x)]  # the center of the box is not on the object


def test_the_metrics_of_a_dataset_are_those_of_lisa_and_grefcoco(monkeypatch):
    """An answer's masks are its boxes; the expected values are computed by hand."""

    def draw(name: str, image: Any, boxes: Any, points: Any) -> np.ndarray:
        return np.any([block(*map(int, box)) for box in boxes], axis=0)

    monkeypatch.setattr(segmentation, "segment", draw)
    task: Any = load_task("segmentation", segmenter="none", weights={"mask_iou": 1.0})
    target = {"boxes": [[0, 0, 20, 10]], "masks": [encode_mask(block(0, 0, 20, 10))]}
    nothing: dict[str, Any] = {"boxes": []}
    ignored = {"ignored_mask": encode_mask(block(10, 0, 40, 10))}
    all_ignored = {"ignored_mask": encode_mask(block(0, 0, 40, 10))}
    rows = [*[(target, {})] * 3, *[(nothing, {})] * 3, (target, ignored), (target, all_ignored)]
    examples = [Example(str(n), (IMAGE,), "cup", *row) for n, row in enumerate(rows)]

    def answer(width: int, height: int = 10) -> Any:
        return (((0.0, 0.0, float(width), float(height)), (1.0, 1.0)),)

    answers = [answer(10), (), None, (), answer(5), None, answer(20), answer(9, 9)]
    values = task.corpus_metrics(answers, examples)
    # IoU: 1/2, 0, 0; nothing to find: 1, 0, 0; without the ignored half, 1; all of it ignored, 1.
    assert values["mask_giou"] == pytest.approx((0.5 + 1 + 1 + 1) / 8)
    # Intersections 100 + 100; unions 200 + 200 + 200 + 50 + 100.
    assert values["mask_ciou"] == pytest.approx(200 / 750)
    assert values["n_acc"] == pytest.approx(1 / 3)
    assert values["t_acc"] == pytest.approx(4 / 5)
    assert task.mask_iou(answers[0], examples[0]) == 0.5
    assert task.mask_iou((), examples[3]) == 1.0
    assert load_task("segmentation").corpus_metrics(answers, examples) == {}


def test_sam_2_of_transformers_makes_the_masks_of_an_answer(tmp_path):
    """A tiny SAM 2 of random weights: its masks are those of its own best output."""
    config = Sam2Config(
        vision_config={
            "backbone_config": {
                "model_type": "sam2_hiera_det_model",
                **{"hidden_size": 12, "image_size": [64, 64]},
                "embed_dim_per_stage": [12, 24, 48, 96],
            },
            "backbone_channel_list": [96, 48, 24, 12],
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "fpn_hidden_size": 32,
        },
        prompt_encoder_config={"hidden_size": 32, "image_size": 64},
        mask_decoder_config={"hidden_size": 32},
    )
    folder = str(tmp_path)
    torch.manual_seed(0)
    Sam2Model(config).save_pretrained(folder)
    size, mask_size = ({"height": side, "width": side} for side in (64, 16))
    Sam2Processor(Sam2ImageProcessor(size=size, mask_size=mask_size)).save_pretrained(folder)
    boxes, points = [(4.0, 4.0, 30.0, 30.0), (20.0, 10.0, 60.0, 40.0)], [(9.0, 9.0), (40.0, 20.0)]
    image = IMAGE.load()
    both = segment(folder, image, boxes, points)
    first, second = (segment(folder, image, [b], [p]) for b, p in zip(boxes, points, strict=True))
    assert (both.shape, both.dtype) == ((48, 64), bool)
    assert (both == (first | second)).mean() > 0.99  # a batch of two rounds otherwise
    assert not segment(folder, image, [], []).any()
    gold = first | block(0, 0, 1, 1)
    answer = {"boxes": [[4, 4, 30, 30]], "masks": [encode_mask(gold)]}
    task: Any = load_task("segmentation", segmenter=folder, weights={"mask_iou": 1.0})
    example = Example("1", (IMAGE,), "cup", answer)
    score = task.score('[{"bbox_2d": [4, 4, 30, 30], "point_2d": [9, 9]}]', example)
    assert not score.failures
    assert 0 < first.mean() < 1
    assert score.rewards["mask_iou"] == pytest.approx(first.sum() / gold.sum())
