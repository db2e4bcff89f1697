"""COCO's average precision of boxes."""

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from vlm_grpo.task.coordinates import Box

LabeledBoxes = Sequence[tuple[Box, str]]


def coco_average_precision(
    predicted: Sequence[LabeledBoxes],
    gold: Sequence[LabeledBoxes],
    crowds: Sequence[LabeledBoxes] = (),
) -> dict[str, float]:
    """Compute COCO's average precision of the labeled boxes of images with pycocotools.

    Models write no reliable confidence, so all detections have the same one and rank in the order
    in which they are written. COCO counts the first 100 per image and class. A box that overlaps
    one of the ``crowds``, labeled regions of each image, is not an error.

    Returns:
        ``ap`` (the mean over IoU thresholds from 0.50 to 0.95), ``ap_50`` and ``ap_75``, in
        [0, 1]; empty if there is no gold box.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    labels = sorted({label for boxes in (*predicted, *gold, *crowds) for _, label in boxes})
    category_ids = {label: number for number, label in enumerate(labels)}
    annotations = _build_coco_rows(gold, category_ids)
    regions = _build_coco_rows(crowds, category_ids)
    detections = _build_coco_rows(predicted, category_ids)
    if not annotations:
        return {}
    if not detections:
        return {"ap": 0.0, "ap_50": 0.0, "ap_75": 0.0}
    dataset: Any = {
        "images": [{"id": number} for number in range(len(gold))],
        "categories": [{"id": number} for number in category_ids.values()],
        "annotations": annotations
        + [r | {"id": len(annotations) + r["id"], "iscrowd": 1} for r in regions],
    }
    with redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        coco = COCO()
        coco.dataset = dataset
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(detections), "bbox")  # type: ignore[arg-type]
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    ap, ap_50, ap_75 = evaluation.stats[:3].tolist()
    return {"ap": ap, "ap_50": ap_50, "ap_75": ap_75}


def _build_coco_rows(images: Sequence[LabeledBoxes], category_ids: Mapping[str, int]) -> list[dict]:
    rows = []
    for image, boxes in enumerate(images):
        for (x1, y1, x2, y2), label in boxes:
            box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}
            keys = {"image_id": image, "category_id": category_ids[label], "score": 1.0}
            # Ids start at 1, because pycocotools treats a match with id 0 as no match.
            rows.append({"id": len(rows) + 1, "iscrowd": 0, **box, **keys})
    return rows
