"""Targets: their texts, their tokens, and the rows that have none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_runs import make_trainer
from tiny_models import make_prompt, noise_example, tiny_policy

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.task import Task, reward
from vlm_grpo.training.methods.warm_start import TargetWriter, find_end_token, write_groups
from vlm_grpo.training.trainer import Trainer
from vlm_grpo.types import Example

WARM = {"steps": 2, "lr": 1e-2}


class Copy(Task):
    """Repeat the answer of the row."""

    primary_metric = "same"

    def parse(self, text: str, example: Example) -> str:
        if text == "raise":
            raise KeyError(text)
        return text

    def write(self, answer: str, example: Example) -> str:
        if answer == "error":
            raise ZeroDivisionError("no text")
        return answer

    @reward()
    def same(self, answer: str, example: Example) -> float:
        return float(answer == example.answer)


def make_settings(*overrides: str) -> Settings:
    limit = "rollout.max_completion_length=8"
    return load_settings("quickstart", ["warm_start.steps=2", limit, *overrides])


def make_example(answer: Any, meta: Mapping[str, Any] | None = None) -> Example:
    return Example("a", (), "Which?", answer, meta or {}, "rows.jsonl:3")


@pytest.fixture(scope="module")
def policy() -> Any:
    return tiny_policy("qwen2_5_vl")


def test_a_target_is_the_gold_text_and_the_end_token(policy):
    writer = TargetWriter(policy, make_settings())
    target = writer.write(make_example("red"), Copy(tags=False))
    end = policy.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert policy.tokenizer.decode(target.token_ids[:-1]) == "red"
    assert target.token_ids[-1] == end
    assert (target.text, target.stop) == ("red", "eos")
    assert target.logprobs == (0.0,) * len(target.token_ids)  # no other text can be written
    writer = TargetWriter(policy, make_settings("rollout.max_completion_length=20"))
    tagged = writer.write(make_example("7"), Copy(tags=True)).text
    assert tagged == "<answer>7</answer>"


def test_a_row_with_a_completion_of_its_own_is_trained_on_it(policy):
    writer = TargetWriter(policy, make_settings())
    assert writer.write(make_example("red", {"completion": "blue"}), Copy()).text == "blue"
    assert writer.write(make_example("red", {"completion": None}), Copy()).text == "red"


@pytest.mark.parametrize(
    ("answer", "meta", "overrides", "problem"),
    [
        ("longer than it", {}, (), r"than it' has 15 tokens .* rollout.max_completion_length=8"),
        ("a", {}, ["rollout.min_new_tokens=2"], "ends after 1 tokens, before .*min_new_tokens=2"),
        ("<|im_end|>", {}, (), "has the text of a control token"),
        ("error", {}, (), "the task cannot write its gold answer: ZeroDivisionError"),
        ("", {}, (), "the task's gold answer must be text, not ''"),
        (5, {}, (), "the task's gold answer must be text, not 5"),
        ("a", {"completion": ["a"]}, (), r"its column completion must be text, not \['a'\]"),
        ("a", {"completion": ""}, (), "its column completion must be text, not ''"),
    ],
)
def test_targets_that_cannot_be_trained_on_name_their_row(policy, answer, meta, overrides, problem):
    writer = TargetWriter(policy, make_settings(*overrides))
    with pytest.raises(UserError, match=f"^rows.jsonl:3: example a: .*{problem}"):
        writer.write(make_example(answer, meta), Copy())


def test_the_limit_counts_the_end_token(policy):
    length = len(TargetWriter(policy, make_settings()).write(make_example("abc"), Copy()).token_ids)
    for limit, fits in ((length, True), (length - 1, False)):
        writer = TargetWriter(policy, make_settings(f"rollout.max_completion_length={limit}"))
        if fits:
            assert len(writer.write(make_example("abc"), Copy()).token_ids) == limit
        else:
            with pytest.raises(UserError, match="raise it"):
                writer.write(make_example("abc"), Copy())


TURN = "{% for m in messages %}{% set c = m['content'] %}{{ c if c is string else c[0]['text'] }}"


@pytest.mark.parametrize(
    ("after", "expected"),
    [("<|im_end|>\n", "<|im_end|>"), ("<|endoftext|>", "<|endoftext|>"), ("", "<|endoftext|>")],
)
def test_the_end_token_is_that_of_the_chat_template(after, expected):
    """A model can have several; Gemma's first one, for example, is not that of a turn."""
    policy = tiny_policy("qwen2_5_vl")
    tokens = policy.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    policy.distribution = type(policy.distribution)(eos=tuple(tokens))
    policy.processor.chat_template = TURN + after + "{% endfor %}"
    assert find_end_token(policy) == policy.tokenizer.convert_tokens_to_ids(expected)


def test_equal_prompts_share_a_group_and_an_image_its_pass(policy):
    writer = TargetWriter(policy, make_settings())
    questions, answers = ["Why?", "Where?", "Why?"], ["a", "bc", "raise"]
    examples = [
        noise_example(name, [(56, 56)], question, seed=1)
        for name, question in zip("123", questions, strict=True)
    ]
    prompts = [
        make_prompt(policy, Example(e.id, examples[0].images, e.question, answer))
        for e, answer in zip(examples, answers, strict=True)
    ]
    groups = write_groups(prompts, writer, Copy())
    assert [[c.text for c in group.completions] for group in groups] == [["a", "raise"], ["bc"]]
    assert [group.id for group in groups] == ["1", "2"]
    (first, failed), (second,) = (group.scores for group in groups)
    assert (first.answer, second.answer, failed.answer) == ("a", "bc", None)
    assert "KeyError" in failed.failures["parse"]
    assert not first.rewards
    assert first.total is None


def make_rows_trainer(settings: Any, folder: Path, rows: list[Any], **changes: Any) -> Trainer:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(path), "train_limit": None, **changes.pop("data", {})}
    return make_trainer(settings(data=data, warm_start=WARM, **changes))


def test_rows_of_one_image_encode_it_once(settings, tmp_path):
    image = noise_example("a", [(56, 56)]).images[0]
    image.load().save(tmp_path / "a.png")
    rows = [
        {"id": str(n), "images": ["a.png"], "question": question, "answer": answer}
        for n, (question, answer) in enumerate([("Why?", "a"), ("Where?", "b"), ("Why?", "c")])
    ]
    trainer = make_rows_trainer(settings, tmp_path, rows)
    sizes: list[int] = []
    write_groups = trainer.run_dir.write_groups
    trainer.run_dir.write_groups = lambda step, groups, *rest: (  # type: ignore[method-assign]
        sizes.extend(len(g.completions) for g in groups),
        write_groups(step, groups, *rest),
    )[1]
    metrics = trainer.step()
    assert sorted(sizes) == [1, 2]
    assert metrics["work/encoder_passes"] == 1
    assert metrics["work/image_decodes"] == 1


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_a_target_that_is_too_long_ends_or_leaves_the_run_before_its_first_step(
    settings, tmp_path, on_bad_row
):
    rows = [
        {"id": str(n), "question": "?", "answer": text} for n, text in enumerate(["a", "ab" * 9])
    ]
    arguments = settings, tmp_path, rows
    if on_bad_row == "skip":
        trainer = make_rows_trainer(*arguments, data={"on_bad_row": "skip"})
        assert [example.id for example in trainer.train_examples] == ["0"]
        return
    with pytest.raises(UserError, match=r"rows.jsonl:2: example 1: its target .* tokens"):
        make_rows_trainer(*arguments)
