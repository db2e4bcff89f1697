"""The examples of a run: filters, splits by image, and the task of held-out examples."""

from __future__ import annotations

import json
import logging
import pickle
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.config.data import DataSettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.run_data import filter_examples, get_held_out_task, load_data, split_by_image
from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example, ImageRef
from vlm_grpo.utils.chat import ThinkingTags

ROW = Example("a", (), "How many cups?", 3)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a counting run that is evaluated on a benchmark of counting."""
    path = tmp_path / "far.yaml"
    path.write_text(
        "title: Far\ntask: counting\nmetric: absolute_error\nvariants: [exact]\n"
        'prompt: "Look. {question}"\n'
    )
    return load_settings("counting", [f"evaluation.benchmark={path}", "task_options.tags=true"])


@pytest.fixture
def run_task() -> Task:
    tags = ThinkingTags("[THINK]", "[/THINK]", is_open=True, is_native=True)
    return load_task("counting", tags=True, frame=FRAMES["permille"], thinking_tags=tags)


def test_without_a_benchmark_it_is_the_task_of_the_run(run_task: Task) -> None:
    assert get_held_out_task(load_settings("counting"), run_task) is run_task


def test_a_benchmark_gets_the_options_and_the_frame_of_the_run(
    settings: Settings, run_task: Task
) -> None:
    task = get_held_out_task(settings, run_task)
    assert task.prompt(ROW) == f"Look. {run_task.prompt(ROW)}"
    assert (task.tags, task.frame.name) == (True, "permille")
    assert task.read("4?[/THINK]<answer>3</answer>", ROW) == 3
    assert task.read("<answer>3</answer>", ROW) is None  # within the thinking
    assert (task.primary_metric, task.lower_is_better) == ("absolute_error", True)


def test_a_benchmark_of_another_task_gets_the_common_options(
    settings: Settings, run_task: Task
) -> None:
    other = settings.model_copy(update={"task": "ocr", "task_options": {"tags": True, "x": 1}})
    assert get_held_out_task(other, run_task).tags


def test_a_run_without_tags_is_not_asked_for_those_of_the_benchmark(settings: Settings) -> None:
    evaluation = settings.evaluation.model_copy(update={"benchmark": "super_clevr_200"})
    plain = settings.model_copy(update={"evaluation": evaluation, "task_options": {}})
    task = get_held_out_task(plain, load_task("counting"))
    assert (task.tags, task.thinking) == (False, False)
    assert load_benchmark("super_clevr_200").load_task().tags


def test_the_task_of_a_benchmark_can_be_pickled(settings: Settings, run_task: Task) -> None:
    task = get_held_out_task(settings, run_task)
    unpickled = pickle.loads(pickle.dumps(task))  # as for reward workers
    assert unpickled.score("<answer>3</answer>", ROW) == task.score("<answer>3</answer>", ROW)
    assert unpickled.corpus_metrics([3], [ROW]) == task.corpus_metrics([3], [ROW])


def test_an_unknown_benchmark_is_refused(settings: Settings, run_task: Task) -> None:
    evaluation = settings.evaluation.model_copy(update={"benchmark": "tallyqaa"})
    unknown = settings.model_copy(update={"evaluation": evaluation})
    with pytest.raises(UserError, match="did you mean tallyqa"):
        get_held_out_task(unknown, run_task)


EXAMPLES = [Example(str(n), (), "?", 1, {"pass_rate": n / 10, "kind": "x"}) for n in range(11)]


def choose(text: str, difficulty: Path | None = None) -> list[str]:
    data = DataSettings(train="rows.jsonl", filter=text, difficulty=difficulty)
    return [example.id for example in filter_examples(EXAMPLES, data)[0]]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_column_of_the_rows_or_a_file_has_the_numbers(tmp_path: Path) -> None:
    assert choose("0.1 < pass_rate < 0.4") == ["2", "3"]
    rows = [{"id": str(n), "pass_rate": 1 - n / 10} for n in range(11)]
    assert choose("pass_rate >= 0.9", write(tmp_path / "d.jsonl", rows)) == ["0", "1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind > 0", r"(?s)example 0 has no number kind.*vlm-grpo sample RECIPE"),
        ("other > 0", "example 0 has no number other"),
        ("pass_rate > 1", "accepts none of the 11 training examples; .*pass_rate from 0 to 1"),
    ],
)
def test_examples_without_the_number_and_an_empty_choice_are_refused(
    text: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        choose(text)


def test_a_file_that_is_none_of_difficulty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"d.jsonl:1 has no id"):
        choose("a > 0", write(tmp_path / "d.jsonl", [{"a": 1}]))
    with pytest.raises(UserError, match="cannot be read: No such file"):
        choose("a > 0", tmp_path / "missing.jsonl")


def test_only_training_examples_are_chosen_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": f"How many {n}?", "answer": n, "pass_rate": n / 8} for n in range(9)]
    path = write(tmp_path / "rows.jsonl", rows)
    given = [f"data.train={path}", "data.eval=null", "data.eval_limit=null", "data.eval_share=0.3"]
    given += ["data.train_limit=null"]
    task = load_task("counting")
    train, held_out = load_data(load_settings("counting", given), task)
    filtered = load_settings("counting", [*given, "data.filter=pass_rate > 0.5"])
    with caplog.at_level(logging.INFO):
        chosen, same = load_data(filtered, task)
    assert list(same) == list(held_out)
    assert list(chosen) == [example for example in train if example.answer > 4]
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert f"keeps {len(chosen)} of {len(train)} training examples" in record.message
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.INFO):
        load_data(filtered, task)
    assert not caplog.records  # one process says it


def image(name: str, data: bytes | None = None) -> ImageRef:
    path = None if data is not None else Path("/somewhere") / name
    return ImageRef(name, (8, 8), (8, 8), path, data)


def build_examples(count: int = 300) -> list[Example]:
    """Return rows: each image in three of them, and some images joined by a row with both."""
    found = []
    for number in range(count):
        images = [image(f"{number // 3}.png")]
        if number % 30 == 0:  # joins this image to the next
            images.append(image(f"{number // 3 + 1}.png"))
        found.append(Example(str(number), tuple(images), "How many?", 1))
    return found


def names(examples: Sequence[Example]) -> set[str]:
    return {image.name for example in examples for image in example.images}


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3])
def test_no_image_is_on_both_sides(share: float) -> None:
    examples = build_examples()
    train, held_out = split_by_image(examples, share, seed=0)
    assert not names(train) & names(held_out)
    assert sorted([*train, *held_out], key=lambda e: int(e.id)) == examples
    assert share * 300 <= len(held_out) <= share * 300 + 6
    assert [e.id for e in train] == sorted((e.id for e in train), key=int)


def test_the_split_depends_on_images_and_seed_only() -> None:
    examples = build_examples()
    chosen = {e.id for e in split_by_image(examples, 0.1, 0)[1]}
    shuffled = random.Random(1).sample(examples, len(examples))
    assert {e.id for e in split_by_image(shuffled, 0.1, 0)[1]} == chosen
    moved = [
        replace(e, images=tuple(replace(i, path=Path("/else") / i.name) for i in e.images))
        for e in examples
    ]
    assert {e.id for e in split_by_image(moved, 0.1, 0)[1]} == chosen
    assert {e.id for e in split_by_image(examples, 0.1, 1)[1]} != chosen


def test_equal_bytes_are_one_image_and_equal_questions_one_text() -> None:
    encoded = [Example(str(n), (image(f"row {n}", b"same"),), "?", 1) for n in range(4)]
    texts = [Example(f"t{n}", (), "What?", 1) for n in range(4)]
    for held_out in (split_by_image([*encoded, *texts], 0.1, seed)[1] for seed in range(5)):
        assert list(held_out) in (encoded, texts)


@pytest.mark.parametrize("examples", [build_examples(3), build_examples(1), build_examples(3)[:2]])
def test_one_image_cannot_be_split(examples: Sequence[Example]) -> None:
    with pytest.raises(UserError, match=r"data.eval_share=0.2 cannot split .* give data.eval"):
        split_by_image(examples, 0.2, 0)
