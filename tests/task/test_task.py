"""The base class of tasks: scores, failures, refused names, prompts and the optional rewards."""

import math
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from vlm_grpo.errors import UserError
from vlm_grpo.task import PlainQuestion, Task, metric, reward, write_prompt
from vlm_grpo.task.parsing import parse_integer
from vlm_grpo.task.registry import check_trainable, load_task
from vlm_grpo.types import Candidate, EpisodeTurn, Example

EXAMPLE = Example("1", (), "How many?", 3, meta={"color": "red"})


class Sum(Task):
    """A task with an exact, a graded and an untrained reward, and two metrics."""

    primary_metric = "exact"
    offset: int = 0

    def parse(self, text: str, example: Example) -> int | None:
        return parse_integer(text)

    def write(self, answer: int, example: Example) -> str:
        return str(answer)

    @reward(weight=0.75)
    def exact(self, answer: int, example: Example) -> float:
        return float(answer == example.answer + self.offset)

    @reward(weight=0.25)
    def near(self, answer: int, example: Example) -> float:
        return 1.0 / (1.0 + abs(answer - example.answer))

    @reward(weight=0.0)
    def shown(self, answer: int, example: Example, text: str) -> float:
        return float(len(text))

    @metric(without_answer=None)
    def error(self, answer: int, example: Example) -> float:
        return abs(answer - example.answer)

    @metric()
    def red(self, answer: int, example: Example) -> float:
        return float(example.meta["color"] == "red")


def test_the_total_is_the_weighted_sum_of_the_rewards_and_0_without_an_answer():
    score = Sum().score("4", EXAMPLE)
    assert score.answer == 4
    assert score.rewards == {"exact": 0.0, "near": 0.5, "shown": 1.0}  # 1 / (1 + 1); one letter
    assert score.total == 0.125  # 0.75 · 0 + 0.25 · 0.5
    assert score.metrics == {"error": 1.0, "red": 1.0}
    assert not score.failures
    score = Sum().score("none", EXAMPLE)
    assert (score.answer, score.total) == (None, 0.0)
    assert score.rewards == {"exact": 0.0, "near": 0.0, "shown": 0.0}
    assert score.metrics == {"error": None, "red": 0.0}  # as declared


def test_rules_and_options_may_override_own_ones_but_no_attribute_of_task():
    def refuse(message: str, **attributes: Any) -> None:
        with pytest.raises(TypeError, match=message):
            type("Mine", (Sum,), attributes)

    for name in ("score", "parse", "length", "weights"):
        for decorate in (reward, metric):
            kind = f"this {decorate.__name__} would replace: give"
            refuse(rf"Mine\.{name}: .* which {kind}", **{name: decorate()(near)})
    refuse(r"Mine\.length: .* which this method would replace", length=lambda self, text: len(text))
    for name in ("length", "check"):
        hints = {"__annotations__": {name: "int"}}
        refuse(rf"Mine\.{name}: .* which this option would replace", **{name: 3}, **hints)
    message = r"Former\.headline is called primary_metric now"
    refuse(message, headline="near", __qualname__="Former")

    class Stricter(Sum):
        offset: int = 1
        tags: bool = True
        exact = reward(weight=1.0)(near)

        def check(self, example: Example) -> None:
            raise ValueError("no")

    assert Stricter().reward_weights()["exact"] == 1.0
    assert (Stricter().offset, Stricter().tags) == (1, True)


def test_the_prompt_states_how_to_answer():
    plain = PlainQuestion()
    assert (plain.prompt(EXAMPLE), plain.read("It is 3.", EXAMPLE)) == ("How many?", "It is 3.")
    assert Sum().prompt(EXAMPLE) == "How many?"
    assert "<answer> </answer>" in Sum(tags=True).prompt(EXAMPLE)
    assert "<think> </think>" in Sum(thinking=True).prompt(EXAMPLE)
    assert "<answer>" not in Sum(thinking=True).prompt(EXAMPLE)
    task = Sum(instruction="Count twice.", tags=True)
    assert task.prompt(EXAMPLE).startswith("How many? Count twice. Give only the final answer in")


@pytest.mark.parametrize("result", [None, 3, ["How many?"]])
def test_a_prompt_that_is_no_text_is_named(result):
    for name in ("question", "prompt"):
        task = type("Odd", (Sum,), {name: lambda self, example: result})(instruction="Count.")
        with pytest.raises(ValueError, match=r"prompt.* returned .*, not text"):
            write_prompt(task, EXAMPLE)

    def ends(self: Task, example: Example) -> str:
        raise SystemExit(3)

    with pytest.raises(ValueError, match="cannot write its prompt: SystemExit: 3"):
        write_prompt(type("Ends", (Sum,), {"question": ends})(), EXAMPLE)


def test_penalties_apply_to_completions_without_an_answer():
    loop = "never again " * 100  # 1,200 characters, a cycle of 2 words, no answer
    task = Sum(weights={"length": 1.0, "repetition": 1.0}, length_budget=800)
    score = task.score(loop, EXAMPLE)
    assert score.answer is None
    assert score.rewards["length"] == -0.5  # 1,200 characters are halfway between 800 and 1,600
    # 200 words have 195 6-grams, two of them different.
    assert score.rewards["repetition"] == pytest.approx(-193 / 195)
    assert score.total == pytest.approx(-0.5 - 193 / 195)


def test_a_decorator_without_parentheses_is_refused():
    decorators: tuple[Any, ...] = reward, metric
    for decorate in decorators:
        message = rf"near: write @{decorate.__name__}\(\), with parentheses"
        with pytest.raises(TypeError, match=message):
            decorate(near)


def near(self: Task, answer: int, example: Example) -> float:
    return 1.0


def test_a_weight_that_is_not_a_finite_number_and_a_wrong_schedule_are_refused():
    weights: list[Any] = [math.nan, math.inf, "1", True, None]
    for weight in weights:
        with pytest.raises(ValueError, match=r"weight of near must be a finite number"):
            reward(weight)(near)
        with pytest.raises(ValueError, match="weight of exact must be a finite number"):
            Sum(weights={"exact": weight})
    equal, falling = [[0.5, 1.0], [0.5, 2.0]], [[1.0, 1.0], [0.0, 2.0]]
    for schedule in ([], [[0.5]], equal, falling, [[-0.1, 1.0]], [[0, 1.0], [1.1, 1]]):
        with pytest.raises(UserError, match="in ascending order"):
            load_task(Sum, weights={"exact": schedule})
    with pytest.raises(UserError, match="must be a finite number"):
        load_task(Sum, weights={"exact": [[0.0, math.inf]]})


def test_a_weight_overrides_that_in_the_code_and_may_change_with_the_progress():
    task = load_task(Sum, weights={"exact": [[0.0, 1.0], [0.5, 1.0], [1.0, 0.2]], "near": 2})
    weights = [task.with_progress(progress).reward_weights() for progress in (0.0, 0.5, 0.75, 1.0)]
    assert [weight["exact"] for weight in weights] == pytest.approx([1.0, 1.0, 0.6, 0.2])
    assert {weight["near"] for weight in weights} == {2}
    assert task.with_progress(1.0).score("3", EXAMPLE).total == pytest.approx(2.2)
    with pytest.raises(ValueError, match=r"no reward exakt; it has exact, near, .*repetition"):
        Sum(weights={"exakt": 1.0})


def test_a_reward_may_begin_without_a_weight():
    off = dict.fromkeys(Sum.rules("reward"), 0)
    assert check_trainable(load_task(Sum, weights={**off, "exact": [[0.0, 0.0], [1.0, 1.0]]}))
    for weight in (0, [[0.0, 0.0], [1.0, 0.0]]):
        with pytest.raises(UserError, match="no reward has a weight: set task_options"):
            check_trainable(load_task(Sum, weights={**off, "exact": weight}))


class Intrusive(PlainQuestion):
    """A reward that changes its process, or returns more than a float32 holds."""

    children: ClassVar[list[int]] = []

    def question(self, example: Example) -> str:
        os.chdir("/")
        return super().question(example)

    @reward()
    def intrusive(self, answer: str, example: Example) -> float:
        if answer == "changes the folder":
            os.chdir("/")
        if answer == "fails at length":
            raise ValueError(300_000 * "x")
        if "child" in answer:
            pid = os.fork()
            if pid == 0 and answer == "a child exits":
                sys.exit(3)
            self.children.append(pid)
        return 1e308 if answer == "earns more than a float32" else 1.0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(("answer", "code"), [("a child exits", 3), ("a child returns", 0)])
def test_a_forked_reward_does_not_go_on_as_a_second_run(answer, code):
    outcomes = Intrusive().apply_rules(Candidate(None, EXAMPLE, answer, None, 0))
    assert outcomes["intrusive"] == (1.0, None)
    assert os.waitstatus_to_exitcode(os.waitpid(Intrusive.children.pop(), 0)[1]) == code


def test_a_task_keeps_the_working_directory_and_fails_in_few_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = Intrusive()
    assert task.score("changes the folder", EXAMPLE).total == 1.0
    assert Path.cwd() == tmp_path
    assert write_prompt(task, EXAMPLE)
    assert Path.cwd() == tmp_path
    (tmp_path / "wordy.py").write_text("import os\nos.chdir('/')\nraise ValueError(300_000 * 'x')")
    message = r"wordy\.py cannot be loaded: line 3: ValueError"
    with pytest.raises(UserError, match=message) as caught:
        load_task("wordy.py")
    assert len(str(caught.value)) < 10_000
    assert Path.cwd() == tmp_path
    found = task.score("fails at length", EXAMPLE)
    assert len(found.failures["intrusive"]) < 10_000
    found = task.score("earns more than a float32", EXAMPLE)
    assert found.total is None
    assert "returned 1e+308, which is not between ±1e+15" in found.failures["intrusive"]


def test_a_rule_of_an_episode_sees_its_answer_and_turns():
    class Short(PlainQuestion):
        """Reward right answers in few turns."""

        @reward()
        def quick(self, episode):
            return (episode.answer == "cup") / len(episode.turns)

    turns = [EpisodeTurn("look"), EpisodeTurn("cup")]
    assert Short().score("cup", EXAMPLE, turns=turns).total == 0.5
    assert Short().score("jug", EXAMPLE, turns=turns).total == 0.0
