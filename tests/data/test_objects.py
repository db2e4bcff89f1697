"""Tasks and rows that are Python objects: how settings name them, and which objects are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from dataset_files import get_load_error, load

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.loading import load_split
from vlm_grpo.data.mixed_task import load_run_task
from vlm_grpo.data.objects import Objects
from vlm_grpo.errors import UserError
from vlm_grpo.task.coordinates import PERMILLE
from vlm_grpo.tasks.counting import Counting
from vlm_grpo.types import Example

ROWS = [{"question": "How many?", "answer": number} for number in range(3)]
EXAMPLE = Example("1", (), "?", 1)


class Parity(Counting):
    """Counting, with an option of its own."""

    words: tuple[str, ...] = ("odd", "even")


def make_settings(train: Any = "python", **values: Any) -> Settings:
    return Settings(**{"task": "python", "model": "embedded", "data": {"train": train}, **values})


def test_a_task_object_is_named_with_its_options_and_used_as_it_is(tmp_path):
    # The library sets frame, progress and token_limit.
    task = Parity(tags=True, words=("no", "yes"), frame=PERMILLE, progress=0.5, token_limit=9)
    objects = Objects(task, ROWS)
    named = objects.name_in(make_settings(task_options={"tags": False}))
    assert named.task.endswith(":Parity")
    assert named.task_options == {"tags": True, "words": ["no", "yes"]}
    assert named.run_dir.name == "parity"
    assert load_run_task(named, objects) is task
    named.save(tmp_path / "config.yaml")
    saved = load_settings(tmp_path / "config.yaml")
    assert (saved.task_options, saved.data.train) == (named.task_options, "python")
    assert load_run_task(named, Objects(Parity)) == Parity(tags=True, words=("no", "yes"))


def test_the_options_of_a_task_object_are_checked_with_the_settings():
    task = Counting(weights={"overlong": 1.0}, overlong_cache=9)
    with pytest.raises(UserError, match="overlong_cache=9 exceeds"):
        Objects(task).name_in(load_settings("counting", ["rollout.max_completion_length=8"]))


def test_a_class_of_a_function_cannot_be_loaded_again():
    class Local(Parity):
        marker: Any = None

    named = Objects(Local(marker=[object()])).name_in(make_settings())
    assert (str(named.task)[:7], named.run_dir) == ("<class ", Path("runs/local"))
    assert named.task_options == {"marker": ["<object object>"]}
    for settings in (named, make_settings()):
        with pytest.raises(UserError, match=r"^task=.*: give it, as train\(settings, task=…\)"):
            load_run_task(settings)


def test_rows_take_the_place_of_a_source():
    examples = [Example(str(row["answer"]), (), "How many?", row["answer"]) for row in ROWS]
    for rows in (ROWS, tuple(ROWS), datasets.Dataset.from_list(ROWS), examples):
        objects = Objects(train=rows)
        settings = objects.name_in(load_settings("counting", ["data.train_limit=2"]))
        found = load_split(settings, Counting(), "train", objects)
        assert [example.answer for example in found] == [0, 1]
        assert settings.data.train == "python"
    with pytest.raises(UserError, match=r"^data\.train=python: .* as train\(settings, data=rows\)"):
        load_split(settings, Counting(), "train")


def test_objects_in_settings_are_refused():
    for values, message in (
        ({"task": Counting}, "task must be text, not .* give an object as an argument"),
        ({"task": 3}, r"task=3 should be text: give an object as an argument"),
        ({"task_options": {"marker": object()}}, "options.marker must be text, .* the task its"),
        ({"data": {"train": ROWS}}, r"data\.train=.* give rows as an argument, train\(settings, d"),
        ({"data": {"train": [EXAMPLE]}}, "data.train must be text, not Example: give rows"),
        # YAML reads them as mappings.
        (["data.train=hf:"], r"data\.train=.* names no dataset: write hf:NAME"),
        (["data.train=hf: lab/data"], r"data\.train=.* names no dataset: write hf:NAME"),
    ):
        with pytest.raises(UserError, match=message):
            load_settings("counting", values)


def test_other_objects_are_not_rows():
    dataset = datasets.Dataset.from_list(ROWS)
    cases: list[tuple[Any, str]] = [
        (dataset.to_pandas(), r': give df\.to_dict\("records"\)'),
        (datasets.DatasetDict({"train": dataset}), r'as ds\["train"\]'),
        (dataset.to_iterable_dataset(), r"give list\(dataset\)"),
        ((row for row in ROWS), r"give list\(rows\)"),
        ({"question": ["?"], "answer": [1]}, r"or Dataset\.from_dict\(columns\)"),
        (3, "a Dataset, or Examples, not int"),
        (["a"], "a Dataset, or Examples, not list"),
    ]
    for source, remedy in cases:
        message = f"should be a list of rows .*{remedy}"
        for use in (lambda rows: Objects(train=rows).name_in(make_settings()), load):
            with pytest.raises(UserError, match=message):
                use(source)
        with pytest.raises(UserError, match="task should be a subclass of Task or a task, not"):
            Objects(source).name_in(make_settings())


@pytest.mark.parametrize("name", ["torch", "numpy", "pandas", "arrow"])
def test_the_format_of_a_dataset_has_no_effect_and_its_transform_has(name):
    dataset = datasets.Dataset.from_list(ROWS)
    examples = load(dataset.with_format(name))
    assert [(type(e.answer), e.answer) for e in examples] == [(int, 0), (int, 1), (int, 2)]
    doubled = dataset.with_transform(lambda r: {**r, "answer": [2 * a for a in r["answer"]]})
    assert [e.answer for e in load(doubled)] == [0, 2, 4]


def test_an_example_with_a_wrong_field_is_a_bad_row():
    for fields, reason in (
        ({"id": 1}, "id must be non-empty text, not 1"),
        ({"question": None}, "question must be text, not None"),
        ({"images": ("ok.png",)}, "images must be a tuple of ImageRef: give rows .* instead"),
        ({"images": None}, "images must be a tuple of ImageRef"),
        ({"meta": None}, "meta must be a mapping, not None"),
    ):
        with pytest.raises(UserError, match=f"data.train row 1: an Example's {reason}"):
            load([replace(EXAMPLE, **fields)])


def test_numpy_scalars_are_accepted_in_rows_and_bad_rows_in_memory_are_named():
    (example,) = load([{"id": np.int64(7), "question": np.str_("?"), "answer": np.int64(3)}])
    assert (example.id, example.question, example.answer) == ("7", "?", 3)
    assert (type(example.question), type(example.answer)) == (str, int)
    rows: list[Any] = [*ROWS, {"question": "How many?"}, 5, {"question": "?", "answer": -1}]
    message = get_load_error(rows)
    assert "data.eval row 4: it has no answer" in message
    assert "data.eval row 5: it is not a mapping but int" in message
    assert "data.eval row 6: " in message
