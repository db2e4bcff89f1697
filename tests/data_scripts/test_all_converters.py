"""Tests of all converters: common arguments, help texts and broken sources."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest
from dataset_files import png, write_files, write_table

import vlm_grpo.data_scripts
from vlm_grpo.benchmarks.definition import benchmark_names, load_benchmark
from vlm_grpo.data_scripts.converter import Converter

FOLDER = Path(vlm_grpo.data_scripts.__file__).parent
MODULES = sorted(p.stem for p in FOLDER.glob("*.py") if "@converter(" in p.read_text("utf-8"))


GUIDE = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def get_published_counts(name: str, split: str) -> list[int]:
    """Return the numbers of rows of a converter's split, by file, dataset or image list."""
    module = importlib.import_module(f"vlm_grpo.data_scripts.{name}")
    counts = module.convert.splits.get(split)
    named = {split: counts} if isinstance(counts, int) else dict(counts or {})
    images = getattr(module, "_IMAGES", {})
    by_image = images.items() if isinstance(images, dict) else ()
    found = [n for key, n in by_image if key == split or f"_{split}20" in key]
    return [*named.values(), *(n for n in found if isinstance(n, int))]


@pytest.mark.parametrize("name", MODULES)
def test_the_guide_tells_how_to_run_every_converter(name):
    sources = GUIDE.partition("### Sources")[2].partition("###")[0]
    (row,) = [line for line in sources.splitlines() if line.startswith(f"| `{name}` |")]
    numbers = re.findall(r"\b\d[\d,]*\b", row.split("|")[4])
    splits = importlib.import_module(f"vlm_grpo.data_scripts.{name}").convert.splits
    counts = {count for split in splits for count in get_published_counts(name, split)}
    assert {int(number.replace(",", "")) for number in numbers} == counts


@pytest.mark.parametrize("name", MODULES)
def test_help_lists_the_common_arguments(name, capsys):
    converter = importlib.import_module(f"vlm_grpo.data_scripts.{name}").convert
    assert isinstance(converter, Converter)
    # Under python -m, the command line starts where the last function is defined.
    last = ast.parse((FOLDER / f"{name}.py").read_text("utf-8")).body[-1]
    assert isinstance(last, ast.FunctionDef)
    assert last.name == "convert"
    with pytest.raises(SystemExit, match="0"):
        converter.main(["--help"])
    output = capsys.readouterr().out
    for option in ("--source", "--images", "--split", "--out", "--limit", "--seed"):
        assert option in output
    assert "--source:" in converter.description, "the docstring must describe --source"
    assert "--images:" in converter.description


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_source_is_one_message(name, tmp_path, capsys):
    converter = importlib.import_module(f"vlm_grpo.data_scripts.{name}").convert
    source, out = str(tmp_path / "nowhere"), str(tmp_path / "out" / "x.jsonl")
    argv = ["--source", source, "--images", str(tmp_path / "images"), "--out", out]
    assert converter.main(argv) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "nowhere" in message
    assert not Path(out).exists()


FILES = {
    "charades_sta": ["charades_sta_test.txt"],
    "blink": ["Counting/val-0.parquet"],
    "chartqa": ["test/test_human.json", "test/test_augmented.json"],
    "clevr": ["CLEVR_val_questions.json"],
    "coco_detection": ["instances_val2017.json"],
    "cosyn": ["validation-0.parquet"],
    "countbenchqa": ["test-0.parquet"],
    "cv_bench": ["test_2d.parquet"],
    "docvqa": ["source.json"],
    "fintabnet": ["test-0.parquet"],
    "flickr30k": ["val.txt", "Annotations/a.xml", "Sentences/a.txt"],
    "fsc147": [
        "annotation_FSC147_384.json",
        "ImageClasses_FSC147.txt",
        "Train_Test_Val_FSC_147.json",
    ],
    "groundui": ["train-0.parquet"],
    "icdar2015": ["Challenge4_Test_Task3_GT.txt"],
    "iiit5k": ["testdata.mat"],
    "mmbench": ["source.tsv"],
    "geometry3k": ["test-0.parquet"],
    "mathverse": ["testmini.json"],
    "mathvista": ["source.json"],
    "mmk12": ["train-0.parquet"],
    "ocrbench": ["source.json"],
    "ocrbench_v2": ["source.json"],
    "olmocr_bench": ["tests.jsonl"],
    "olmocr_mix": ["eval-0.parquet"],
    "omnidocbench": ["OmniDocBench.json"],
    "os_atlas": ["source.json"],
    "ovdeval": ["source.json"],
    "pixmo_count": ["test-0.parquet"],
    "pubtabnet": ["PubTabNet_2.0.0.jsonl"],
    "r1_v": ["source.jsonl"],
    "reason_seg": ["val/a.json"],
    "ref_l4": ["ref-l4-val.parquet", "ref-l4-test.parquet"],
    "refcoco": ["refs(unc).p", "instances.json"],
    "refcoco_hub": ["val-0.parquet"],
    "screenspot": ["screenspot_web.json"],
    "sroie": ["test/entities/a.txt"],
    "stvqa": ["train_task_3.json"],
    "super_clevr": ["superCLEVR_questions_30k.json"],
    "tallyqa": ["test.json"],
    "textvqa": ["TextVQA_0.5.1_val.json"],
    "virl39k": ["train-0.parquet"],
    "visual_genome": ["region_descriptions.json"],
    "vlm_r1": ["source.json"],
}
"""Names of the files that each converter reads; ``source``: the file itself is the source."""
_KEYS = "data images annotations categories questions scenes test shapes"
BAD_CONTENTS = {
    "empty": b"",
    "null": b"null",
    "a number": b"7\n",
    "text": b'"abc"',
    "an empty list": b"[]",
    "an empty object": b"{}\n",
    "a list of null": b"[null]",
    "a list of lists": b"[[1, 2, 3]]\n",
    "a list of empty objects": b"[{}]",
    "numbers for lists": json.dumps(dict.fromkeys(_KEYS.split(), 7)).encode(),
    "empty rows": json.dumps({key: [{}] for key in _KEYS.split()}).encode(),
    "truncated": b'{"data": [{"id": 1, "im',
    "deeply nested": b"[" * 100_000,
    "bytes": b"\x00\xff\x13 no dataset" * 50,
    "a pickle's first bytes": b"\x80\x04\x95\x10\x00\x00",
    "a zip archive": b"PK\x03\x04\x14\x00\x00\x00",
    "a parquet file's first bytes": b"PAR1\x15\x04\x15",
}


@pytest.mark.parametrize("content", BAD_CONTENTS)
@pytest.mark.parametrize("name", MODULES)
def test_a_broken_source_is_one_message_and_no_output(name, content, tmp_path, capsys):
    """All files of the source have the same bad content."""
    converter = importlib.import_module(f"vlm_grpo.data_scripts.{name}").convert
    source, out, images = tmp_path / "source", tmp_path / "out", tmp_path / "images"
    write_files(source, dict.fromkeys(FILES[name], BAD_CONTENTS[content]))
    write_files(images, {"a.png": png()})
    path = next(source.glob("source.*"), source)
    argv = ["--source", str(path), "--images", str(images), "--out", str(out / "x.jsonl")]
    assert converter.main(argv) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert str(path) in message, "the message names the source"
    assert "Traceback" not in message
    assert not out.exists() or list(out.iterdir()) == []
    assert [file.name for file in images.rglob("*")] == ["a.png"]


def test_a_table_that_lacks_a_part_is_an_error(tmp_path, capsys):
    row = {"image": {"bytes": png()}, "question": "How many?", "number": 2}
    write_table(tmp_path / "data" / "test-00000-of-00003.parquet", [row])
    argv = [
        "--source",
        str(tmp_path),
        "--images",
        str(tmp_path),
        "--out",
        str(tmp_path / "x.jsonl"),
    ]
    assert importlib.import_module("vlm_grpo.data_scripts.countbenchqa").convert.main(argv) == 2
    assert "has 1 of the 3 parts of test: add the others" in capsys.readouterr().err


WITHOUT_NUMBER = {
    "clevr": "most questions are left out, and the number of the others is not published",
    "flickr30k": "its number of images is published, not that of phrases",
    "ocrbench_v2": "types of questions are left out",
    "reason_seg": "its number of images is published, not that of questions",
    "ovdeval": "each of its parts is a benchmark of its own",
    "sroie": "fields without a value are left out",
}


@pytest.mark.parametrize("name", benchmark_names())
def test_benchmarks_and_converters_state_the_same_numbers(name):
    benchmark = load_benchmark(name)
    assert benchmark.converter is not None
    for split, count in benchmark.splits.items():
        published = get_published_counts(benchmark.converter, split)
        if count is not None:
            assert count in published, split
        elif benchmark.converter not in WITHOUT_NUMBER:
            assert published == [], split
