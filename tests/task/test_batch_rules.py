"""Batch rewards and metrics: what they see, what a failure affects, and that workers agree."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from vlm_grpo.task import PlainQuestion, Task, metric, reward
from vlm_grpo.task.registry import load_task
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Batch, Example, Score

# Options select what the rewards do. As with users' files, workers cannot import the module.
BATCHED = '''
import os, time
from collections import Counter
from vlm_grpo.task import Task, metric, reward

class Batched(Task):
    """Rewards of many completions at once."""

    primary_metric = "right"
    does: str = ""

    def parse(self, text, example):
        if text == "the parser raises":
            raise RuntimeError("unreadable")
        return text or None

    def write(self, answer, example):
        return answer

    @reward()
    def right(self, answer, example):
        return float(answer == example.answer)

    @reward(weight=0.5, batch=True)
    def rare(self, batch):
        """The inverse of the number of equal answers in the group."""
        if self.does == "raises":
            raise KeyError("no such column")
        if self.does == "exits":
            raise SystemExit(1)
        if self.does == "dies":
            os._exit(1)
        if self.does == "loops":
            while True:
                pass
        if self.does == "too few":
            return [1.0]
        counts = Counter((c.group, c.answer) for c in batch)
        return (1 / counts[c.group, c.answer] for c in batch)

    @reward(weight=0.25, batch=True, needs_answer=False)
    def brief(self, batch):
        odd = {"odd": float("nan"), "none": None, "fails": ValueError("no verdict")}
        return [odd.get(c.text, -len(c.text) / 100) for c in batch]

    @metric(without_answer=None, batch=True)
    def size(self, batch):
        return [len(batch)] * len(batch)
'''
EXAMPLE = Example("row 7", (), "?", "good")
LIMIT = 0.1


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("task") / "batched.py"
    path.write_text(BATCHED)
    return str(path)


@pytest.fixture(scope="module")
def workers() -> Iterator[RewardScorer]:
    with RewardScorer(LIMIT, workers=1) as scorer:
        yield scorer


@pytest.fixture(params=["in this process", "in a worker"])
def scorer(request: pytest.FixtureRequest) -> RewardScorer:
    if request.param == "in a worker":
        return request.getfixturevalue("workers")
    return RewardScorer(LIMIT)


TEXTS = ["good", "bad", "bad", "", "bad", "the parser raises"]
GROUPS = [0, 0, 0, 0, 1, 1]


def score(scorer: RewardScorer, task: Task, groups: list[int] | None = GROUPS) -> list[Score]:
    return scorer(task, TEXTS, [EXAMPLE] * len(TEXTS), None, groups)


def test_a_batch_reward_sees_groups_and_its_values_are_weighted(scorer, source):
    good, bad, again, empty, other, unread = score(scorer, load_task(source))
    # Twice "bad" in group 0 and once in group 1; right 1 + rare / 2 − letters / 400.
    assert good.rewards == {"right": 1.0, "rare": 1.0, "brief": -0.04}
    assert good.total == pytest.approx(1.0 + 0.5 - 0.01)
    assert (bad.rewards["rare"], again.rewards["rare"], other.rewards["rare"]) == (0.5, 0.5, 1.0)
    assert bad.total == pytest.approx(0.25 - 0.0075)
    # Without an answer a reward is 0 and the method is not called for it; a penalty is called.
    assert empty.rewards == {"right": 0.0, "rare": 0.0, "brief": 0.0}
    assert [s.metrics["size"] for s in (good, bad, again, empty, other)] == [4, 4, 4, None, 4]
    assert (unread.total, set(unread.failures)) == (None, {"parse"})
    assert unread.rewards == {"right": None, "rare": None, "brief": None}
    alone = score(scorer, load_task(source), None)  # each is a group of its own
    assert [s.rewards["rare"] for s in alone] == [1.0, 1.0, 1.0, 0.0, 1.0, None]


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("raises", "KeyError: 'no such column'"),
        ("exits", "SystemExit: 1"),
        ("loops", "longer than its limit of 0.4 s"),  # four completions of 0.1 s
        ("too few", "it returned 1 values for 4 completions"),
    ],
)
def test_a_batch_reward_that_fails_makes_its_batch_unscorable(scorer, source, does, reason):
    scores = score(scorer, load_task(source, does=does))
    assert [s.total is None for s in scores] == [True, True, True, False, True, True]
    assert all(reason in s.failures["rare"] for s in (*scores[:3], scores[4]))
    assert [s.rewards["right"] for s in scores[:3]] == [1.0, 0.0, 0.0]  # other rewards are kept
    assert scores[0].rewards["brief"] == -0.04


def test_a_batch_reward_that_ends_its_worker_is_named(workers, source):
    scores = score(workers, load_task(source, does="dies"))
    assert scores[0].failures == {"rare": "the process that scored it ended with exit code 1"}
    assert score(workers, load_task(source))[0].total is not None


def test_one_bad_value_affects_its_own_completion(scorer, source):
    texts = ["good", "odd", "none", "fails"]
    good, *failed = scorer(load_task(source), texts, [EXAMPLE] * 4)
    assert good.failures == {}
    reasons = ["not between", "NoneType", "no verdict"]
    for found, reason in zip(failed, reasons, strict=True):
        assert (found.rewards["rare"], found.rewards["brief"], found.total) == (1.0, None, None)
        assert reason in found.failures["brief"]


def test_a_batch_of_one_gives_the_score_of_a_task(source):
    task = load_task(source)
    (expected,) = RewardScorer(LIMIT)(task, ["good"], [EXAMPLE])
    assert task.score("good", EXAMPLE) == expected
    assert list(task.score("the parser raises", EXAMPLE).metrics) == ["size"]


def test_the_limit_is_that_of_the_rule_or_of_the_run_times_the_completions():
    class Slow(PlainQuestion):
        @reward(batch=True, seconds=0.05)
        def endless(self, batch: Batch) -> list[float]:
            while True:
                pass

        @reward(batch=True)
        def waited(self, batch: Batch) -> list[float]:
            time.sleep(0.3)
            return [1.0] * len(batch)

        @metric(batch=True, seconds=float("inf"))
        def patient(self, batch: Batch) -> list[float]:
            return [1.0] * len(batch)

    for count, waited in ((5, 1.0), (1, None)):  # 1 s, 0.2 s
        found = RewardScorer(0.2)(Slow(), ["a"] * count, [EXAMPLE] * count)[0]
        assert "longer than its limit of 0.05 s" in found.failures["endless"]
        assert (found.rewards["waited"], found.metrics) == (waited, {"patient": 1.0})


@pytest.mark.parametrize(
    ("mark", "method", "message"),
    [
        (reward(batch=True), lambda self, answer, example: 1.0, r"must take \(self, batch\)"),
        (reward(), lambda self, answer: 1.0, r"must take \(self, answer, example\), then text"),
        (reward(), lambda self, batch: [1.0], r"with @reward\(batch=True\)"),
        (metric(), lambda self, batch: [1.0], r"with @metric\(batch=True\)"),
        (reward(seconds=5), lambda self, answer, example: 1.0, "seconds must be positive, and"),
        (reward(batch=True, seconds=0), lambda self, batch: [1.0], "seconds must be positive"),
    ],
)
def test_a_wrong_mark_is_refused(mark, method, message):
    with pytest.raises(TypeError, match=message):
        mark(method)
