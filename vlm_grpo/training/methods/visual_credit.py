"""Which parts of an image a step learns from, read off the backward pass that runs anyway.

The gradient of the policy loss at the features v of an image token is -Σ A ∂log π/∂v over all
tokens of all completions behind the image, with the loss's own weights. Its norm, a number per
image token, is the token's credit: how much the loss depends on what is seen there. It is drawn as
a map; its share inside the gold boxes, beside the share of the image that these cover, shows
whether the reward is earned by what the question is about. The vision tower needs no gradient for
it, and those of the weights stay what they are.

With ``hide_object`` each step also scores its completions behind images without what the gold boxes
show, with the present weights and with those at the start. Where right answers become likelier than
wrong ones there, too, the run learns them from something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image

from vlm_grpo.config.methods import MethodSettings
from vlm_grpo.data.boxes import hide_boxes, replace_image
from vlm_grpo.dist.collectives import gather_object
from vlm_grpo.errors import UserError
from vlm_grpo.model.families.family import ImageFeatures, Unit
from vlm_grpo.task.coordinates import Box
from vlm_grpo.training.methods import Method, Metrics, Passes, Run
from vlm_grpo.training.snapshot import Snapshot
from vlm_grpo.training.step_batch import Rollout, Values
from vlm_grpo.types import Example, Group, ImageRef

CELLS = 8
"""Parts of an image token's side, to which the share of it that a box covers is rounded."""
COLOR = (255, 110, 0)


class VisualCreditSettings(MethodSettings):
    """Maps of what a step learns from, and what it learns without the object."""

    hide_object: bool = False
    """True: two passes without gradient behind images in which the gold boxes are filled with the
    mean color measure what right answers gain there, for the alarm ``shortcut``."""

    @property
    def extra_model(self) -> str | None:
        return "" if self.hide_object else None

    @property
    def extra_passes(self) -> int:
        return int(self.hide_object)


class VisualCredit(Method):
    """A map of the loss's gradient over the images of a step, and its share inside gold boxes."""

    name, has_videos = "visual_credit", False
    own: VisualCreditSettings
    slope: float | None = None  # of the last step's gains over its rewards, without the object
    maps: Mapping[ImageRef, Float[np.ndarray, "rows columns"]] = MappingProxyType({})
    examples: Sequence[Example] = ()

    def start(self, run: Run) -> None:
        super().start(run)
        if not run.policy.shared:
            raise UserError("methods: visual_credit needs policy.engine=shared")
        if self.own.hide_object:
            self.snapshot = Snapshot(run.strategy)

    def begin(self, rollout: Rollout, scheduler: Any) -> None:
        self.examples = [group.prompt.example for group in rollout.groups]
        if self.snapshot is not None and rollout.step == self.run.settings.supervised_steps:
            self.snapshot.move()

    def score(self, passes: Passes) -> Values:
        """Find the slope of the completions' gains over their rewards, behind images without the
        object; for rewards of 0 and 1, the mean gain of right answers less that of wrong ones.

        A gain is by how much the geometric mean of the tokens' probabilities has risen since the
        first sampled step; bounded gains vary less than those of log-probs. Completions without an
        answer are left out: others gain on them while the model learns the format.
        """
        if self.snapshot is None:
            return {}
        rollout, slices = passes.rollout, passes.behind(self._hide)
        unseen = torch.zeros(rollout.layout.total)
        weights = nullcontext(), self.snapshot.in_place()
        found = (passes.score(slices, unseen, own).logprobs.cpu() for own in weights)
        pairs = zip(*map(rollout.layout.split, found), strict=True)
        gains = [(a.mean().exp() - b.mean().exp()).item() for a, b in pairs]
        scores = [score for group in rollout.groups for score in group.scores]
        rows = [row for piece in slices for row in piece.rows if scores[row].answer is not None]
        points = [(scores[row].total, gains[row]) for row in rows if scores[row].total is not None]
        x, y = np.array(gather_object(points)).reshape(-1, 2).T
        has_spread = len(x) > 0 and np.ptp(x) > 1e-6
        self.slope = float(np.polyfit(x, y, 1)[0]) if has_spread else None
        return {}

    def _hide(self, group: Group) -> Example | None:
        example = group.prompt.example
        boxes = self.run.task.gold_boxes(example) if example.images else ()
        if not boxes:
            return None
        target = self.run.task.target_image(example)
        return replace_image(example, target, hide_boxes(target, boxes))

    def read_features(self, updates: Sequence[Mapping[Unit, ImageFeatures]]) -> Metrics:
        family, processor = self.run.policy.family, self.run.policy.prompts.processor
        maps: dict[ImageRef, np.ndarray] = {}
        for unit, features in (pair for update in updates for pair in update.items()):
            grids = [family.token_grid(image, processor) for image in unit]
            norms, start = measure_credit(features), 0
            sizes = [0 if grid is None else grid[0] * grid[1] for grid in grids]
            if sum(sizes) != len(norms):
                raise UserError(
                    "methods: visual_credit: this model's image tokens form no grid of the image: "
                    "remove the method"
                )
            for image, grid, size in zip(unit, grids, sizes, strict=True):
                own, start = norms[start : start + size].reshape(grid), start + size
                maps[image] = maps[image] + own if image in maps else own
        self.maps = maps
        found = {} if self.slope is None else {"visual_credit/gain_without_object": self.slope}
        shares = map(self._find_shares, self.examples)
        if not (every := gather_object([share for share in shares if share is not None])):
            return found
        inside, area = map(fmean, zip(*every, strict=True))
        return {"visual_credit/in_boxes": inside, "visual_credit/box_area": area, **found}

    def _find_shares(self, example: Example) -> tuple[float, float] | None:
        """Return the shares of the credit and of the image that are in an example's gold boxes."""
        found = self._find_map(example)
        if found is None or not (boxes := self.run.task.gold_boxes(example)):
            return None
        covered = cover_cells(boxes, self.run.task.target_image(example).size, found.shape)
        return float((found * covered).sum() / found.sum()), float(covered.mean())

    def _find_map(self, example: Example) -> np.ndarray | None:
        """Return the map of an example's target image; None: nothing was learned from it."""
        found = self.maps.get(self.run.task.target_image(example)) if example.images else None
        return found if found is not None and found.any() else None

    def draw(self, example: Example) -> Image.Image | None:
        """Return the map over the target image, its opacity relative to the largest credit."""
        found = self._find_map(example)
        if found is None:
            return None
        alpha = Image.fromarray(np.uint8(200 * found / found.max()))
        size = self.run.task.target_image(example).picture_size
        canvas = Image.new("RGBA", size, COLOR)
        canvas.putalpha(alpha.resize(size, Image.Resampling.NEAREST))
        return canvas


def measure_credit(features: ImageFeatures) -> Float[np.ndarray, " tokens"]:
    """Return the norm of the gradient at each image token, over all layers that get features."""
    total = np.zeros(len(features.embeds))
    for tensor in (features.embeds, *features.deepstack):
        if tensor.grad is not None:
            total += tensor.grad.double().square().sum(-1).cpu().numpy()
    return np.sqrt(total)


def cover_cells(
    boxes: Sequence[Box], size: tuple[int, int], grid: tuple[int, int]
) -> Float[np.ndarray, "rows columns"]:
    """Return the share of each cell of a grid over an image of a size that the boxes cover."""
    rows, columns = grid
    fine = np.zeros((rows * CELLS, columns * CELLS))
    for x1, y1, x2, y2 in boxes:
        left, right = (round(x / size[0] * columns * CELLS) for x in (x1, x2))
        top, bottom = (round(y / size[1] * rows * CELLS) for y in (y1, y2))
        fine[max(top, 0) : bottom, max(left, 0) : right] = 1.0
    return fine.reshape(rows, CELLS, columns, CELLS).mean((1, 3))
