"""Build and warm up the embedded tiny VLM: ``python -m vlm_grpo.data_scripts.make_tiny_vlm``.

The model is a Qwen2.5-VL of 1.2 million parameters that counts shapes, locates a shape and reads
words with an accuracy of about one half, so that most groups in GRPO contain both right and wrong
completions. The warm-up is supervised learning on random examples. Two lessons teach the model to
see. An answer of a few tokens says little about an image: after a thousand steps on answers alone,
the vision tower hardly distinguishes two shapes. In the first lesson, every image token has linear
heads, which are dropped afterwards. They predict the names and boxes of shapes, the number of shape
centers, and letters, so that each image supervises all of its tokens. In the second lesson, the
language model names the cell, one of nine, that contains a shape. If it is asked for several
shapes, it writes each name before its cell, which teaches it to attend to the shape just named.

The language model is then trained on the three tasks to a high accuracy. Finally its weights are
interpolated between those before and those after the tasks (Wortsman et al. 2022,
https://arxiv.org/abs/2109.01903), which lowers all accuracies to about one half. The resulting
model has learned skills that the tasks need but applies them unreliably. A model whose training
merely stops at one half lacks some of these skills, and GRPO with the recipes does not teach them.

The command reproduces accuracies, not bits: threads, processors and versions of torch change the
order of additions, and a thousand steps amplify the difference. The finished model is tested on new
examples and is written only if the accuracy of every task lies in ``BAND``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor, get_wsd_schedule

from vlm_grpo.data_scripts import make_shapes, make_words
from vlm_grpo.data_scripts.make_shapes import KINDS, PAIRS, SIDE
from vlm_grpo.data_scripts.make_words import LETTERS
from vlm_grpo.data_scripts.tiny_vlm import build_model, build_processor, render_model_card
from vlm_grpo.errors import UserError
from vlm_grpo.model.prompts import ChatTemplate
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example
from vlm_grpo.utils.atomic_io import create_whole_folder
from vlm_grpo.utils.chat import Turn, place_images

MAKERS = {
    "ocr": (make_words.draw_examples, "ocr"),
    "counting": (make_shapes.draw_examples, "cluttered"),
    "grounding": (make_shapes.draw_examples, "crowded"),
}
"""Each task's generator and kind of data. Counting and grounding use scenes other than those of the
recipes, which leaves more room for improvement."""
SEEN = {"ocr": 64, "counting": 32, "grounding": 32}
"""Examples of each task per step of the first lesson."""
SHARES = {"ocr": 64, "counting": 64, "grounding": 64}
"""Examples of each task in a batch. Grounding comes first and alone: beside the others, it does not
learn which of two shapes it is asked for."""
REMAINING = tuple(number / 40 for number in range(20, 33))
"""Interpolation factors to try: 0 are the weights before the tasks, 1 those after them."""
BAND = (0.25, 0.65)
"""Range of held-out accuracies in which most groups contain right and wrong completions; the
finished model's must lie in it."""
MAX_ANSWER_TOKENS = 40  #: A box takes about 25 tokens
CELLS = 3  #: Image tokens per row and column of a scene
QUARTERS = 2
"""A token is divided into this many parts per axis, and each part is labeled with the shape that
overlaps it most."""
LEAST_AREA = 12  #: Smallest overlap of a shape with a part that counts, in pixels; a part has 196
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

    ``compute_loss`` returns the loss on a split, which is named by the lesson's name and the step.
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
        """Return the loss of scenes, with tokens (scenes, 9, width): the cross-entropy of names,
        the distance of boxes in sides of the scene, and the squared error of counts of centers."""
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
        """Return the connectionist temporal classification loss of the letters in tokens (words, 3,
        width), which needs no places (Graves et al. 2006, doi.org/10.1145/1143844.1143891)."""
        scores = self.letters(tokens).unflatten(-1, (COLUMNS, -1)).flatten(1, 2)
        return functional.ctc_loss(
            scores.log_softmax(-1).transpose(0, 1),
            torch.tensor([1 + LETTERS.index(letter) for word in words for letter in word]),
            torch.full((len(words),), scores.shape[1]),
            torch.tensor([len(word) for word in words]),
        )


def label_scene(shapes: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a scene's tokens show.

    They are labels of the parts, (9, 4): 0 for background, otherwise 1 plus the index of the
    shape's kind and color in ``PAIRS``; box targets of the parts, (9, 4, 4), as fractions of the
    scene's side; and the number of shape centers per token and kind, (9, 3).
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
    tokens = [encode_images(model, processor, part) for part in (scenes, words)]
    spelled = [str(word.answer) for word in words]
    return heads.compute_scene_loss(tokens[0], scenes) + heads.compute_word_loss(tokens[1], spelled)


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
    """Return the mean cross-entropy of the answers' tokens, <|im_end|> included; ``features`` is
    what ``encode_scenes`` returned for the questions' scenes, (questions, 9, width)."""
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
    scene, the others for all, with their names in the answer; return their scenes' numbers, too."""
    numbers = rng.choices(range(len(scenes)), k=count)
    chosen = enumerate(scenes[number] for number in numbers)
    return numbers, [_ask_for_places(scene, place % 2 == 0, rng) for place, scene in chosen]


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


@dataclass(frozen=True)
class WarmUpSettings:
    """Settings of the warm-up; ``warmup.json`` stores them under these names."""

    seed: int = 0  # seed of the weights and of all examples
    # schedule of the vision tower's lesson, on 64 scenes and 64 words per step
    see: Schedule = field(default_factory=lambda: Schedule(steps=2400, peak=2e-3))
    # schedule of the language model's lesson, on 96 questions per step
    place: Schedule = field(
        default_factory=lambda: Schedule(steps=1400, peak=2e-3, warmup=100, stable=500)
    )
    # number of its scenes. Each of them returns about eight times with other questions: the model
    # learns from few scenes far sooner than from new ones (Charton & Kempe 2024,
    # https://arxiv.org/abs/2410.07041)
    places: int = 16384
    # schedule of grounding alone, on 96 examples per step
    locate: Schedule = field(default_factory=lambda: Schedule(steps=500, peak=1.5e-3))
    # schedule of all tasks, on ``SHARES`` examples per step
    tasks: Schedule = field(default_factory=lambda: Schedule(steps=700, peak=1.5e-3))
    held_out: int = 200  # examples per task for choosing the step back
    test_size: int = 500  # examples per task in the test of the finished model
    band: tuple[float, float] = BAND  # range of the finished model's accuracies, in both tests


class OutOfBand(Exception):
    """A finished model with an accuracy outside of ``BAND``."""


TaskExample = tuple[Task, Example]


def load_embedded_task(name: str) -> Task:
    """Load a task with the prompts that the model is trained on, which hold no instruction."""
    return load_task(name, frame=FRAMES["resized"], instruction=None)


def draw_examples(task: str, count: int, seed: int, split: str) -> list[Example]:
    draw, kind = MAKERS[task]
    return draw(kind, count, seed, split)


def build_prompts(
    processor: Qwen2_5_VLProcessor, batch: Sequence[TaskExample]
) -> dict[str, Tensor]:
    """Build the left-padded prompts of a batch, of which ``input_ids`` is (batch, T_prompt)."""
    chat = ChatTemplate(processor)
    turns = [place_images([Turn("user", task.prompt(example))], 1) for task, example in batch]
    return dict(
        processor(
            text=[chat.render(turn) for turn in turns],
            images=[[image.load() for image in example.images] for _, example in batch],
            padding=True,  # pyright: ignore[reportCallIssue]
            return_tensors="pt",  # pyright: ignore[reportCallIssue]
        )
    )


def supervised_loss(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    batch: Sequence[TaskExample],
) -> Tensor:
    """Return the mean cross-entropy of the gold answers' tokens, <|im_end|> included."""
    tokenizer = processor.tokenizer
    inputs = build_prompts(processor, batch)
    ids = [tokenizer(task.gold(example) + "<|im_end|>")["input_ids"] for task, example in batch]
    answers = torch.full((len(ids), max(map(len, ids))), tokenizer.pad_token_id)
    mask = torch.zeros_like(answers)
    for row, answer in enumerate(ids):
        answers[row, : len(answer)] = torch.tensor(answer)
        mask[row, : len(answer)] = 1
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answers], dim=1)
    inputs["attention_mask"] = torch.cat([inputs["attention_mask"], mask], dim=1)
    inputs["mm_token_type_ids"] = torch.cat(
        [inputs["mm_token_type_ids"], torch.zeros_like(mask)], dim=1
    )
    with torch.autocast("cpu", torch.bfloat16):
        # The prompt's last position predicts the first answer token; the last position is unused.
        logits = model(**inputs, logits_to_keep=answers.shape[1] + 1).logits[:, :-1]
    return functional.cross_entropy(
        logits.float().flatten(0, 1)[mask.flatten() == 1], answers[mask == 1]
    )


@torch.no_grad()
def measure_accuracy(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    task: Task,
    examples: Sequence[Example],
    temperature: float = 0.0,
) -> float:
    """Return the share of examples whose primary metric is 1 (grounding: an IoU of at least 0.5).

    A temperature of 0 decodes greedily; above 0 samples from the full vocabulary.
    """
    inputs = build_prompts(processor, [(task, example) for example in examples])
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    rows = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        **inputs, **sampling, max_new_tokens=MAX_ANSWER_TOKENS
    )
    texts = processor.batch_decode(
        rows[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    right = 0
    for text, example in zip(texts, examples, strict=True):
        score = task.score(text, example)
        values = {**score.rewards, **score.metrics}
        right += (values[task.primary_metric] or 0.0) == 1.0
    return right / len(examples)


def warm_up(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    tasks: Mapping[str, Task],
    settings: WarmUpSettings,
) -> dict[str, Any]:
    """Give the two lessons, teach the tasks and take the step back; return the seconds per step of
    each part, and what ``step_back`` returns."""
    tower = model.model.visual
    heads = VisionHeads(model.config.get_text_config().hidden_size)

    def see(split: str) -> Tensor:
        drawn = {
            name: draw_examples(name, count, settings.seed, split) for name, count in SEEN.items()
        }
        scenes = [*drawn["counting"], *drawn["grounding"]]
        return compute_vision_loss(model, processor, heads, scenes, drawn["ocr"])

    places = make_shapes.draw_examples("scattered", settings.places, settings.seed, "warmup-place")

    def place(split: str) -> Tensor:
        rng = random.Random(f"{settings.seed}/{split}")
        numbers, questions = draw_place_questions(places, 96, rng)
        kinds = slice(0, None, 2), slice(1, None, 2)  # one shape, all shapes
        losses = [
            compute_place_loss(model, processor, features[numbers[kind]], questions[kind])
            for kind in kinds
        ]
        return torch.stack(losses).sum()

    def answer(split: str, shares: Mapping[str, int] = SHARES) -> Tensor:
        losses = []  # means of their own: a count has 2 tokens, a box about 25
        for name, share in shares.items():
            drawn = draw_examples(name, share, settings.seed, split)
            batch = [(tasks[name], example) for example in drawn]
            losses.append(supervised_loss(model, processor, batch))
        return torch.stack(losses).mean()

    seconds = {"see": train([*tower.parameters(), *heads.parameters()], settings.see, see, "see")}
    tower.requires_grad_(False)  # it sees as well as it can
    features = encode_scenes(model, processor, places)
    language = [weight for weight in model.parameters() if weight.requires_grad]
    seconds["place"] = train(language, settings.place, place, "place")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    seconds["locate"] = train(
        language, settings.locate, partial(answer, shares={"grounding": 96}), "locate"
    )
    seconds["tasks"] = train(language, settings.tasks, answer, "tasks")
    return {"seconds_per_step": seconds, **step_back(model, processor, before, tasks, settings)}


def step_back(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    before: Mapping[str, Tensor],
    tasks: Mapping[str, Task],
    settings: WarmUpSettings,
) -> dict[str, Any]:
    """Move the weights back toward ``before``, to where the accuracies are nearest to the middle of
    the band; return the share of the way that remains, and the accuracies by share."""
    after = {name: weight.clone() for name, weight in model.state_dict().items()}
    examples = {
        name: draw_examples(name, settings.held_out, settings.seed, "warmup-check")
        for name in tasks
    }

    def move(share: float) -> None:
        for name, weight in model.state_dict().items():
            weight.copy_(torch.lerp(before[name], after[name], share))

    accuracies: dict[float, dict[str, float]] = {}
    for share in (*REMAINING, 1.0):
        move(share)
        accuracies[share] = {
            name: measure_accuracy(model, processor, task, examples[name])
            for name, task in tasks.items()
        }
        print(f"{share:.0%} of the way:", accuracies[share], flush=True)
    middle = sum(settings.band) / 2
    share = min(
        REMAINING,
        key=lambda share: max(abs(value - middle) for value in accuracies[share].values()),
    )
    move(share)
    return {"remaining": share, "accuracies": accuracies}


def build_tiny_vlm(settings: WarmUpSettings, out: Path) -> dict[str, Any]:
    """Build the model, warm it up, test it on new examples, save it and return ``warmup.json``.

    If an accuracy is outside of the band, it raises ``OutOfBand`` and writes nothing.
    """
    with create_whole_folder(out) as folder:
        tasks = {name: load_embedded_task(name) for name in MAKERS}
        texts = [
            text
            for name, task in tasks.items()
            for example in draw_examples(name, 300, settings.seed, "warmup-texts")
            for text in (task.prompt(example), task.gold(example))
        ]
        processor = build_processor(texts)
        model = build_model(processor, settings.seed)
        trained = warm_up(model, processor, tasks, settings)
        report = {
            "settings": asdict(settings),
            "parameters": model.num_parameters(),
            **trained,
            "tests": [
                evaluate_model(model, processor, tasks, settings, settings.seed + shift)
                for shift in (1, 2)
            ],
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        check_band(report["tests"], settings.band)
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        (folder / "warmup.json").write_text(json.dumps(report, indent=2) + "\n")
        (folder / "README.md").write_text(render_model_card(report))
    return report


def evaluate_model(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    tasks: Mapping[str, Task],
    settings: WarmUpSettings,
    seed: int,
) -> dict[str, Any]:
    """Return the accuracies on new examples, decoded greedily and sampled at temperature 1."""
    torch.manual_seed(seed)
    examples = {
        name: draw_examples(name, settings.test_size, seed, "warmup-test") for name in tasks
    }
    return {
        "split": "warmup-test",
        "seed": seed,
        "examples_per_task": settings.test_size,
        **{
            mode: {
                name: round(measure_accuracy(model, processor, task, examples[name], heat), 4)
                for name, task in tasks.items()
            }
            for mode, heat in (("greedy", 0.0), ("sampled", 1.0))
        },
    }


def check_band(tests: Sequence[Mapping[str, Any]], band: tuple[float, float]) -> None:
    """Raise OutOfBand if a task's greedy accuracy in one of the tests is outside of the band."""
    wrong = [
        f"{name} {value:.3f} (seed {test['seed']})"
        for test in tests
        for name, value in test["greedy"].items()
        if not band[0] <= value <= band[1]
    ]
    if wrong:
        raise OutOfBand(
            f"held-out accuracies outside of {band[0]} to {band[1]}: {', '.join(wrong)}; nothing "
            "was written: give another --seed"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the process's exit status."""
    parser = argparse.ArgumentParser(description="Build and warm up the embedded tiny VLM.")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and examples")
    arguments = parser.parse_args(argv)
    try:
        settings = WarmUpSettings(seed=arguments.seed)
        report = build_tiny_vlm(settings, arguments.out)
    except (UserError, OSError, OutOfBand) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {arguments.out}; every greedy accuracy is in {BAND}:")
    for test in report["tests"]:
        print(f"  seed {test['seed']}: greedy {test['greedy']}, sampled {test['sampled']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
