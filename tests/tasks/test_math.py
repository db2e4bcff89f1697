"""The task ``math``: its limits; what it reads is in ``tests/conformance/math*.jsonl``."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest

from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import load_task
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import Example

TOWER = r"\boxed{9^{9^{9^{9}}}}"
"""An answer whose comparison does not end, inside compiled code."""


EXAMPLE = Example("1", (), "?", "4")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    found = import_module("vlm_grpo.tasks.math")
    monkeypatch.setattr(found, "_SECONDS", 0.5)  # comparisons of this file take milliseconds
    return found


def test_a_comparison_that_does_not_end_is_wrong_and_the_next_is_right(module):
    task = load_task("math")
    texts = [TOWER, r"\boxed{\sqrt{16}}"]
    assert task.score(r"\boxed{3+1}", EXAMPLE).total == 1.0  # starts the process
    started = time.monotonic()
    assert [task.score(text, EXAMPLE).total for text in texts] == [0.0, 1.0]
    # A comparison times out after half a second, and starting a process takes longer.
    assert time.monotonic() - started < 60


def test_other_threads_compare_too(module):
    task, gate = load_task("math"), threading.Barrier(4)

    def score(_: int) -> float | None:
        gate.wait()
        return task.score(r"\boxed{\frac{8}{2}}", EXAMPLE).total

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(score, range(4))] == [1.0] * 4


def test_reward_workers_compare_in_their_own_process():
    texts = [r"\boxed{\frac{8}{2}}", r"\boxed{5}", r"\boxed{4^{1}}"]
    with RewardScorer(workers=1) as scorer:
        scores = scorer(load_task("math"), texts, [EXAMPLE] * 3)
    assert [score.total for score in scores] == [1.0, 0.0, 1.0]


def test_slow_code_in_a_reward_worker_is_interrupted(module, monkeypatch):
    monkeypatch.setattr(module, "is_worker", lambda: True)
    monkeypatch.setattr(module, "compare", lambda gold, answer: time.sleep(60) or True)
    assert load_task("math").score(r"\boxed{3+1}", EXAMPLE).total == 0.0


def test_the_missing_library_names_the_extra(module, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"task math: .*pip install 'vlm-grpo\[math\]'"):
        load_task("math")
