"""All built-in tasks: gold answers earn 1, rewards stay in their range; options; corpus metrics."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageChops

from vlm_grpo.errors import UserError
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example, ImageRef, VideoRef

SHARED = {"format": 0.1, "thought": 0.1, "length": 0.1, "repetition": 0.1}
PENALTIES = ("length", "repetition")
IMAGE = ImageRef("image", size=(640, 480), resized_size=(644, 476))
CLIP = VideoRef("clip", size=(64, 48), resized_size=(56, 56), times=(0.0, 10.0), seconds=20.0)
SEVERAL = {"boxes": [[10, 20, 200, 210], [300, 5, 500, 300]], "labels": ["Cat", "dog"]}
ONE = {"boxes": [[10, 20, 200, 210]], "labels": ["cat"]}
TABLE = "<table><tr><td>a</td><td>b</td></tr><tr><td colspan='2'>1</td></tr></table>"
PAGE = {"text": "No EXIT\n\n" + TABLE, "tests": [{"type": "present", "text": "No EXIT"}]}
CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("counting", {"weights": {"closeness": 0.5}}, 3),
    ("counting", {}, 0),
    ("counting", {"points": True}, 3),
    ("grounding", {"weights": {"giou": 0.5, "hit": 0.5}}, ONE),
    ("grounding", {"several": True}, SEVERAL),
    ("grounding", {"absent": True}, {"boxes": []}),
    ("detection", {}, SEVERAL),
    ("detection", {}, {"boxes": [], "labels": []}),
    ("pointing", {}, ONE),
    ("pointing", {"several": True}, SEVERAL),
    ("ocr", {}, "No EXIT"),
    ("document", {"weights": {"similarity": 0.5, "order": 0.5}}, PAGE),
    ("table", {"weights": {"structure": 0.5}}, TABLE),
    ("table", {"form": "markdown"}, "a|b\n---|---\n1|2"),
    ("ocr", {"normalize": ("case", "space", "punctuation", "nfkc")}, ["你好，世界", "Hello"]),
    ("numeric", {"weights": {"closeness": 0.5}}, 1234.5),
    ("numeric", {"units": True}, ["$1.2 million", "Yes"]),
    ("math", {}, "\\frac{1}{2}"),
    ("math", {}, 4),
    ("math", {}, "\\boxed{B}"),
    ("gui", {"weights": {"gaussian": 0.5, "action_type": 0.1}}, ONE),
    ("gui", {"box": True, "weights": {"gaussian": 0.5, "coverage": 0.5}}, SEVERAL),
    ("gui", {"actions": ("type", "back")}, {"action": "type", "text": "No EXIT"}),
    ("temporal", {"weights": {"bounded": 0.5}}, [2.5, 7]),
    ("keypoints", {}, {"points": {"nose": [20, 30], "handle": [300, 5]}, "box": [0, 0, 400, 300]}),
    ("spatial", {}, 2.5),
    ("spatial", {"grade": "error"}, {"options": ["No EXIT", "3"], "answer": "3"}),
    ("segmentation", {}, SEVERAL),
    ("segmentation", {"canvas": 840}, {"boxes": []}),
    ("self_supervised", {"joined": True, "rows": 2}, {"order": [3, 1, 2, 6, 5, 4]}),
    ("self_supervised", {"puzzle": "rotation"}, {"degrees": 180}),
    ("choice", {}, {"options": ["No EXIT", "3", "[1, 2]", "NaN"], "answer": "3"}),
    ("choice", {"shuffle": False}, {"options": ["A", "B"], "answer": "B"}),
]
IDS = [f"{name}-{number}" for number, (name, _, _) in enumerate(CASES)]


def load_case(case: tuple[str, dict[str, Any], Any], **more: Any) -> tuple[Task, Example]:
    name, options, answer = case
    weights = {**SHARED, **options.get("weights", {})}
    task = load_task(name, **{**options, "weights": weights}, **more)
    image = CLIP if name == "temporal" else IMAGE
    return task, Example("1", (image,), "the cat", answer)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_gold_completion_earns_the_full_reward_and_the_prompt_describes_its_frame(case):
    for frame, tags, thinking in product(FRAMES.values(), (False, True), (False, True)):
        task, example = load_case(case, frame=frame, tags=tags, thinking=thinking)
        task.check(example)
        score = task.score(task.gold(example), example)
        assert not score.failures, frame
        for name, value in score.rewards.items():
            assert value is not None
            if name in PENALTIES:
                assert value == 0.0
            else:
                assert task.gold_reward(example) - 1e-9 <= value <= 1.0 + 1e-9, frame
        # Boxes of at least 190 pixels lose less than 1.1 % to rounding; nothing else is rounded.
        assert task.gold_reward(example) > 0.97, frame
        primary = {**score.rewards, **score.metrics}[task.primary_metric]
        lost = 1e-3 if case[0] == "keypoints" else 0  # its points lose a little to rounding
        assert primary == pytest.approx(1.0, rel=0, abs=lost), frame
        assert example.question in (prompt := task.prompt(example))
        if case[0] in ("grounding", "detection"):
            assert frame.form in prompt
        elif case[0] == "pointing" or "points" in case[1] or case[:2] == ("gui", {}):
            assert frame.describe_point(IMAGE.size) in prompt


def test_the_threshold_of_hits_moves_from_loose_to_strict():
    task: Any = load_task("grounding", loose=0.5, strict=0.9, weights={"hit": 1.0})
    example = make_example({"boxes": [[0, 0, 100, 100]]})
    answer = ((0.0, 0.0, 100.0, 70.0),)  # an IoU of 0.7
    scores = [task.with_progress(p).hit(answer, example) for p in (0.0, 0.5, 0.51, 1.0)]
    assert scores == [1.0, 1.0, 0.0, 0.0]


def test_the_gold_reward_of_several_boxes_is_that_of_the_smallest():
    task = load_task("detection", frame=FRAMES["permille"])
    boxes = [[0, 0, 640, 480], [0, 0, 3.5, 480]]
    sizes = [{"boxes": few, "labels": ["cat"] * len(few)} for few in (boxes, boxes[:1], boxes[1:])]
    rewards = [task.gold_reward(example) for example in make_examples(*sizes)]
    # A box 5.5 units wide may lose one of them: an IoU of 0.82, which reaches 0.50 to 0.80.
    assert rewards == [0.7, 1.0, 0.7]


PIECES = [
    *("<answer>", "</answer>", "<think>", "</think>", "[", "]", "{", "}", ",", '"bbox_2d":', "3"),
    *('{"bbox_2d": [10, 20, 200, 210], "label": "cat"}', "[1,2,3,4]", "[50, 60]", "[]", " or "),
    *('{"point_2d": [50, 60]}', "three", "-1", "1e308", "1e6", "0.001", "NaN", "No EXIT", "\x00"),
    *("你好", "!", "<box>[[1,2,3,4]]</box>", "<loc0001>", "(1,2),(3,4)", "word " * 50, "\u200b"),
    *("```json", "```", "1e999", "9" * 400, "1,234", "½", "③", "３", "٣", "−", "\ud800", "'"),
    *("<|box_start|>", "<|box_end|>", "<ref>", "at least", "null", "-Infinity", "\u202e"),
]
TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=8).map(lambda p: f"<answer>{''.join(p)}</answer>"),
)


@pytest.mark.parametrize("case", CASES, ids=IDS)
@given(text=TEXTS)
@settings(max_examples=100)
def test_rewards_of_any_text_stay_in_their_range(case, text):
    for tags in (True, False):
        task, example = load_case(case, tags=tags)
        score = task.score(text, example)
        assert not score.failures
        for name, value in score.rewards.items():
            low, high = (-1.0, 0.0) if name in PENALTIES else (0.0, 1.0)
            assert value is not None
            assert low - 1e-9 <= value <= high + 1e-9, name
        assert all(v is None or math.isfinite(v) for v in score.metrics.values())
        task.corpus_metrics([score.answer], [example])


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_answers_are_drawn_on_a_copy(case):
    task, example = load_case(case)
    image = Image.new("RGB", IMAGE.size, "white")
    drawn = task.draw(image, task.gold_answer(example), example, "red")
    assert drawn.size == image.size
    assert image.getextrema() == ((255, 255),) * 3  # the original is untouched
    marked = ImageChops.difference(drawn, image).getbbox() is not None
    # Texts and counts have no position; an empty list of boxes draws nothing.
    has_boxes = isinstance(case[2], dict) and bool(case[2].get("boxes"))
    assert marked == (case[0] in ("table", "temporal", "self_supervised", "keypoints") or has_boxes)


ACTIONS, NOSE = {"actions": ["type", "scroll", "back"]}, {"points": {"nose": [1, 2]}}
JUDGE = {"address": "http://a", "judge_model": "b"}
BAD: list[tuple[str, dict[str, Any], Any, str]] = [
    ("counting", {}, "3", "an integer"),
    ("counting", {}, True, "an integer"),
    ("counting", {}, -1, "an integer"),
    ("grounding", {}, SEVERAL, "has 2 boxes"),
    ("grounding", {}, {"boxes": []}, "has 0 boxes"),
    ("grounding", {"several": True, "max_boxes": 1}, SEVERAL, "max_boxes=1"),
    ("detection", {}, {"boxes": [[1, 2, 3, 4]]}, "must name each of 1 boxes"),
    ("detection", {}, {"boxes": [[1, 2, 3, 4]], "labels": [""]}, "non-empty"),
    ("detection", {"max_boxes": 1}, SEVERAL, "more than max_boxes=1"),
    ("pointing", {}, SEVERAL, "has 2 boxes"),
    ("table", {}, 3, "must be one table in HTML.* by form=markdown"),
    ("table", {}, TABLE * 2, "must be one table in HTML"),
    ("table", {}, "<table><tr></tr></table>", "table with cells"),
    ("table", {}, "<table>" + "<tr><td>1" * 900 + "</table>", "too many cells"),
    ("table", {"form": "markdown"}, "a b", "must be one table in markdown"),
    ("ocr", {}, 3, "string"),
    ("ocr", {}, " ", "non-empty"),
    ("ocr", {}, ["EXIT", 3], "must be a non-empty string"),
    ("ocr", {"normalize": ("punctuation",)}, "...", "non-empty"),
    ("ocr", {}, "x" * 20_001, "longer than"),
    ("temporal", {}, [7, 2.5], "start within the video of 20.0 seconds"),
    ("temporal", {}, [20, 21], "start within the video of 20.0 seconds"),
    ("temporal", {}, [1, 1.001], "end at least 0.01 seconds later"),
    ("temporal", {}, [1], "must be \\[start, end\\] in seconds"),
    ("choice", {}, {"options": ["a"], "answer": "a"}, "2 to 26 options"),
    ("choice", {}, {"options": ["a", 2], "answer": "a"}, "option 2 must be"),
    ("choice", {}, {"options": ["a", "b" * 2001], "answer": "a"}, "longer than"),
    ("choice", {}, {"options": ["a", "A."], "answer": "a"}, "the same text"),
    ("choice", {}, {"options": ["a", "b"], "answer": "c"}, "one of the options"),
    ("choice", {}, {"options": ["a", "b"]}, "one of the options"),
    ("gui", ACTIONS, {"boxes": []}, "no box of an element"),
    ("gui", ACTIONS, {"action": "key", "text": "x"}, "add it to the option actions"),
    ("gui", ACTIONS, {"action": ["click"]}, "add it to the option actions"),
    ("gui", ACTIONS, {"action": "type"}, "must be a string"),
    ("gui", ACTIONS, {"action": "scroll", "direction": "sideways"}, "one of up, down"),
    ("document", {}, "text", "must be"),
    ("document", {}, {"tests": "x"}, "tests must be a list"),
    ("document", {}, {"tests": []}, "must be"),
    ("document", {}, {"text": " "}, "must have 1 to 50,000"),
    ("document", {}, {"tests": [{"type": "x"}]}, "must have a type"),
    ("document", {"weights": {"order": 1}}, {"tests": PAGE["tests"]}, "needs the page's text"),
    *(
        ("math", {}, gold, "no answer can equal .*: give a finite number")
        for gold in ("=", "%", "1e999", "nan", float("inf"), "{}", r"\%", "°")
    ),
    *(
        ("math", {}, gold, "the answer")
        for gold in (None, True, ["4"], "", "$4$ or $5$", "4" * 301, r"\boxed{4")
    ),
    *(
        ("numeric", {}, gold, "the answer")
        for gold in (None, True, {}, [], "", " . ", math.nan, "x" * 300, [None])
    ),
    ("keypoints", {}, {"boxes": []}, "must have points"),
    ("keypoints", {}, {"points": {}, "area": 9}, "must have points"),
    ("keypoints", {}, {"points": {"nose": [1, 2, 2]}, "area": 9}, "must be two numbers"),
    ("keypoints", {}, {"points": {"nose": [1, True]}, "area": 9}, "must be two numbers"),
    ("keypoints", {}, {"points": {"nose": [1, math.nan]}, "area": 9}, "must be two numbers"),
    ("keypoints", {}, NOSE, "a positive area, or a box"),
    ("keypoints", {}, {**NOSE, "area": 0}, "a positive area, or a box"),
    ("keypoints", {}, {**NOSE, "area": 9, "names": ["ear"]}, "the labeled ones among them"),
    ("keypoints", {}, {**NOSE, "area": 9, "names": ["nose", "Nose"]}, "each point once"),
    *(
        ("segmentation", {}, {"boxes": [[1, 2, 3, 4]], "masks": [mask]}, reason)
        for mask, reason in (
            ({"size": [64, 48], "counts": [3072]}, "it has 48x64 pixels, and its image 640x480"),
            ({"size": [480, 640], "counts": [3000]}, "do not add up"),
            ({"size": [480, 640], "counts": [-1, 307_201]}, "do not add up"),
            ({"size": [480, 640]}, "counts"),
            ([], "three points"),
            ([[1, 2, 3, 4]], "three points"),
            ([[1, 2, 3, 4, 5, 6, 7]], "three points"),
            (7, "not iterable"),
        )
    ),
]


@pytest.mark.parametrize(("name", "options", "answer", "reason"), BAD)
def test_an_invalid_gold_answer_is_an_error(name, options, answer, reason):
    task = load_task(name, **options)
    with pytest.raises(ValueError, match=reason):
        task.check(make_example(answer, CLIP if name == "temporal" else IMAGE))


def test_wrong_options_are_refused():
    for name, options, reason in (
        ("gui", {"actions": ["tap"]}, "give a list of click"),
        ("gui", {"actions": ["type"], "box": True}, "choose one"),
        ("gui", {"weights": {"coverage": 1}}, "set box=true"),
        ("gui", {"spread": 0}, "above 0"),
        ("ocr", {"normalize": ("upper",)}, "normalize"),
        ("numeric", {"tolerance": 1.0}, r"tolerance is 1\.0; it must be from 0 to less than 1"),
        ("segmentation", {"weights": {"mask_iou": 1.0}}, "the reward mask_iou needs segmenter"),
        ("counting", {"weights": {"overlong": 1.0}}, "needs overlong_cache"),
        ("judged", {}, r"set task_options\.address=…"),
        ("judged", {**JUDGE, "address": "host:80/v1"}, "address 'host:80/v1' must start with http"),
        ("judged", {**JUDGE, "lowest": 10.0}, "lowest=10 must be less than highest=10"),
        ("judged", {**JUDGE, "concurrency": 0}, "concurrency is 0; it must be at least 1"),
        ("judged", {**JUDGE, "timeout": float("inf")}, "timeout is inf"),
        ("judged", {**JUDGE, "judge_options": {"model": "x"}}, "judge_options must not have model"),
        ("judged", {**JUDGE, "adress": "x"}, "unknown option adress .did you mean address"),
    ):
        with pytest.raises(UserError, match=reason):
            load_task(name, **options)


def test_an_example_without_an_image_is_an_error():
    tasks = map(load_task, ("grounding", "detection", "pointing", "gui"))
    for task, answer in [*((task, ONE) for task in tasks), (load_task("counting", points=True), 1)]:
        with pytest.raises(ValueError, match="no image"):
            task.check(Example("1", (), "the cat", answer))
    with pytest.raises(ValueError, match="no video"):
        load_task("temporal").check(make_example([1, 2]))


def make_example(answer: Any, image: Any = IMAGE) -> Example:
    return Example("1", (image,), "?", answer)


def make_examples(*answers: Any) -> list[Example]:
    return [*map(make_example, answers)]


def test_counting_reports_rmse_accuracy_by_count_and_the_majority_baseline():
    examples = make_examples(3, 3, 3, 5, 8)
    found = load_task("counting").corpus_metrics([3, 4, None, 5, 4], examples)
    assert found == pytest.approx(
        {
            "majority_baseline": 3 / 5,  # three of five rows say 3
            "rmse": np.sqrt(np.mean([0, 1, 0, 16])),  # the row without an answer has no error
            "exact_of_3": 1 / 3,
            "exact_of_5": 1.0,
            "exact_of_8": 0.0,
        }
    )
    assert load_task("counting").corpus_metrics([], []) == {}
    assert "rmse" not in load_task("counting").corpus_metrics([None], make_examples(3))
    task, examples = load_task("counting", points=True), make_examples(2, 2, 0)
    answers = [((5.0, 5.0), (9.0, 9.0)), ((5.0, 5.0),), ()]
    found = task.corpus_metrics(answers, examples)
    assert (found["exact_of_2"], found["exact_of_0"]) == (0.5, 1.0)
    assert found["rmse"] == pytest.approx(np.sqrt(1 / 3))  # one of three is off by one


def test_grounding_reports_accuracy_by_size():
    small, medium, large = [0, 0, 30, 30], [0, 0, 90, 90], [0, 0, 200, 200]
    examples = make_examples(*({"boxes": [box]} for box in (small, small, medium, large)))
    answers = [((0.0, 0.0, 30.0, 30.0),), None, ((50.0, 50.0, 90.0, 90.0),), None]
    assert load_task("grounding").corpus_metrics(answers, examples) == {
        "accuracy_50_small": 0.5,  # 900 pixels, at most 32²
        "iou_small": 0.5,  # one exact box and one missing answer
        "accuracy_50_medium": 0.0,  # 8,100 pixels, at most 96²
        "iou_medium": pytest.approx(40**2 / 90**2),  # a corner of the box
        **{"accuracy_50_large": 0.0, "iou_large": 0.0},
    }
    only = load_task("grounding").corpus_metrics(answers[:1], examples[:1])
    assert only == {"accuracy_50_small": 1.0, "iou_small": 1.0}


def test_detection_reports_average_precision():
    gold = {"boxes": [[0, 0, 100, 100], [200, 0, 300, 100]], "labels": ["cat", "dog"]}
    task, examples = load_task("detection"), make_examples(gold, gold)
    cat, dog = task.gold_answer(examples[0])
    found = task.corpus_metrics([(cat, dog), None], examples)
    # For both classes, recall 1/2 at precision 1 reaches 51 of the 101 recall levels.
    assert found == pytest.approx({"ap": 51 / 101, "ap_50": 51 / 101, "ap_75": 51 / 101})


def test_f1_uses_the_maximum_matching():
    """Two boxes that both overlap two gold boxes: a greedy matching would match only one."""
    gold = {"boxes": [[0, 0, 100, 100], [0, 0, 100, 60]], "labels": ["a", "a"]}
    answer = '[{"bbox_2d": [0,0,100,80], "label": "a"}, {"bbox_2d": [0,0,100,110], "label": "a"}]'
    # The first overlaps both gold boxes (0.80, 0.75), the second 0.91 and 0.55.
    score = load_task("detection").score(answer, make_example(gold))
    assert score.metrics["f1_50"] == 1.0
    # Both boxes match at the six thresholds up to 0.75. At 0.80, 0.85 and 0.90 only one box
    # matches (0.80 and 0.55 cannot both be reached), and none does at 0.95.
    assert score.rewards["f1_mean"] == pytest.approx((6 * 1.0 + 3 * 0.5 + 0.0) / 10)
