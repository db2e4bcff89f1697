"""Classes written for TRL, which run unchanged."""

import json

import pytest
from small_environments import EXAMPLE, see, write

from vlm_grpo.errors import UserError
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.episodes import EnvironmentRunner
from vlm_grpo.task.registry import load_environment, load_task
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.types import EpisodeTurn

# In the form of the examples of TRL's documentation; its classes know nothing of this package.
SOURCE = '''
class CounterEnv:
    def __init__(self):
        self.count = 0

    def reset(self, **kwargs) -> str | None:
        self.count, self.row = 0, kwargs
        return f"The counter is at 0; bring it to {kwargs['target']}."

    def increment(self, step: int = 1) -> str:
        """
        Increment the counter.

        Args:
            step: How much to add,
                a whole number.

        Returns:
            The new value.
        """
        self.count += step
        return f"now {self.count}"

    def show(self) -> list:
        """
        Show the image of the row.

        Returns:
            Text and the image.
        """
        image = self.row["images"][0].resize((64, 32))
        return [{"type": "text", "text": "here: "}, {"type": "image", "image": image}]

    async def wait(self) -> str:
        """Wait."""
        return "waited"

    def get_reward(self) -> float:
        return float(self.count == self.row["target"])

    def _hidden(self):
        raise RuntimeError


class Plain:
    def reset(self, question):
        self.question = question

    def read(self, letters: int) -> str:
        """Read the start of the question."""
        return self.question[:letters]


class Empty:
    def step(self) -> str:
        """Step."""
'''
ROW = EXAMPLE.__class__("a", EXAMPLE.images, "Count.", 3, meta={"target": 3})


@pytest.fixture
def path(tmp_path):
    (tmp_path / "counters.py").write_text(SOURCE)
    return str(tmp_path / "counters.py")


def test_a_class_of_trl_runs_unchanged_with_its_reward(path):
    task = load_task("counting", environment=f"{path}:CounterEnv")
    assert task.reward_weights()["get_reward"] == 1.0
    texts = [write("increment"), write("increment", step=2), write("show"), write("wait")]
    with EnvironmentRunner(seconds=20.0) as runner:
        example, start = runner.begin(task.environment, ROW)
        assert example.question == "Count.\nThe counter is at 0; bring it to 3."
        state, turns = start.state, []
        for text in texts:
            ((state, call, observed),) = runner.step([state], [text])
            turns.append(EpisodeTurn(text, call, see(observed)))
        shown = [see(turn.observed).text for turn in turns]
        assert shown == ["now 1", "now 3", "here: <image>", "waited"]
        assert see(turns[2].observed).images[0].size == (64, 32)
        # Each episode has an object of its own.
        calls = [write("increment"), write("_hidden")]
        first, hidden = (see(seen).text for *_, seen in runner.step([start.state] * 2, calls))
        assert first == "now 1"
        assert hidden.startswith("Error: there is no tool '_hidden'; there is increment")
    with RewardScorer(workers=1) as scores:
        for count, expected in ((2, 1.0), (1, 0.0)):
            (score,) = scores(task, ["3"], [example], turns=[tuple(turns[:count])])
            assert score.rewards["get_reward"] == expected


def test_its_docstrings_describe_its_tools(path):
    environment = load_environment(f"{path}:CounterEnv").adapt(FRAMES["permille"])
    described = [t["function"] for t in environment.describe(ROW)]
    assert [t["name"] for t in described] == ["increment", "show", "wait"]
    assert described[0]["description"] == "Increment the counter."
    step = described[0]["parameters"]["properties"]["step"]
    assert step == {"type": "integer", "description": "How much to add, a whole number."}
    json.dumps(described)


def test_a_class_without_a_reward_adds_none_and_one_without_reset_is_refused(path):
    task = load_task("counting", environment=f"{path}:Plain")
    assert "get_reward" not in task.reward_weights()
    task.environment.begin(ROW)
    assert task.environment.step(write("read", letters=2))[1].text == "Co"
    with pytest.raises(UserError, match=r"there is no environment class Empty"):
        load_environment(f"{path}:Empty")
