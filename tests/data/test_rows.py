"""Conversion of rows in every supported form, and the reason why each bad row is refused."""

import json
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import pytest
from dataset_files import check_bad_row, get_load_error, load, make_row, png, write_rows
from PIL import Image
from published_formats import write_format

from vlm_grpo.config.data import SourceSettings
from vlm_grpo.data.files import MAX_DEPTH
from vlm_grpo.data.images import MediaReader
from vlm_grpo.data.rows import Row, get_answer_candidates, to_example
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example

COUNTING = load_task("counting")
BOXES = [[1, 2, 3, 4], [5, 6, 7, 8]]
LABELED = '```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "cup"}]\n```'


def convert(values: Any, columns: Any = MappingProxyType({}), root: Path | None = None) -> Example:
    source = SourceSettings(source="rows", columns=dict(columns))
    return to_example(Row("row 1", 1, values), source, MediaReader(root, 100), COUNTING)


def test_a_canonical_row_becomes_an_example(folder):
    first_row = make_row(meta={"level": 2}, license="CC0")
    first, second = load(write_rows(folder, first_row, "", make_row(id=7, images=...)))
    assert (first.id, first.question, first.answer) == ("a", "How many?", 3)
    assert first.meta == {"level": 2, "license": "CC0"}
    assert first.images[0].size == first.images[0].resized_size == (8, 6)
    assert first.images[0].load().getpixel((0, 0)) == (200, 10, 10)
    assert (second.id, second.images) == ("7", ())  # rows without an image are valid


FORMS = {  # of a box with the edges x, y, u, v in an image of 640x480
    "fractions": (lambda x, y, u, v: [x / 640, y / 480, u / 640, v / 480], {"box_scale": 1}),
    "thousandths": (
        lambda x, y, u, v: [1000 * x / 640, 1000 * y / 480, 1000 * u / 640, 1000 * v / 480],
        {"box_scale": 1000},
    ),
    "COCO": (lambda x, y, u, v: [x, y, u - x, v - y], {"box_format": "xywh"}),
    "YOLO": (
        lambda x, y, u, v: [(x + u) / 1280, (y + v) / 960, (u - x) / 640, (v - y) / 480],
        {"box_format": "cxcywh", "box_scale": 1},
    ),
    "y first": (lambda x, y, u, v: [y, x, v, u], {"box_format": "yxyx"}),
}


def write_boxes(folder: Path, form: Any, size: tuple[int, int] = (640, 480)) -> str:
    """Write an image of this size, and 48 rows with a box in this form."""
    random = Random(0)
    edges = []
    for _ in range(48):
        x, y = random.randint(0, 500), random.randint(0, 380)
        edges.append((x, y, random.randint(x + 20, 640), random.randint(y + 20, 480)))
    (folder / "a.png").write_bytes(png(*size))
    boxes = [[form(*own)] for own in edges]
    rows = [make_row(id=n, answer={"boxes": b}, evidence=b) for n, b in enumerate(boxes)]
    return write_rows(folder, *rows)


@pytest.mark.parametrize("name", FORMS)
def test_boxes_in_another_form_are_refused_with_the_settings_that_read_them(tmp_path, name):
    expected = load(write_boxes(tmp_path, lambda *box: list(box)), "grounding")
    form, options = FORMS[name]
    source = write_boxes(tmp_path, form)
    settings = " ".join(f"data.{name}={value}" for name, value in options.items())
    remedy = f"the first 100 rows are read without such a box by {settings}"
    assert remedy in get_load_error(source, "grounding")
    for own, example in zip(load(source, "grounding", **options), expected, strict=True):
        for boxes in (own.answer["boxes"], own.meta["evidence"]):
            assert boxes[0] == pytest.approx(example.answer["boxes"][0], abs=0.001)
    with Path(source).open("a") as file:  # a row that is bad in every form
        file.write(json.dumps(make_row(id="bad", answer={"boxes": [[1, 2, 3]]})) + "\n")
    assert remedy in get_load_error(source, "grounding")


def test_boxes_of_another_size_of_the_image_are_found(tmp_path, caplog):
    source = write_boxes(tmp_path, lambda *box: [3 * edge for edge in box])
    assert "are they of another size of the images?" in get_load_error(source, "grounding")
    source = write_boxes(tmp_path, lambda *box: list(box), size=(1600, 1200))
    assert len(load(source, "grounding")) == 48
    assert "no box of 48 rows reaches beyond 40% of its image's width or 40% of its" in caplog.text


def test_evidence_is_checked_like_boxes_of_answers_unless_it_is_something_else(folder):
    for evidence in ("a text", ["a text"], [0.5, 2], [], None, [[1, 1, 4, 4], [0, 0, 8, 6]]):
        convert(make_row(evidence=evidence), root=folder)
    for bad, problem in (([[1, 2, 3]], "evidence: box .* four"), ([[0, 0, 9.5, 6]], "outside its")):
        with pytest.raises(ValueError, match=problem):
            convert(make_row(evidence=bad), root=folder)


def test_few_bad_boxes_boxes_below_a_pixel_and_forms_of_boxes_that_are_known_are_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    rows = [make_row(id=n, answer={"boxes": [[n, 5, 60, 45]]}) for n in range(9)]
    source = write_rows(tmp_path, *rows, make_row(answer={"boxes": [[1, 2, 99, 40]]}))
    assert "is outside its image of 64x48\n" in get_load_error(source, "grounding")
    source = write_boxes(tmp_path, lambda x, y, u, v: [x, y, x + 0.5, v])
    assert "is smaller than a pixel of its image of 640x480" in get_load_error(source, "grounding")
    source = write_boxes(tmp_path, lambda *e: [1.3, e[1], 2.3, e[3]] if e[0] < 99 else [*e])
    assert len(load(source, "grounding")) == 48  # some are exactly one pixel wide
    coco = write_format(tmp_path, "coco")
    message = get_load_error(coco, "detection", box_format="xywh")
    assert "its boxes are edges in pixels in any case: remove box_format and box_scale" in message
    for name in ("points", "masks"):
        answer = {"boxes": [[0.1, 0.1, 0.5, 0.5]], name: [[0.3, 0.3]]}
        others = write_rows(tmp_path, {**make_row(), "answer": answer})
        message = get_load_error(others, "segmentation", box_scale=1)
        assert f"its answer has {name}, which box_format and box_scale do not convert" in message


def test_columns_with_other_names_are_mapped_and_all_others_are_meta(folder):
    values = {"uid": "x", "ask": "How many?", "n": 3, "png": "a.png"}
    columns = {"id": "uid", "question": "ask", "answer": "n", "images": "png"}
    example = convert(values, columns, folder)
    assert (example.id, example.question, example.answer) == ("x", "How many?", 3)
    assert [image.name for image in example.images] == ["a.png"]
    message = r"no asked \(did you mean ask\?\); it has uid, ask, n, png"
    with pytest.raises(ValueError, match=message):
        convert(values, {"question": "asked"})
    meta = {"image_id": 7, "source": "a book", "tags": [], "n": 1}  # of a row without images
    assert dict(convert({"question": "?", "answer": 3, **meta}).meta) == meta
    message = r"it has no question; it has 1, None: set data\.columns\.question=…"
    with pytest.raises(ValueError, match=message):
        convert({1: 2, None: 3})


def test_an_answer_of_another_toolkit_has_several_readings():
    for value, others in (
        *(("<answer> 3 </answer>", ["3", 3]), (3.0, [3.0, 3])),
        (BOXES, [BOXES, {"boxes": BOXES}]),
        ("[1, 2, 3, 4]", ["[1, 2, 3, 4]", {"boxes": BOXES[:1]}]),
        (LABELED, [LABELED, {"boxes": BOXES[:1], "labels": ["cup"]}]),
        *((alone, [alone]) for alone in ("EXIT 3", ["a", "b"], "[1, 2", "[" * 5000)),
    ):
        assert get_answer_candidates(value) == others


def test_a_bad_row_is_named_with_file_line_and_reason(folder):
    for bad, reason in (
        ('{"id": "a", "question"', "the line is not JSON: Expecting ':' delimiter at column"),
        ('{"id": "a", "answer": NaN}', "NaN is not a number"),
        ("[1, 2]", "must be a JSON object, not a list"),
        (b'{"id": "\xff"}', "not UTF-8"),
        ('{"a":' + "[" * 200_000 + "]" * 200_000 + "}", f"nested deeper than {MAX_DEPTH}"),
        ('{"a": ' + "9" * 5000 + "}", "the line is not JSON"),
        (make_row(images=[5]), "must be a path, encoded bytes or a PIL image, not int"),
        (make_row(images=[{"bytes": 5}]), "an image must be a path, encoded bytes or a PIL image"),
        (make_row(images=["a\x00.png"]), "cannot be read"),
        (make_row(images=["https://example.org/a.png"]), "is a URL"),
        (make_row(images=["data:image/png;base64,AAAA"]), "rows.jsonl:2 image 1 cannot be read"),
        (make_row(images=["data:image/png,PNG"]), "is no data:image/…;base64,… URL: "),
        (make_row(answer="3"), "must be an integer of at least 0"),  # the canonical form is strict
        (make_row(image="a.png"), "it has images and image: keep one of them"),
    ):
        check_bad_row(folder, bad, reason)
    # Errors of other types in a check, too.
    rows = (make_row(id=n, answer={"boxes": boxes}) for n, boxes in enumerate(([[1, 2, 3]], 5)))
    assert "2 bad rows" in get_load_error(write_rows(folder, *rows), "grounding")


def test_a_misnamed_image_column_is_named_with_the_remedy():
    for column, value in (
        *(("imagess", [1]), ("Image", None), ("photo", "frames/a.JPG")),
        *(("photos", ["a.png", "b.png"]), ("picture", {"bytes": b"PNG", "path": None})),
        ("pixels", Image.new("RGB", (2, 2))),
    ):
        values = {"question": "How many?", "answer": 3, column: value}
        message = rf"column {column} .* rename it to images, set data\.columns"
        with pytest.raises(ValueError, match=message):
            convert(values)
        assert convert({**values, "images": []}).images == ()
