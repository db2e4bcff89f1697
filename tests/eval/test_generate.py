"""Generation for all examples: bounded chunks, outputs that do not depend on the batches, and the
log of a stopped evaluation."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import tiny_policy

from vlm_grpo import UserError, load_settings, load_task
from vlm_grpo.data.loading import load_examples
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.eval.generate import generate_all
from vlm_grpo.eval.models import LocalModel, split_into_chunks
from vlm_grpo.eval.outputs import read_outputs
from vlm_grpo.eval.prediction_log import PredictionLog, open_log
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.task import PlainQuestion
from vlm_grpo.types import Completion, Example, ImageRef
from vlm_grpo.utils.chat import Turn

EXAMPLES = make_shapes.draw_examples("counting", 10, seed=1)
KEYS = [(example.id, 0) for example in EXAMPLES]
GOLDS = [Completion.from_text(str(example.answer)) for example in EXAMPLES]
REQUEST = {"model": "embedded", "seed": 0}


def make_example(number: int, *sides: int) -> Example:
    """Return an example with square images, resized to these sides."""
    images = tuple(ImageRef("a", (1, 1), (side, side), data=b"") for side in sides)
    return Example(str(number), images, "?", 1)


def test_chunks_have_a_bounded_number_of_pixels_and_examples():
    # Sides of 2,048: four such images are the budget of 2 ** 24 pixels.
    large = [make_example(i, 2048) for i in range(9)]
    assert split_into_chunks(large) == [range(0, 4), range(4, 8), range(8, 9)]
    several = [make_example(i, 2048, 2048, 2048) for i in range(3)]
    assert split_into_chunks(several) == [range(0, 1), range(1, 2), range(2, 3)]
    huge = [make_example(0, 28), make_example(1, 8000), make_example(2, 28)]
    assert split_into_chunks(huge) == [range(0, 1), range(1, 2), range(2, 3)]
    small = [make_example(i, 28) for i in range(150)]
    assert split_into_chunks(small) == [range(0, 64), range(64, 128), range(128, 150)]
    assert split_into_chunks([]) == []


def test_examples_that_the_model_cannot_use_are_named_before_any_is_generated(monkeypatch):
    policy = tiny_policy("qwen2_5_vl")
    monkeypatch.setattr(policy, "sample", lambda *_: pytest.fail("an output was generated"))
    examples = [Example("good", (), "What?", 1), Example("bad", (), "What<|im_end|>?", 1)]

    with pytest.raises(UserError, match=r"example bad: its prompt has the text <\|im_end\|>"):
        generate_all(LocalModel(policy, load_settings("counting")), PlainQuestion(), examples)


@pytest.fixture(scope="module")
def policy() -> Policy:
    """The embedded model."""
    return load_policy(load_settings("counting"), training=False)


def generate_counts(
    policy: Policy, count: int, *overrides: str, log: PredictionLog | None = None
) -> tuple[list[Example], list[Completion]]:
    settings = load_settings("counting", [f"data.eval_limit={count}", *overrides])
    task = load_task("counting", frame=policy.prompts.frame)
    examples = load_examples("embedded:counting", task, settings.data, "eval")
    return generate_all(LocalModel(policy, settings), task, examples, log)


def test_outputs_do_not_depend_on_the_batch_size(policy):
    first, *others = (
        generate_counts(policy, 24, f"evaluation.max_tokens_per_batch={tokens}")
        for tokens in (1, 500, 100_000)
    )
    # Rounding in float32 depends on the size of a batch, but changes no token of these 24 outputs.
    assert others == [first, first]


def test_several_samples_begin_with_the_only_one_and_resume(policy, tmp_path, monkeypatch):
    monkeypatch.setattr("vlm_grpo.eval.models.CHUNK_EXAMPLES", 2)
    once = generate_counts(policy, 6, "evaluation.temperature=2")[1]
    given = (policy, 6, "evaluation.temperature=2", "evaluation.samples=4")
    examples, texts = generate_counts(*given)
    assert len({example.id for example in examples}) == 6
    assert (texts[::4], len(texts)) == (once, 24)
    assert len(set(texts[:4])) > 1, "the samples of an example are equal"

    log = PredictionLog(tmp_path, {})
    keys = [(example.id, number) for example in examples[2:4] for number in range(4)]
    # One chunk of two is finished, and one sample of the next, which is generated again.
    kept = [Completion.from_text("\ud83d")] * 8  # UTF-8 cannot encode it
    log.append(keys, [examples[2]] * 4 + [examples[3]] * 4, kept)
    log.append([(examples[0].id, 3)], [examples[0]], [Completion.from_text("incomplete")])
    resumed = generate_counts(*given, log=PredictionLog(tmp_path, {}))[1]
    assert resumed == [*texts[:8], *kept, *texts[16:]]
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["output"] for line in lines] == [output.text for output in resumed]


def append(log: PredictionLog, chunk: slice) -> None:
    log.append(KEYS[chunk], EXAMPLES[chunk], GOLDS[chunk])


def test_a_stopped_evaluation_keeps_the_complete_lines_of_each_process(tmp_path):
    log = PredictionLog(tmp_path, REQUEST)
    append(log, slice(4))
    append(log, slice(4, 6))
    with log.rank_path.open("a") as file:  # the process ended within a line
        file.write('{"id": "shapes-coun')
    assert not log.path.exists(), "the file exists only when complete"

    resumed = PredictionLog(tmp_path, REQUEST)
    assert resumed.outputs == dict(zip(KEYS[:6], GOLDS, strict=False))
    append(resumed, slice(4, 10))
    image = replace(EXAMPLES[0].images[0], resized_size=(56, 56))
    examples = [replace(EXAMPLES[0], images=(image,)), *EXAMPLES[1:]]
    resumed.finish(KEYS, examples, GOLDS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions.jsonl", "request.json"]
    assert [*PredictionLog(tmp_path, REQUEST).outputs] == KEYS
    assert read_outputs(resumed.path, EXAMPLES) == (examples, GOLDS)
    first, second = (PredictionLog(tmp_path / "ranks", REQUEST, rank=rank) for rank in range(2))
    append(first, slice(5))
    append(second, slice(5, 10))
    assert first.rank_path != second.rank_path
    assert PredictionLog(tmp_path / "ranks", REQUEST).outputs == dict(zip(KEYS, GOLDS, strict=True))


def test_a_request_has_the_prompts_in_full(tmp_path):
    task, chat = load_task("counting"), (Turn("user", "a"), Turn("assistant", "b"))

    def open_one(example: Example, *overrides: str) -> PredictionLog:
        settings = load_settings("counting", overrides)
        model: Any = SimpleNamespace(settings=settings, served_name=None)
        return open_log(tmp_path, model, None, task, [example])

    open_one(EXAMPLES[0])
    open_one(EXAMPLES[0], "evaluation.every=5")  # does not change the outputs
    with pytest.raises(UserError, match=r"questions was .* and is now"):
        open_one(replace(EXAMPLES[0], history=chat))
    with pytest.raises(UserError, match=r"prompt.system was None and is now 'Be brief.'"):
        open_one(EXAMPLES[0], "prompt.system=Be brief.")
