"""The gallery stays within its size limit and reads thumbnails only."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
from report_runs import load_few_examples, make_group, make_run

from vlm_grpo.report import build_report
from vlm_grpo.report.entries import to_script_json
from vlm_grpo.report.gallery import build_gallery
from vlm_grpo.report.run import read_run
from vlm_grpo.report.samples import THUMBNAIL_BYTES, write_samples
from vlm_grpo.task.registry import load_task


def test_training_groups_are_thinned_out_evenly(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, "ocr", steps=12, held_out=2, samples_every=1))
    full = build_gallery([("", run)])
    assert (len(full.entries), full.omitted) == (2 + 48, 0)  # four groups per step
    texts = sum(len(to_script_json(entry)) for entry in full.entries)
    pictures = sum(len(uri) for uri in full.pictures.values())
    thinned = build_gallery([("", run)], limit=(texts + pictures) // 2)
    steps = sorted({e["step"] for e in thinned.entries if e["view"] == "training"})
    assert (steps[0], steps[-1]) == (0, 11)  # the ends are kept
    assert 3 <= len(steps) <= 6  # about half of the twelve
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 4  # evenly spaced
    assert thinned.omitted == 4 * (12 - len(steps))


def test_held_out_examples_over_the_limit_are_omitted(counting_run: Path) -> None:
    gallery = build_gallery([("", read_run(counting_run))], limit=20_000)
    assert 0 < len(gallery.entries) < 24
    assert {entry["view"] for entry in gallery.entries} == {"held-out"}


def test_page_of_a_thousand_samples_is_small(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    images = folder / "images"
    images.mkdir(parents=True)
    rows: dict[int, list[str]] = {}
    generator = np.random.default_rng(0)
    for number in range(1000):
        picture = f"{number:032x}.webp"
        (images / picture).write_bytes(generator.bytes(THUMBNAIL_BYTES))  # the largest thumbnail
        answer = {
            "text": f"<think>{'word ' * 100}</think><answer>{number}</answer>",
            "stop": "eos", "tokens": 120, "answer": number, "rewards": {"exact": 1.0},
            "reward": 1.0, "metrics": {"absolute_error": 0.0}, "advantage": 0.0,
        }  # fmt: skip
        row = {"step": number // 4, "id": str(number), "pictures": [picture], "gold": 1}
        rows.setdefault(number // 4, []).append(json.dumps(row | {"completions": [answer] * 8}))
    for step, lines in rows.items():
        (folder / f"step-{step:06d}.jsonl").write_text("\n".join(lines))
    size = build_report(tmp_path).stat().st_size
    # A thousand pictures of 12 kB are 16 MB in base64, and the texts take more than 1 MB.
    assert 17e6 < size < 25e6
    assert len(build_gallery([("", read_run(tmp_path))]).entries) == 1000


def test_rows_cannot_read_other_files(tmp_path: Path) -> None:
    (tmp_path / "secret.webp").write_bytes(b"secret")
    task = load_task("counting")
    example = load_few_examples("counting", task)[0]
    path = write_samples(tmp_path / "samples", 0, [make_group(task, example, ["1"])], [[0]], task)
    row = json.loads(path.read_text())
    row["pictures"] = ["../../secret.webp"]
    row["gold_marks"] = str(tmp_path / "secret.webp")
    path.write_text(json.dumps(row))
    gallery = build_gallery([("", read_run(tmp_path))])
    assert len(gallery.entries) == 1
    assert gallery.pictures == {}
