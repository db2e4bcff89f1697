"""Masks: those of annotations as arrays, and those that SAM 2 makes of boxes and points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from vlm_grpo.task.coordinates import Box

Point = tuple[float, float]


def decode_mask(mask: Any, size: tuple[int, int]) -> np.ndarray:
    """Return the mask of an image of (width, height) as booleans (height, width).

    ``mask`` is COCO's run-length encoding, ``{"size": [height, width], "counts": …}`` with counts
    as text or a list of lengths, or a list of polygons, ``[[x1, y1, x2, y2, …], …]``.
    ``ValueError``: it is neither, or has another size.
    """
    from pycocotools import mask as coco

    width, height = size
    try:
        if isinstance(mask, Mapping):
            rows, columns = mask["size"]
            if (rows, columns) != (height, width):
                raise ValueError(f"it has {columns}x{rows} pixels, and its image {width}x{height}")
            counts = mask["counts"]
            if isinstance(counts, str | bytes):
                data = counts.encode() if isinstance(counts, str) else counts
                found = coco.decode({"size": [height, width], "counts": data})  # type: ignore[arg-type]
            else:
                lengths = np.asarray(counts, np.int64)
                if lengths.ndim != 1 or (lengths < 0).any() or lengths.sum() != height * width:
                    raise ValueError("its counts do not add up to its number of pixels")
                runs = np.repeat(np.arange(len(lengths)) % 2, lengths)
                found = runs.reshape(width, height).T  # column by column
        else:
            polygons = [[float(value) for value in polygon] for polygon in mask]
            if not polygons or any(len(p) < 6 or len(p) % 2 for p in polygons):
                raise ValueError("a polygon must have at least three points")
            found = coco.decode(coco.merge(coco.frPyObjects(polygons, height, width)))  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a mask is malformed: {error or type(error).__name__}") from error
    return np.asarray(found, bool)


def encode_mask(mask: np.ndarray) -> dict[str, Any]:
    """Return a mask (height, width) in COCO's compressed run-length encoding, with a text."""
    from pycocotools import mask as coco

    found = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": [*mask.shape], "counts": found["counts"].decode()}  # type: ignore[union-attr]


def find_center(mask: np.ndarray) -> Point:
    """Return the center (x, y) of the largest circle inside a mask, as in Seg-Zero's data."""
    from scipy.ndimage import distance_transform_edt

    depth = distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1]  # type: ignore[index]
    y, x = np.unravel_index(int(np.argmax(depth)), mask.shape)
    return (float(x), float(y))


def find_box(mask: np.ndarray) -> Box:
    """Return the smallest box around a mask that is not empty."""
    ys, xs = np.nonzero(mask)
    return (float(xs.min()), float(ys.min()), float(xs.max() + 1), float(ys.max() + 1))


@lru_cache(2)
def _load(name: str) -> tuple[Any, Any]:
    import torch
    from transformers import Sam2Model, Sam2Processor

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = Sam2Model.from_pretrained(name).eval().requires_grad_(False)
    model.to(device)
    return model, Sam2Processor.from_pretrained(name)


def segment(
    name: str, image: Image.Image, boxes: Sequence[Box], points: Sequence[Point]
) -> np.ndarray:
    """Return the union (height, width) of the masks of objects in an image, by SAM 2.

    Each object is prompted with its box and its point; of SAM's three masks, the one with the
    highest predicted IoU counts (VisionReasoner, vision_reasoner_model.py).

    Args:
        name: a SAM 2 of the hub, or its folder.
        image: the image, in original pixels.
        boxes: xyxy in pixels of the image.
        points: (x, y) in pixels, one for each box.
    """
    if not boxes:
        return np.zeros(image.size[::-1], bool)
    import torch

    model, processor = _load(name)
    inputs = processor(
        images=image,
        input_boxes=[[list(box) for box in boxes]],
        input_points=[[[list(point)] for point in points]],
        input_labels=[[[1] for _ in points]],
        return_tensors="pt",
    ).to(model.device)
    with torch.inference_mode():
        found = model(**inputs, multimask_output=True)
    masks = processor.post_process_masks(found.pred_masks.cpu(), inputs["original_sizes"].cpu())[0]
    best = found.iou_scores[0].argmax(dim=-1).cpu()
    return masks[torch.arange(len(boxes)), best].any(dim=0).numpy().astype(bool)
