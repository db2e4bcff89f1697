"""A reward that fails on every completion ends the run; one that fails now and then does not."""

from __future__ import annotations

import pytest

from vlm_grpo.errors import UserError
from vlm_grpo.task import Task, reward
from vlm_grpo.task.scorer import FailureGuard
from vlm_grpo.types import Example, Score

EXAMPLE = Example("row 7", (), "?", "good")


class Both(Task):
    """One reward that works, and one that fails for most answers."""

    primary_metric = "right"

    def parse(self, text: str, example: Example) -> str | None:
        if text == "unreadable":
            raise ValueError("cannot parse")
        return text or None

    @reward()
    def right(self, answer: str, example: Example) -> float:
        return 1.0

    @reward()
    def remote(self, answer: str, example: Example) -> float:
        if answer != "up":
            raise ConnectionError("the judge is down")
        return 1.0

    @reward(weight=0.0)
    def logged(self, answer: str, example: Example) -> float:
        raise ValueError("only logged")


def score(*texts: str) -> list[Score]:
    return [Both().score(text, EXAMPLE) for text in texts]


def check(guard: FailureGuard, *texts: str) -> None:
    guard.check(Both(), score(*texts), [EXAMPLE] * len(texts))


@pytest.mark.parametrize(
    "texts",
    [
        ("down",),  # the only completion
        ("down", "down"),
        ("down", "down", "down", "down", "", "", ""),  # enough, though most had no answer
        ("unreadable", "unreadable"),
        ("unreadable", "down"),
    ],
)
def test_a_reward_that_fails_on_everything_is_an_error(texts: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"on every completion \(\d in .*row 7: \w+Error: ") as e:
        check(FailureGuard(), *texts)
    assert "resume=true" in str(e.value)


@pytest.mark.parametrize(
    "texts",
    [
        ("down", "down", "down", "down", "up"),
        ("down", "", ""),  # a single failure may be bad luck
        ("", ""),
        (),
    ],
)
def test_other_failures_are_only_counted(texts: tuple[str, ...]) -> None:
    check(FailureGuard(), *texts)


def test_failures_are_counted_over_rounds_until_the_reward_works() -> None:
    guard = FailureGuard()
    check(guard, "down", "down", "")
    check(guard, "up", "")
    check(guard, "down", "down", "")
    check(guard, "", "")
    check(guard, "down", "")
    with pytest.raises(UserError, match=r"remote failed on every completion \(4 in a row\)"):
        check(guard, "down", "")


def test_the_completions_of_all_ranks_count() -> None:
    def other_works(counts: list[int]) -> list[int]:
        # Completions, and for each reward with a weight the calls and failures.
        assert counts == [1, 1, 0, 1, 1]
        return [2, 2, 0, 2, 1]

    def other_fails(counts: list[int]) -> list[int]:
        return [count + other for count, other in zip(counts, [1, 1, 0, 1, 1], strict=True)]

    FailureGuard().check(Both(), score("down"), [EXAMPLE], other_works)
    with pytest.raises(UserError, match=r"\(2 in a row\), here first on example row 7"):
        FailureGuard().check(Both(), score("down"), [EXAMPLE], other_fails)
    with pytest.raises(UserError, match=r"\(1 in a row\), all of other processes"):
        FailureGuard().check(Both(), [], [], other_fails)
