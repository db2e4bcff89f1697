"""Whatever a user's rewards do, the other completions are scored, and the run goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from vlm_grpo.errors import UserError
from vlm_grpo.registry import load_task
from vlm_grpo.rewards.scorer import RewardScorer
from vlm_grpo.task import Task, reward
from vlm_grpo.types import Example, Score

# The answer says what the reward does. A file, as users write one: no other process can import it.
NAUGHTY = '''
import os, re, time
from vlm_grpo.task import Task, metric, reward

class Naughty(Task):
    """Does what the answer says."""

    primary_metric = "right"

    def parse(self, text, example):
        if text == "the parser dies":
            os._exit(3)
        if text == "the parser raises":
            raise RuntimeError("unreadable")
        return text

    def write(self, answer, example):
        return answer

    @reward()
    def right(self, answer, example):
        return float(answer == example.answer)

    @reward()
    def trouble(self, answer, example):
        if answer == "raises":
            raise KeyError("no such column")
        if answer == "exits":
            raise SystemExit(1)
        if answer == "dies":
            os._exit(1)
        while answer == "loops":
            pass
        if answer == "swallows":
            try:
                time.sleep(60)
            except Exception:
                return 1.0
        if answer == "matches":
            re.match("(a|aa)+$", 60 * "a" + "b")
        if answer == "computes":  # some 20 s in compiled code, which no signal interrupts
            return float(sum(range(10**9)))
        odd = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "much"}
        return odd.get(answer, 0.5)

    @metric()
    def letters(self, answer, example):
        if answer == "raises":
            raise ValueError("a metric fails too")
        return len(answer)
'''
EXAMPLE = Example("row 7", (), "?", "good")
SOFT = ["good", "fine", "raises", "exits", "nan", "inf", "none", "text", "the parser raises"]
SLOW = ["loops", "swallows", "matches"]
LIMIT = 0.2


@pytest.fixture(scope="module")
def naughty(tmp_path_factory: pytest.TempPathFactory) -> Task:
    path = tmp_path_factory.mktemp("task") / "naughty.py"
    path.write_text(NAUGHTY)
    return load_task(str(path))


@pytest.fixture(scope="module")
def workers() -> Iterator[RewardScorer]:
    with RewardScorer(LIMIT, workers=2) as judge:
        yield judge


def scored(judge: RewardScorer, task: Task, texts: list[str]) -> list[Score]:
    return judge(task, texts, [EXAMPLE] * len(texts))


def essence(score: Score) -> tuple:
    """All of a score but its tracebacks' words."""
    return score.answer, score.rewards, score.total, score.metrics, set(score.failures)


def test_a_failing_reward_costs_its_own_completion_alone(naughty: Task):
    scores = scored(RewardScorer(LIMIT), naughty, SOFT + SLOW)
    # 1 for the right text and 0.5 for causing no trouble; everything else cannot be scored.
    assert [score.total for score in scores] == [1.5, 0.5] + [None] * (len(SOFT + SLOW) - 2)
    for text, score in zip((SOFT + SLOW)[2:], scores[2:], strict=True):
        if text != "the parser raises":
            assert (score.rewards["right"], score.rewards["trouble"]) == (0.0, None)
            assert "trouble" in score.failures


def test_the_failure_says_what_happened(naughty: Task):
    texts = ["raises", "loops", "text", "the parser raises"]
    raises, loops, text, parser = scored(RewardScorer(LIMIT), naughty, texts)
    assert "KeyError: 'no such column'" in raises.failures["trouble"]
    assert "a metric fails too" in raises.failures["letters"]
    assert "longer than its limit of 0.2 s" in loops.failures["trouble"]
    assert "while answer ==" in loops.failures["trouble"]  # the line where it hung
    assert "could not convert string to float" in text.failures["trouble"]
    assert (parser.answer, set(parser.rewards.values())) == (None, {None})
    assert "unreadable" in parser.failures["parse"]


def test_workers_score_the_same_in_the_same_order(naughty: Task, workers: RewardScorer):
    texts = (SOFT + SLOW) * 2
    here = scored(RewardScorer(LIMIT), naughty, texts)
    there = scored(workers, naughty, texts)
    assert list(map(essence, here)) == list(map(essence, there))


def test_a_worker_that_dies_is_survived_and_its_reward_named(naughty: Task, workers: RewardScorer):
    good, dies, parser, fine = scored(workers, naughty, ["good", "dies", "the parser dies", "fine"])
    assert (good.total, fine.total) == (1.5, 0.5)
    assert (dies.total, dies.answer) == (None, "dies")
    # What the other rules gave is kept; only the one that ended the process has no value.
    assert (dies.rewards, dies.metrics) == ({"right": 0.0, "trouble": None}, {"letters": 4.0})
    assert dies.failures == {"trouble": "the process that scored it ended with exit code 1"}
    assert parser.failures == {"parse": "the process that scored it ended with exit code 3"}


def test_a_worker_that_does_not_heed_its_limit_is_killed(naughty: Task, workers: RewardScorer):
    started = time.monotonic()
    (computes,) = scored(workers, naughty, ["computes"])
    # 0.2 s and one of grace, twice (the second time to find which rule), and a new worker: the
    # sum itself takes ten times as long.
    assert time.monotonic() - started < 20
    assert (computes.answer, computes.total) == ("computes", None)
    assert "was killed" in computes.failures["trouble"]


def test_the_first_failure_of_a_rule_is_logged_with_its_traceback(
    naughty: Task, caplog: pytest.LogCaptureFixture
):
    judge = RewardScorer(LIMIT)
    with caplog.at_level(logging.WARNING):
        scored(judge, naughty, ["good", "raises", "nan", "raises"])
        scored(judge, naughty, ["raises"])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2  # one for the reward, one for the metric
    assert "trouble failed on example row 7" in told[0]
    assert "KeyError: 'no such column'" in told[0]
    assert "Traceback" in told[0]
    assert "letters failed on example row 7" in told[1]


def test_no_limit_lets_a_slow_reward_end():
    class Slow(Task):
        primary_metric = "slept"

        def parse(self, text: str, example: Example) -> str:
            return text

        @reward()
        def slept(self, answer: str, example: Example) -> float:
            time.sleep(0.3)
            return 1.0

    assert RewardScorer(None)(Slow(), ["a"], [EXAMPLE])[0].total == 1.0
    assert RewardScorer(0.1)(Slow(), ["a"], [EXAMPLE])[0].total is None
    with pytest.raises(UserError, match=r"Slow cannot be sent .* in a file of its own"):
        RewardScorer(None, workers=1)(Slow(), ["a"], [EXAMPLE])


def test_outside_the_main_thread_a_worker_keeps_the_limit(naughty: Task):
    found: list[Score] = []
    with RewardScorer(LIMIT) as judge:
        thread = threading.Thread(
            target=lambda: found.extend(scored(judge, naughty, ["good", "loops"]))
        )
        thread.start()
        thread.join()
    assert [score.total for score in found] == [1.5, None]
