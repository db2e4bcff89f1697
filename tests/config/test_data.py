"""The settings of data: lists of sources, their names and defaults."""

from pathlib import Path

import pytest
import yaml

from vlm_grpo import Settings, UserError, load_settings
from vlm_grpo.config.data import DataSettings, SourceSettings

COUNT = {"source": "embedded:counting", "task": "counting"}
OTHER, TALLY = {**COUNT, "name": "b"}, {"benchmark": "tallyqa"}


@pytest.mark.parametrize(
    ("values", "label"),
    [
        ({"source": "a.jsonl", "name": "mine", "task": "ocr"}, "mine"),
        ({"source": "a.jsonl", "task": "ocr"}, "ocr"),
        ({"source": "a.jsonl", "task": "my_tasks/clock.py:Clock"}, "clock"),
        ({"source": "data/train set.jsonl"}, "train-set"),
        ({"source": "hf:owner/counts:train"}, "counts"),
        ({"source": "embedded:ocr"}, "ocr"),
        ({"source": "python"}, "python"),
        ({"source": "…"}, "-"),
    ],
)
def test_the_name_of_a_source(values, label):
    assert SourceSettings(**values).label == label


def test_a_source_gets_the_defaults_of_all_sources():
    own = {"source": "a.jsonl", "limit": 3, "columns": {"answer": "gold"}, "image_root": Path("x")}
    sources = {"train": [own, {"source": "b.jsonl"}], "eval": [{"source": "c.jsonl"}]}
    limits = {"train_limit": 9, "eval_limit": 4, "columns": {"answer": "label", "id": "key"}}
    roots = {"image_root": Path("images"), "eval_image_root": Path("other")}
    data = DataSettings(**sources, **limits, **roots)
    first, second = data.get_sources("train")
    assert (first.limit, second.limit) == (3, 9)
    assert first.columns == {"answer": "gold", "id": "key"}
    assert second.columns == {"answer": "label", "id": "key"}
    assert (first.image_root, second.image_root) == (Path("x"), Path("images"))
    (held_out,) = data.get_sources("eval")
    assert (held_out.limit, held_out.image_root) == (4, Path("other"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": [COUNT, COUNT]}, "data.train has several sources counting: give each a name"),
        ({"train": [{**COUNT, "weight": 0}]}, "data.train.0.weight=0 should be greater than 0"),
        ({"train": [{**COUNT, "wieght": 1}]}, "data.train.0.wieght (did you mean data.train.0.we"),
        ({"train": [{**COUNT, **TALLY}]}, "leave out task and tasks"),
        ({"train": [{"source": "a", **TALLY}]}, "no effect in data.train"),
        ({"train": [COUNT], "eval": [{**COUNT, "weight": 1}]}, "weight has no effect in data.eval"),
        ({"train": [COUNT], "mixing_temperature": 2}, "needs several sources"),
        ({"train": [COUNT, {**OTHER, "weight": 1}], "mixing_temperature": 2}, "without weights"),
        ({"train": [{**COUNT, "tasks": {"ocr": {}}}]}, "tasks and columns.task need each other"),
        ({"train": [{**COUNT, "tasks": {"ocr": {}}, "columns": {"task": "k"}}]}, "replaces task"),
        ({"train": [COUNT], "eval": "a.jsonl", "eval_share": 0.1}, "exclude each other"),
        ({"train": [COUNT], "eval_share": 1.0}, "data.eval_share=1.0 should be less than 1"),
        ({"train": [{"source": "a.jsonl"}]}, "data.train: the source a has no task: give it task"),
        ({"train": "a.jsonl"}, "task has no value"),
        ({"train": [COUNT], "difficulty": "d.jsonl"}, "has no effect without data.filter"),
        ({"train": [COUNT], "task_options": {"tags": True}}, "task_options has no effect"),
        ({"train": [COUNT], "eval": [COUNT], "evaluation": TALLY}, "give benchmark to a source"),
    ],
)
def test_wrong_sources_are_refused(values, message, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    others = {key: values[key] for key in ("task_options", "evaluation") if key in values}
    data = {key: value for key, value in values.items() if key not in others}
    recipe.write_text(yaml.safe_dump({"model": "embedded", "data": data, **others}))
    with pytest.raises(UserError) as caught:
        load_settings(recipe)
    assert message in str(caught.value)


def test_the_embedded_model_is_the_default_of_tasks_that_it_has_learned():
    other = {"source": "a.jsonl", "task": "my_task.py"}
    assert Settings(data={"train": [COUNT]}).model == "embedded"
    with pytest.raises(UserError, match="model has no value"):
        Settings(data={"train": [COUNT, other]})
