"""``vlm-grpo check``: sound tasks and data pass, and each way of being unsound is named.

tests/data/test_report.py covers the checks of the data.
"""

from textwrap import indent

import numpy as np
import pytest
from commands import fails, run
from dataset_files import encode_image, make_row, photo, write_files
from published_formats import write_format

from vlm_grpo import Settings, UserError, load_task
from vlm_grpo.cli.preview import build_preview
from vlm_grpo.config.data import DataSettings
from vlm_grpo.data.loading import load_examples
from vlm_grpo.model.loading import load_prompt_builder
from vlm_grpo.task import soundness
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.soundness import build_exploits
from vlm_grpo.types import Example, ImageRef


@pytest.mark.parametrize(
    "arguments",
    [
        "counting",
        "grounding tags=true task_options.thinking=true",  # as in a recipe, too
        "grounding several=true absent=true",
        "ocr tags=true weights.format=0.1 weights.length=0.1",
        "detection --data embedded:grounding",
        "spatial --data embedded:distances",  # options and estimates
        "keypoints tags=true --data embedded:figures",  # whose points are rounded
    ],
)
def test_the_built_in_tasks_are_sound_on_embedded_data(capsys, monkeypatch, arguments):
    monkeypatch.setattr(soundness, "_PARSE_SECONDS", 5.0)  # on a busy machine
    status, out, err = run(capsys, "check", *arguments.split())
    assert (status, err) == (0, "")
    earned = "0.99" if "keypoints" in arguments else "1.000"
    assert f"gold answers earn {earned}" in out
    assert "an empty text earns at most 0.000" in out
    assert "is sound on this data" in out


@pytest.mark.parametrize("model", [[], ["--model", "embedded"]])
def test_the_prompt_of_every_row_is_written(capsys, model):
    bad = """prompt.template="{{ question }}{% if id.endswith('7') %}{{ meta.hint }}{% endif %}\""""
    status, out, _ = run(capsys, "check", "counting", bad, *model)
    assert status == 2
    assert "prompts that cannot be built 50\n" in out  # of 500 rows
    assert "prompt.template: UndefinedError: 'dict object' has no attribute 'hint'" in out


# Above the limit, on one hostile text only. On a busy machine a parser waits for a processor, which
# is not its fault.
LETTER = "return text if len(text) == 1 else None"
WAITING = f"time.sleep(0.06 * text.startswith('aaa')); {LETTER}"
SLOW = (
    "end = time.process_time() + 0.06 * text.startswith('aaa'); "
    f"[_ for _ in iter(lambda: time.process_time() < end, False)]; {LETTER}"
)


@pytest.mark.parametrize(
    ("methods", "messages"),
    [
        ({"parse": "return None"}, ["a: 'a' holds no answer and earns right 0.000"]),
        (
            {"parse": "return text", "right": "return float(example.answer in answer)"},
            ["two answers with or between earns 1.000, above 0.5, on a: 'a or b'"],
        ),
        ({"right": "return 1 / 0"}, ["right failed on example 'a'", "ZeroDivisionError"]),
        ({"parse": f"text.encode('utf-8'); {LETTER}"}, ["pair: it raised UnicodeEncodeError"]),
        ({"parse": SLOW}, ["100,000 letters: it took"]),
        ({"write": "return 1.0"}, ["2 gold answers for which write returns no text:\n  - a: 1.0"]),
    ],
)
def test_an_unsound_task_is_named(capsys, write_letters, letters_data, methods, messages):
    status, _, error = run(capsys, "check", write_letters(**methods), "--data", letters_data)
    assert (status, [message for message in messages if message not in error]) == (2, [])


def test_a_busy_machine_does_not_make_a_parser_slow_but_waiting_does(
    succeed, capsys, write_letters, letters_data, monkeypatch
):
    given = ["check", write_letters(WAITING), "--data", letters_data]
    assert "the parser handles hostile texts" in succeed(*given)
    monkeypatch.setattr(soundness, "_PARSE_SECONDS", 0.005)  # it waits more than ten times as long
    assert "100,000 letters: it took 6" in fails(capsys, *given)


def test_gold_answers_that_no_completion_can_write_are_an_error():
    image = ImageRef("a", (4000, 4000), (4000, 4000))  # a thousandth of a side is 4 pixels
    boxes = [[n, n, n + 2, n + 2] for n in range(20)]
    examples = [Example(str(box), (image,), "the cup", {"boxes": [box]}) for box in boxes]
    task = load_task("grounding", frame=FRAMES["permille"])
    with pytest.raises(UserError, match="20 gold answers that earn less than half of the full"):
        list(soundness.check_task(task, examples))


def test_a_reward_that_hangs_is_named(capsys, letters_data, write_letters, monkeypatch):
    monkeypatch.setattr(soundness, "REWARD_TIMEOUT", 0.1)
    task = write_letters(right="time.sleep(60)")
    status, _, message = run(capsys, "check", task, "--data", letters_data)
    assert (status, "right failed on example 'a'" in message) == (2, True)
    assert "longer than its limit of 0.1 s" in message


def test_prompts_are_built_for_a_model(succeed, capsys, write_letters, letters_data):
    assert "give its data by --data" in fails(capsys, "check", write_letters())
    given = ["check", write_letters(), "--data", letters_data]
    out = succeed(*given)
    assert "not checked without --model: control tokens" in out
    assert "Letters is sound on this data" in out
    assert "tokens per prompt" in succeed(*given, "--model", "embedded")
    given += ["instruction=End with <|im_end|>", "--model", "embedded"]
    status, out, error = run(capsys, *given)
    assert (status, error) == (2, "error: the data are not sound: see above\n")
    assert "prompts that cannot be built 2\n" in out
    assert f"{letters_data}:1: example a: its prompt has the text <|im_end|>" in out


def test_exploits_with_tags_hedge_with_another_gold_answer_if_there_is_one():
    first, second = Example("a", (), "?", 3), Example("b", (), "?", 5)
    names = build_exploits(load_task("counting"), first, first)
    assert not any("two answers" in name for name in names)
    texts = build_exploits(load_task("counting", tags=True), first, second)
    assert texts["the answer without tags"] == "3"
    assert texts["two tagged answers"] == "<answer>5</answer><answer>3</answer>"
    assert texts["an unclosed tag"] == "<answer>3"


def test_the_limit_bounds_the_rows_and_images(succeed, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(soundness, "_PARSE_SECONDS", 5.0)  # on a busy machine
    out = succeed("check", "counting", "--limit", "3")
    assert "3 good rows" in out
    rows = [make_row(images=[]), make_row(id="b", images=["gone.png"])]
    source = write_files(tmp_path, {"train.jsonl": rows}) / "train.jsonl"
    given = ["check", "counting", "--data", source]
    assert run(capsys, *given, "--limit", "1")[0] == 0
    assert run(capsys, *given)[0] == 2
    assert run(capsys, *given, "data.on_bad_row=skip")[0] == 0


def test_images_and_ids_that_two_sources_share_exit_with_status_2(capsys, tmp_path):
    images = {"a.png": encode_image(photo(0)), "copy.bmp": encode_image(photo(0), "BMP")}
    write_files(tmp_path, {"train.jsonl": [make_row()], **images})
    numbered = [make_row(id=..., images=[])]  # ids that only number the rows
    given = ["check", "counting", "--data-only", "--data", tmp_path / "train.jsonl", "--against"]
    for row, line, expected in (
        (make_row(id="t", images=["copy.bmp"]), "1 IMAGES of", 2),
        (make_row(images=[]), "1 IDS ARE IN BOTH: a", 2),
        (make_row(id="t", images=[]), "have no image and no id in common", 0),
    ):
        write_files(tmp_path, {"other.jsonl": [row], "same.jsonl": numbered})
        status, out, _ = run(capsys, *given, tmp_path / "other.jsonl")
        assert (status, line in out, "gold answers" in out) == (expected, True, False)
    write_files(tmp_path, {"train.jsonl": numbered, "bad.jsonl": [make_row(answer="?")]})
    assert run(capsys, *given, tmp_path / "same.jsonl")[0] == 0
    status, out, _ = run(capsys, *given, tmp_path / "bad.jsonl")
    assert (status, "in common" in out) == (2, False)  # none of its rows is known


def test_rows_are_shown_as_the_model_gets_them(capsys, tmp_path):
    source, out = write_format(tmp_path, "coco", {"b.png": None}), tmp_path / "rows.html"
    given = ["several=true", "--data", source, "--rows", "2", "--preview", out]
    status, text, err = run(capsys, "check", "grounding", *given)
    assert (status, err) == (2, "error: the data are not sound: see above\n")
    assert f"bad rows                     1\n  - {source}: image 2: image b.png is missing" in text
    assert f"{source}: image 1: example 7-2" in text
    assert "image a.png: 64x48, seen as 56x56, 4 tokens" in text
    assert "<|vision_start|><|image_pad|><|vision_end|>Locate every book." in text
    # Boxes at 20, 8 and 40, 8 of 64x48, in pixels of 56x56: 20 * 56 / 64 = 17.5, 8 * 56 / 48 = 9.3.
    assert '[{"bbox_2d": [18, 9, 32, 23]}, {"bbox_2d": [35, 9, 49, 24]}]' in text
    assert f"2 rows drawn in {out}" in text
    page = out.read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "&lt;|vision_start|&gt;" in page


def test_a_preview_is_the_prompt_of_training_and_draws_the_gold_answer(tmp_path):
    source = write_format(tmp_path, "coco")
    data = DataSettings(train=source)
    prompts = load_prompt_builder(Settings(task="any", model="embedded", data=data))
    task = prompts.adapt(load_task("grounding", several=True))
    _, example, _ = load_examples(source, task, data, "train")
    text, (picture,) = build_preview(example, task, prompts)
    expected = prompts.build(prompts.with_resized_sizes(example), task)
    assert f"prompt, {len(expected.token_ids)} tokens:\n{indent(expected.text, '  ')}" in text
    assert picture.size == example.with_resized_sizes([(56, 56)]).images[0].resized_size
    # The image is red without green; the lines of the two boxes have green, blurred by the resize.
    rows, columns = np.nonzero(np.array(picture)[:, :, 1] > 60)
    assert (columns.min(), columns.max()) == pytest.approx((17.5, 49), abs=1.5)
    assert (rows.min(), rows.max()) == pytest.approx((9.3, 23.9), abs=1.5)


def test_settings_of_the_data_are_written_among_the_options(succeed, tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("ask,number\nHow many?,3\n")
    words = ["data.columns.question=ask", "data.columns.answer=number", "prompt.system=Count!"]
    given = [*words, "--data", rows, "--preview", tmp_path / "rows.html"]
    text = succeed("check", "counting", *given)
    assert "Count!" in text
    assert "gold answer 3, which a model should write as:\n    3" in text
