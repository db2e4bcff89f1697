"""``vlm-grpo validate``: sound tasks pass, and each way of being unsound is named."""

from __future__ import annotations

import pytest
from commands import fails, run

from vlm_grpo.cli import validation
from vlm_grpo.cli.validation import build_exploits
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.data_scripts.synthetic import write_examples
from vlm_grpo.task.registry import load_task


@pytest.mark.parametrize(
    "arguments",
    [
        ["counting"],
        ["grounding"],
        ["ocr"],
        ["counting", "tags=true"],
        ["grounding", "tags=true", "thinking=true"],
        ["grounding", "several=true", "absent=true"],
        ["ocr", "tags=true", "weights.format=0.1", "weights.length=0.1"],
        ["pointing", "--data", "embedded:grounding"],
        ["detection", "--data", "embedded:grounding"],
    ],
    ids=" ".join,
)
def test_the_built_in_tasks_are_sound_on_embedded_data(capsys, arguments):
    status, out, err = run(capsys, "validate", *arguments)

    assert (status, err) == (0, "")
    assert "gold answers earn 1.000 of the full reward" in out
    assert "an empty text earns at most 0.000" in out
    assert "is sound on this data" in out


def test_a_sound_task_of_a_user_passes(capsys, write_letters, letters_data):
    status, out, _ = run(capsys, "validate", write_letters(), "--data", letters_data)

    assert status == 0
    assert "Letters is sound on this data" in out


def test_settings_of_the_prompt_stand_among_the_options(capsys):
    good = "prompt.template='{{ question }} {{ instruction }}'"
    status, out, _ = run(capsys, "validate", "counting", good, "prompt.system=Count.")
    assert (status, "Counting is sound on this data" in out) == (0, True)
    message = fails(capsys, "validate", "counting", "prompt.template={{ quest }}")
    assert (
        'prompt.template="{{ quest }}" line 1 has the unknown name quest (did you mean question?)'
        in message
    )


@pytest.mark.parametrize("model", [[], ["--model", "embedded"]])
def test_the_prompt_of_every_row_is_written(capsys, model):
    bad = """prompt.template="{{ question }}{% if id.endswith('7') %}{{ meta.hint }}{% endif %}\""""
    message = fails(capsys, "validate", "counting", bad, *model)
    assert "50 prompts that cannot be" in message  # of 500 rows
    assert "prompt.template: UndefinedError: 'dict object' has no attribute 'hint'" in message


def test_gold_answers_that_earn_nothing_are_named(capsys, write_letters, letters_data):
    task = write_letters(parse="return None")
    message = fails(capsys, "validate", task, "--data", letters_data)

    assert "2 gold answers that do not earn the full reward" in message
    assert "a: 'a' holds no answer and earns right 0.000" in message


def test_a_reward_that_pays_for_hedging_is_named(capsys, write_letters, letters_data):
    task = write_letters(parse="return text", right="return float(example.answer in answer)")
    message = fails(capsys, "validate", task, "--data", letters_data)

    assert "two answers with or between earns 1.000, above 0.5, on a: 'a or b'" in message


def test_a_reward_that_raises_is_named_with_its_traceback(capsys, write_letters, letters_data):
    task = write_letters(right="return 1 / 0")
    _, _, err = run(capsys, "validate", task, "--data", letters_data)

    assert "right failed on example 'a'" in err
    assert "ZeroDivisionError" in err


def test_a_reward_that_hangs_is_named(capsys, counting_data, write_letters, monkeypatch):
    monkeypatch.setattr(validation, "REWARD_TIMEOUT", 0.1)
    task = write_letters("return text", "time.sleep(60)", "return str(answer)")
    status, _, message = run(capsys, "validate", task, "--data", counting_data)

    assert status == 2
    assert "right failed on example 'r3'" in message
    assert "longer than its limit of 0.1 s" in message


def test_a_parser_that_raises_on_a_hostile_text_is_named(capsys, write_letters, letters_data):
    task = write_letters("text.encode('utf-8'); return text if len(text) == 1 else None")
    message = fails(capsys, "validate", task, "--data", letters_data)

    assert "half a surrogate pair: it raised UnicodeEncodeError" in message


def test_a_slow_parser_is_named(capsys, write_letters, letters_data):
    # Above the limit, on long texts only.
    slow = "time.sleep(0.06 * (len(text) > 1000)); return text if len(text) == 1 else None"
    message = fails(capsys, "validate", write_letters(slow), "--data", letters_data)

    assert "100,000 letters: it took" in message


def test_a_gold_answer_that_is_not_written_as_text_is_named(capsys, counting_data, write_letters):
    task = write_letters("return text", "return 1.0")  # write returns the answer, a number
    message = fails(capsys, "validate", task, "--data", counting_data)

    assert "2 gold answers for which write returns no text:\n  - r3: 3" in message


def test_a_task_without_embedded_data_needs_data(capsys, write_letters):
    assert "give its data by --data" in fails(capsys, "validate", write_letters())


def test_a_missing_task_file_is_named_before_its_data(capsys):
    assert "there is no task file nope.py" in fails(capsys, "validate", "nope.py")


def test_an_image_that_cannot_be_decoded_is_named(capsys, tmp_path):
    examples = make_shapes.draw_examples("counting", 2)
    path = write_examples(examples, tmp_path / "made", "rows.jsonl")
    image = next((tmp_path / "made" / "images").iterdir())
    image.write_bytes(image.read_bytes()[:-200])

    message = fails(capsys, "validate", "counting", "--data", path)

    assert "1 images that cannot be decoded" in message
    assert image.name in message


def test_prompts_are_built_for_a_model(capsys, write_letters, letters_data):
    given = ["validate", write_letters(), "--data", letters_data]

    assert "not checked without --model" in run(capsys, *given)[1]
    status, out, _ = run(capsys, *given, "--model", "embedded")
    assert status == 0
    assert "tokens per prompt" in out
    message = fails(capsys, *given, "instruction=End with <|im_end|>", "--model", "embedded")
    assert "2 prompts that cannot be built" in message
    assert f"{letters_data}:1: example a: its prompt has the text <|im_end|>" in message


def test_data_with_one_gold_answer_have_no_second_answer_to_hedge_with():
    (example,) = make_shapes.draw_examples("counting", 1)
    names = {exploit.name for exploit in build_exploits(load_task("counting"), example, example)}

    assert "an empty text" in names
    assert not any(name.startswith("two answers") for name in names)


def test_exploits_of_a_tagged_task_have_the_gold_answer_outside_the_tags():
    first, second = make_shapes.draw_examples("counting", 2)
    exploits = build_exploits(load_task("counting", tags=True), first, second)
    texts = {exploit.name: exploit.text for exploit in exploits}

    assert texts["the answer without tags"] == str(first.answer)
    assert texts["an unclosed tag"] == f"<answer>{first.answer}"
