"""All converters: what they make of small published files, their arguments, and broken sources."""

import ast
import base64
import csv
import importlib
import io
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from dataset_files import encode_image, png, write_files, write_table
from PIL import Image
from scipy.io import savemat
from video_files import make_video

import vlm_grpo.data_scripts
from vlm_grpo.benchmarks.definition import benchmark_names, load_benchmark
from vlm_grpo.config.data import DataSettings
from vlm_grpo.data.loading import load_examples
from vlm_grpo.data_scripts.converter import Converter
from vlm_grpo.data_scripts.olmocr_bench import LONGEST_SIDE, render_page
from vlm_grpo.task.registry import load_task

FOLDER = Path(vlm_grpo.data_scripts.__file__).parent
MODULES = sorted(p.stem for p in FOLDER.glob("*.py") if "@converter(" in p.read_text("utf-8"))
GUIDE = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
CASES = yaml.safe_load(Path(__file__).with_name("converters.yaml").read_text("utf-8"))
WITHOUT_NUMBER = {
    "clevr": "most questions are left out, and the number of the others is not published",
    "flickr30k": "its number of images is published, not that of phrases",
    "reason_seg": "its number of images is published, not that of questions",
    "ovdeval": "each of its parts is a benchmark of its own",
    "sroie": "fields without a value are left out",
}
STORED = re.compile(r"[0-9a-f]{20}")
"""The name of an image that was in a table: the start of its bytes' hash."""


def load_converter(name: str) -> Converter:
    return importlib.import_module(f"vlm_grpo.data_scripts.{name}").convert


def build_argv(folder: Path, source: str = "", images: str = "images", **options: Any) -> list[str]:
    paths = {"source": folder / source, "images": folder / images, "out": folder / "out/x.jsonl"}
    return [word for k, v in {**paths, **options}.items() for word in (f"--{k}", str(v))]


class Output:
    """What a converter makes of the files of a folder, which are parts of a dataset."""

    def __init__(self, capsys: Any, name: str, folder: Path, **where: Any) -> None:
        argv, out = build_argv(folder, **where), folder / "out/x.jsonl"
        out.unlink(missing_ok=True)
        capsys.readouterr()
        converter = load_converter(name)
        assert converter.main([*argv, "--allow-partial"]) == 0, capsys.readouterr().err
        self.text = capsys.readouterr().out
        self.rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
        self.answers = {row["id"]: row["answer"] for row in self.rows}
        found = re.findall(r"(\d+) × (.*?)(?: \(first.*)?\n", self.text)
        self.refused = {reason: int(count) for count, reason in found}
        # The toolkit's own loader reads the rows.
        data = DataSettings(train=str(out), image_root=folder / where.get("images", "images"))
        task = load_task(where.get("task", converter.tasks[0]))
        self.examples = load_examples(str(out), task, data)


def get_error(capsys: Any, name: str, folder: Path, **where: Any) -> str:
    """Return the error of a converter that must fail without leaving files behind."""
    before = sorted(folder.rglob("*"))
    assert load_converter(name).main(build_argv(folder, **where)) == 2
    after = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in after if path not in before] == []
    return capsys.readouterr().err


def write_pdf(pages: int = 1) -> bytes:
    first, *others = [Image.new("RGB", (200, 100), "white")] * pages
    return encode_image(first, "PDF", save_all=True, append_images=others)


def restore(value: Any) -> Any:
    """Return a value of the table with its images, clips and pages."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        restored = {key: restore(item) for key, item in pairs}
        return restored if isinstance(value, dict) else [*restored.values()]
    make = {"PNG": png, "MP4": make_video, "PDF": write_pdf}.get(str(value)[:3])
    return make(*map(int, value.split()[1:])) if make else value


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['converter']}: {case['about']}")
def test_a_published_file_gives_its_rows(case, tmp_path, capsys):
    for name, content in restore(case["files"]).items():
        if name.endswith(".parquet"):
            write_table(tmp_path / name, content)
        else:  # Python 2 wrote the published pickles, in protocols up to 2
            content = pickle.dumps(content, protocol=2) if name.endswith(".p") else content
            write_files(tmp_path, {name: content})
    where = {"source": case.get("source", ""), "images": case.get("images", "")}
    where |= case.get("options", {})
    if "error" in case:
        message = get_error(capsys, case["converter"], tmp_path, **where)
        assert case["error"].replace("~", str(tmp_path)) in message
        return
    output = Output(capsys, case["converter"], tmp_path, **where)
    images = [STORED.sub("*", " ".join(row["images"])).split() for row in output.rows]
    assert [{**row, "images": i} for row, i in zip(output.rows, images, strict=True)] == [
        {"meta": {}, **row} for row in case["rows"]
    ]
    assert output.refused == case.get("refused", {})
    assert len(output.examples) == len(output.rows)
    assert all(image.load() for example in output.examples for image in example.images)


class Attack:
    def __reduce__(self):
        return (print, ("code ran",))


@pytest.mark.parametrize("end", [None, 0, 9, 20])
def test_a_pickle_of_code_or_a_truncated_one_is_an_error(tmp_path, capsys, end):
    content = pickle.dumps([Attack()] if end is None else [{"ref_id": 1}])[:end]
    coco = {"images": [], "annotations": [], "categories": []}
    write_files(tmp_path, {"refs(unc).p": content, "instances.json": coco})
    error = get_error(capsys, "refcoco", tmp_path)
    assert "refs(unc).p is corrupt, truncated or not a pickle of plain data" in error
    assert ("builtins.print; only plain data is allowed" in error) == (end is None)
    assert "code ran" not in error
    assert error.count("\n") == 1


def test_a_cell_may_be_longer_than_the_limit_of_csv_which_stays(tmp_path, capsys):
    image = base64.b64encode(png() + bytes(200_000)).decode()
    lines = "index\tquestion\tA\tB\tanswer\timage", f"7\tWhich?\tcat\tdog\tA\t{image}"
    write_files(tmp_path, {"a.tsv": "\n".join(lines)})
    csv.field_size_limit(limit := 131_072)
    assert Output(capsys, "mmbench", tmp_path, source="a.tsv").answers["7"]["answer"] == "cat"
    assert csv.field_size_limit() == limit  # that of the process, for tables read later


def test_a_page_of_a_pdf_has_the_side_of_olmocr(tmp_path):
    write_files(tmp_path, {"a.pdf": write_pdf(2)})
    data = render_page(tmp_path / "a.pdf", 2)
    assert data is not None
    assert max(Image.open(io.BytesIO(data)).size) == LONGEST_SIDE


def test_iiit5k_file(tmp_path, capsys):
    kinds = [("ImgName", object), ("GroundTruth", object)]
    words = [("test/1002_1.png", "PRIVATE"), ("test/1009_2.png", "24")]
    write_files(tmp_path, {name: png() for name, _ in words})
    savemat(tmp_path / "testdata.mat", {"testdata": np.array([words], dtype=kinds)})
    output = Output(capsys, "iiit5k", tmp_path, images="")
    assert output.answers == {f"iiit5k-{name}": [word] for name, word in words}


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
    splits = load_converter(name).splits
    counts = {count for split in splits for count in get_published_counts(name, split)}
    assert {int(number.replace(",", "")) for number in numbers} == counts


@pytest.mark.parametrize("name", MODULES)
def test_help_lists_the_common_arguments(name, capsys):
    converter = load_converter(name)
    # Under python -m, the command line starts where the last function is defined.
    last = ast.parse((FOLDER / f"{name}.py").read_text("utf-8")).body[-1]
    assert getattr(last, "name", "") == "convert"
    with pytest.raises(SystemExit, match="0"):
        converter.main(["--help"])
    output = capsys.readouterr().out
    for option in ("--source", "--images", "--split", "--out", "--limit", "--seed"):
        assert option in output
    assert "--source:" in converter.description, "the docstring must describe --source"
    assert "--images:" in converter.description


READ = {"iiit5k": ("", ["testdata.mat"])}
for _case in reversed(CASES):
    _names = [
        name for name in _case["files"] if not name.endswith((".png", ".jpg", ".mp4", ".pdf"))
    ]
    READ[_case["converter"]] = (_case.get("source", ""), _names)
"""The source of a converter, and the names of the files that it reads: those of its first case."""
_KEYS = "data images annotations categories questions scenes test shapes"
BAD_CONTENTS = {
    **{"empty": b"", "null": b"null", "a number": b"7\n", "text": b'"abc"', "a list": b"[]"},
    **{"an empty object": b"{}\n", "a list of null": b"[null]", "a list of lists": b"[[1, 2]]\n"},
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


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_or_broken_source_is_one_message_and_no_output(name, tmp_path, capsys):
    """All files of the source have the same bad content, each third of them for a converter."""
    write_files(tmp_path / "images", {"a.png": png()})
    for content in ["missing", *[*BAD_CONTENTS][MODULES.index(name) % 3 :: 3]]:
        source, names = READ[name]
        if content in BAD_CONTENTS:
            write_files(tmp_path / content, dict.fromkeys(names, BAD_CONTENTS[content]))
        path = tmp_path / content / source
        message = get_error(capsys, name, tmp_path, source=str(path))
        assert message.startswith("error: "), content
        assert str(path) in message, content
        assert "Traceback" not in message, content


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
