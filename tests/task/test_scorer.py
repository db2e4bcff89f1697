"""A failure of a user's reward affects its own completion only, in this process and in workers;
one that fails on every completion ends the run."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import Any

import pytest
from dataset_files import write_files
from small_tasks import Distance

from vlm_grpo.errors import UserError
from vlm_grpo.task import PlainQuestion, Task, metric, reward
from vlm_grpo.task.registry import load_task
from vlm_grpo.task.scorer import FailureGuard, RewardScorer, measure_pass
from vlm_grpo.types import Batch, Candidate, Example, Score
from vlm_grpo.utils.http_json import post_json

# The answer, or an option, selects what a rule does. Workers cannot import it, as users' files.
TASKS = '''
import os, re, time
from collections import Counter
from vlm_grpo.task import Task, metric, reward

class _Echo(Task):
    primary_metric = "right"

    def parse(self, text, example):
        if text == "the parser dies":
            os._exit(3)
        if text == "the parser raises":
            raise RuntimeError("unreadable")
        return text or None

    def write(self, answer, example):
        return answer

    @reward()
    def right(self, answer, example):
        return float(answer == example.answer)

def fail(how):
    if how == "raises":
        raise KeyError("no such column")
    if how == "exits":
        raise SystemExit(1)
    if how == "dies":
        os._exit(1)
    while how == "loops":
        pass

class Failing(_Echo):
    """Fails in the way that the answer names."""

    @reward()
    def trouble(self, answer, example):
        fail(answer)
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

class Batched(_Echo):
    """Rewards of many completions at once."""

    does: str = ""

    @reward(weight=0.5, batch=True)
    def rare(self, batch):
        """The inverse of the number of equal answers in the group."""
        fail(self.does)
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
SOFT = ["good", "fine", "raises", "exits", "nan", "inf", "none", "text", "the parser raises"]
SLOW = ["loops", "swallows", "matches"]
LIMIT = 0.2


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("task"), {"tasks.py": TASKS}) / "tasks.py"


@pytest.fixture(scope="module")
def failing(tasks: Path) -> Task:
    return load_task(f"{tasks}:Failing")


@pytest.fixture(scope="module")
def workers() -> Iterator[RewardScorer]:
    with RewardScorer(LIMIT, workers=2) as scorer:
        yield scorer


def score(scorer: RewardScorer, task: Task, texts: list[str]) -> list[Score]:
    return scorer(task, texts, [EXAMPLE] * len(texts))


def test_a_failing_reward_affects_its_own_completion_only(failing, workers):
    texts = SOFT + SLOW
    found = score(RewardScorer(LIMIT), failing, texts)
    here, there = (
        [replace(each, failures=[*each.failures]) for each in own]
        for own in (found, score(workers, failing, texts * 2))
    )
    assert here * 2 == there  # but for the tracebacks
    scores = dict(zip(texts, found, strict=True))
    # 1 for the right text and 0.5 for no trouble; the others cannot be scored.
    assert [each.total for each in scores.values()] == [1.5, 0.5] + [None] * (len(texts) - 2)
    for text in texts[2:]:
        found = scores[text]
        if text != "the parser raises":
            assert (found.rewards["right"], found.rewards["trouble"]) == (0.0, None)
            assert "trouble" in found.failures
    failures = {text: found.failures for text, found in scores.items()}
    assert "KeyError: 'no such column'" in failures["raises"]["trouble"]
    assert "a metric fails too" in failures["raises"]["letters"]
    assert "longer than its limit of 0.2 s" in failures["loops"]["trouble"]
    assert "while how ==" in failures["loops"]["trouble"]  # the line where it hung
    assert "could not convert string to float" in failures["text"]["trouble"]
    parser = scores["the parser raises"]
    assert (parser.answer, set(parser.rewards.values())) == (None, {None})
    assert "unreadable" in parser.failures["parse"]


def test_a_parser_that_fails_in_the_job_of_one_rule_is_its_failure(failing, monkeypatch):
    scorer, texts = RewardScorer(LIMIT), ("good", "the parser raises")
    item, other = (Candidate(None, EXAMPLE, text, 1, 0) for text in texts)
    good, unread = map(failing.apply_rules, (item, other))
    results = {"parse": good, "right": good, "trouble": unread, "letters": good}
    monkeypatch.setattr(scorer, "_run", lambda *given: [results[name] for _, name in given[2]])
    found = scorer._apply_each_rule(failing, item)  # noqa: SLF001
    assert (found["right"], found["trouble"][0]) == (good["right"], None)
    assert "unreadable" in (found["trouble"][1] or "")


def test_a_reward_that_ends_its_worker_is_named(failing, workers, tasks):
    good, dies, parser, fine = score(workers, failing, ["good", "dies", "the parser dies", "fine"])
    assert (good.total, fine.total) == (1.5, 0.5)
    assert (dies.total, dies.answer) == (None, "dies")
    # The values of the other rules are kept.
    assert (dies.rewards, dies.metrics) == ({"right": 0.0, "trouble": None}, {"letters": 4.0})
    assert dies.failures == {"trouble": "the process that scored it ended with exit code 1"}
    assert parser.failures == {"parse": "the process that scored it ended with exit code 3"}
    of_batch = score_groups(workers, load_task(f"{tasks}:Batched", does="dies"))[0].failures
    assert of_batch == {"rare": dies.failures["trouble"]}
    assert score_groups(workers, load_task(f"{tasks}:Batched"))[0].total is not None


def test_a_worker_in_compiled_code_is_killed_at_the_limit(failing, workers):
    started = time.monotonic()
    (computes,) = score(workers, failing, ["computes"])
    # Twice 0.2 s and 1 s of grace (the second time to find the rule), and a new worker; the sum
    # itself takes ten times as long.
    assert time.monotonic() - started < 20
    assert (computes.answer, computes.total) == ("computes", None)
    assert "was killed" in computes.failures["trouble"]


def test_a_service_that_fails_is_logged_by_its_message_alone(caplog):
    class Asking(PlainQuestion):
        @reward()
        def asked(self, answer: str, example: Example) -> float:
            return post_json("http://127.0.0.1:1", {}, retries=0)

    (found,) = RewardScorer()(Asking(), ["a"], [EXAMPLE])
    assert found.failures["asked"].startswith("ServiceError: http://127.0.0.1:1: URLError: ")
    assert "\n" not in found.failures["asked"]
    assert caplog.messages[0].endswith(f"The first:\n{found.failures['asked']}")


def test_the_first_failure_of_a_rule_is_logged_with_its_traceback(failing, caplog):
    scorer = RewardScorer(LIMIT)
    score(scorer, failing, ["good", "raises", "nan", "raises"])
    score(scorer, failing, ["raises"])
    of_reward, of_metric = caplog.messages
    assert "trouble failed on example row 7" in of_reward
    assert "Traceback" in of_reward
    assert "KeyError: 'no such column'" in of_reward
    assert "letters failed on example row 7" in of_metric


def test_a_slow_reward_completes_without_a_limit():
    class Slow(PlainQuestion):
        @reward()
        def slept(self, answer: str, example: Example) -> float:
            time.sleep(0.3)
            return 1.0

    assert RewardScorer(None)(Slow(), ["a"], [EXAMPLE])[0].total == 1.0
    with pytest.raises(UserError, match=r"Slow cannot be sent .* in a file of its own"):
        RewardScorer(None, workers=1)(Slow(), ["a"], [EXAMPLE])


def test_the_limit_holds_outside_the_main_thread(failing):
    with RewardScorer(LIMIT) as scorer, ThreadPoolExecutor(1) as thread:
        found = thread.submit(score, scorer, failing, ["good", "loops"]).result()
    assert [each.total for each in found] == [1.5, None]


def test_a_task_that_workers_cannot_load_is_one_error(tmp_path):
    path = tmp_path / "fleeting.py"
    path.write_text(TASKS)
    task = load_task(f"{path}:Failing")
    path.write_text("import no_such_module")
    message = r"the reward workers cannot load a call: task file .*line 1"
    with RewardScorer(workers=1) as scorer, pytest.raises(UserError, match=message):
        score(scorer, task, ["good"])


def check(guard: FailureGuard, task: Task, *texts: str) -> None:
    scores = [task.score(text, EXAMPLE) for text in texts]
    guard.check(task, scores, [EXAMPLE] * len(texts))


def test_a_reward_that_fails_on_everything_is_an_error(failing):
    message = r"on every completion \(\d in .*row 7: \w+Error: (.|\n)*resume=true"
    for texts in (
        ("raises",),  # the only completion
        (*["raises"] * 4, "", "", ""),  # enough, though most had no answer
        ("the parser raises", "raises"),
    ):
        with pytest.raises(UserError, match=message):
            check(FailureGuard(), failing, *texts)


def test_other_failures_are_only_counted(failing):
    # Once it works, a single failure may be bad luck, and no completion has failed.
    for texts in ((*["raises"] * 4, "good"), ("raises", "", ""), ()):
        check(FailureGuard(), failing, *texts)
    logged = load_task(failing, weights={"trouble": 0})
    check(FailureGuard(), logged, "raises")
    assert logged.score("raises", EXAMPLE).total == 0.0


def test_failures_are_counted_over_rounds_until_the_reward_works(failing):
    guard = FailureGuard()
    for texts in (("raises", "raises"), ("good",), ("raises", "raises"), ("",), ("raises",)):
        check(guard, failing, *texts, "")
    with pytest.raises(UserError, match=r"trouble failed on every completion \(4 in a row\)"):
        check(guard, failing, "raises", "")


def test_the_completions_of_all_ranks_count(failing):
    scores = [failing.score("raises", EXAMPLE)]

    def other_works(counts: list[int]) -> list[int]:
        # Completions, and for each reward with a weight the calls and failures.
        assert counts == [1, 1, 0, 1, 1]
        return [2, 2, 0, 2, 1]

    def other_fails(counts: list[int]) -> list[int]:
        return [*map(add, counts, [1, 1, 0, 1, 1])]

    FailureGuard().check(failing, scores, [EXAMPLE], other_works)
    with pytest.raises(UserError, match=r"\(2 in a row\), here first on example row 7"):
        FailureGuard().check(failing, scores, [EXAMPLE], other_fails)
    with pytest.raises(UserError, match=r"\(1 in a row\), all of other processes"):
        FailureGuard().check(failing, [], [], other_fails)


@pytest.fixture(params=["in this process", "in a worker"])
def scorer(request: pytest.FixtureRequest) -> RewardScorer:
    if request.param == "in a worker":
        return request.getfixturevalue("workers")
    return RewardScorer(LIMIT)


def score_groups(scorer: RewardScorer, task: Task, groups: Any = (0, 0, 0, 0, 1, 1)) -> list[Score]:
    texts = ["good", "bad", "bad", "", "bad", "the parser raises"]
    return scorer(task, texts, [EXAMPLE] * 6, None, groups)


def test_a_batch_reward_sees_groups_and_its_values_are_weighted(scorer, tasks):
    good, bad, again, empty, other, unread = score_groups(scorer, load_task(f"{tasks}:Batched"))
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
    alone = score_groups(scorer, load_task(f"{tasks}:Batched"), None)  # each is a group of its own
    assert [s.rewards["rare"] for s in alone] == [1.0, 1.0, 1.0, 0.0, 1.0, None]


def test_a_batch_reward_that_fails_makes_its_batch_unscorable(scorer, tasks):
    for does, reason in {
        "raises": "KeyError: 'no such column'",
        "exits": "SystemExit: 1",
        "loops": "longer than its limit of 0.8 s",  # four completions of 0.2 s
        "too few": "it returned 1 values for 4 completions",
    }.items():
        scores = score_groups(scorer, load_task(f"{tasks}:Batched", does=does))
        assert [s.total is None for s in scores] == [True, True, True, False, True, True]
        assert all(reason in s.failures["rare"] for s in (*scores[:3], scores[4]))
        assert [s.rewards["right"] for s in scores[:3]] == [1.0, 0.0, 0.0]  # the others are kept
        assert scores[0].rewards["brief"] == -0.04


def test_one_bad_value_affects_its_own_completion(scorer, tasks):
    texts = ["good", "odd", "none", "fails"]
    good, *failed = score(scorer, load_task(f"{tasks}:Batched"), texts)
    assert good.failures == {}
    reasons = ["not between", "NoneType", "no verdict"]
    for found, reason in zip(failed, reasons, strict=True):
        assert (found.rewards["rare"], found.rewards["brief"], found.total) == (1.0, None, None)
        assert reason in found.failures["brief"]


def test_a_batch_of_one_gives_the_score_of_a_task(tasks):
    task = load_task(f"{tasks}:Batched")
    assert score(RewardScorer(LIMIT), task, ["good"]) == [task.score("good", EXAMPLE)]
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


def test_a_wrong_mark_is_refused():
    for mark, method, message in (
        (reward(batch=True), lambda self, answer, example: 1.0, r"must take \(self, batch\)"),
        (reward(), lambda self, answer: 1.0, r"must take \(self, answer, example\), then text"),
        (reward(), lambda self, batch: [1.0], r"with @reward\(batch=True\)"),
        (metric(), lambda self, batch: [1.0], r"with @metric\(batch=True\)"),
        (reward(seconds=5), lambda self, answer, example: 1.0, "seconds must be positive, and"),
        (reward(batch=True, seconds=0), lambda self, batch: [1.0], "seconds must be positive"),
    ):
        with pytest.raises(TypeError, match=message):
            mark(method)


def test_a_pass_is_the_primary_metric_or_the_full_reward():
    example = Example("1", (), "How many?", 3)

    def measure(task: Task, text: str, **metrics: float | None) -> float:
        score = task.score(text, example)
        return measure_pass(task, example, replace(score, metrics={**score.metrics, **metrics}))

    counting = load_task("counting")
    name = counting.primary_metric
    assert [measure(counting, "3", **{name: value}) for value in (0.25, 1.0, None)] == [0.25, 1, 0]
    assert [measure(counting, text, **{name: 2.0}) for text in ("3", "4")] == [1, 0]  # of no share
    assert [measure(Distance(), text) for text in ("3", "4")] == [1, 0]  # an error
