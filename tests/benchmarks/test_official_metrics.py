"""Official metrics and rules of benchmarks, against values by hand from their scripts, definitions
written down again here, and jiwer."""

import random
import re
from collections import defaultdict

import jiwer
import numpy as np
import pytest

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.task.scores import anls, iou
from vlm_grpo.tasks.graders import official_metrics as official
from vlm_grpo.tasks.graders.average_precision import coco_average_precision
from vlm_grpo.tasks.graders.official_metrics import CORPUS_RULES, RULES, error_rate
from vlm_grpo.types import Example, ImageRef, VideoRef

NORMALIZED = {
    **{"A dog": "dog", "none": "0", "Ten": "10", "1,000": "1000", "3.5": "3.5", "a\nb": "b"},
    **{"end. of": "end of", "7-11": "7 11", "(yes)": "yes", "it's": "it 's", "isnt": "isn't"},
    **{"couldn'tve": "couldn't've", "'ows'at": "'ow's'at", "x @home": "x home"},
    "me@home": "me home",
}
CHOICES = {"choices": ["145°", "B", "circle"], "answer_type": "text"}
CLIP = VideoRef("clip", (64, 48), (64, 48), times=(0.0, 1.0), seconds=30.0)
PIECES = [
    *("3", "12.5", "7.", ".5", "1.2.3", "to", "and", "-", "TO", "<think>", "</think>", "s", "99"),
    *("<answer>", "</answer>", "from", "4 to 10", "4.0 and 9.5", "12 to 2", "\n", "5 to 5"),
]


def make_example(answer: object, **meta: object) -> Example:
    image = ImageRef(name="a", size=(100, 100), resized_size=(100, 100), data=b"")
    return Example("a", (image,), "?", answer, meta)


def test_ocrbench():
    for text, answers, dataset, expected in (
        ("CENTRE", ["centre"], "IIIT5K", 1),  # case is ignored
        ("The word is: centre.", ["CENTRE"], "IIIT5K", 1),  # the text contains the answer
        ("cent re", ["CENTRE"], "IIIT5K", 0),  # spaces are not ignored
        ("cent\nre", ["cent re"], "IIIT5K", 1),  # a line break equals a space
        ("5 dollars", ["$5", "5 dollars"], "STVQA", 1),  # any accepted answer
        ("", ["a"], "STVQA", 0),
        ("x ^ { 2 }", ["x^{2}"], "HME100k", 1),  # formulas: spaces are ignored
        ("X^{2}", ["x^{2}"], "HME100k", 0),  # but case is not
        ("= x^{2} + 1", ["x^{2}"], "HME100k", 1),
    ):
        assert official.ocrbench(text, answers, dataset) == expected


def test_vqa_accuracy_agrees_with_leaving_each_answer_out():
    rng = random.Random(0)
    for _ in range(200):
        answers = rng.choices(["1", "two", "the two", "3"], k=10)
        normal = [official.normalize_vqa(answer) for answer in answers]
        others = [normal[:i] + normal[i + 1 :] for i in range(10)]
        for text, number in {"2": "2", "one": "1", "four": "4"}.items():
            by_hand = sum(min(1, rest.count(number) / 3) for rest in others) / 10
            assert official.vqa_accuracy(text, answers) == pytest.approx(by_hand)
    # A missing answer counts: (3·2 + 7·3)/30; with nine annotators it would be (3·2 + 6·3)/27.
    assert official.vqa_accuracy("nokia", ["nokia"] * 3 + ["x"] * 6) == pytest.approx(0.9)


def test_vqa_normalization_and_the_letters_and_digits_of_word_recognition():
    assert {text: official.normalize_vqa(text) for text in NORMALIZED} == NORMALIZED
    texts = ("STAR24", "star-24!", "star2", "it says: star24")
    assert [official.word_recognition(text, ["Star24"]) for text in texts] == [1, 1, 0, 0]


def test_anls_of_the_paper_and_of_the_script():
    for text, answers, paper, rrc in (
        ("exit", ["EXIT"], 1, 1),
        ("abcd", ["abxy"], 0, 0.5),  # exactly one half: 0 in the paper, kept by the script
        ("abc", ["abxyz"], 0, 0),  # 1 − 3/5
        ("abcde", ["abcdx", "zzzzz"], 0.8, 0.8),  # the best of the accepted answers
        ("", ["a"], 0, 0),
        # Padding: 4 edits, 8 characters with the spaces; the script divides by all of them.
        ("abcd    ", ["xyzw"], 0, 0.5),
    ):
        assert anls(text, answers) == pytest.approx(paper)
        assert official.anls_rrc(text, answers) == pytest.approx(rrc)


def test_error_rates_agree_with_jiwer():
    rng = random.Random(1)

    def draw() -> str:
        text = "".join(rng.choices("abc ", k=rng.randint(1, 20)))
        return " ".join(text.split()) or "a"  # jiwer merges spaces first

    golds, texts = ([draw() for _ in range(100)] for _ in range(2))
    assert error_rate(texts, golds, words=False) == pytest.approx(jiwer.cer(golds, texts))
    assert error_rate(texts, golds, words=True) == pytest.approx(jiwer.wer(golds, texts))
    for words in (False, True):
        with pytest.raises(ValueError, match="gold texts are empty"):
            error_rate(["a"], [""], words)


def test_every_text_has_a_score_between_0_and_1():
    for text in ("", "9" * 100_000, "a " * 50_000, "\x00", "٣", "-" * 100_000):
        assert 0.0 <= official.ocrbench(text, ["a"], "IIIT5K") <= 1.0
        assert 0.0 <= official.vqa_accuracy(text, ["a"] * 10) <= 1.0
        assert 0.0 <= official.anls_rrc(text, ["a"]) <= 1.0
        assert 0.0 <= official.word_recognition(text, ["a"]) <= 1.0


def test_relaxed_accuracy():
    for text, answer, is_near in (
        ("21", "20", True),  # exactly 5 %
        ("18.9", "20", False),
        ("21%", "0.2", True),  # a hundredth
        *(("20", "20%", False), ("20 %", "20%", True), ("2%%", "0.02", True), ("-2", "2", False)),
        ("1e2", "95", False),  # 5 of 95
        ("0.2", "0", False),  # of a gold answer of 0 the texts are compared
        *(("0", "0", True), ("NO", "no", True), ("$2", "2", False), ("nan", "nan", False)),
        ("", "%", False),
    ):
        for answers in ([answer], ["Yes", answer]):
            assert official.relaxed_accuracy(text, answers) == is_near


def test_mathvista():
    for text, answer, meta, expected in (
        ("(A)", "145°", CHOICES, 1),
        ("(c) B", "circle", CHOICES, 1),  # the letter in brackets decides
        ("B", "B", CHOICES, 1),  # a letter alone is the second choice
        ("C.", "B", CHOICES, 1),  # neither a letter nor a choice: the nearest one
        ("a", "145°", CHOICES, 0),  # small letters only in brackets
        ("(Z)", "B", CHOICES, 1),  # no such option: the text nearest to "Z"
        ("circles", "circle", CHOICES, 1),
        ("12.9", "12", {"answer_type": "integer"}, 1),
        ("12 cm", "12", {"answer_type": "integer"}, 0),
        ("inf", "12", {"answer_type": "integer"}, 0),
        ("1.24", "1.2", {"answer_type": "float", "precision": 1}, 1),
        ("1.24", "1.24", {"answer_type": "float", "precision": 1}, 0),
        ("1.2", "1.2", {"answer_type": "float", "precision": 1.0}, 1),
        ("[1, 2]", "[1, 2]", {"answer_type": "list"}, 1),
        ("[1,2]", "[1, 2]", {"answer_type": "list"}, 0),
    ):
        assert official.mathvista(text, answer, meta) == expected


def test_accuracy_at_least_and_above():
    row = make_example({"boxes": [[0, 0, 10, 10]]})
    task = load_benchmark("refcoco").load_task()
    for box, at_least, above, mean_above in (
        # Against [0, 0, 10, 10]: half of it has an IoU of exactly 0.5, which is not above 0.5.
        ([0, 0, 10, 5], 1, 0, 0.0),
        ([0, 0, 10, 5.1], 1, 1, 0.1),  # above one of ten thresholds, 0.5
        ([0, 0, 10, 10], 1, 1, 1.0),
        ([0, 0, 10, 7.5], 1, 1, 0.5),  # above 0.5, 0.55, 0.6, 0.65 and 0.7, not above 0.75
        ([50, 50, 60, 60], 0, 0, 0.0),
    ):
        answer = (tuple(map(float, box)),)
        assert task.score(f"{box}", row).metrics["accuracy_50"] == at_least
        assert RULES["accuracy_above_50"](answer, row) == above
        assert RULES["mean_accuracy_above"](answer, row) == pytest.approx(mean_above)


def test_a_missing_answer_earns_nothing_by_any_rule_and_is_an_empty_text_in_error_rates():
    for name in RULES.keys() - {"mae"}:
        of_boxes = name.startswith(("accuracy", "mean_accuracy"))
        gold = {"boxes": [[0, 0, 10, 10]]} if of_boxes else ["b"]
        assert RULES[name](None, make_example(gold, type="science QA en")) == 0.0
    rows = [make_example(["ab"]), make_example(["cd"])]
    assert CORPUS_RULES["cer_micro"](["ab", None], rows) == 0.5  # 2 deletions of 4 characters


def test_figures_of_groups_are_means_and_a_circle_is_right_if_all_its_rotations_are():
    golds = [("2D", "ADE20K"), ("2D", "ADE20K"), ("2D", "COCO"), ("3D", "Omni3D"), ("3D", "Omni3D")]
    gold = {"options": ["a", "b"], "answer": "b"}
    rows = [make_example(gold, type=kind, source=source) for kind, source in golds]
    # 1/2 of ADE20K, COCO and 1/2 of Omni3D: ((1/2 + 1) / 2 + 1/2) / 2.
    assert CORPUS_RULES["cv_bench"]([1, None, 1, 0, 1], rows) == 0.625
    tasks = [make_example(gold, task=task) for task in ("Counting", "Jigsaw", "Jigsaw")]
    assert CORPUS_RULES["blink"]([1, 0, 1], tasks) == 0.75
    # A circle is right if all its rotations are.
    turned = [["a", "b"], ["b", "a"]]
    golds = [{"options": options, "answer": "b"} for options in turned]
    rows = [make_example(gold, circle=circle) for circle in (7, 8) for gold in golds]
    assert CORPUS_RULES["circular"]([1, 0, 1, 1], rows) == 0.5
    assert CORPUS_RULES["circular"]([1, None, 1, 0], rows) == 0.5
    twins = make_example({"options": ["a", "a", "b"], "answer": "a"}, circle=1)
    assert CORPUS_RULES["circular"]([1], [twins]) == 1.0


def test_groups_of_examples_by_size_answer_and_meta():
    row = make_example({"boxes": [[0, 0, 32, 32]]}, split="val")
    found = [official.get_group(name, row) for name in ("size", "split", "lost")]
    assert found == ["small", "val", "unknown"]  # 32² is COCO's largest small area
    sides = {127: "small", 128: "medium", 256: "medium", 257: "large"}
    for side, size in sides.items():
        assert official.get_group("size_128", make_example({"boxes": [[0, 0, side, side]]})) == size
    assert official.get_group("answer", make_example(3)) == "3"
    assert official.get_group("size", make_example({"boxes": []})) == "0 boxes"


def test_nms_ap_agrees_with_the_official_computation_on_random_boxes():
    rng = random.Random(0)
    found, golds = [], []
    for _ in range(30):
        gold = [draw_box(rng) for _ in range(rng.randint(1, 4))]
        edges = [[edge + rng.uniform(-2, 2) for edge in box] for box, _ in gold for _ in range(2)]
        found.append([*((box, rng.randrange(3)) for box in edges), draw_box(rng)])
        golds.append(gold)
    columns = [zip(*gold, strict=True) for gold in golds]
    rows = [make_example({"boxes": [*b], "labels": [f"L{n}" for n in ids]}) for b, ids in columns]
    answers = [tuple((box, f"l{label}") for box, label in boxes) for boxes in found]
    kept = []
    for boxes, gold in zip(found, golds, strict=True):  # OVDEval suppresses boxes around each gold
        removed, keep = set[int](), set[int]()
        for box, _ in gold:
            near = [i for i, (other, _) in enumerate(boxes) if iou(box, other) > 0.5]
            keep |= {*near[-1:]}  # of equal scores, a reversed argsort takes the last
            removed |= {*near[:-1]}
        kept.append([own for i, own in enumerate(boxes) if i not in removed - keep])
    expected = coco_average_precision(kept, golds)["ap"]
    assert 0.05 < expected < 0.95, "neither trivially right nor wrong"
    assert CORPUS_RULES["nms_ap"](answers, rows) == pytest.approx(expected)


def draw_box(rng: random.Random) -> tuple[list[float], int]:
    x, y = rng.uniform(0, 60), rng.uniform(0, 60)
    return [x, y, x + rng.uniform(10, 40), y + rng.uniform(10, 40)], rng.randrange(3)


def expect(output: str, start: float, end: float) -> dict[str, float]:
    """Return the metrics by their definition, from the last pair that the script would find."""
    iou = 0.0
    if pairs := re.findall(r"(\d+\.?\d*) (?:to|and) (\d+\.?\d*)", output):
        first, last = map(float, pairs[-1])
        shared = min(end, last) - max(start, first)
        iou = max(0.0, shared / (max(end, last) - min(start, first)))
    recalls = {f"recall_{limit}": float(iou >= limit / 100) for limit in (30, 50, 70)}
    return {**recalls, "iou": iou}


def test_metrics_of_charades_sta_are_those_of_the_definition():
    task, rng = load_benchmark("charades_sta").load_task(), random.Random(0)
    earned = 0
    for number in range(1000):
        start = round(rng.uniform(0, 20), 1)
        end = round(start + rng.uniform(0.1, 10), 1)
        glue = rng.choice([" ", " ", ""])
        output = glue.join(rng.choice(PIECES) for _ in range(rng.randint(0, 8)))
        if number % 3 == 0:
            output += f" {rng.uniform(0, 20):.2f} to {rng.uniform(0, 30):.2f}"
        score = task.score(output, Example("a", (CLIP,), "a person walks", [start, end]))
        found = {**score.rewards, **score.metrics}
        expected = expect(output, start, end)
        assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-9), output
        earned += expected["iou"] > 0
    assert earned > 200
    # No hit: the IoU is the threshold, but 0.29999999999999993 and so on in the script.
    for limit, gold, output in (
        (30, [0.2, 1.2], "0.9 to 1.2"),
        (50, [0.1, 5.3], "2.7 to 5.3"),
        (70, [1.3, 2.3], "1.6 to 2.3"),
    ):
        score = task.score(output, Example("a", (CLIP,), "", gold))
        assert score.metrics[f"recall_{limit}"] == 0.0
        assert score.rewards["iou"] == pytest.approx(limit / 100)


def test_the_score_of_vsi_bench_is_that_of_its_script():
    """The script's formulas on random numbers (lmms-eval, vsibench/utils.py)."""
    rng, task = np.random.default_rng(0), load_benchmark("vsi_bench").load_task()
    expected, examples, answers = defaultdict(list), list[Example](), []

    def add(kind: str, level: str, gold: object, text: str, value: float) -> None:
        examples.append(make_example(gold, type=kind, level=level))
        expected[kind, level].append(value)
        answers.append(task.read(text, examples[-1]))

    for number in range(400):
        gold, guess = round(rng.uniform(1, 9), 1), round(rng.uniform(1, 9), 1)
        kind = ("object_abs_distance", "object_counting")[number % 2]
        thresholds = np.linspace(0.5, 0.95, int((0.95 - 0.5) / 0.05 + 2))
        value = float((abs(guess - gold) / gold <= 1 - thresholds).mean())
        add(kind, "all", gold, str(guess), value)
        assert task.score(str(guess), examples[-1]).metrics["mra"] == value
    for number in range(60):
        answer, level = "ab"[number % 3 % 2], ("easy", "hard")[number % 5 % 2]
        gold = {"options": ["a", "b"], "answer": answer}
        add("object_rel_direction", level, gold, "A", float(answer == "a"))
    means = {key: np.mean(values) for key, values in expected.items()}
    direction = np.mean([means.pop(("object_rel_direction", n)) for n in ("easy", "hard")])
    overall = np.mean([*means.values(), direction])
    assert task.corpus_metrics(answers, examples)["category_mean"] == pytest.approx(overall)
