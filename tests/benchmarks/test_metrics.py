"""Official metrics of benchmarks, against values by hand from their scripts and against jiwer."""

from __future__ import annotations

import random

import jiwer
import pytest

from vlm_grpo.benchmarks.metrics import (
    OCRBENCH_V2,
    anls_rrc,
    error_rate,
    normalize_vqa,
    ocrbench,
    ocrbench_v2,
    vqa_accuracy,
    word_recognition,
)
from vlm_grpo.task.scores import anls


@pytest.mark.parametrize(
    ("text", "answers", "dataset", "expected"),
    [
        ("CENTRE", ["centre"], "IIIT5K", 1),  # case is ignored
        ("The word is: centre.", ["CENTRE"], "IIIT5K", 1),  # the text contains the answer
        ("cent re", ["CENTRE"], "IIIT5K", 0),  # spaces are not ignored
        ("cent\nre", ["cent re"], "IIIT5K", 1),  # a line break equals a space
        ("5 dollars", ["$5", "5 dollars"], "STVQA", 1),  # any accepted answer
        ("", ["a"], "STVQA", 0),
        ("x ^ { 2 }", ["x^{2}"], "HME100k", 1),  # formulas: spaces are ignored
        ("X^{2}", ["x^{2}"], "HME100k", 0),  # but case is not
        ("= x^{2} + 1", ["x^{2}"], "HME100k", 1),
    ],
)
def test_ocrbench(text, answers, dataset, expected):
    assert ocrbench(text, answers, dataset) == expected


LONG = "one two three four five"  # 23 characters; five words are not short any longer


@pytest.mark.parametrize(
    ("text", "answers", "kind", "rule", "expected"),
    [
        ("it is a cat", ["cat"], "reasoning VQA en", None, 1),
        ("one two three four", ["one two three four"], "cognition VQA en", None, 1),
        # Five words are scored by ANLS: 23 of 46 characters, 1 − 23/46 = 0.5.
        (LONG + LONG, [LONG], "cognition VQA en", None, 0.5),
        # With one character more it is below one half.
        (LONG + LONG + "x", [LONG], "cognition VQA en", None, 0),
        ("One two three four fiv", [LONG], "cognition VQA en", None, 1 - 1 / 23),
        ("B", ["B"], "science QA en", "multiple choice", 1),
        ("(B)", ["B"], "science QA en", "multiple choice", 1),  # only letters are compared
        ("b", ["B"], "science QA en", "multiple choice", 0),
        ("Answer: B", ["B"], "science QA en", "multiple choice", 0),
        ("Exit", ["EXIT"], "text recognition en", "case sensitive", 0),
        ("Exit", ["EXIT"], "text recognition en", None, 1),
        # 9 of 10: 1 − 1/10.
        ("9 words", ["10"], "text counting en", "regression", 0.9),
        ("5", ["10"], "text counting en", "regression", 0),  # exactly one half is not enough
        ("20", ["10"], "text counting en", "regression", 0),
        ("0", ["10"], "text counting en", "regression", 0),
        ("many", ["10"], "text counting en", "regression", 0),
        ("there are 3", ["3"], "text counting en", "exact match", 1),
        (r"\frac {1}{2}", [r"\frac{1}{2}"], "formula recognition en", None, 1),
        (r"\text{m} = 1", [r"m=1"], "formula recognition cn", None, 1),
        (r"\text{m} = 1", [r"m=1"], "formula recognition en", None, 0),
        ("答案是 北京", ["北京"], "cognition VQA cn", None, 1),
        # Four parts between commas: ANLS; the third of seven characters differs: 1 − 1/7.
        ("a,x,c,d", ["a,b,c,d"], "cognition VQA cn", None, 1 - 1 / 7),
        ("x a,b,c", ["a,b,c"], "cognition VQA cn", None, 1),
    ],
)
def test_ocrbench_v2(text, answers, kind, rule, expected):
    assert kind in OCRBENCH_V2
    assert ocrbench_v2(text, answers, kind, rule) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("matching", "expected"),
    # Of ten answers k match: k of the leave-outs have k − 1 matches, 10 − k have k; each counts up
    # to 3.
    [(0, 0), (1, 9 / 30), (2, (2 * 1 + 8 * 2) / 30), (3, (3 * 2 + 7 * 3) / 30), (4, 1), (10, 1)],
)
def test_vqa_accuracy_by_the_number_of_matching_answers(matching, expected):
    answers = ["yes"] * matching + ["no"] * (10 - matching)
    assert vqa_accuracy("Yes.", answers) == pytest.approx(expected)


def test_vqa_accuracy_agrees_with_leaving_each_answer_out():
    rng = random.Random(0)
    for _ in range(200):
        answers = rng.choices(["1", "two", "the two", "3"], k=10)
        normal = [normalize_vqa(answer) for answer in answers]
        for text in ("2", "one", "four"):
            others = [normal[:i] + normal[i + 1 :] for i in range(10)]
            by_hand = sum(min(1, rest.count(normalize_vqa(text)) / 3) for rest in others) / 10
            assert vqa_accuracy(text, answers) == pytest.approx(by_hand)


def test_vqa_accuracy_counts_annotators_with_a_missing_answer():
    # Three of ten: (3·2 + 7·3)/30; with nine annotators it would be (3·2 + 6·3)/27.
    assert vqa_accuracy("nokia", ["nokia"] * 3 + ["x"] * 6) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("A dog", "dog"),
        ("none", "0"),
        ("Ten", "10"),
        ("1,000", "1000"),
        ("3.5", "3.5"),
        ("end. of", "end of"),
        ("7-11", "7 11"),
        ("(yes)", "yes"),
        ("it's", "it 's"),
        ("isnt", "isn't"),
        ("couldn'tve", "couldn't've"),
        ("'ows'at", "'ow's'at"),
        ("a\nb", "b"),
        ("x @home", "x home"),
        ("me@home", "me home"),
    ],
)
def test_vqa_normalization(text, normal):
    assert normalize_vqa(text) == normal


@pytest.mark.parametrize(
    ("text", "answers", "paper", "rrc"),
    [
        ("exit", ["EXIT"], 1, 1),
        ("abcd", ["abxy"], 0, 0.5),  # exactly one half: 0 in the paper, kept by the script
        ("abc", ["abxyz"], 0, 0),  # 1 − 3/5
        ("abcde", ["abcdx", "zzzzz"], 0.8, 0.8),  # the best of the accepted answers
        ("", ["a"], 0, 0),
        # Padding: 4 edits, 8 characters with the spaces; the script divides by all of them.
        ("abcd    ", ["xyzw"], 0, 0.5),
    ],
)
def test_anls_of_the_paper_and_of_the_script(text, answers, paper, rrc):
    assert anls(text, answers) == pytest.approx(paper)
    assert anls_rrc(text, answers) == pytest.approx(rrc)


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("STARBUCKS", ["Starbucks"], 1),
        ("star-bucks!", ["Starbucks"], 1),
        ("starbuck", ["Starbucks"], 0),
        ("24/7", ["247"], 1),
        ("it says: exit", ["exit"], 0),
    ],
)
def test_word_recognition(text, answers, expected):
    assert word_recognition(text, answers) == expected


def test_error_rates_divide_sums_over_the_dataset():
    # 1 substitution of 2 characters, 3 insertions of 1: 4 / 3; the mean of the two rates is 1.75.
    assert error_rate(["ax", "cdef"], ["ab", "c"]) == pytest.approx(4 / 3)
    assert error_rate(["no exit"], ["no way out"], words=True) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="gold texts are empty"):
        error_rate(["a"], [""])


@pytest.mark.parametrize(("words", "peer"), [(False, "cer"), (True, "wer")])
def test_error_rates_agree_with_jiwer(words, peer):
    rng = random.Random(1)
    golds = ["".join(rng.choices("abc ", k=rng.randint(3, 20))).strip() or "a" for _ in range(100)]
    texts = ["".join(rng.choices("abc ", k=rng.randint(1, 20))).strip() or "b" for _ in range(100)]
    golds = [" ".join(gold.split()) for gold in golds]  # jiwer merges spaces first
    texts = [" ".join(text.split()) for text in texts]
    assert error_rate(texts, golds, words) == pytest.approx(getattr(jiwer, peer)(golds, texts))


@pytest.mark.parametrize(
    "rule",
    [
        lambda text: ocrbench(text, ["a"], "IIIT5K"),
        lambda text: ocrbench_v2(text, ["a b c d e"], "cognition VQA en"),
        lambda text: vqa_accuracy(text, ["a"] * 10),
        lambda text: anls_rrc(text, ["a"]),
        lambda text: word_recognition(text, ["a"]),
        lambda text: ocrbench_v2(text, ["3"], "text counting en", "regression"),
    ],
)
@pytest.mark.parametrize("text", ["", "9" * 100_000, "a " * 50_000, "\x00", "٣", "-" * 100_000])
def test_every_text_has_a_score_between_0_and_1(rule, text):
    assert 0.0 <= rule(text) <= 1.0
