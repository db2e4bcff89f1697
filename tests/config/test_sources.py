"""Settings from Python objects: the classes of tasks, and rows in memory."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from vlm_grpo.config.data import DataSettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.config.sources import InMemoryRows, is_rows
from vlm_grpo.data import load_examples
from vlm_grpo.errors import UserError
from vlm_grpo.task import Task, reward
from vlm_grpo.task.coordinates import PERMILLE
from vlm_grpo.task.names import get_short_name, get_task_name
from vlm_grpo.task.registry import load_task, load_task_class
from vlm_grpo.tasks.counting import Counting
from vlm_grpo.types import Example

ROWS = [{"question": "How many?", "answer": number} for number in range(3)]


class Parity(Task):
    """Whether a number is even."""

    primary_metric = "exact"
    words: tuple[str, ...] = ("odd", "even")

    def parse(self, text: str, example: Example) -> str | None:
        return text if text in self.words else None

    def write(self, answer: str, example: Example) -> str:
        return answer

    @reward()
    def exact(self, answer: str, example: Example) -> float:
        return float(answer == example.answer)


def make_settings(task: Any, train: Any = "embedded:counting", **values: Any) -> Settings:
    return Settings.model_validate(
        {"task": task, "model": "embedded", "data": {"train": train}, **values}
    )


def write_module(folder: Path, name: str) -> None:
    text = Path(__file__).read_text("utf-8")
    body = text[text.index("class Parity") : text.index("def make_settings")]
    header = "from __future__ import annotations\nfrom vlm_grpo import Example, Task, reward\n"
    (folder / name).write_text(header + body)


def test_a_task_object_is_split_into_its_class_and_options() -> None:
    task = Parity(tags=True, words=("no", "yes"), frame=PERMILLE, progress=0.5, token_limit=9)

    settings = make_settings(task, task_options={"tags": False})

    assert settings.task is Parity
    # The library sets frame, progress and token_limit; task_options override the object.
    assert settings.task_options == {"tags": False, "words": ("no", "yes")}
    loaded = load_task(settings.task, **settings.task_options)
    assert loaded == Parity(words=("no", "yes"))


def test_the_options_of_a_task_object_are_checked_with_the_other_settings() -> None:
    task = Counting(weights={"overlong": 1.0}, overlong_cache=9)

    with pytest.raises(ValidationError, match="overlong_cache=9 exceeds"):
        make_settings(task, rollout={"max_completion_length": 8})


def test_a_built_in_class_is_saved_by_its_name() -> None:
    settings = make_settings(Counting)

    assert settings.task_name == settings.model_dump()["task"] == "counting"
    assert settings.run_dir.name == "counting"


def test_a_class_of_a_package_is_saved_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo/__init__.py").touch()
    write_module(tmp_path, "zoo/parity.py")
    monkeypatch.syspath_prepend(tmp_path)
    task = importlib.import_module("zoo.parity").Parity

    settings = make_settings(task)

    assert settings.task_name == "zoo.parity:Parity"
    assert load_task_class(settings.task_name) is task
    assert make_settings(settings.task_name).run_dir == settings.run_dir == Path("runs/parity")


def test_a_class_of_a_file_is_saved_by_the_files_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, "parity_file.py")
    monkeypatch.syspath_prepend(tmp_path)
    imported = importlib.import_module("parity_file").Parity
    loaded = load_task_class(str(tmp_path / "parity_file.py"))

    for task in (imported, loaded):
        assert get_task_name(task) == f"{tmp_path / 'parity_file.py'}:Parity"
        assert vars(load_task(get_task_name(task), words=["a"]))["words"] == ("a",)
    del sys.modules["parity_file"]


def test_a_class_of_a_function_is_saved_by_a_text_that_is_not_loaded(tmp_path: Path) -> None:
    class Local(Parity):
        pass

    make_settings(Local).save(tmp_path / "config.yaml")
    saved = load_settings(tmp_path / "config.yaml")

    assert str(saved.task).startswith("<class ")
    assert saved.run_dir == Path("runs/local")
    with pytest.raises(UserError, match=r"^task=<class .*: give it again with task=TheClass"):
        load_task(saved.task)
    assert load_settings(tmp_path / "config.yaml", task=Local).task is Local


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (Parity, "parity"),
        (Parity(), "parity"),
        ("counting", "counting"),
        ("tasks/clock.py", "clock"),
        ("tasks/clock.py:Hands", "clock"),
        ("zoo.clock:Hands", "hands"),
        ("<class test.<locals>.Hands>", "hands"),
    ],
)
def test_the_short_name_is_that_of_the_class_or_file(task: Any, name: str) -> None:
    assert get_short_name(task) == name


def test_a_module_that_is_missing_is_named_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"no\.module:Parity cannot be loaded.*PYTHONPATH"):
        load_task("no.module:Parity")
    with pytest.raises(UserError, match="no task class Pariti"):
        load_task("vlm_grpo.tasks.counting:Pariti")


@pytest.mark.parametrize("task", [3, Example, None])
def test_other_objects_are_not_tasks(task: Any) -> None:
    with pytest.raises(UserError, match=r"task=.* should be text, a subclass of Task or a task"):
        load_settings("counting", task=task)


def test_options_that_json_cannot_hold_are_kept_and_saved_as_a_text_without_addresses(
    tmp_path: Path,
) -> None:
    marker, options = object(), {"words": ["a"]}

    settings = load_settings("counting", task_options={"marker": marker, "more": [{"m": marker}]})
    settings.save(tmp_path / "config.yaml")

    assert settings.task_options == {"marker": marker, "more": [{"m": marker}]}
    saved = load_settings(tmp_path / "config.yaml", task_options=options).task_options
    assert saved == {"marker": "<object object>", "more": [{"m": "<object object>"}], **options}


def test_the_options_of_a_recipe_are_not_those_of_a_task_object(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("task: counting\ntask_options: {tags: true}\ndata: {train: a.jsonl}\n")

    assert load_settings(recipe, task=Counting()).task_options == {}
    assert load_settings(recipe, task=Counting).task_options == {"tags": True}
    given = load_settings(recipe, ["task_options.thinking=true"], task=Counting(tags=True))
    assert given.task_options == {"tags": True, "thinking": True}


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        tuple(ROWS),
        datasets.Dataset.from_list(ROWS),
        [Example(str(row["answer"]), (), "How many?", row["answer"]) for row in ROWS],
    ],
    ids=["list", "tuple", "Dataset", "Examples"],
)
@pytest.mark.parametrize("strict", [False, True])
def test_rows_in_memory_are_a_source(rows: Any, strict: bool, tmp_path: Path) -> None:
    settings = (
        load_settings("counting", data={"train": rows})
        if strict
        else make_settings("counting", rows)
    )

    examples = load_examples(settings.data.train, Counting(), settings.data, "train")
    settings.save(tmp_path / "config.yaml")

    assert [example.answer for example in examples] == [0, 1, 2]
    saved = load_settings(tmp_path / "config.yaml")
    assert saved.data.train == "<in memory: 3 rows>" == str(settings.data.train)
    with pytest.raises(UserError, match=r'^data\.train=<in memory: 3 rows>.*data=\{"train": rows'):
        load_examples(saved.data.train, Counting(), saved.data, "train")


def test_the_contents_of_rows_are_neither_shown_nor_compared() -> None:
    settings = make_settings("counting", ROWS)

    assert "How many" not in repr(settings)
    assert settings == make_settings("counting", ROWS)
    assert settings != make_settings("counting", [*ROWS])
    assert hash(InMemoryRows(ROWS)) == hash(InMemoryRows(ROWS))


def test_rows_in_memory_are_wrapped_once() -> None:
    settings = load_settings("counting", data={"train": ROWS})

    again = load_settings("counting", data={"train": settings.data.train})

    assert again.data.train is settings.data.train
    assert not is_rows(settings.data.train)


@pytest.mark.parametrize("source", [3, ["a"], {"a": 1}, iter(ROWS), datasets.DatasetDict()])
def test_other_objects_are_not_sources(source: Any) -> None:
    assert not is_rows(source)
    with pytest.raises(UserError, match=r"data\.train=.* should be text or a list of rows"):
        load_settings("counting", data={"train": source})


@pytest.mark.parametrize("text", ["hf:", "hf: lab/data"])
def test_a_source_that_yaml_reads_as_a_mapping_is_explained(text: str) -> None:
    with pytest.raises(UserError, match=r"data\.train=.* names no dataset: write hf:NAME"):
        load_settings("counting", [f"data.train={text}"])


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        (datasets.Dataset.from_list(ROWS).to_pandas(), r'give df\.to_dict\("records"\)'),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), r'as ds\["train"\]'),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), r"give list\(dataset\)"),
        ((row for row in ROWS), r"give list\(rows\)"),
        ({"question": ["?"], "answer": [1]}, r"or Dataset\.from_dict\(columns\)"),
    ],
    ids=["DataFrame", "DatasetDict", "IterableDataset", "generator", "columns"],
)
def test_the_remedy_for_a_common_other_source_is_named(source: Any, remedy: str) -> None:
    with pytest.raises(UserError, match=f"should be text or a list of rows .*{remedy}"):
        load_settings("counting", data={"train": source})
    with pytest.raises(UserError, match=remedy):
        DataSettings(train=source)


@pytest.mark.parametrize("name", ["torch", "numpy", "pandas", "arrow"])
def test_the_format_of_a_dataset_has_no_effect(name: str) -> None:
    dataset = datasets.Dataset.from_list(ROWS).with_format(name)

    examples = load_examples(dataset, Counting())

    assert [(type(e.answer), e.answer) for e in examples] == [(int, 0), (int, 1), (int, 2)]


def test_the_transform_of_a_dataset_is_applied() -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    doubled = dataset.with_transform(
        lambda rows: {**rows, "answer": [2 * a for a in rows["answer"]]}
    )

    assert [e.answer for e in load_examples(doubled, Counting())] == [0, 2, 4]


def test_numpy_scalars_are_accepted_in_rows() -> None:
    rows = [{"id": np.int64(7), "question": np.str_("?"), "answer": np.int64(3)}]

    (example,) = load_examples(rows, Counting())

    assert (example.id, example.question, example.answer) == ("7", "?", 3)
    assert (type(example.question), type(example.answer)) == (str, int)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"id": 1}, "id must be non-empty text, not 1"),
        ({"question": None}, "question must be text, not None"),
        ({"images": ("ok.png",)}, "images must be a tuple of ImageRef: give rows .* instead"),
        ({"images": (Image.new("RGB", (2, 2)),)}, "images must be a tuple of ImageRef"),
        ({"images": None}, "images must be a tuple of ImageRef"),
        ({"meta": None}, "meta must be a mapping, not None"),
    ],
)
def test_an_example_with_a_wrong_field_is_a_bad_row(fields: Any, reason: str) -> None:
    example = Example(**{"id": "a", "images": (), "question": "?", "answer": 1, **fields})

    with pytest.raises(UserError, match=f"data.eval row 1: an Example's {reason}"):
        load_examples([example], Counting())


def test_paths_are_saved_as_text(tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "task.py", tmp_path / "rows.jsonl")

    assert settings.task == str(tmp_path / "task.py")
    assert settings.data.train == str(tmp_path / "rows.jsonl")


def test_limits_and_equal_splits_hold_for_rows_in_memory() -> None:
    data = DataSettings(train=ROWS, eval=ROWS, eval_limit=2)

    assert len(load_examples(ROWS, Counting(), data, "eval")) == 2
    assert data.eval == data.train  # load_data warns of this


def test_bad_rows_in_memory_are_named() -> None:
    rows: list[Any] = [*ROWS, {"question": "How many?"}, 5, {"question": "?", "answer": -1}]

    with pytest.raises(UserError) as caught:
        load_examples(rows, Counting(), DataSettings(train=rows), "train")

    message = str(caught.value)
    assert "data.train row 4: it has no answer" in message
    assert "data.train row 5: it is not a mapping but int" in message
    assert "data.train row 6: " in message


def test_settings_of_rows_are_json() -> None:
    assert json.loads(make_settings(Parity, ROWS).model_dump_json())["data"]["eval"] is None
