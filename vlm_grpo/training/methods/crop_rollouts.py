"""Groups of which a part is sampled behind the crop that the answer needs.

Where the policy reads a crop, and hardly ever the whole image, most groups have no right answer and
no gradient. Completions behind the crop bring right ones into the group; all are scored, and
trained, behind the whole image. As in NoisyRollout (arXiv:2504.13055), which samples behind noise,
the ratio of a completion from behind the other image is that of the policy behind the whole one.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import Field

from vlm_grpo.config.methods import MethodSettings
from vlm_grpo.data.boxes import crop_to_boxes, list_boxes, list_evidence
from vlm_grpo.errors import UserError
from vlm_grpo.task.coordinates import Box
from vlm_grpo.training.methods import Method, Run, Variant
from vlm_grpo.types import Example

NEED_WHOLE_IMAGES = (
    *("objective.beta", "objective.replay", "objective.distillation", "objective.perception"),
    *("counterfactual", "revision"),
)
"""Settings and methods that need completions sampled behind the images that are trained with."""


class CropRolloutsSettings(MethodSettings):
    """Completions sampled behind the crop of the row's column ``evidence``."""

    extra_views: ClassVar[int] = 1

    share: float = Field(default=0.5, gt=0, lt=1)
    """Share of a group's completions sampled behind the crop, rounded; at least one behind each."""
    margin: float = Field(default=0.1, ge=0)
    """Share of the sides of the boxes by which the crop extends them on each side."""


@dataclass(frozen=True)
class Cropped(Variant):
    """Prompts with the part of their only image that the answer needs."""

    label = "crop", 1
    margin: float

    def change(self, example: Example, index: int) -> Example | None:
        if not (boxes := find_boxes(example)):
            return None
        (image,) = example.images
        return replace(example, images=(crop_to_boxes(image, boxes, self.margin),))


def find_boxes(example: Example) -> tuple[Box, ...]:
    """Return the evidence in an example's only image; none if its answer has boxes, too."""
    if [image.kind for image in example.images] != ["image"] or list_boxes(example):
        return ()
    return list_evidence(example)


class CropRollouts(Method):
    """Completions of a part of each group from behind the crop."""

    name, has_videos, refused = "crop_rollouts", False, NEED_WHOLE_IMAGES
    own: CropRolloutsSettings

    def start(self, run: Run) -> None:
        super().start(run)
        if not any(map(find_boxes, run.stream.examples)):
            raise UserError(
                "methods: crop_rollouts has no effect: no training example has one image, evidence "
                "with boxes in its pixels, and an answer without boxes"
            )

    def variant(self, step: int) -> Cropped | None:
        return None if self.run.settings.is_supervised(step) else Cropped(self.own.margin)

    def count_variants(self, size: int) -> int:
        return min(max(1, round(self.own.share * size)), size - 1)
