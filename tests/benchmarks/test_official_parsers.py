"""Outputs scored as by the official scripts, where these read more or less than the rewards do."""

import itertools
from functools import cache

import pytest

from vlm_grpo.benchmarks.definition import load_benchmark
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.tasks.graders.official_parsers import READERS, begins_word, unwrap
from vlm_grpo.types import Example, ImageRef

BOX = {"boxes": [[0, 0, 10, 10]]}
BOX_JSON = '{"bbox_2d": [0, 0, 10, 10]}'
CUP = '{"bbox_2d": [0, 0, 10, 10], "label": "Cup"}'
LAYER = "<|object_ref_start|>Layer 2<|object_ref_end|>"
CALL = '<tool_call>\n{"name": "computer_use", "arguments": {"coordinate": '
HALF_JSON = '{"bbox_2d": [0, 0, 20, 10]}'  # an IoU of exactly 0.5


def make_example(answer: object, **meta: object) -> Example:
    image = ImageRef(name="a", size=(1000, 1000), resized_size=(1000, 1000), data=b"")
    return Example("a", (image,), "?", answer, meta)


SVT = make_example(["EXIT"], dataset_name="svt")
CHOICES = {"choices": ["145°", "B", "circle"], "answer_type": "text", "precision": None}


@cache
def load_task(benchmark: str, frame: str = "original") -> Task:
    return load_benchmark(benchmark).load_task(FRAMES[frame])


def test_an_output_is_scored_as_by_the_script():
    for benchmark, gold, expected, *outputs in (
        # The only digits in tags, for which the models were asked.
        ("super_clevr_200", 8, 1, "<answer> 8 </answer>", "<think>4</think><answer>\n8\n</answer>"),
        ("super_clevr_200", 8, 0, "<answer>A. 8</answer>"),  # the reward's parser reads 8
        ("super_clevr_200", 8, 1, "<answer>x</answer><answer>8</answer>"),  # the first with digits
        ("super_clevr_200", 8, 0, "<answer>8 apples</answer>", "<answer>8", "8"),
        # The last integer box in tags.
        ("lisa_grounding", BOX, 1, f"<answer>{BOX_JSON}</answer>"),
        ("lisa_grounding", BOX, 0, f"<answer>{HALF_JSON}</answer>"),  # the IoU must be above 0.5
        ("lisa_grounding", BOX, 0, '<answer>{"bbox_2d": [0, 0, 10.0, 10]}</answer>'),
        ("lisa_grounding", BOX, 0, "<answer>[0, 0, 10, 10]</answer>"),  # braces are required
        ("lisa_grounding", BOX, 1, f"<answer>[{HALF_JSON}, {BOX_JSON}]</answer>"),
        ("lisa_grounding", BOX, 0, f"<answer>[{BOX_JSON}, {HALF_JSON}]</answer>"),
        ("lisa_grounding", BOX, 0, BOX_JSON),  # no tags
        # The first box in the grammar of the model.
        ("refcoco", BOX, 1, HALF_JSON),  # an IoU of at least 0.5
        ("refcoco", BOX, 1, f"[{BOX_JSON}, [500, 500, 600, 600]]", f"The 2 dogs: {BOX_JSON}"),
        ("refcoco", BOX, 1, '{"bbox_2d": [0, 0, 10, 10], "lab'),
        ("refcoco", BOX, 1, f"<think>[1, 2, 3, 4]</think>{BOX_JSON}"),
        ("refcoco", BOX, 0, "[0 0 10 10]", "[10, 10, 0, 0]", "(0, 0, 10, 10)"),
        ("refcoco qwen2_vl", BOX, 1, "It is <|box_start|>(0,0),(10,10)<|box_end|>"),
        # Qwen-VL's pattern allows no blank between corners and begins at the first parenthesis.
        ("refcoco qwen2_vl", BOX, 0, "(0, 0), (10, 10)", "(a), (0,0),(10,10)"),
        # It divides by 999: 499.6 of 1,000 pixels is 500.1, an IoU of 0.5 with a box of 1,000.
        ("refcoco qwen2_vl", {"boxes": [[0, 0, 1000, 1000]]}, 1, "(0,0),(999,499.6)"),
        ("refcoco internvl", BOX, 1, "<ref>cup</ref><box>[[0, 0, 10, 10]]</box>"),
        ("refcoco internvl", BOX, 1, "[[0 , 0. , 10 ,10.0 ]]", "[cup]\n[[0, 0, 10, 10]]"),
        ("refcoco internvl", BOX, 1, "[0, 0, 0.01, 0.01]"),  # a sum below 4: shares of the sides
        ("refcoco internvl", BOX, 0, "[cup, left]: [[0, 0, 10, 10]]"),  # "cup" is no number
        ("refcoco glm", BOX, 1, "at <0, 0, 10, 10>"),
        ("refcoco paligemma", BOX, 1, "<loc0000><loc0000><loc0010><loc0010>"),
        # A number alone; the reward's parser reads "7." and "There are 7 apples" too.
        ("tallyqa", 7, 1, "7", "Seven", "<answer>7</answer>"),
        ("tallyqa", 7, 0, "7.", "There are 7 apples", "07", "9" * 5000),
        ("tallyqa", 0, 1, "none"),
        ("tallyqa", 21, 0, "twenty-one"),
        # The first digits of the text.
        ("pixmo_count", 7, 1, "There are 7 apples, or 8", "7.5"),
        ("pixmo_count", 7, 0, "07", "seven"),  # texts are compared
        # The number stated, or else the first one: the error is 0.
        ("fsc147", 1234, 0, "approximately 1,234 objects"),
        ("fsc147", 7, 0, "seven"),
        ("fsc147", 120, 0, "between 120 and 150"),
        ("fsc147", 7, 7, "many"),
        # Texts.
        ("docvqa", ["ax"], 0.5, "ab"),  # a similarity of exactly 0.5 counts
        ("stvqa", ["ax"], 0.0, "ab"),  # but not in the paper
        ("textvqa", ["b"] * 10, 0, "b" + 33 * "."),  # the script removes 32 periods
        ("textvqa", ["b"] * 10, 1, "b" + 32 * "."),
        # With the columns of its row. Without an article four of ten are empty, and three without
        # one of the four.
        ("textvqa", make_example(["a", *"xxxxxx"], answers=10), 1, "the"),
        ("ocrbench", SVT, 1, "<think>exit</think>no", "<think>exit", "x" * 20_000 + "exit"),
        ("chartqa", make_example("43", type="human"), 1, "<think>x</think>42"),
        ("mathvista", make_example("B", **CHOICES), 1, r"so \boxed{B}"),
        ("mathverse", make_example("D", version="Text Lite"), 1, r"so \boxed{D}"),
        ("geometry3k", r"2 \sqrt { 3 }", 1, r"so \boxed{\sqrt{12}}"),
    ):
        task = load_task(*benchmark.split())
        example = gold if isinstance(gold, Example) else make_example(gold)
        for output in outputs:
            score = task.score(output, example)
            assert task.primary_metric not in score.failures
            found = {**score.rewards, **score.metrics}[task.primary_metric]
            assert found == pytest.approx(expected), (benchmark, output)
    # Super-CLEVR without tags in the prompt reads digits.
    task = load_benchmark("super_clevr_200").load_task(tags=False, thinking=False)
    outputs = ["8", "<answer>8</answer>", "A. 8"]
    assert [task.read(output, make_example(8)) for output in outputs] == [8, 8, None]


def test_an_output_without_a_count_is_a_count_of_0_in_fsc_147():
    task = load_task("fsc147")
    first, second = make_example(8), make_example(3)
    scores = [task.score("8", first), task.score("many", second)]
    assert [score.metrics["mae"] for score in scores] == [0, 3]
    assert scores[1].metrics["absolute_error"] is None
    corpus = task.corpus_metrics([score.answer for score in scores], [first, second])
    assert corpus["rmse_all"] == pytest.approx((9 / 2) ** 0.5)  # 3² over two images
    assert corpus["rmse"] == 0.0  # over the one with a count


def test_one_bad_box_does_not_void_an_image():
    task = load_task("coco")
    example = make_example({**BOX, "labels": ["cup"]})
    for output in (
        f"[{', '.join([CUP] * 101)}]",
        f'[{CUP}, {{"bbox_2d": [5, 5, 5, 9], "label": "cup"}}]',  # a box without area
        f'[{CUP}, {{"bbox_2d": [20, 20, 30, 30]}}]',  # without a label
        f'[{CUP}, {{"bbox_2d": [20, 20, 3',  # cut off
        f"<answer>[{CUP}]</answer>",
    ):
        average = task.corpus_metrics([task.read(output, example)], [example])["ap"]
        assert average == pytest.approx(1), output


def test_objects_are_read_in_every_grammar():
    cup = "<|object_ref_start|>cup<|object_ref_end|><|box_start|>(0,0),(10,10)<|box_end|>"
    for frame, output in {
        "qwen2_vl": cup,
        "internvl": "<ref>cup</ref><box>[[0, 0, 10, 10]]</box>",
        "paligemma": "<loc0000><loc0000><loc0010><loc0010> cup ; <loc0001>",
    }.items():
        task = load_task("coco", frame)
        found = task.read(f"{output} and more", make_example({**BOX, "labels": ["cup"]}))
        assert found is not None
        assert [label[:3] for _, label in found] == ["cup"]
        assert task.read("[]", make_example(BOX)) == ()
        assert task.read("I see a cup.", make_example(BOX)) is None
    # With y first, a box is read in order.
    example, task = make_example(BOX), load_task("refcoco", "gemma4")
    written = '[{"box_2d": [200, 100, 500, 300], "label": "cup"}]'
    assert READERS["first_box"](written, example, task) == ((100, 200, 300, 500),)
    assert READERS["objects"](written, example, task) == (((100, 200, 300, 500), "cup"),)


def test_a_click_is_two_numbers_or_the_center_of_four():
    for frame, expected, *outputs in (
        ("original", (12, 30), "click (12, 30)", "<think>1 2</think>[12, 30]"),
        ("original", (20, 30), '{"bbox_2d": [10, 20, 30, 40]}'),
        ("original", (12, 30.5), '{"point_2d": [12, 30.5]}'),
        ("permille", (0.5, 0.25), '{"action": "left_click", "coordinate": [500, 250]}'),
        ("gemma4", (0.5, 0.25), '{"point": [250, 500]}'),
        # Forms of single models, whose echoed instructions may have digits.
        ("original", (12, 30), f"Layer 2 {CALL}[12, 30]}}}}\n</tool_call>"),
        ("original", (20, 30), f"{CALL}[10, 20, 30, 40]}}}}"),
        ("original", None, f'{CALL}"12"}}}}\n</tool_call>'),
        ("qwen2_vl", (0.5, 0.25), f"{LAYER}<|box_start|>(400,200),(600,300)<|box_end|>"),
        ("fraction", (0.5, 0.25), "<|box_start|>[[400, 200], [600, 300]]<|box_end|>", "(0.5,0.25)"),
        ("fraction", None, "<|box_start|>(400,200),(600,1300)<|box_end|>", "a box at (0.5,0.25)"),
        ("fraction", (0.5, 0.25), "<box>(400,200),(600,300)</box>"),  # divided by 1,000
        ("internvl", (0.5, 0.25), "<ref>Layer 2</ref><box>[[400, 200, 600, 300]]</box>"),
        ("permille", (0.5, 0.25), "2. [[500,250]]", "step 1: pyautogui.click(x=0.5, y=0.25)"),
        ("original", (6.5, 16), "[12, 30] or [1, 2]"),
        ("original", None, "12", "1 2 3", "9" * 400 + ",1"),
    ):
        if expected is not None and frame != "original":  # expected are shares of the sides
            expected = tuple(1000 * share for share in expected)
        for output in outputs:
            answer = READERS["click"](output, make_example(BOX), load_task("screenspot", frame))
            assert (answer and answer.point) == expected, output


def test_a_choice_is_read_as_the_scripts_do():
    example = make_example({"options": ["cat", "dog"], "answer": "dog"})
    readers = [READERS[name] for name in ("first_letter", "any_letter", "only_option")]
    for output, *expected in (
        ("B", 1, 1, 1),
        ("It is B.", None, 1, 1),
        ("It is a dog", None, 0, 1),  # a letter between spaces precedes the text for one of them
        ("answer: b", 0, 0, None),  # the first letter of answer, as the script reads it
        ("A or B", 0, 0, None),
        ("<answer>(A)</answer>", 0, 0, 0),
        ("<answer>(B)</answer>", 1, 1, 1),
        ("(b) dog", 1, 1, 1),
        ("Z, no dog", None, None, None),
        *(("Bird", 1, 1, None), ("C", None, None, None)),
        *(("[A]", None, 0, 0), ("", None, None, None)),
    ):
        found = [read(output, example, load_task("hr_bench_4k")) for read in readers]
        assert found == expected, output
    # A letter may be the beginning of a word.
    outputs = ["Based on it", " (Bird)", "(B) bird", "B", "B. As", "<answer>Box</answer>", "12"]
    assert [begins_word(output) for output in outputs] == [True, True, *[False] * 3, True, False]


@pytest.mark.parametrize("name", READERS)
def test_no_reader_raises(name):
    many = ("[" * 50_000, "(" * 50_000, "{" * 50_000, "<answer>" * 10_000, "9" * 50_000)
    numbers = (f"<answer>{'9' * 9_000}</answer>", f"[{'9' * 400}, 1, 2, 3]", "(nan,nan),(nan,nan)")
    for output, frame in itertools.product(("", "\x00", *many, *numbers), FRAMES):
        READERS[name](output, make_example(BOX), load_task("refcoco", frame))


def test_the_answer_is_in_the_last_tags_or_after_the_thinking_or_in_the_last_box():
    found = {
        **{"<answer>a</answer> <answer> b </answer>": "b", "x</think> c ": "c", " d": " d"},
        **{"<answer>e": "<answer>e", "<s> A": "A", "A. <|im_end|>\n": "A.", "a<s>": "a<s>"},
    }
    assert {output: unwrap(output) for output in found} == found
    for text, answer in {
        r"so \boxed{\frac{1}{2}} or \boxed{ 3 }.": "3",
        r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
        'It is 4. The answer is "4".': "4",
        r"<think>\boxed{1}</think> (B)": "(B)",
        r"\boxed{3": r"\boxed{3",
    }.items():
        assert READERS["last_boxed"](text, make_example("4"), load_task("mathvista")) == answer
