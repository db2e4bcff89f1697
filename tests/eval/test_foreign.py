"""Scores of files in the layouts of VLM-R1, R1-V and lmms-eval, and rows that match no example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run, write_jsonl
from foreign_results import lmms_eval_sample, r1_v_result, vlm_r1_result
from PIL import Image

SIZE = (640, 480)


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


def write_results(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps({"accuracy": 50.0, "results": rows}, indent=2))
    return path


def write_samples(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return write_jsonl(folder / "20260101_000000_samples_docvqa_val.jsonl", *rows)


def score(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status, out, err = run(capsys, "evaluate", *arguments)
    assert "Traceback" not in err
    return status, out, err


def score_as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    status, out, err = score(capsys, *arguments, "--json")
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


def predictions(path: Path, layout: str, frame: str | None = None) -> list[object]:
    given: list[object] = ["--predictions", path, "--format", layout]
    return given if frame is None else [*given, "--frame", frame]


def boxed(box: list[int]) -> str:
    return f'<think>I see.</think><answer>```json\n[{{"bbox_2d": {box}}}]\n```</answer>'


def test_vlm_r1_boxes_are_in_pixels_of_the_resized_image(capsys, tmp_path: Path):
    rows = [
        vlm_r1_result("the red cup", [0, 0, 100, 100], boxed([0, 0, 50, 50])),  # the full box
        vlm_r1_result("the cup", [64, 48, 320, 240], boxed([32, 24, 160, 72])),  # its upper half
    ]
    given = predictions(write_results(tmp_path, rows), "vlm_r1", "resized")
    data = grounding_data(tmp_path)
    first, second, total = score_as_json(capsys, "grounding", "--data", data, *given)
    # In the order of the dataset, matched by image name, expression and gold box.
    assert (first["id"], first["rewards"]["iou"]) == ("row 0", pytest.approx(0.5))
    assert (second["id"], second["rewards"]["iou"]) == ("row 1", pytest.approx(1.0))
    assert total["total"]["n"] == 2


def test_examples_without_an_output_are_counted(capsys, tmp_path: Path):
    rows = [vlm_r1_result("the cup", [64, 48, 320, 240], boxed([32, 24, 160, 120]))]
    given = predictions(write_results(tmp_path, rows), "vlm_r1", "resized")
    status, out, _ = score(capsys, "grounding", "--data", grounding_data(tmp_path), *given)
    assert status == 0
    assert "2 more examples have no output in the file" in out


def test_vlm_r1_results_without_a_resized_size_are_scored_in_other_frames(capsys, tmp_path: Path):
    """src/eval/test_rec_r1_internvl.py writes no size, and src/eval/test_od_r1.py no image."""
    result = vlm_r1_result("the cup", [64, 48, 320, 240], "<box>[[100,100,500,500]]</box>")
    for key in ("input_size", "image_size", "image"):
        del result[key]
    given = predictions(write_results(tmp_path, [result]), "vlm_r1")
    given += ["--data", grounding_data(tmp_path), "--no-tags"]
    row, _ = score_as_json(capsys, "grounding", *given, "--frame", "internvl")
    assert (row["id"], row["rewards"]["iou"]) == ("row 0", pytest.approx(1.0))
    status, _, err = score(capsys, "grounding", *given, "--frame", "resized")
    assert status == 2
    assert "needs the size of the resized image" in err


def test_r1_v_results_are_scored(capsys, tmp_path: Path):
    rows = [{"images": [f"{n}.png"], "question": "How many items?", "answer": n} for n in (4, 9)]
    outputs = [
        r1_v_result("/home/x/9.png", 9, "<think>\n10\n</think>\n<answer>\n10\n</answer>"),
        r1_v_result("./images/4.png", "4", "<answer>four</answer>"),
    ]
    given = predictions(write_results(tmp_path, outputs), "r1_v")
    data = write_data(tmp_path, rows)
    first, second, _ = score_as_json(capsys, "counting", "--data", data, *given)
    assert (first["answer"], first["rewards"]["exact"]) == (4, 1.0)
    assert (second["answer"], second["rewards"]["exact"]) == (10, 0.0)


def test_r1_v_results_have_the_accuracy_of_its_log(capsys, caplog, tmp_path: Path):
    outputs = {4: "<answer>\n4\n</answer>", 8: "<answer>8 items</answer>", 9: "9"}
    rows = [{"images": [f"{n}.png"], "question": "How many items?", "answer": n} for n in outputs]
    results = [r1_v_result(f"{n}.png", n, text) for n, text in outputs.items()]
    given = ["--data", write_data(tmp_path, rows)]
    given += predictions(write_results(tmp_path, results), "r1_v")
    status, out, err = run(capsys, "evaluate", "super_clevr_200", *given)
    assert (status, err) == (0, "")
    assert caplog.messages == []  # no warning: the rows are not training data
    # Its rule is digits alone in tags; the reward also reads words around them.
    assert "exact 33.3" in out
    assert "n = 3, 33.3% answered" in out
    assert "as the reward reads answers: 66.7 (66.7% answered)" in out


def ocr_data(folder: Path) -> Path:
    rows = [
        {"images": [f"{n}.png"], "question": f"What is on sign {n}?", "answer": ["EXIT", "Exit"]}
        for n in range(3)
    ]
    return write_data(folder, rows)


def test_boxes_of_lmms_eval_are_fractions_of_the_image(capsys, tmp_path: Path):
    prompt = "All values are floating point numbers bounded between 0 and 1. {}"
    rows = [  # the cup's box, and the left half of the red cup's, in an image of 640 x 480
        lmms_eval_sample(0, prompt.format("the cup"), resps=[["[0.1, 0.1, 0.5, 0.5]"]]),
        lmms_eval_sample(1, prompt.format("the red cup"), resps=[["[0.0, 0.0, 0.078, 0.208]"]]),
    ]
    given = predictions(write_samples(tmp_path, rows), "lmms_eval", "fraction")
    given += ["--data", grounding_data(tmp_path)]
    first, second, _ = score_as_json(capsys, "grounding", *given)
    assert first["rewards"]["iou"] == pytest.approx(1.0)
    assert second["rewards"]["iou"] == pytest.approx(0.5, abs=0.01)  # 49.92 x 99.84 of 100 x 100


def test_lmms_eval_samples_are_matched_by_index(capsys, tmp_path: Path):
    rows = [
        # The format of newer versions, of older versions, and a response that a filter changed.
        lmms_eval_sample(2, "What is on sign 2?", filtered_resps="EXIT"),
        lmms_eval_sample(0, "What is on sign 0?", filtered_resps=["Exit"]),
        lmms_eval_sample(1, "What is on sign 1?", filtered_resps="EXIT", resps=[["EXIT sign"]]),
    ]
    given = [*predictions(write_samples(tmp_path, rows), "lmms_eval"), "--no-tags"]
    *scores, total = score_as_json(capsys, "ocr", "--data", ocr_data(tmp_path), *given)
    assert [row["answer"] for row in scores] == ["Exit", "EXIT sign", "EXIT"]
    assert total["total"]["rewards"]["exact"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("layout", "content", "reason"),
    [
        ("vlm_r1", '{"id": "1", "output": "3"}\n{"id": "2", "output": "3"}', "is not a JSON file"),
        ("vlm_r1", '{"accuracy": 3}', 'it lacks {"results": […]}'),
        ("vlm_r1", '{"results": [{"question": "?"}]}', "results[0] must have question, ground_"),
        ("r1_v", "[]", 'it lacks {"results": […]}'),
        ("r1_v", '{"results": []}', "has no outputs"),
        ("lmms_eval", '{"id": "1", "output": "3"}', ":1: not a sample logged by lmms-eval"),
        ("lmms_eval", '{"results": [', "the line is not JSON"),
        ("lmms_eval", '{"doc_id": 0, "resps": [["a", "b"]]}', "it has 2 responses"),
        ("lmms_eval", '{"doc_id": 9, "resps": [["a"]]}', "number 9 (from 0) does not exist"),
        ("vlm-r1", "", "did you mean vlm_r1?"),
    ],
)
def test_a_file_of_another_layout_is_refused(capsys, tmp_path: Path, layout, content, reason):
    path = tmp_path / "log"
    path.write_text(content)
    given = ["--data", ocr_data(tmp_path), "--predictions", path, "--format", layout]
    status, _, err = score(capsys, "ocr", *given)
    assert status == 2
    assert reason in err


def test_each_json_layout_refuses_the_other(capsys, tmp_path: Path):
    data = ["--data", grounding_data(tmp_path)]
    theirs = write_results(tmp_path, [vlm_r1_result("the cup", [64, 48, 320, 240], "")])
    _, _, err = score(capsys, "grounding", *data, "--predictions", theirs, "--format", "r1_v")
    assert "its question is a str, but r1_v writes a dict: is it another --format?" in err
    theirs = write_results(tmp_path, [r1_v_result("7.jpg", 3, "")])
    _, _, err = score(capsys, "grounding", *data, "--predictions", theirs, "--format", "vlm_r1")
    assert "its question is a dict, but vlm_r1 writes a str" in err


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image": "train2014/8.jpg"}, "no example has an image 8.jpg"),
        ({"question": "Where is the dog?"}, "no unmatched example has the question"),
        ({"ground_truth": [64, 48, 320, 300]}, "its gold answer [64, 48, 320, 300] is not"),
        ({"model_output": None}, "its output and its image must be strings"),
        ({"input_size": "240x320"}, "input_size is '240x320', not [height, width]"),
    ],
)
def test_rows_that_match_no_example_are_named(capsys, tmp_path: Path, changes, reason):
    row = {**vlm_r1_result("the cup", [64, 48, 320, 240], boxed([1, 2, 3, 4])), **changes}
    path = write_results(tmp_path, [row])
    given = ["--data", grounding_data(tmp_path), "--predictions", path, "--format", "vlm_r1"]
    status, _, err = score(capsys, "grounding", *given)
    assert status == 2
    assert reason in err
    assert f"{path}: results[0]" in err


def test_no_example_is_matched_twice(capsys, tmp_path: Path):
    row = vlm_r1_result("the cup", [64, 48, 320, 240], boxed([1, 2, 3, 4]))
    path = write_results(tmp_path, [row, row])
    given = ["--data", grounding_data(tmp_path), "--predictions", path, "--format", "vlm_r1"]
    _, _, err = score(capsys, "grounding", *given)
    assert "results[1]: its gold answer" in err  # the other example has another box
    sample = lmms_eval_sample(1, "What is on sign 1?", filtered_resps="EXIT")
    path = write_samples(tmp_path, [sample, sample])
    given = ["--data", ocr_data(tmp_path), "--predictions", path, "--format", "lmms_eval"]
    _, _, err = score(capsys, "ocr", *given)
    assert "example number 1 (from 0) has an output already" in err


def test_data_in_another_order_than_lmms_eval_is_refused(capsys, tmp_path: Path):
    sample = lmms_eval_sample(0, "What is on sign 2?", filtered_resps="EXIT")
    path = write_samples(tmp_path, [sample])
    given = ["--data", ocr_data(tmp_path), "--predictions", path, "--format", "lmms_eval"]
    _, _, err = score(capsys, "ocr", *given)
    assert "its prompt does not contain 'What is on sign 0?', example number 0's question" in err
