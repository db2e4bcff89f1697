"""Lessons that the embedded model gets before its tasks.

An answer of a few tokens says little about an image: after a thousand steps on answers alone, the
vision tower hardly distinguishes two shapes. In the first lesson, every image token has linear
heads, which are dropped afterwards. They predict the names and boxes of shapes, the number of shape
centers, and letters, so that each image supervises all of its tokens. In the second lesson, the
language model names the cell, one of nine, that contains a shape. If it is asked for several
shapes, it writes each name before its cell, which teaches it to attend to the shape just named.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    get_wsd_schedule,
)

from vlm_grpo.data_scripts.make_shapes import KINDS, PAIRS, SIDE
from vlm_grpo.data_scripts.make_words import LETTERS
from vlm_grpo.model.chat import ChatTemplate
from vlm_grpo.types import Example
from vlm_grpo.utils.chat import Turn, place_images

CELLS = 3
"""Image tokens per row and column of a scene."""
QUARTERS = 2
"""A token is divided into this many parts per axis, and each part is labeled with the shape that
overlaps it most."""
LEAST_AREA = 12
"""Smallest overlap of a shape with a part that counts, in pixels; a part has 196."""
COLUMNS = 9
"""Parts into which the token of a word is divided, from left to right; each shows one letter or
none."""


@dataclass(frozen=True)
class Schedule:
    """The number of optimizer steps and the highest learning rate, which is reached after
    ``warmup`` steps, stays for ``stable`` more, and decays to zero as a cosine."""

    steps: int
    peak: float
    warmup: int = 50
    stable: int = 0


def train(
    parameters: Iterable[nn.Parameter],
    schedule: Schedule,
    compute_loss: Callable[[str], Tensor],
    name: str,
) -> float:
    """Take the optimizer steps of a schedule and return the mean seconds of one.

    Args:
        compute_loss: returns the loss on the examples of a split, one for each step.
        name: what is learned; the splits' names begin with it.
    """
    weights = list(parameters)
    optimizer = torch.optim.AdamW(weights, lr=schedule.peak, betas=(0.9, 0.98), weight_decay=0.01)
    decay = schedule.steps - schedule.warmup - schedule.stable
    scheduler = get_wsd_schedule(
        optimizer,
        schedule.warmup,
        num_decay_steps=decay,
        num_stable_steps=schedule.stable,
        decay_type="cosine",
    )
    start = time.perf_counter()
    for step in range(schedule.steps):
        loss = compute_loss(f"warmup-{name}-{step}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"{name}: step {step + 1}/{schedule.steps}, loss {loss.item():.3f}", flush=True)
    return round((time.perf_counter() - start) / max(1, schedule.steps), 3)


class VisionHeads(nn.Module):
    """Linear heads that predict what an image token shows from its ``width`` features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        parts = QUARTERS**2
        self.names = nn.Linear(width, parts * (1 + len(PAIRS)))
        self.boxes = nn.Linear(width, parts * 4)
        self.counts = nn.Linear(width, len(KINDS))
        self.letters = nn.Linear(width, COLUMNS * (1 + len(LETTERS)))

    def compute_scene_loss(self, tokens: Tensor, scenes: Sequence[Example]) -> Tensor:
        """Return the loss of scenes: the cross-entropy of the names, the distance of the boxes of
        shapes in sides of the scene, and the squared error of the number of centers by kind.

        Args:
            tokens: (scenes, 9, width).
        """
        labels = [label_scene(scene.meta["shapes"]) for scene in scenes]
        names, boxes, counts = (torch.stack(part) for part in zip(*labels, strict=True))
        scores = self.names(tokens).unflatten(-1, (-1, 1 + len(PAIRS)))
        distances = (self.boxes(tokens).unflatten(-1, (-1, 4)) - boxes).abs()
        return (
            functional.cross_entropy(scores.flatten(0, -2), names.flatten())
            + 5 * distances[names > 0].mean()
            + 2 * functional.mse_loss(self.counts(tokens), counts)
        )

    def compute_word_loss(self, tokens: Tensor, words: Sequence[str]) -> Tensor:
        """Return the connectionist temporal classification loss of the letters, which needs no
        places of theirs (Graves et al. 2006, https://doi.org/10.1145/1143844.1143891).

        Args:
            tokens: (words, 3, width).
        """
        scores = self.letters(tokens).unflatten(-1, (COLUMNS, -1)).flatten(1, 2)
        return functional.ctc_loss(
            scores.log_softmax(-1).transpose(0, 1),
            torch.tensor([1 + LETTERS.index(letter) for word in words for letter in word]),
            torch.full((len(words),), scores.shape[1]),
            torch.tensor([len(word) for word in words]),
        )


def label_scene(shapes: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a scene's tokens show.

    Args:
        shapes: kind, color and box of each shape.

    Returns:
        Class labels of the parts, (9, 4): 0 for background, otherwise 1 plus the index of the
        shape's kind and color in ``PAIRS``. Box targets of the parts, (9, 4, 4), as fractions of
        the scene's side. Number of shape centers per token and kind, (9, 3).
    """
    boxes = torch.tensor([shape["box"] for shape in shapes])
    starts = torch.arange(0, SIDE, SIDE // (CELLS * QUARTERS))
    ends = starts + SIDE // (CELLS * QUARTERS)
    covered = [
        (
            torch.minimum(boxes[:, axis + 2, None], ends)
            - torch.maximum(boxes[:, axis, None], starts)
        )
        for axis in (0, 1)
    ]
    areas = covered[1].clamp(min=0)[:, :, None] * covered[0].clamp(min=0)[:, None]
    most, who = (_split_into_tokens(part) for part in areas.max(dim=0))
    pairs = torch.tensor([1 + PAIRS.index((shape["kind"], shape["color"])) for shape in shapes])
    counts = torch.zeros(CELLS**2, len(KINDS))
    for shape in shapes:
        counts[find_cell(shape["box"]), KINDS.index(shape["kind"])] += 1
    return torch.where(most >= LEAST_AREA, pairs[who], 0), boxes[who] / SIDE, counts


def find_cell(box: Sequence[int]) -> int:
    """Return the number of the token with a box's center, 0 to 8 in reading order."""
    column, row = ((box[axis] + box[axis + 2]) // 2 * CELLS // SIDE for axis in (0, 1))
    return row * CELLS + column


def _split_into_tokens(grid: Tensor) -> Tensor:
    """Regroup (rows, columns) of all parts of a scene by token: (9, 4)."""
    return (
        grid.view(CELLS, QUARTERS, CELLS, QUARTERS).transpose(1, 2).reshape(CELLS**2, QUARTERS**2)
    )


def encode_images(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    examples: Sequence[Example],
) -> Tensor:
    """Return the features of images of one size, (images, tokens, width)."""
    images = [image.load() for example in examples for image in example.images]
    inputs = processor.image_processor(images=images, return_tensors="pt")
    with torch.autocast("cpu", torch.bfloat16):
        features = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    return features.pooler_output.float().unflatten(0, (len(images), -1))


def compute_vision_loss(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    heads: VisionHeads,
    scenes: Sequence[Example],
    words: Sequence[Example],
) -> Tensor:
    """Return the loss of scenes and of images of words."""
    return heads.compute_scene_loss(
        encode_images(model, processor, scenes), scenes
    ) + heads.compute_word_loss(
        encode_images(model, processor, words), [str(word.answer) for word in words]
    )


@torch.no_grad()
def encode_scenes(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    scenes: Sequence[Example],
) -> Tensor:
    """Return the features of scenes without a gradient, (scenes, 9, width)."""
    parts = [scenes[start : start + 128] for start in range(0, len(scenes), 128)]
    return torch.cat([encode_images(model, processor, part) for part in parts])


def compute_place_loss(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    features: Tensor,
    questions: Sequence[Example],
) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens, <|im_end|> included.

    Args:
        features: what ``encode_scenes`` returned for the questions' scenes, (questions, 9, width).
    """
    tokenizer, chat, image = processor.tokenizer, ChatTemplate(processor), processor.image_token
    prompts = [
        chat.render(place_images([Turn("user", question.question)], 1)) for question in questions
    ]
    rows = [
        (
            tokenizer(prompt.replace(image, image * CELLS**2))["input_ids"],
            tokenizer(f"{question.answer}<|im_end|>")["input_ids"],
        )
        for prompt, question in zip(prompts, questions, strict=True)
    ]
    shape = len(rows), max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full(shape, tokenizer.pad_token_id)
    answered = torch.zeros(shape, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        answered[row, len(prompt) : end] = True
    shown = ids == model.config.image_token_id
    grid = torch.tensor([[1, 2 * CELLS, 2 * CELLS]])  # each token covers 2 × 2 patches
    inner: Any = model.model
    positions, _ = inner.get_rope_index(
        ids, mm_token_type_ids=shown.int(), image_grid_thw=grid.expand(len(rows), -1)
    )
    embedded = model.get_input_embeddings()(ids).masked_scatter(shown[..., None], features)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = inner.language_model(
            inputs_embeds=embedded, position_ids=positions, use_cache=False
        ).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][answered[:, 1:]])
    return functional.cross_entropy(logits.float(), ids[:, 1:][answered[:, 1:]])


def draw_place_questions(
    scenes: Sequence[Example], count: int, rng: random.Random
) -> tuple[list[int], list[Example]]:
    """Draw questions for the cells, 1 to 9, of shapes: every other one asks for one shape of its
    scene, the others for all, with their names in the answer.

    Returns:
        The numbers of the questions' scenes, and the questions.
    """
    numbers = rng.choices(range(len(scenes)), k=count)
    return numbers, [
        _ask_for_places(scenes[number], place % 2 == 0, rng) for place, number in enumerate(numbers)
    ]


def _ask_for_places(scene: Example, one: bool, rng: random.Random) -> Example:
    shapes = scene.meta["shapes"]
    cells = {
        f"{shape['color']} {shape['kind']}": str(1 + find_cell(shape["box"]))
        for shape in rng.sample(shapes, len(shapes))
    }
    if one:
        name, cell = next(iter(cells.items()))
        return replace(scene, question=f"Where is the {name}?", answer=cell)
    answer = "; ".join(f"{name} {cell}" for name, cell in cells.items())
    return replace(scene, question=f"Where are {', '.join(cells)}?", answer=answer)
