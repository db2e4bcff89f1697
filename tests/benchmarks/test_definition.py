"""Benchmark definitions, and their rules against pycocotools and tables worked out by hand."""

from __future__ import annotations

import importlib
import io
import random
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_table import build_tables
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from vlm_grpo.benchmarks import benchmark_names, get_group, load_benchmark, rule_values
from vlm_grpo.benchmarks.rules import CORPUS_RULES, RULES
from vlm_grpo.errors import UserError
from vlm_grpo.types import Example, ImageRef


def example(answer: object, **meta: object) -> Example:
    image = ImageRef(name="a", size=(100, 100), resized_size=(100, 100), data=b"")
    return Example("a", (image,), "?", answer, meta)


@pytest.mark.parametrize("name", benchmark_names())
def test_every_definition_is_sound(name):
    benchmark = load_benchmark(name)
    converter = importlib.import_module(f"vlm_grpo.data_scripts.{benchmark.converter}").CONVERTER
    assert benchmark.task in converter.tasks
    assert benchmark.load_task().prompt(example({"boxes": [[0, 0, 9, 9]]}))
    assert benchmark.load_task().primary_metric == benchmark.metric
    for published in benchmark.published:
        assert published.source, "a number without a source is no published number"
        # A mean is between 0 and 1, so a number is between 0 and the scale.
        assert 0 <= published.value <= benchmark.scale


def test_every_kind_of_task_has_a_benchmark():
    tasks = {load_benchmark(name).task for name in benchmark_names()}
    assert tasks == {"grounding", "counting", "ocr", "detection"}


def test_a_prompt_wraps_the_question():
    task = load_benchmark("docvqa").load_task(tags=True)
    asked = task.prompt(Example("a", (), "What {is} it?", ["x"]))
    assert "What {is} it? Answer the question using a single word or phrase." in asked
    assert asked.endswith("inside <answer> </answer>.")


def test_an_error_of_a_users_task_is_one_in_its_benchmark(tmp_path):
    (tmp_path / "far.py").write_text(
        "from vlm_grpo.task import Task, reward\n\n"
        "class Far(Task):\n    primary_metric = 'distance'\n    lower_is_better = True\n\n"
        "    def parse(self, text, example):\n        return float(text)\n\n"
        "    def write(self, answer, example):\n        return str(answer)\n\n"
        "    @reward()\n    def distance(self, answer, example):\n        return answer\n\n"
        "    @reward()\n    def near(self, answer, example):\n        return -answer\n"
    )
    path = tmp_path / "x.yaml"
    for metric, is_error in (("distance", True), ("near", False)):
        path.write_text(f"title: X\ntask: {tmp_path / 'far.py'}\nmetric: {metric}\n")
        benchmark = load_benchmark(str(path))
        assert benchmark.lower_is_better == benchmark.load_task().lower_is_better == is_error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("metric: exakt", "no metric exakt .did you mean exact"),
        ("frame: permill", "no frame permill .did you mean permille"),
        ("prompt: How many?", "prompt must hold .question."),
        ("average: groups", "average: groups needs groups"),
        ("average: groups\ngroups: [kind]", "average: groups needs a rule"),
        ("published: [{model: x, value: 1, split: all, source: y}]", "splits that it has not: all"),
        ("metrik: exact", "metrik: Extra inputs"),
        ("title: [", "is no YAML"),
    ],
)
def test_a_wrong_definition_says_what_is_wrong(tmp_path, change, message):
    lines = {"title": "X", "converter": "clevr", "task": "counting", "metric": "exact"}
    lines |= {"splits": "{val: 3}"}
    lines.pop(change.partition(":")[0], None)
    text = "\n".join([*(f"{key}: {value}" for key, value in lines.items()), change])
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_benchmark(str(path))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean refcoco"):
        load_benchmark("refcocoo")


@pytest.mark.parametrize(
    ("box", "at_least", "above", "mean_above"),
    [
        # Against [0, 0, 10, 10]: half of it is an IoU of exactly 0.5, which "above" does not count.
        ([0, 0, 10, 5], 1, 0, 0.0),
        ([0, 0, 10, 5.1], 1, 1, 0.1),  # above 0.5 alone of ten thresholds
        ([0, 0, 10, 10], 1, 1, 1.0),
        ([0, 0, 10, 7.5], 1, 1, 0.5),  # above 0.5, 0.55, 0.6, 0.65 and 0.7, not above 0.75
        ([50, 50, 60, 60], 0, 0, 0.0),
    ],
)
def test_accuracy_at_least_and_above(box, at_least, above, mean_above):
    row = example({"boxes": [[0, 0, 10, 10]]})
    task = load_benchmark("refcoco").load_task()
    answer = (tuple(map(float, box)),)
    assert task.score(f"{box}", row).metrics["accuracy_50"] == at_least
    assert rule_values("accuracy_above_50", [answer], [row]) == [above]
    assert rule_values("mean_accuracy_above", [answer], [row]) == pytest.approx([mean_above])


def test_no_answer_earns_nothing_by_any_rule():
    golds = {True: {"boxes": [[0, 0, 10, 10]]}, False: ["a"]}
    for name in RULES:
        row = example(golds["accuracy" in name and "vqa" not in name], type="science QA en")
        assert rule_values(name, [None], [row]) == [0.0]


def test_error_rates_count_a_missing_answer_as_nothing_written():
    rows = [example(["ab"]), example(["cd"])]
    assert CORPUS_RULES["cer_micro"](["ab", None], rows) == 0.5  # 2 deletions of 4 characters


def test_groups():
    row = example({"boxes": [[0, 0, 32, 32]]}, split="val")
    assert [get_group(name, row) for name in ("size", "size_128", "split", "lost")] == [
        "small",  # 32² is COCO's largest small area
        "small",
        "val",
        "unknown",
    ]
    sides = {127: "small", 128: "medium", 256: "medium", 257: "large"}
    for side, size in sides.items():
        assert get_group("size_128", example({"boxes": [[0, 0, side, side]]})) == size
    assert get_group("answer", example(3)) == "3"
    assert get_group("size", example({"boxes": []})) == "0 boxes"


def official_nms_ap(found: list, golds: list) -> float:
    """OVDEval's own way: suppress around each gold box by confidence, then COCO's evaluation."""
    annotations, kept = [], []
    for image, (boxes, gold) in enumerate(zip(found, golds, strict=True)):
        for box, label in gold:
            wide = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image, "category_id": label}
                | {"bbox": wide, "area": wide[2] * wide[3], "iscrowd": 0}
            )
        removed, keep = set(), set()
        for box, _ in gold:
            near = [i for i, (other, _) in enumerate(boxes) if overlap(box, other) > 0.5]
            if near:
                keep.add(near[0])
                removed |= set(near[1:])
        for i, (box, label) in enumerate(boxes):
            if i in removed - keep:
                continue
            wide = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            kept.append({"image_id": image, "category_id": label, "bbox": wide, "score": 1.0})
    with redirect_stdout(io.StringIO()):
        coco = COCO()
        dataset: Any = {
            "images": [{"id": i} for i in range(len(golds))],
            "categories": [{"id": i} for i in range(3)],
            "annotations": annotations,
        }
        coco.dataset = dataset
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(kept), "bbox")  # type: ignore[arg-type]
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


def overlap(first: list, second: list) -> float:
    sides = [min(first[i + 2], second[i + 2]) - max(first[i], second[i]) for i in (0, 1)]
    inner = max(0, sides[0]) * max(0, sides[1])
    areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in (first, second)]
    return inner / (sum(areas) - inner)


def test_nms_ap_agrees_with_the_official_way_on_random_boxes():
    rng = random.Random(0)
    found, golds = [], []
    for _ in range(30):
        gold = [random_box(rng) for _ in range(rng.randint(1, 4))]
        near = [(jittered(rng, box), rng.randrange(3)) for box, _ in gold for _ in range(2)]
        found.append([*near, random_box(rng)])
        golds.append(gold)
    rows = [
        example({"boxes": [b for b, _ in gold], "labels": [f"L{label}" for _, label in gold]})
        for gold in golds
    ]
    answers = [tuple((box, f"l{label}") for box, label in boxes) for boxes in found]
    expected = official_nms_ap(found, golds)
    assert 0.05 < expected < 0.95, "the boxes decide something"
    assert CORPUS_RULES["nms_ap"](answers, rows) == pytest.approx(expected)


def test_nms_ap_does_not_pay_for_every_label_on_one_place():
    row = example({"boxes": [[0, 0, 10, 10]], "labels": ["red cup"]})
    box = (0.0, 0.0, 10.0, 10.0)
    # The wrong label comes first, so it is the one that is left, and the right one is suppressed.
    assert CORPUS_RULES["nms_ap"]([((box, "blue cup"), (box, "red cup"))], [row]) == 0
    right_first = CORPUS_RULES["nms_ap"]([((box, "red cup"), (box, "blue cup"))], [row])
    assert right_first == pytest.approx(1)


def random_box(rng: random.Random) -> tuple[list[float], int]:
    x, y = rng.uniform(0, 60), rng.uniform(0, 60)
    return [x, y, x + rng.uniform(10, 40), y + rng.uniform(10, 40)], rng.randrange(3)


def jittered(rng: random.Random, box: list[float]) -> list[float]:
    return np.add(box, [rng.uniform(-2, 2) for _ in box]).tolist()


def test_tables_in_the_docs_match_the_definitions():
    text = (Path(__file__).parents[2] / "docs/benchmarks.md").read_text(encoding="utf-8")
    # `python tests/helpers/benchmark_table.py` prints the tables.
    assert all(table in text for table in build_tables())


def test_a_verified_number_has_an_address():
    numbers = [p for name in benchmark_names() for p in load_benchmark(name).published]
    verified = [p for p in numbers if p.verified]
    assert verified
    assert [p.source for p in verified if not p.source.startswith("https://")] == []
