"""Scores of files in our layout and in those of VLM-R1, R1-V and lmms-eval, and rows that match no
example."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import fails, run, write_jsonl
from PIL import Image
from published_formats import lmms_eval_sample, r1_v_result, vlm_r1_result

from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.errors import UserError
from vlm_grpo.eval.outputs import read_outputs

SIZE = (640, 480)
CUP = ("the cup", [64, 48, 320, 240])


def write_data(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write canonical rows, with ids and images added."""
    for number, row in enumerate(rows):
        row.setdefault("id", f"row {number}")
        for name in row["images"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", SIZE).save(folder / name)
    return write_jsonl(folder / "data.jsonl", *rows)


def grounding_data(folder: Path) -> Path:
    boxes = {"the cup": [64, 48, 320, 240], "the red cup": [0, 0, 100, 100]}
    rows = [
        {"images": ["coco/7.jpg"], "question": question, "answer": {"boxes": [box]}}
        for question, box in boxes.items()
    ]
    rows.append({**rows[0], "images": ["coco/9.jpg"], "answer": {"boxes": [[1, 2, 30, 40]]}})
    return write_data(folder, rows)


def ocr_data(folder: Path) -> Path:
    rows = [
        {"images": [f"{n}.png"], "question": f"What is on sign {n}?", "answer": ["EXIT", "Exit"]}
        for n in range(3)
    ]
    return write_data(folder, rows)


def counting_data(folder: Path, *numbers: int) -> Path:
    rows = [{"images": [f"{n}.png"], "question": "How many items?", "answer": n} for n in numbers]
    return write_data(folder, rows)


def predictions(
    folder: Path, layout: str, content: list[dict[str, Any]] | str, frame: str | None = None
) -> list[object]:
    """Write a file in a layout, and return the options that give it."""
    path = folder / "log"
    if isinstance(content, str):
        path.write_text(content)
    elif layout == "lmms_eval":
        write_jsonl(path, *content)
    else:
        path.write_text(json.dumps({"accuracy": 50.0, "results": content}, indent=2))
    given: list[object] = ["--predictions", path, "--format", layout]
    return given if frame is None else [*given, "--frame", frame]


def score_as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    status, out, err = run(capsys, "evaluate", *arguments, "--json")
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


def boxed(box: list[int]) -> str:
    return f'<think>I see.</think><answer>```json\n[{{"bbox_2d": {box}}}]\n```</answer>'


def test_vlm_r1_boxes_are_in_pixels_of_the_resized_image(capsys, tmp_path):
    rows = [
        vlm_r1_result("the red cup", [0, 0, 100, 100], boxed([0, 0, 50, 50])),  # the full box
        vlm_r1_result(*CUP, boxed([32, 24, 160, 72])),  # its upper half
    ]
    given = ["--data", grounding_data(tmp_path), *predictions(tmp_path, "vlm_r1", rows, "resized")]
    first, second, total = score_as_json(capsys, "grounding", *given)
    # In the order of the dataset, matched by image name, expression and gold box.
    assert (first["id"], first["rewards"]["iou"]) == ("row 0", pytest.approx(0.5))
    assert (second["id"], second["rewards"]["iou"]) == ("row 1", pytest.approx(1.0))
    assert total["total"]["n"] == 2
    status, out, _ = run(capsys, "evaluate", "grounding", *given)
    assert (status, "1 more examples have no output in the file" in out) == (0, True)


def test_vlm_r1_results_without_a_resized_size_are_scored_in_other_frames(capsys, tmp_path):
    """src/eval/test_rec_r1_internvl.py writes no size, and src/eval/test_od_r1.py no image."""
    result = vlm_r1_result(*CUP, "<box>[[100,100,500,500]]</box>")
    for key in ("input_size", "image_size", "image"):
        del result[key]
    given = predictions(tmp_path, "vlm_r1", [result])
    given += ["--data", grounding_data(tmp_path), "--no-tags"]
    row, _ = score_as_json(capsys, "grounding", *given, "--frame", "internvl")
    assert (row["id"], row["rewards"]["iou"]) == ("row 0", pytest.approx(1.0))
    message = fails(capsys, "evaluate", "grounding", *given, "--frame", "resized")
    assert "needs the size of the resized image" in message


def test_r1_v_results_are_scored(capsys, tmp_path):
    outputs = [
        r1_v_result("/home/x/9.png", 9, "<think>\n10\n</think>\n<answer>\n10\n</answer>"),
        r1_v_result("./images/4.png", "4", "<answer>four</answer>"),
    ]
    given = ["--data", counting_data(tmp_path, 4, 9), *predictions(tmp_path, "r1_v", outputs)]
    first, second, _ = score_as_json(capsys, "counting", *given)
    assert (first["answer"], first["rewards"]["exact"]) == (4, 1.0)
    assert (second["answer"], second["rewards"]["exact"]) == (10, 0.0)


def test_r1_v_results_have_the_accuracy_of_its_log(capsys, caplog, tmp_path):
    outputs = {4: "<answer>\n4\n</answer>", 8: "<answer>8 items</answer>", 9: "9"}
    results = [r1_v_result(f"{n}.png", n, text) for n, text in outputs.items()]
    given = ["--data", counting_data(tmp_path, *outputs), *predictions(tmp_path, "r1_v", results)]
    status, out, err = run(capsys, "evaluate", "super_clevr_200", *given)
    assert (status, err) == (0, "")
    assert caplog.messages == []  # no warning: the rows are not training data
    # Its rule is digits alone in tags; the reward also reads words around them.
    assert "exact 33.3" in out
    assert "n = 3, 33.3% answered" in out
    assert "as the reward reads answers: 66.7 (66.7% answered)" in out


def test_boxes_of_lmms_eval_are_fractions_of_the_image(capsys, tmp_path):
    prompt = "All values are floating point numbers bounded between 0 and 1. {}"
    rows = [  # the cup's box, and the left half of the red cup's, in an image of 640 x 480
        lmms_eval_sample(0, prompt.format("the cup"), resps=[["[0.1, 0.1, 0.5, 0.5]"]]),
        lmms_eval_sample(1, prompt.format("the red cup"), resps=[["[0.0, 0.0, 0.078, 0.208]"]]),
    ]
    given = predictions(tmp_path, "lmms_eval", rows, "fraction")
    first, second, _ = score_as_json(
        capsys, "grounding", "--data", grounding_data(tmp_path), *given
    )
    assert first["rewards"]["iou"] == pytest.approx(1.0)
    assert second["rewards"]["iou"] == pytest.approx(0.5, abs=0.01)  # 49.92 x 99.84 of 100 x 100


def test_lmms_eval_samples_are_matched_by_index(capsys, tmp_path):
    rows = [
        # The format of newer versions, of older versions, and a response that a filter changed.
        lmms_eval_sample(2, "What is on sign 2?", filtered_resps="EXIT"),
        lmms_eval_sample(0, "What is on sign 0?", filtered_resps=["Exit"]),
        lmms_eval_sample(1, "What is on sign 1?", filtered_resps="EXIT", resps=[["EXIT sign"]]),
    ]
    given = [*predictions(tmp_path, "lmms_eval", rows), "--no-tags", "--data", ocr_data(tmp_path)]
    *scores, total = score_as_json(capsys, "ocr", *given)
    assert [row["answer"] for row in scores] == ["Exit", "EXIT sign", "EXIT"]
    assert total["total"]["metrics"]["exact"] == pytest.approx(2 / 3)


CUP_RESULT = vlm_r1_result(*CUP, boxed([1, 2, 3, 4]))
SIGN_1 = lmms_eval_sample(1, "What is on sign 1?", filtered_resps="EXIT")


@pytest.mark.parametrize(
    ("layout", "content", "reason"),
    [
        ("vlm_r1", '{"id": "1", "output": "3"}\n{"id": "2", "output": "3"}', "is not a JSON file"),
        ("vlm_r1", '{"accuracy": 3}', 'it lacks {"results": […]}'),
        ("vlm_r1", '{"results": [{"question": "?"}]}', "results[0] must have question, ground_"),
        ("r1_v", "[]", 'it lacks {"results": […]}'),
        ("r1_v", '{"results": []}', "has no outputs"),
        ("r1_v", [CUP_RESULT], "is a str, but r1_v writes a dict: is it another --format?"),
        ("vlm_r1", [r1_v_result("7.jpg", 3, "")], "is a dict, but vlm_r1 writes a str"),
        ("lmms_eval", '{"id": "1", "output": "3"}', ":1: not a sample logged by lmms-eval"),
        ("lmms_eval", '{"results": [', "the line is not JSON"),
        ("lmms_eval", '{"doc_id": 0, "resps": [["a", "b"]]}', "it has 2 responses"),
        ("lmms_eval", '{"doc_id": 9, "resps": [["a"]]}', "number 9 (from 0) does not exist"),
        ("vlm-r1", "", "did you mean vlm_r1?"),
        # rows that match no example
        ("vlm_r1", [{**CUP_RESULT, "image": "x/8.jpg"}], "results[0]: no example has an image 8"),
        ("vlm_r1", [{**CUP_RESULT, "question": "A dog?"}], "no unmatched example has the question"),
        (
            "vlm_r1",
            [{**CUP_RESULT, "ground_truth": [64, 48, 320, 300]}],
            "results[0]: its gold answer [64, 48, 320, 300] is not that of example row 0, {'boxes'",
        ),
        (
            "vlm_r1",
            [{**CUP_RESULT, "ground_truth": [100, 100, 500, 500]}],
            "in thousandths of the image's sides: such a file cannot be scored",
        ),
        ("vlm_r1", [{**CUP_RESULT, "model_output": None}], "results[0]: its output and its image"),
        ("vlm_r1", [{**CUP_RESULT, "input_size": "2x3"}], "is '2x3', not [height, width]"),
        # The other example of the image has another box.
        ("vlm_r1", [CUP_RESULT, CUP_RESULT], "results[1]: its gold answer"),
        ("lmms_eval", [SIGN_1, SIGN_1], "example number 1 (from 0) has an output already"),
        (
            "lmms_eval",
            [{**SIGN_1, "doc_id": 0}],
            "its prompt does not contain 'What is on sign 0?', example number 0's question",
        ),
    ],
)
def test_a_file_of_another_layout_or_of_other_examples_is_refused(
    capsys, tmp_path, layout, content, reason
):
    task, data = ("ocr", ocr_data) if layout == "lmms_eval" else ("grounding", grounding_data)
    given = ["--data", data(tmp_path), *predictions(tmp_path, layout, content)]
    assert reason in fails(capsys, "evaluate", task, *given)


EXAMPLES = make_shapes.draw_examples("counting", 10, seed=1)
FIRST = {"id": EXAMPLES[0].id, "output": "3"}


def test_predictions_are_read_in_the_order_of_the_examples(tmp_path):
    lines = [json.dumps({"id": e.id, "output": str(e.answer)}) for e in reversed(EXAMPLES)]
    lines[-1] = json.dumps({**FIRST, "seen": [[56, 56]]})
    (tmp_path / "p.jsonl").write_text("\n".join(lines))  # the last line has no line break
    found, texts = read_outputs(tmp_path / "p.jsonl", None, EXAMPLES)
    assert texts == ["3", *(str(example.answer) for example in EXAMPLES[1:])]
    resized = replace(EXAMPLES[0].images[0], resized_size=(56, 56))
    assert found == [replace(EXAMPLES[0], images=(resized,)), *EXAMPLES[1:]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([FIRST], f"no prediction for id '{EXAMPLES[1].id}'"),
        ([{"name": "x"}], ":1: a prediction is"),
        ([{"id": "other", "output": "3"}], "no example has the id 'other'"),
        ([FIRST] * 2, "has a prediction already"),
        ([{**FIRST, "output": 3}], ":1: a prediction is"),
        (['"a text"'], "p.jsonl:1: "),
        ([], f"no prediction for id '{EXAMPLES[0].id}'"),
    ],
)
def test_predictions_that_do_not_match_are_named(tmp_path, lines, message):
    path = write_jsonl(tmp_path / "p.jsonl", *lines)
    with pytest.raises(UserError, match=message):
        read_outputs(path, None, EXAMPLES)


@pytest.mark.parametrize("wrong", [{}, {"seen": [9, 9]}, {"seen": [[0, 9]]}, {"seen": []}])
def test_missing_resized_sizes_are_named(tmp_path, wrong):
    path = write_jsonl(tmp_path / "p.jsonl", {**FIRST, **wrong})
    read_outputs(path, None, EXAMPLES[:1])
    with pytest.raises(UserError, match='--frame resized needs "seen"'):
        read_outputs(path, None, EXAMPLES[:1], needs_resized_size=True)


@pytest.mark.parametrize(
    ("frame", "box", "more"),
    [
        (None, "[64, 48, 320, 240]", {}),
        ("qwen2_vl", "<|box_start|>(100,100),(500,500)<|box_end|>", {}),
        ("resized", "[32, 24, 160, 120]", {"seen": [[320, 240]]}),
    ],
)
def test_boxes_are_converted_from_their_frame(capsys, tmp_path, frame, box, more):
    row = {"images": ["7.jpg"], "question": CUP[0], "answer": {"boxes": [CUP[1]]}}
    given = ["--data", write_data(tmp_path, [row]), "--no-tags", "--predictions"]
    given.append(write_jsonl(tmp_path / "p.jsonl", {"id": "row 0", "output": box, **more}))
    given += ["--frame", frame] if frame else []
    assert score_as_json(capsys, "grounding", *given)[0]["rewards"]["iou"] == pytest.approx(1.0)
