"""Every command of the guides runs once, in a short form if it would take long.

A model from the hub becomes the embedded model, and several processes one. ``test_docs.py`` checks
settings and options as written, also of the few commands that do not run (``NOT_RUN``).
"""

import json
import pickle
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pytest
from chat_model import ChatModel, serve
from commands import run_python
from dataset_files import encode_image, photo, png, write_files, write_table
from guide_commands import GUIDES, ROOT, read_blocks, read_commands, run_blocks
from PIL import Image
from published_formats import COCO, IMAGES, lmms_eval_sample

from vlm_grpo import cli
from vlm_grpo.data_scripts import make_shapes, make_tool_vlm

STEP = 2
"""Last step of the runs that the commands start, which replaces the steps that they name."""

NOT_RUN = {
    r"^make quickstart": "run by .ci/run",
    r"^source \.venv/bin/activate": "only changes the reader's shell",
    r"^pip install --constraint": "tests/test_package.py installs the wheel",
    r"tests/tasks/test_reward_hacking\.py": "run as one of the tests",
    r"make_tiny_vlm --out": "trains for half an hour",
    r"^vlm-grpo train judged ": "tests/tasks/test_judged.py trains",
    r"^python pdf_validation\.py|^python -m olmocr\.bench": "of OmniDocBench and of olmOCR",
    r"rollout\.vllm|vllm/bin|venv vllm": "tests/vllm trains and serves with a real server",
    r"=openenv|taskset": "tests/environments runs both where their packages are installed",
}
"""Patterns of commands that do not run here, with the reason."""

RUNS = {
    "evaluating.md": ("mine",),
    "report.md": (
        *("counting", "counting-lora", "lr-1", "lr-2", "lr-3"),
        *(f"{method}-{seed}" for method in "ab" for seed in range(3)),
    ),
}
"""Runs that a guide expects; each is a copy of one run."""

FEW_STEPS = "optim.max_steps=2 optim.prompts_per_step=2 evaluation.every=2 data.train_limit=20"
APPENDED = {
    r"make_clocks\.py": "--train 20 --test 8",
    r"^vlm-grpo train ": f"{FEW_STEPS} optim.warmup_steps=0 rollout.num_generations=4",
    r"^vlm-grpo sft ": FEW_STEPS,
    r"^vlm-grpo (plan|sample) ": "data.train_limit=20",
    r"warm_start\.steps=": "warm_start.steps=1",
    # No test downloads a model.
    r"^vlm-grpo (train|sft|plan|evaluate) .*(_\db\b|model=Qwen/)": "model=embedded "
    "rollout.max_completion_length=4",
    r"--model Qwen/": "--model embedded",
    r"^vlm-grpo (train|sft) (?!.*eval_share)|evaluate counting": "data.eval_limit=4",
    # These recipes have episodes of several turns, and supervised steps.
    r"(train|sft) (tiny_words|maze)": "data.eval_limit=1",
    r"train (tiny_words|maze).*warm_start=null": "rollout.max_completion_length=16",
    r"train maze": "rollout.num_generations=2 task_options.environment.max_turns=3",
    r"(train|sft) (tiny_words|maze)(?!.*warm_start=null)": "warm_start.warmup_steps=0",
    r"train (tiny_words|maze)(?!.*warm_start=null)": "warm_start.steps=1",
    r"data_scripts\.(?!make_)": "--allow-partial",  # the files are a part of a dataset
}
"""By a pattern: arguments that make a command quick; the last value of a setting wins."""
_ADDRESS = r"^https?://(localhost:8000|api\.openai\.com/v1)$"
"""Addresses of models in the guides, for which a local server answers."""


_LAUNCHER = r"accelerate launch .*-m vlm_grpo\.cli "
"""The launchers of a command in several processes."""
QUICKSTART = "vlm-grpo train quickstart"
COMMANDS: dict[Path, list[str]] = {}
"""By guide: its commands that run, without those of the guides before it."""
for _guide in GUIDES:
    _known = {QUICKSTART, *chain.from_iterable(COMMANDS.values())}
    _lines = dict.fromkeys(re.sub(_LAUNCHER, "vlm-grpo ", line) for line in read_commands(_guide))
    _lines = [line for line in _lines if line not in _known]
    COMMANDS[_guide] = [line for line in _lines if not re.search("|".join(NOT_RUN), line)]


def run_command(line: str) -> None:
    """Run one command of a guide in short form, in the current folder and in this process."""
    line = line.removeprefix("until ").partition(";")[0]  # one iteration of a shell loop
    program, *arguments = shlex.split(line, comments=True)
    arguments = [re.sub(r"step-\d+", f"step-{STEP}", argument) for argument in arguments]
    for pattern, more in APPENDED.items():
        arguments += more.split() if re.search(pattern, line) else []
    if program == "vlm-grpo":
        with serve(ChatModel(lambda *_: "[1, 2, 30, 40]")) as server:
            arguments = [re.sub(_ADDRESS, server.address, argument) for argument in arguments]
            with pytest.raises(SystemExit) as caught:
                cli.main(arguments)
        assert caught.value.code == 0, line
        return
    assert program == "python"
    if arguments[0] == "-m" and arguments[1].startswith("vlm_grpo."):
        run_module(*arguments[1:])
        return
    run_python(*arguments)


def run_module(name: str, *arguments: str) -> None:
    """Run a module of the library as a program, without another interpreter's imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        patch.delitem(sys.modules, name, raising=False)
        status: Any = 0
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
        assert not status, (name, arguments)


def _write_rows(name: str, task: str, split: str, folder: str = "") -> None:
    """Write ``NAME.jsonl``, and its images in a folder: one of another place, or images/."""
    place, rows = "" if folder else "images/", []
    for example in make_shapes.draw_examples(task, 10, seed=1, split=split):
        file, (image,) = f"{example.id}.png", example.images
        write_files(Path(folder or "images"), {file: image.read_bytes()})
        row = {"id": example.id, "images": [place + file], "question": example.question}
        rows.append({**row, "answer": example.answer})
    write_files(Path(), {f"{name}.jsonl": rows})


def _make_table_rows(split: str, question: str = "question", answer: str = "answer") -> list[dict]:
    examples = make_shapes.draw_examples("counting", 10, seed=1, split=split)
    images = [[{"bytes": example.images[0].data, "path": None}] for example in examples]
    return [
        {"images": image, question: example.question, answer: example.answer}
        for image, example in zip(images, examples, strict=True)
    ]


def _write_grounding(folder: str = "") -> None:
    for split in ("train", "test"):
        _write_rows(split, "grounding", split, folder)


def _write_your_own_data() -> None:
    _write_grounding()
    for name, second in (("me/my-dataset", "validation"), ("folder", "test")):
        tables = {split: _make_table_rows(split) for split in ("train", second)}
        parts: Any = {split: datasets.Dataset.from_list(rows) for split, rows in tables.items()}
        datasets.DatasetDict(parts).save_to_disk(name)
    images = {f"val/{name}.png": data for name, data in IMAGES.items()}
    write_files(Path(), {"annotations/instances_val.json": COCO, **images})
    write_table(Path("train.parquet"), _make_table_rows("train"))
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    rows = {"image": [{"bytes": png(), "path": None}] * 2, "label": [0, 1]}
    datasets.Dataset.from_dict(rows, datasets.Features(features)).save_to_disk("saved")
    photos = {f"photos/{number}.jpg": encode_image(photo(number), "JPEG") for number in range(10)}
    labels = {f"labels/{number}.txt": ("cat\n", "dog\n")[number % 2] for number in range(10)}
    write_files(Path(), {**photos, **labels, "new.jpg": photos["photos/9.jpg"]})


def _write_other_columns() -> None:
    for split in ("train", "test"):
        write_table(Path(f"{split}.parquet"), _make_table_rows(split, "prompt", "label"))


def _write_readme_files() -> None:
    _write_grounding()
    (code,) = read_blocks(ROOT / "README.md", "python")
    Path("fingers.py").write_text(code, "utf-8")
    _write_rows("hands", "counting", "train")
    _write_rows("more_hands", "counting", "test")


def _write_benchmarks() -> None:
    """Write a page of OmniDocBench and olmOCR-Bench and two sentences of RefCOCO, as published."""
    image = {"id": 7, "file_name": "COCO_train2014_000000000007.jpg", "width": 64, "height": 48}
    box = {"id": 70, "image_id": 7, "category_id": 1, "bbox": [10.5, 5.0, 20.0, 30.25]}
    instances = {"images": [image], "annotations": [box], "categories": [{"id": 1, "name": "dog"}]}
    sentences = [
        {"sent_id": number, "sent": text, "raw": text, "tokens": text.split()}
        for number, text in enumerate(("the dog", "left one"))
    ]
    ref: dict[str, Any] = {"ref_id": 1, "ann_id": 70, "image_id": 7, "category_id": 1}
    ref |= {"split": "val", "file_name": image["file_name"], "sent_ids": [0, 1]}
    refs = pickle.dumps([{**ref, "sentences": sentences}], protocol=2)
    write_files(Path("refcoco"), {"refs(unc).p": refs, "instances.json": instances})
    write_files(Path("train2014"), {image["file_name"]: png()})
    block = {"category_type": "title", "order": 1, "anno_id": 1, "text": "Title"}
    page = {"page_info": {"image_path": "a.jpg"}, "layout_dets": [block]}
    pages = [page | {"extra": {"relation": []}}]
    write_files(Path("OmniDocBench"), {"OmniDocBench.json": pages, "images/a.jpg": png()})
    test = {"pdf": "a.pdf", "page": 1, "id": "1", "type": "present", "text": "Title"}
    pdf = encode_image(Image.new("RGB", (200, 100)), "PDF")
    write_files(Path("bench_data"), {"tests.jsonl": [test], "pdfs/a.pdf": pdf})
    _write_grounding("train2014")


def _write_outputs() -> None:
    rows = map(json.loads, Path("refcoco_val.jsonl").read_text("utf-8").splitlines())
    output = '```json\n[{"bbox_2d": [1, 2, 300, 400]}]\n```'
    given = {"output": output, "seen": [[320, 240]]}
    write_files(Path(), {"outputs.jsonl": [{"id": row["id"], **given} for row in rows]})


def _write_photos() -> None:
    photos = [encode_image(photo(number, (168, 168))) for number in range(8)]
    for folder, images in (("photos", photos[:4]), ("others", photos[4:])):
        write_files(Path(folder), {f"{number}.png": image for number, image in enumerate(images)})


def _write_tool_model() -> None:
    """Write the model of the recipes with tools, which another guide explains."""
    if not Path("tiny-tools").exists():
        make_tool_vlm.main(["tiny_words", "maze", "--out", "tiny-tools"])


def _write_foreign_results() -> None:
    """Write data, and one sample as lmms-eval logs it."""
    row = {"id": "1", "images": ["7.jpg"]}
    cup = {**row, "question": "the cup", "answer": {"boxes": [[64, 48, 320, 240]]}}
    sign = {**row, "question": "What does the sign say?", "answer": ["EXIT"]}
    sample = lmms_eval_sample(0, sign["question"], resps=[["EXIT"]])
    samples = {"20260101_000000_samples_docvqa_val.jsonl": [sample]}
    data = {"refcoco_val.jsonl": [cup], "docvqa_val.jsonl": [sign]}
    write_files(Path(), {"7.jpg": png(640, 480), **data, **samples})


FILES: Mapping[str, Callable[[], None]] = {
    "README.md": _write_readme_files,
    "evaluating.md": _write_benchmarks,
    "coming-from.md": _write_foreign_results,
    "your-own-data.md": _write_your_own_data,
}
"""By guide: create the files that its commands name, in the current folder."""
EXTRA_FILES: Mapping[str, Callable[[], None]] = {
    "--predictions outputs.jsonl": _write_outputs,
    "data.columns.question=prompt": _write_other_columns,
    "train tiny_words": _write_tool_model,
    "photos/": _write_photos,
}
"""By a part of a command: create the files that only this command needs."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the run ``quickstart``."""
    folder = tmp_path_factory.mktemp("before")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_command(QUICKSTART)
    return folder / "runs"


@pytest.mark.parametrize("guide", [*filter(COMMANDS.get, GUIDES)], ids=lambda path: path.name)
def test_every_command_runs(guide, runs, tmp_path, monkeypatch, capsys):
    if guide.name == "small-worlds.md":
        pytest.importorskip("sklearn", reason="its digits are those of scikit-learn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vlm_grpo.task.soundness._PARSE_SECONDS", 5.0)  # on a busy machine
    Path("docs").symlink_to(ROOT / "docs")
    for name in RUNS.get(guide.name, ()):
        shutil.copytree(runs / "quickstart", Path("runs", name))
        config = Path("runs", name, "config.yaml")
        text = config.read_text().replace("name: quickstart", f"name: {name}")
        if name.startswith("lr-"):
            text = re.sub(r"(?m)^  lr: .*", f"  lr: {name[-1]}.0e-06", text)
        config.write_text(text)
    FILES.get(guide.name, lambda: None)()
    if guide.name in ("report.md", "your-own-data.md"):  # whose programs need no command before
        run_blocks(guide)
    for line in COMMANDS[guide]:
        for part, prepare in EXTRA_FILES.items():
            if part in line:
                prepare()
        run_command(line)
    if guide.name == "evaluating.md":
        run_blocks(guide)
        assert Path("pages-model/a.md").is_file()  # for the script of OmniDocBench
    printed = {mask_numbers(line) for line in capsys.readouterr().out.splitlines()}
    quoted = "".join(read_blocks(guide, "text")).splitlines()
    assert {mask_numbers(line) for line in quoted} <= printed


def mask_numbers(line: str) -> str:
    """Replace the numbers of a line: those of a short run differ from the guide's."""
    return re.sub(r"\d[\d.,]*", "#", line)


def test_commands_are_in_shell_blocks_and_those_not_run_are_still_in_a_guide():
    for guide in GUIDES:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", guide.read_text("utf-8"), re.DOTALL | re.M)
        for language, text in blocks:
            if re.search(r"^(vlm-grpo|python|pip|make|accelerate) ", text, re.MULTILINE):
                assert language == "sh", f"{guide.name}: {text}"
    lines = [line for guide in GUIDES for line in read_commands(guide)]
    patterns = "|".join(NOT_RUN)
    assert [p for p in patterns.split("|") if not any(re.search(p, line) for line in lines)] == []
    # A new command that a pattern leaves out, too, is one to look at.
    assert len({line for line in lines if re.search(patterns, line)}) == 16
