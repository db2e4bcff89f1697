"""Tests of the converters of multiple choice on small files in the published layouts."""

from __future__ import annotations

import base64

from dataset_files import png, write_files, write_table


def test_cv_bench_reads_both_tables(convert, tmp_path):
    row = {
        "idx": 0,
        "type": "2D",
        "task": "Count",
        "image": {"bytes": png()},
        "question": "How many chairs are in the image?",
        "choices": ["2", "1", "0"],
        "answer": "(C)",
        "source": "ADE20K",
    }
    write_table(tmp_path / "hub" / "test_2d.parquet", [row])
    write_table(tmp_path / "hub" / "test_3d.parquet", [{**row, "type": "3D", "source": "Omni3D"}])
    result = convert("cv_bench", tmp_path / "hub", tmp_path / "images")
    gold = {"options": ["2", "1", "0"], "answer": "0"}
    assert result.answers == {"cv-bench-2D-0": gold, "cv-bench-3D-0": gold}
    assert result.rows[1]["meta"] == {"type": "3D", "task": "Count", "source": "Omni3D"}


def test_blink_keeps_all_images_of_a_question(convert, tmp_path):
    row = {
        "idx": "val_Jigsaw_1",
        "question": "Which image is the missing part?",
        "sub_task": "Jigsaw",
        "image_1": {"bytes": png(shade=1)},
        "image_2": {"bytes": png(shade=2)},
        "image_3": None,
        "choices": ["the second image", "the third image"],
        "answer": "(A)",
    }
    write_table(tmp_path / "hub" / "Jigsaw" / "val-00000-of-00001.parquet", [row])
    result = convert("blink", tmp_path / "hub", tmp_path / "images")
    assert result.answers["val_Jigsaw_1"]["answer"] == "the second image"
    assert len(result.examples[0].images) == 2
    assert result.rows[0]["meta"] == {"task": "Jigsaw"}


def make_table(*rows: dict[str, str]) -> str:
    return "\n".join("\t".join(row) for row in [tuple(rows[0]), *(row.values() for row in rows)])


def test_mmbench_reads_rotations_and_shared_images(convert, tmp_path):
    first = {
        "index": "7",
        "question": "Which animal?",
        "hint": "Look closely.",
        "A": "cat",
        "B": "dog",
        "C": "",
        "answer": "A",
        "category": "identity",
        "image": base64.b64encode(png(200, 200) + bytes(200_000)).decode(),
    }
    turned = {**first, "index": "1000007", "A": "dog", "B": "cat", "answer": "B", "image": "7"}
    hidden = {**first, "index": "8", "answer": "", "image": "7"}
    write_files(tmp_path, {"MMBench_DEV_EN.tsv": make_table(first, turned, hidden)})
    result = convert("mmbench", tmp_path / "MMBench_DEV_EN.tsv", tmp_path / "images")
    assert result.answers == {
        "7": {"options": ["cat", "dog"], "answer": "cat"},
        "1000007": {"options": ["dog", "cat"], "answer": "cat"},
    }
    assert [row["meta"] for row in result.rows] == [{"circle": 7, "category": "identity"}] * 2
    assert result.rows[0]["images"] == result.rows[1]["images"]
    assert result.examples[0].question == "Look closely.\nWhich animal?"
    assert result.reasons == {"its answer is not published": 1}


def test_a_line_of_mmbench_with_another_number_of_cells_is_named(convert_with_error, tmp_path):
    write_files(tmp_path, {"a.tsv": "index\tquestion\timage\n1\tWhat?"})
    message = convert_with_error("mmbench", tmp_path / "a.tsv", tmp_path / "images")
    assert "a.tsv:2: it does not have 3 cells" in message
