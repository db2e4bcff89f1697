"""Builds and warms up the embedded tiny VLM: ``python -m vlm_grpo.data_scripts.make_tiny_vlm``.

The model is a Qwen2.5-VL of 1.2 million parameters that has learnt to count shapes, to box one
of them, and to read words — about every second time. That is where GRPO has most to do: some
samples of a group earn the reward and some do not. Warm-up is plain supervised learning on
freshly drawn examples. The three tasks are learnt at different speeds, so a task that is good
enough gets a small share of each batch while the others catch up, and training stops when all
three are inside the band.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from vlm_grpo.coordinates import FRAMES
from vlm_grpo.data_scripts import make_shapes, make_words
from vlm_grpo.data_scripts.synthetic import atomic_folder
from vlm_grpo.data_scripts.tiny_vlm import build_model, build_processor
from vlm_grpo.registry import load_task
from vlm_grpo.task import Task
from vlm_grpo.types import Example

MAKERS = {
    "ocr": (make_words.draw_examples, "ocr"),
    "counting": (make_shapes.draw_examples, "cluttered"),
    "grounding": (make_shapes.draw_examples, "crowded"),
}
"""Each task's maker and what it draws, in the order in which the tasks are learnt. Counting and
grounding are learnt on other scenes than the recipes train on, which leaves more to gain."""
LONGEST_ANSWER = 40
"""Tokens; a box takes about 25."""


CARD = """# tiny-vlm

A Qwen2.5-VL of {parameters:,} parameters for tests and first runs, made from random weights by
`python -m vlm_grpo.data_scripts.make_tiny_vlm`. It knows three tasks on drawn images (84×84
shapes, 84×28 words) about half well, which leaves room for reinforcement learning; it is of no
use for anything else. No other model's weights, images or texts are in it.

| task | greedy | sampled, temperature 1 |
| --- | --- | --- |
{rows}

Counting and OCR: exact match; grounding: IoU of at least 0.5; {n} held-out examples each.
Settings, seeds and all figures: `warmup.json`. Licence: Apache-2.0, as the package.
"""


@dataclass(frozen=True)
class Settings:
    """How the warm-up runs.

    Attributes:
        seed: of the weights and of every example drawn.
        max_steps: optimizer steps at most; also the length of the learning-rate schedule.
        peak: highest learning rate, reached after ``warmup`` steps, then a cosine to zero.
        enough: accuracies; below ``enough[0]`` a task is behind, above ``enough[1]`` it rests.
        focus: examples in a batch of the first task that is behind.
        other: examples of each other task that is behind.
        keep: examples of a task that is neither behind nor resting.
        stop: training ends when every task's held-out accuracy is inside these two.
        check_every: steps between held-out checks, from ``first_check`` on.
        held_out: examples a task in a check.
        test_size: examples a task in the test of the finished model.
    """

    seed: int = 0
    max_steps: int = 2400
    peak: float = 1.5e-3
    warmup: int = 100
    enough: tuple[float, float] = (0.42, 0.5)
    focus: int = 36
    other: int = 8
    keep: int = 4
    stop: tuple[float, float] = (0.38, 0.58)
    check_every: int = 25
    first_check: int = 200
    held_out: int = 200
    test_size: int = 500


Lesson = tuple[Task, Example]


def draw(task: str, count: int, seed: int, split: str) -> list[Example]:
    """Examples of one task, from its maker."""
    maker, kind = MAKERS[task]
    return maker(kind, count, seed, split)


def ask(processor: Qwen2_5_VLProcessor, lessons: Sequence[Lesson]) -> dict[str, Tensor]:
    """The prompts as the model reads them when it is asked: padded on the left.

    Returns:
        The processor's tensors; ``input_ids`` is (lessons, T_prompt).
    """
    chats = [
        [
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": task.prompt(example)}],
            }
        ]
        for task, example in lessons
    ]
    return dict(
        processor(
            text=processor.apply_chat_template(chats, add_generation_prompt=True, tokenize=False),
            images=[[image.load() for image in example.images] for _, example in lessons],
            padding=True,  # pyright: ignore[reportCallIssue]
            return_tensors="pt",  # pyright: ignore[reportCallIssue]
        )
    )


def lesson_loss(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    lessons: Sequence[Lesson],
) -> Tensor:
    """Mean cross-entropy of the gold answers' tokens, each answer's <|im_end|> included."""
    tokenizer = processor.tokenizer
    inputs = ask(processor, lessons)
    ids = [tokenizer(task.gold(example) + "<|im_end|>")["input_ids"] for task, example in lessons]
    answers = torch.full((len(ids), max(map(len, ids))), tokenizer.pad_token_id)
    real = torch.zeros_like(answers)
    for row, answer in enumerate(ids):
        answers[row, : len(answer)] = torch.tensor(answer)
        real[row, : len(answer)] = 1
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answers], dim=1)
    inputs["attention_mask"] = torch.cat([inputs["attention_mask"], real], dim=1)
    inputs["mm_token_type_ids"] = torch.cat(
        [inputs["mm_token_type_ids"], torch.zeros_like(real)], dim=1
    )
    with torch.autocast("cpu", torch.bfloat16):
        # The prompt's last position predicts the first answer token; the last one, nothing.
        logits = model(**inputs, logits_to_keep=answers.shape[1] + 1).logits[:, :-1]
    return functional.cross_entropy(
        logits.float().flatten(0, 1)[real.flatten() == 1], answers[real == 1]
    )


@torch.no_grad()
def accuracy(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    task: Task,
    examples: Sequence[Example],
    temperature: float = 0.0,
) -> float:
    """The part of the examples on which the task's primary metric is 1 (a box: IoU at least 0.5).

    Args:
        temperature: 0 takes the likeliest token; above 0 samples from the whole vocabulary.
    """
    inputs = ask(processor, [(task, example) for example in examples])
    how: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    rows = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        **inputs, **how, max_new_tokens=LONGEST_ANSWER
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


def mixture(found: Mapping[str, float], settings: Settings) -> dict[str, int]:
    """How many examples of each task the next batches hold, given held-out accuracies.

    The first task below the band gets most of the batch. In equal parts, each task's gradient
    is too noisy for the hardest of them, reading, to ever begin.
    """
    low, high = settings.enough
    behind = [name for name, value in found.items() if value < low]
    shares = {name: settings.keep if value < high else 0 for name, value in found.items()}
    for name in behind:
        shares[name] = settings.focus if name == behind[0] else settings.other
    return shares if any(shares.values()) else dict.fromkeys(found, 1)


def learning_rate(step: int, settings: Settings) -> float:
    """A linear rise to the peak, then a cosine down to zero at ``max_steps``."""
    if step < settings.warmup:
        return settings.peak * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.max_steps - settings.warmup)
    return settings.peak * 0.5 * (1.0 + float(torch.cos(torch.tensor(done * torch.pi))))


def warm_up(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    tasks: Mapping[str, Task],
    settings: Settings,
) -> dict[str, Any]:
    """Train until every task is inside the band, or for ``max_steps``.

    Returns:
        The steps taken, the seconds a step, and the last held-out accuracies.
    """
    held_out = {
        name: draw(name, settings.held_out, settings.seed, "warmup-check") for name in tasks
    }
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    found = dict.fromkeys(tasks, 0.0)
    step, seconds = 0, 0.0
    for step in range(1, settings.max_steps + 1):
        start = time.perf_counter()
        lessons = [
            (tasks[name], example)
            for name, share in mixture(found, settings).items()
            if share
            for example in draw(name, share, settings.seed, f"warmup-{step}")
        ]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, settings)
        loss = lesson_loss(model, processor, lessons)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - start
        if step >= settings.first_check and step % settings.check_every == 0:
            found = {
                name: accuracy(model, processor, task, held_out[name])
                for name, task in tasks.items()
            }
            print(
                f"step {step} loss {loss.item():.3f} {seconds / step:.2f} s/step",
                *(f"{name} {value:.2f}" for name, value in found.items()),
                *mixture(found, settings).values(),
                flush=True,
            )
            if all(settings.stop[0] <= value <= settings.stop[1] for value in found.values()):
                break
    return {"steps": step, "seconds_per_step": round(seconds / max(1, step), 3), "check": found}


def build(settings: Settings, out: Path) -> dict[str, Any]:
    """Make the model, warm it up, measure it on fresh examples, and save everything.

    Returns:
        What is written to ``warmup.json``.

    Raises:
        FileExistsError: ``out`` is a file, or a folder that is not empty.
    """
    with atomic_folder(out) as aside:
        tasks = {name: load_task(name, frame=FRAMES["resized"]) for name in MAKERS}
        texts = [
            text
            for name, task in tasks.items()
            for example in draw(name, 300, settings.seed, "warmup-texts")
            for text in (task.prompt(example), task.gold(example))
        ]
        processor = build_processor(texts)
        model = build_model(processor, settings.seed)
        trained = warm_up(model, processor, tasks, settings)
        record = {
            "settings": asdict(settings),
            "parameters": model.num_parameters(),
            **trained,
            "tests": [
                test(model, processor, tasks, settings, settings.seed + shift) for shift in (1, 2)
            ],
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        model.save_pretrained(aside)
        processor.save_pretrained(aside)
        (aside / "warmup.json").write_text(json.dumps(record, indent=2) + "\n")
        (aside / "README.md").write_text(model_card(record))
    return record


def test(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    tasks: Mapping[str, Task],
    settings: Settings,
    seed: int,
) -> dict[str, Any]:
    """Accuracies on examples that no check has seen: greedy, and sampled at temperature 1."""
    torch.manual_seed(seed)
    fresh = {name: draw(name, settings.test_size, seed, "warmup-test") for name in tasks}
    return {
        "split": "warmup-test",
        "seed": seed,
        "examples_per_task": settings.test_size,
        **{
            how: {
                name: round(accuracy(model, processor, task, fresh[name], temperature), 4)
                for name, task in tasks.items()
            }
            for how, temperature in (("greedy", 0.0), ("sampled", 1.0))
        },
    }


def model_card(record: Mapping[str, Any]) -> str:
    """The model folder's README."""
    first = record["tests"][0]
    rows = "\n".join(
        f"| {name} | {first['greedy'][name]:.0%} | {first['sampled'][name]:.0%} |"
        for name in first["greedy"]
    )
    return CARD.format(rows=rows, n=first["examples_per_task"], **record)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the process's exit status."""
    parser = argparse.ArgumentParser(description="Build and warm up the embedded tiny VLM.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the examples")
    parser.add_argument("--max-steps", type=int, default=Settings.max_steps)
    arguments = parser.parse_args(argv)
    try:
        record = build(Settings(seed=arguments.seed, max_steps=arguments.max_steps), arguments.out)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {arguments.out} after {record['steps']} steps: {record['tests'][0]['greedy']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
