"""The runner of environments: whatever a tool does, the others go on and the state is kept."""

import os

import pytest
import small_environments
from processes import is_alive, wait_for
from small_environments import EXAMPLE, FAILURES, see, write

from vlm_grpo.errors import UserError
from vlm_grpo.task.environment import MAX_TEXT, Environment, tool
from vlm_grpo.task.episodes import EnvironmentRunner
from vlm_grpo.task.registry import load_environment
from vlm_grpo.utils.chat import Turn

TOOLS = f"{small_environments.__file__}:Tools"
ENDINGS = {
    "exit": "the tool's process ended (exit code 3)",
    "kill": "the tool's process ended (exit code -9)",
    "close": "Error: the tool",  # ended, or too slow where a process forked from it goes on
    "sleep": "CallTimeout: it took longer than its limit of 1 s",
    "exit politely": "SystemExit: bye",
    "interrupt": "KeyboardInterrupt: stop",
    "recurse": "RecursionError",
    "memory": "MemoryError",
    "raise a placeholder": "ValueError: <im age> ?",
    "raise an own class": "Own: mine",
    "state that cannot be sent": "Tools cannot be sent to worker processes",
    "deep state": "Tools cannot be sent to worker processes",
    "a generator": "the tool returned callable_iterator",
    "an array": "the tool returned ndarray",
    "an object": "the tool returned object",
    "a huge number": "ValueError: Exceeds the limit",
    "100 megapixels": "too large or too thin",
    "a line": "only 1x4000 pixels",
    "a thin image": "too large or too thin",
    "no pixels": "only 0x5 pixels",
    "floats": "32 bits per channel",
    "many images": "more than 8 images",
}
"""What the model reads of the failures that are answered in text."""
SHOWN = dict.fromkeys(("a long text", "long texts"), "x" * MAX_TEXT)
SHOWN |= {"surrogates": "a?b", "placeholders": " <im age>"}


@pytest.fixture(scope="module")
def runner():
    with EnvironmentRunner(workers=1, seconds=1.0) as made:
        yield made


@pytest.mark.parametrize("how", FAILURES)
def test_a_failing_tool_costs_one_call(runner, how):
    _, start = runner.begin(load_environment(TOOLS), EXAMPLE)
    (counted, _, first), (failed, call, observed) = runner.step(
        [start.state] * 2, [write("count"), write("fail", how=how)]
    )
    assert first.text == f"1 {os.getcwd()}"
    assert call is None or call.name == "fail"
    if how in ENDINGS:
        assert observed.is_error
        assert ENDINGS[how] in observed.text
        assert failed is start.state  # as it was before the call
    else:
        assert not observed.is_error
        assert observed.text.startswith(SHOWN.get(how, ""))
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


@pytest.mark.parametrize(
    ("question", "history", "shown"),
    [
        ("Where?", (), "Where?\n  a text"),
        ("<image> Where?", (), "<image> Where?\n<image>  a text"),
        ("Where?", (Turn("user", "No place."),), "Where?\n  a text"),
        ("Where?", (Turn("user", "<image>"),), "Where?\n<image>  a text"),
    ],
)
def test_the_question_ends_with_what_reset_shows(runner, question, history, shown):
    environment = load_environment({"name": f"{__file__}:Shows", "what": "image"})
    example = EXAMPLE.__class__("a", EXAMPLE.images, question, None, history=history)
    begun, _ = runner.begin(environment, example)
    assert begun.question == shown
    assert len(begun.images) == 2


def test_a_reset_that_fails_ends_the_run_with_one_message(runner):
    environment = load_environment({"name": f"{__file__}:Shows", "what": "raise"})
    with pytest.raises(UserError, match=r"example a: reset of Shows failed: RuntimeError: no game"):
        runner.begin(environment, EXAMPLE)
