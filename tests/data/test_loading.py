"""Loading of sources: limits, embedded datasets, bad rows, mixtures; the examples of a run."""

import logging
import pickle
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dataset_files import get_load_error, load, make_row, write_rows

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.config.data import DataSettings
from vlm_grpo.config.prompt import PromptSettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.data import loading
from vlm_grpo.data.held_out import split_by_image
from vlm_grpo.data.mixed_task import Mixed, load_run_task
from vlm_grpo.errors import UserError
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.registry import load_task
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Example, ImageRef
from vlm_grpo.utils.chat import ThinkingTags

COUNTING = load_task("counting")
COUNT = Example("count/a", (), "How many cups?", 3, source="count")
READ = Example("read/a", (), "Which word?", "exit", source="read")
ROWS = (
    {"question": "How many?", "answer": 3, "kind": "counting"},
    {"question": "Which word?", "answer": "exit", "kind": "ocr"},
)
BY_ROW = {"name": "mix", "columns": {"task": "kind"}, "tasks": {"counting": {}, "ocr": {}}}


def test_embedded_data_suits_its_task_and_its_splits_share_no_image():
    limits = {"train_limit": 40, "eval_limit": 30}
    tasks = {"counting": "counting", "grounding": "grounding", "ocr": "ocr", "words": "ocr"}
    tasks |= {"attributes:hard": "counting", "relations:hard,noise=0": "grounding"}
    for name, task in tasks.items():
        source, splits = f"embedded:{name}", ("train", "eval")
        train, held_out = (load(source, task, split, eval=source, **limits) for split in splits)
        assert (len(train), len(held_out)) == (40, 30)
        assert not {e.images[0].data for e in train} & {e.images[0].data for e in held_out}


def test_a_source_that_cannot_be_read_is_named():
    reasons = {
        "embedded:ocr": "does not fit Counting",
        "embedded:countin": "did you mean counting?",
        "embedded:relation:hard": "did you mean relations?",
        "rows.txt": "rows.txt is not a data source",
    }
    missing = "none.jsonl", "none.parquet", "~no-such-user/rows.jsonl"
    for source, reason in {**reasons, **{n: f"there is no data file {n}" for n in missing}}.items():
        assert reason in get_load_error(source)


def test_a_row_whose_prompt_the_task_cannot_write_is_a_bad_row(folder):
    source = write_rows(folder, make_row(id="good", meta={"hint": "Look!"}), make_row())
    message = r"has 1 bad row \(good rows: 1\):\n.*:2: the task cannot write its prompt: "
    for question, reason in (
        (lambda self, example: example.meta["hint"], "KeyError: 'hint'"),
        (lambda self, e: e.meta.get("hint"), "TypeError: question returned None, not"),
    ):
        task = type("Hinted", (type(COUNTING),), {"question": question})()
        with pytest.raises(UserError, match=message + reason):
            load(source, task)


def test_all_bad_rows_are_reported_together_in_a_list_of_limited_length(folder):
    rows = [make_row(id=i, question=0, answer="x") for i in range(3)]
    source = write_rows(folder, *rows, *[make_row(id=i, answer="x" * i) for i in range(9, 69)])
    message = get_load_error(source)
    assert "63 bad rows (good rows: 0)" in message
    assert f"\n    2 more like it: {source}:2, {source}:3\n" in message
    assert f"\n  - {source}:4: the answer 'xxxxxxxxx' " in message
    others = ", ".join(f"{source}:{number}" for number in range(5, 9))
    assert f"\n    59 more like it: {others}, …\n" in message
    source = write_rows(folder, make_row(id=1), make_row(id="1"))
    assert f"{source}:2: id '1' is a duplicate of {source}:1" in get_load_error(source)


def test_skipping_all_rows_is_an_error(folder):
    source = write_rows(folder, make_row(answer="x"))
    for on_bad_row in ("skip", "error"):
        message = get_load_error(source, on_bad_row=on_bad_row)
        assert "1 bad row (good rows: 0)" in message
        assert "on_bad_row" not in message  # no good row would be left
    assert "on_bad_row=skip" in get_load_error(write_rows(folder, make_row(answer="x"), make_row()))


@pytest.fixture
def mixed() -> Mixed:
    members = {"count": load_task("counting"), "read": load_task("ocr", tags=True)}
    return Mixed(members=members)


def build_settings(folder: Path, *rows: dict[str, Any], **source: Any) -> Settings:
    """Return settings with one list of sources: a file with the rows."""
    train = [{"source": write_rows(folder, *rows), **source}]
    return Settings(model="embedded", data={"train": train})


def test_each_example_has_the_task_of_its_source(mixed):
    for example, name in ((COUNT, "count"), (READ, "read")):
        own = mixed.members[name]
        assert mixed.resolve(example) == (name, own)
        assert mixed.prompt(example) == own.prompt(example)
        assert mixed.gold(example) == own.gold(example)
        assert mixed.read(mixed.gold(example), example) == example.answer
        mixed.check(example)
    assert "<answer>" in mixed.prompt(READ)
    assert "<answer>" not in mixed.prompt(COUNT)
    template = PromptSettings(template="{{ source }}: {{ question }} {{ instruction }}")
    texts = [template.write_chat(example, mixed)[-1].text for example in (COUNT, READ)]
    instruction = mixed.members["read"].instructions(READ)
    assert texts == ["count: How many cups? ", f"read: Which word? {instruction}"]
    with pytest.raises(ValueError, match="source 'other' is none of count, read"):
        mixed.resolve(Example("x", (), "?", 1, source="other"))


def test_gold_rewards_and_boxes_are_those_of_the_own_task_of_an_example():
    class Rounded(type(load_task("counting"))):
        def gold_reward(self, example: Example) -> float:
            return 0.75

        def gold_boxes(self, example: Example) -> Any:
            return ((0.0, 0.0, 8.0, 6.0),)

    mixed = Mixed(members={"count": Rounded(), "read": load_task("ocr")})
    assert [mixed.gold_reward(example) for example in (COUNT, READ)] == [0.75, 1.0]
    rows = [replace(example, meta={"boxes": [[1, 2, 3, 4]]}) for example in (COUNT, READ)]
    found = [mixed.gold_boxes(row) for row in rows]
    assert found == [((0.0, 0.0, 8.0, 6.0),), ((1.0, 2.0, 3.0, 4.0),)]


def test_what_the_trainer_sets_reaches_every_task(mixed):
    frame = FRAMES["permille"]
    framed = Mixed(members=mixed.members, frame=frame, token_limit=7).with_progress(0.5)
    for task in framed.members.values():
        assert (task.frame, task.token_limit, task.progress) == (frame, 7, 0.5)


def test_completions_are_scored_by_their_own_tasks(mixed):
    examples = [READ, COUNT, READ, COUNT]
    texts = ["<answer>exit</answer>", "3", "exit", "4"]
    scores = RewardScorer()(mixed, texts, examples)
    assert [score.total for score in scores] == [1.0, 1.0, 0.0, 0.0]
    assert scores[1].rewards["count/exact"] == 1.0
    assert all(name.startswith("read/") for name in (*scores[0].rewards, *scores[0].metrics))


def test_a_source_without_a_task_has_that_of_the_run_with_its_options():
    sources = [{"source": "embedded:counting", "task_options": {"tags": False}}]
    values = {"task": "counting", "task_options": {"tags": True, "thinking": True}}
    task = load_run_task(Settings(**values, data={"train": sources}))
    assert isinstance(task, Mixed)
    own = task.members["counting"]
    assert (own.tags, own.thinking) == (False, True)


def test_a_limit_that_no_source_takes_is_refused():
    names = ("a", "b")
    sources = [{"source": "x.jsonl", "limit": 5, "name": name, "task": "ocr"} for name in names]
    given = {"train": sources, "train_limit": 6}
    with pytest.raises(UserError, match=r"data\.train_limit has no effect, since every source"):
        Settings(model="embedded", data=given)
    del sources[0]["limit"]
    limits = Settings(model="embedded", data=given).data.get_sources("train")
    assert [source.limit for source in limits] == [6, 5]


def test_rows_may_name_their_tasks_which_must_be_known(tmp_path):
    settings = build_settings(tmp_path, *ROWS, **BY_ROW)
    task = load_run_task(settings)
    examples = loading.load_split(settings, task, "train")
    assert [e.source for e in examples] == ["mix/counting", "mix/ocr"]
    assert [e.id for e in examples] == ["mix/row-1", "mix/row-2"]
    assert [type(task.resolve(e)[1]).__name__ for e in examples] == ["Counting", "OCR"]
    assert [dict(e.meta) for e in examples] == [{}, {}]
    assert settings.task_names == ("counting", "ocr")
    for row, message in (
        ({**ROWS[0], "kind": "grounding"}, "rows.jsonl:2: its source 'grounding' is none of"),
        ({**ROWS[0], "kind": 3}, "rows.jsonl:2: its column kind must name its task"),
        ({**ROWS[1], "kind": "counting"}, "rows.jsonl:2: the answer"),
    ):
        settings = build_settings(tmp_path, ROWS[0], row, **BY_ROW)
        with pytest.raises(UserError, match=message):
            loading.load_split(settings, load_run_task(settings), "train")


def test_a_benchmark_gets_the_options_and_the_frame_of_the_run(tmp_path):
    path = tmp_path / "far.yaml"
    values = "task: counting\nmetric: absolute_error\nvariants: [exact]"
    path.write_text(f'title: Far\n{values}\nprompt: "Look. {{question}}"\n')
    run = load_settings("counting", [f"evaluation.benchmark={path}", "task_options.tags=true"])
    tags = ThinkingTags("[THINK]", "[/THINK]", is_open=True, is_native=True)
    run_task = load_task("counting", tags=True, frame=FRAMES["permille"], thinking_tags=tags)
    task = loading.get_held_out_task(run, run_task)
    assert task.prompt(COUNT) == f"Look. {run_task.prompt(COUNT)}"
    assert (task.tags, task.frame.name) == (True, "permille")
    assert task.read("4?[/THINK]<answer>3</answer>", COUNT) == 3
    assert task.read("<answer>3</answer>", COUNT) is None  # within the thinking
    assert (task.primary_metric, task.lower_is_better) == ("absolute_error", True)
    unpickled = pickle.loads(pickle.dumps(task))  # as for reward workers
    assert unpickled.score("<answer>3</answer>", COUNT) == task.score("<answer>3</answer>", COUNT)
    assert unpickled.corpus_metrics([3], [COUNT]) == task.corpus_metrics([3], [COUNT])
    # A benchmark of another task gets the common options.
    other = run.model_copy(update={"task": "ocr", "task_options": {"tags": True, "x": 1}})
    assert loading.get_held_out_task(other, run_task).tags


def test_a_run_without_tags_is_not_asked_for_those_of_the_benchmark():
    plain = load_settings("counting", ["evaluation.benchmark=super_clevr_200"])
    task = loading.get_held_out_task(plain, COUNTING)
    assert (task.tags, task.thinking) == (False, False)
    assert load_benchmark("super_clevr_200").load_task().tags


def choose(text: str, difficulty: str | Path | None = None) -> list[str]:
    examples = [Example(f"{n}", (), "?", 1, {"pass_rate": n / 10, "kind": "x"}) for n in range(11)]
    given = {"train": "rows.jsonl", "filter": text, "difficulty": difficulty}
    chosen, _ = loading.filter_examples(examples, DataSettings.model_validate(given))
    return [example.id for example in chosen]


def test_a_column_or_a_file_has_the_numbers_and_what_has_none_or_no_rows_is_refused(tmp_path):
    assert choose("0.1 < pass_rate < 0.4") == ["2", "3"]
    rows = [{"id": str(n), "pass_rate": 1 - n / 10} for n in range(11)]
    assert choose("pass_rate >= 0.9", write_rows(tmp_path, *rows)) == ["0", "1"]
    for text, path, message in (
        ("kind > 0", None, r"(?s)example 0.*: it has no number kind.*vlm-grpo sample RECIPE"),
        ("other > 0", None, "example 0.*: it has no number other"),
        ("pass_rate > 1", None, "none of the 11 training examples; .*pass_rate from 0 to 1"),
        ("a > 0", write_rows(tmp_path, {"a": 1}), r"rows.jsonl:1 has no id"),
        ("a > 0", tmp_path / "missing.jsonl", "cannot be read: No such file"),
    ):
        with pytest.raises(UserError, match=message):
            choose(text, path)


def test_only_training_examples_are_chosen_and_counted(tmp_path, caplog, monkeypatch):
    rows = [{"question": f"How many {n}?", "answer": n, "pass_rate": n / 8} for n in range(9)]
    caplog.set_level(logging.INFO)
    source = {"train": write_rows(tmp_path, *rows), "eval_share": 0.3}
    filtered = {**source, "filter": "pass_rate > 0.5"}
    every, some = (Settings(task="counting", model="x", data=data) for data in (source, filtered))
    train, held_out = loading.load_data(every, COUNTING)
    chosen, same = loading.load_data(some, COUNTING)
    assert list(same) == list(held_out)
    assert list(chosen) == [example for example in train if example.answer > 4]
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert f"keeps {len(chosen)} of {len(train)} training examples" in record.message
    monkeypatch.setenv("RANK", "1")
    loading.load_data(some, COUNTING)
    assert caplog.records == [record]  # one process says it


def image(name: str, data: bytes | None = None) -> ImageRef:
    path = None if data is not None else Path("/somewhere") / name
    return ImageRef(name, (8, 8), (8, 8), path, data)


def build_examples(count: int = 300) -> list[Example]:
    """Return rows: each image in three of them, and some images joined by a row with both."""
    images = [image(f"{number}.png") for number in range(count // 3 + 1)]
    pairs = ((n // 3, n // 3 + 1 + (n % 30 == 0)) for n in range(count))
    return [Example(str(n), tuple(images[a:b]), "?", 1) for n, (a, b) in enumerate(pairs)]


def names(examples: Sequence[Example]) -> set[str]:
    return {image.name for example in examples for image in example.images}


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3])
def test_no_image_is_on_both_sides(share):
    examples = build_examples()
    train, held_out = split_by_image(examples, share, seed=0)
    assert not names(train) & names(held_out)
    assert sorted([*train, *held_out], key=lambda e: int(e.id)) == examples
    assert share * 300 <= len(held_out) <= share * 300 + 6
    assert [e.id for e in train] == sorted((e.id for e in train), key=int)


def test_the_split_depends_on_images_and_seed_only():
    def hold_out(examples: Sequence[Example], seed: int = 0) -> set[str]:
        return {example.id for example in split_by_image(examples, 0.1, seed)[1]}

    examples = build_examples()
    shuffled = random.Random(1).sample(examples, len(examples))
    images = (tuple(replace(i, path=Path(i.name)) for i in e.images) for e in examples)
    moved = [replace(e, images=own) for e, own in zip(examples, images, strict=True)]
    assert hold_out(examples) == hold_out(shuffled) == hold_out(moved)
    assert hold_out(examples, seed=1) != hold_out(examples)


def test_equal_bytes_are_one_image_and_equal_questions_one_text_which_cannot_be_split():
    encoded = [Example(str(n), (image(f"row {n}", b"same"),), "?", 1) for n in range(4)]
    texts = [Example(f"t{n}", (), "What?", 1) for n in range(4)]
    for held_out in (split_by_image([*encoded, *texts], 0.1, seed)[1] for seed in range(5)):
        assert list(held_out) in (encoded, texts)
    with pytest.raises(UserError, match=r"data.eval_share=0.2 cannot split .* give data.eval"):
        split_by_image(build_examples(3), 0.2, 0)
