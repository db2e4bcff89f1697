"""Run the commands of the guides, with small versions of the files that they name."""

from __future__ import annotations

import json
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
from chat_model import ChatModel, serve
from dataset_files import encode_image, png, write_files, write_table
from foreign_results import lmms_eval_sample, r1_v_result, vlm_r1_result
from PIL import Image
from published_formats import COCO, IMAGES

from vlm_grpo import cli
from vlm_grpo.data_scripts import make_shapes
from vlm_grpo.types import Example

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

SHORT = {
    "make_clocks.py": ["--train", "20", "--test", "8"],
    "train": [
        "optim.max_steps=2",
        "optim.prompts_per_step=2",
        "optim.warmup_steps=0",
        "evaluation.every=1",
        "data.train_limit=20",
    ],
    **{command: ["data.train_limit=20"] for command in ("plan", "sample")},
}
SHORT["sft"] = [setting for setting in SHORT["train"] if "warmup" not in setting]
"""Arguments appended to a command so that it finishes quickly; the last value of a setting wins."""
_ADDRESS = r"^https?://(localhost:8000|api\.openai\.com/v1)$"
"""Addresses of models in the guides, for which a local server answers."""
HELD_OUT = ["data.eval_limit=4"]
HUB_MODEL = ["model=embedded", "rollout.max_completion_length=4"]
"""Arguments appended to a command with a model from the hub: no test downloads one."""


def read_commands(guide: Path) -> list[str]:
    """Return the commands of a guide's ``sh`` blocks, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", guide.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def remove_launcher(line: str) -> str:
    """Return the command that a launcher starts in each of its processes."""
    return re.sub(r"accelerate launch .*-m vlm_grpo\.cli ", "vlm-grpo ", line)


def run_command(line: str, step: int) -> None:
    """Run one command of a guide in short form, in the current folder and in this process.

    Args:
        line: the command as in the guide.
        step: the last step of the runs in the folder, which replaces the steps in the command.
    """
    line = line.removeprefix("until ").partition(";")[0]  # one iteration of a shell loop
    program, *arguments = shlex.split(line, comments=True)
    arguments = [re.sub(r"step-\d+", f"step-{step}", argument) for argument in arguments]
    command = arguments[0]
    arguments += next((more for word, more in SHORT.items() if word in command), [])
    if "warm_start.steps=" in line:
        arguments += ["warm_start.steps=1"]
    if command in ("train", "sft", "plan", "evaluate"):
        arguments += HUB_MODEL if re.search(r"_\db\b|model=Qwen/", line) else []
    arguments += ["--model", "embedded"] if "--model Qwen/" in line else []
    if command in ("train", "sft") or "evaluate counting" in line:
        arguments += HELD_OUT
    if "data_scripts" in line:  # the files are a part of a dataset
        arguments += ["--allow-partial"]
    if program == "vlm-grpo":
        with serve(ChatModel(lambda *_: "[1, 2, 30, 40]")) as server:
            arguments = [re.sub(_ADDRESS, server.address, argument) for argument in arguments]
            with pytest.raises(SystemExit) as caught:
                cli.main(arguments)
        assert caught.value.code == 0, line
        return
    assert program == "python"
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def _make_shapes(task: str, split: str, count: int = 10) -> list[Example]:
    return make_shapes.draw_examples(task, count, seed=1, split=split)


def _write_rows(name: str, examples: list[Example], folder: str = "") -> None:
    """Write JSON Lines in the current folder, and the images in its subfolder ``folder``."""
    rows = []
    for example in examples:
        (image,) = example.images
        write_files(Path(folder or "images"), {f"{example.id}.png": image.read_bytes()})
        path = f"{example.id}.png" if folder else f"images/{example.id}.png"
        row = {"id": example.id, "images": [path], "question": example.question}
        rows.append(json.dumps({**row, "answer": example.answer}) + "\n")
    Path(name).write_text("".join(rows), "utf-8")


def _make_table_rows(split: str, question: str = "question", answer: str = "answer") -> list[dict]:
    return [
        {
            "images": [{"bytes": example.images[0].data, "path": None}],
            question: example.question,
            answer: example.answer,
        }
        for example in _make_shapes("counting", split)
    ]


def _write_grounding(folder: str = "") -> None:
    for split in ("train", "test"):
        _write_rows(f"{split}.jsonl", _make_shapes("grounding", split), folder)


def _save_dataset(name: str, *splits: str) -> None:
    parts = datasets.DatasetDict()
    for split in splits:
        parts[split] = datasets.Dataset.from_list(_make_table_rows(split))
    parts.save_to_disk(name)


def _write_your_own_data() -> None:
    _write_grounding()
    _save_dataset("me/my-dataset", "train", "validation")
    _save_dataset("folder", "train", "test")
    images = {f"val/{name}.png": data for name, data in IMAGES.items()}
    write_files(Path(), {"annotations/instances_val.json": COCO, **images})
    write_table(Path("train.parquet"), _make_table_rows("train"))
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    rows = {"image": [{"bytes": png(), "path": None}] * 2, "label": [0, 1]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk("labels")


def _write_other_columns() -> None:
    for split in ("train", "test"):
        write_table(Path(f"{split}.parquet"), _make_table_rows(split, "prompt", "label"))


def _write_readme_files() -> None:
    _write_grounding()
    text = (ROOT / "README.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?class Fingers.*?)^```", text, re.DOTALL | re.MULTILINE)
    Path("fingers.py").write_text(code, "utf-8")
    _write_rows("hands.jsonl", _make_shapes("counting", "train"))
    _write_rows("more_hands.jsonl", _make_shapes("counting", "test"))


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
    lines = [json.dumps({"id": row["id"], "output": output}) + "\n" for row in rows]
    Path("outputs.jsonl").write_text("".join(lines), "utf-8")


def _write_foreign_results() -> None:
    """Write one result in the layout of each supported evaluation."""
    write_files(Path("images"), {"7.jpg": png(640, 480)})
    answers: dict[str, tuple[str, Any]] = {
        "refcoco_val.jsonl": ("the cup", {"boxes": [[64, 48, 320, 240]]}),
        "superclevr.jsonl": ("How many items?", 3),
        "docvqa_val.jsonl": ("What does the sign say?", ["EXIT"]),
    }
    for name, (question, answer) in answers.items():
        row = {"id": "1", "images": ["images/7.jpg"], "question": question, "answer": answer}
        Path(name).write_text(json.dumps(row) + "\n", "utf-8")
    box = '<answer>[{"bbox_2d": [32, 24, 160, 120]}]</answer>'
    found = {
        "rec_results_refcoco_val_r1_500.json": vlm_r1_result("the cup", [64, 48, 320, 240], box),
        "counting_results.json": r1_v_result("./images/7.jpg", 3, "<answer>3</answer>"),
    }
    for name, row in found.items():
        Path(name).write_text(json.dumps({"accuracy": 100.0, "results": [row]}), "utf-8")
    sample = lmms_eval_sample(0, "What does the sign say?", resps=[["EXIT"]])
    name = "20260101_000000_samples_docvqa_val.jsonl"
    Path(name).write_text(json.dumps(sample) + "\n", "utf-8")


FILES: Mapping[str, Callable[[], None]] = {
    "README.md": _write_readme_files,
    "benchmarks.md": _write_benchmarks,
    "coming-from.md": _write_foreign_results,
    "your-own-data.md": _write_your_own_data,
}
"""By guide: create the files that its commands name, in the current folder."""
EXTRA_FILES: Mapping[str, Callable[[], None]] = {
    "--predictions outputs.jsonl": _write_outputs,
    "data.columns.question=prompt": _write_other_columns,
}
"""By a part of a command: create the files that only this command needs."""
