"""Samples of training examples: pass rates, and rows for supervised fine-tuning."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import pytest
from small_tasks import Distance

from vlm_grpo import Task, UserError, load_settings, load_task
from vlm_grpo.data.loading import load_examples
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.eval import sampling
from vlm_grpo.eval.sampling import SampledExamples, write_completions
from vlm_grpo.model.loading import load_prompt_builder
from vlm_grpo.model.prompts import PromptWriter
from vlm_grpo.task.coordinates import ORIGINAL
from vlm_grpo.types import Completion, Example
from vlm_grpo.utils.chat import Turn
from vlm_grpo.utils.jsonl import read_rows

COUNTING = load_task("counting")
EXAMPLES = [Example(name, (), f"How many {name}?", 3) for name in ("dogs", "cats", "cows")]
TEXTS = [["3", "3", "3 ", "4"], ["5", "5", "5", ""], ["3", "4", "4", "4"]]


def make_samples(
    examples: Sequence[Example],
    texts: Sequence[Sequence[str]],
    task: Task = COUNTING,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> SampledExamples:
    """Return scored samples of a model whose frame alone is known."""
    given = [f"data.columns.{name}={value}" for name, value in columns.items()]
    settings = load_settings("counting", given)
    writer = PromptWriter(ORIGINAL, None, settings.prompt)
    pairs = zip(examples, texts, strict=True)
    scores = [[task.score(text, example) for text in own] for example, own in pairs]
    outputs = [[*map(Completion.from_text, own)] for own in texts]
    return SampledExamples(settings, task, writer, examples, outputs, scores)


def test_the_pass_rate_is_the_mean_primary_metric_or_the_share_with_the_full_reward(tmp_path):
    found = make_samples(EXAMPLES, TEXTS)
    assert sampling.write_difficulty(found, tmp_path / "d.jsonl") == [0.75, 0.0, 0.25]
    row = {"id": "dogs", "pass_rate": 0.75, "samples": 4, "reward": 0.75}
    assert read_rows(tmp_path / "d.jsonl")[0] == row
    # Of a task whose metric is an error.
    found = make_samples(EXAMPLES[:1], [["3", "3.5", "", "3"]], Distance())
    assert sampling.write_difficulty(found, tmp_path / "d.jsonl") == [0.5]


def test_kept_completions_are_distinct_and_the_best(tmp_path):
    path = tmp_path / "s.jsonl"
    assert write_completions(make_samples(EXAMPLES, TEXTS), path) == (2, 2)
    rows = [(row["id"], row["completion"]) for row in read_rows(path)]
    assert rows == [("dogs", "3"), ("cows", "3")]
    assert write_completions(make_samples(EXAMPLES, TEXTS), path, least=0.0, keep=3) == (6, 3)
    rows = [(row["id"], row["completion"]) for row in read_rows(path)]
    assert rows[:4] == [("dogs", "3"), ("dogs#2", "3 "), ("dogs#3", "4"), ("cats", "5")]
    with pytest.raises(UserError, match="earned the full reward; the highest reward is 0: lower"):
        write_completions(make_samples(EXAMPLES[1:2], TEXTS[1:2]), tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("columns", [{}, {"answer": "solution", "id": "key"}])
def test_the_rows_are_read_as_the_examples_that_they_were(tmp_path, columns):
    drawn = make_shapes.draw_examples("counting", 2, seed=1)
    file = tmp_path / "1.png"
    drawn[0].images[0].load().save(file)
    image = replace(drawn[0].images[0], path=file, data=None, name="1.png")
    turns = (Turn("system", "Be brief."), Turn("user", "Hello"), Turn("assistant", "Hello."))
    meta = {"kind": "x", "completion": "an old one"}
    first, second = drawn
    examples = [replace(first, images=(image,), meta={}), replace(second, history=turns, meta=meta)]
    texts = [[str(example.answer)] for example in examples]
    path = tmp_path / "s.jsonl"
    found = make_samples(examples, texts, columns=columns)
    write_completions(found, path)
    assert sampling.find_outside_folder(found, path) is None
    assert sampling.find_outside_folder(found, tmp_path / "a" / "s.jsonl") == tmp_path
    assert read_rows(path)[0]["images"] == ["1.png"]
    again = load_examples(path, COUNTING, found.settings.data, "train")
    for example, before, (text,) in zip(again, examples, texts, strict=True):
        assert example.meta == {**before.meta, "completion": text}
        fields = ("id", "question", "answer", "history")
        assert [getattr(example, f) for f in fields] == [getattr(before, f) for f in fields]
        assert example.images[0].load().tobytes() == before.images[0].load().tobytes()


def test_truncated_completions_and_control_tokens_are_left_out(tmp_path):
    settings = make_samples([], []).settings
    prompts, limit = load_prompt_builder(settings), settings.rollout.max_completion_length
    # With its end token, the first has one token more than the limit, which training refuses.
    long, longest = "3" * limit, "3" * (limit - 1)
    assert len(prompts.processor.tokenizer(long)["input_ids"]) == limit
    found = make_samples([EXAMPLES[0]] * 2, [["3", long, longest], ["3<|im_end|>", "4"]])
    path = tmp_path / "s.jsonl"
    write_completions(replace(found, prompts=prompts), path, least=-1.0, keep=9)
    assert [row["completion"] for row in read_rows(path)] == ["3", longest, "4"]
