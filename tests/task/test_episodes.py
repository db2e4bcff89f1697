"""The runner of environments: whatever a tool does, the others go on and the state is kept."""

import os

import pytest
import small_environments
from processes import is_alive, wait_for
from small_environments import EXAMPLE, FAILURES, ODDITIES, see, write

from vlm_grpo.errors import UserError
from vlm_grpo.task.environment import MAX_TEXT, Environment, tool
from vlm_grpo.task.episodes import EnvironmentRunner
from vlm_grpo.task.registry import load_environment
from vlm_grpo.utils.chat import Turn

TOOLS = f"{small_environments.__file__}:Tools"


@pytest.fixture(scope="module")
def runner():
    with EnvironmentRunner(workers=1, seconds=1.0) as made:
        yield made


@pytest.mark.parametrize("how", [*FAILURES, *ODDITIES])
def test_a_failing_tool_costs_one_call(runner, how):
    _, start = runner.begin(load_environment(TOOLS), EXAMPLE)
    (counted, _, first), (failed, call, observed) = runner.step(
        [start.state] * 2, [write("count"), write("fail", how=how)]
    )
    assert first.text == f"1 {os.getcwd()}"
    assert call is None or call.name == "fail"
    if how in FAILURES:
        assert observed.is_error
        assert FAILURES[how][1] in observed.text
        assert failed is start.state  # as it was before the call
    else:
        assert not observed.is_error
        assert observed.text.startswith(ODDITIES[how][1])
    assert len(observed.text) <= MAX_TEXT
    assert observed.text.count("<image>") == len(observed.images)
    # Episodes with equal states do not see each other, nor what a call did to its process.
    _, _, second = runner.step([counted], [write("count")])[0]
    assert second.text == f"2 {os.getcwd()}"


def test_processes_that_a_tool_leaves_behind_end_with_the_workers():
    with EnvironmentRunner(workers=1, seconds=1.0) as runner:
        _, start = runner.begin(load_environment(TOOLS), EXAMPLE)
        ((_, _, observed),) = runner.step([start.state], [write("fail", how="fork and sleep")])
        child = int(see(observed).text)
        os.kill(child, 0)
    wait_for(lambda: not is_alive(child))


class Shows(Environment):
    """Show a text at the start."""

    what: str = "text"

    def reset(self, example):
        if self.what == "raise":
            raise RuntimeError("no game")
        return [self.image, "<image> a text"] if self.what == "image" else "a text"

    @tool
    def wait(self) -> None:
        """Wait."""


def test_the_question_ends_with_what_reset_shows_and_its_failure_ends_the_run(runner):
    for question, history, shown in (
        ("Where?", (), "Where?\n  a text"),
        ("<image> Where?", (), "<image> Where?\n<image>  a text"),
        ("Where?", (Turn("user", "No place."),), "Where?\n  a text"),
        ("Where?", (Turn("user", "<image>"),), "Where?\n<image>  a text"),
    ):
        environment = load_environment({"name": f"{__file__}:Shows", "what": "image"})
        example = EXAMPLE.__class__("a", EXAMPLE.images, question, None, history=history)
        begun, _ = runner.begin(environment, example)
        assert begun.question == shown
        assert len(begun.images) == 2
    environment = load_environment({"name": f"{__file__}:Shows", "what": "raise"})
    with pytest.raises(UserError, match=r"example a: reset of Shows failed: RuntimeError: no game"):
        runner.begin(environment, EXAMPLE)
