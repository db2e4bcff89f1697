"""A taskset of verifiers: its rows, tools and rewards, where the package is installed."""

import importlib.util
import sys

import pytest
from small_environments import see, write

from vlm_grpo.data_scripts import taskset
from vlm_grpo.environments import verifiers
from vlm_grpo.errors import UserError
from vlm_grpo.task.episodes import EnvironmentRunner
from vlm_grpo.task.registry import load_environment, load_task
from vlm_grpo.task.scorer import RewardScorer, get_full_reward
from vlm_grpo.task.soundness import check_task
from vlm_grpo.types import EpisodeTurn, Example
from vlm_grpo.utils.jsonl import read_rows

is_installed = importlib.util.find_spec("verifiers") is not None
needs_verifiers = pytest.mark.skipif(not is_installed, reason="needs verifiers")
ABACUS = {"name": "verifiers", "taskset": "abacus"}


@needs_verifiers
def test_a_taskset_becomes_rows_tools_and_rewards(tmp_path):
    config = '{"num_tasks": 4, "task": {"bonus": 0.5}}'
    taskset.main(["abacus", "--output", str(tmp_path / "rows.jsonl"), "--config", config])
    rows = read_rows(tmp_path / "rows.jsonl")
    found = [(row["id"], row["answer"]) for row in rows[2:]]
    assert found == [("abacus-2", "2"), ("abacus-3", "3")]
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    example = Example("a", (), "Push.", "3", meta={verifiers.COLUMN: rows[3][verifiers.COLUMN]})
    task = load_task("verifiers", taskset="abacus", environment=ABACUS)
    assert task.reward_weights() == {"taskset_reward": 0.0, "pushed": 0.5, "right": 1.0}
    calls = [("push", {"count": 2}), ("push", {"count": -1}), ("push", {"count": 1}), ("look", {})]
    with EnvironmentRunner(seconds=60.0) as runner:
        _, start = runner.begin(task.environment, example)
        state, turns = start.state, list[EpisodeTurn]()
        for name, arguments in calls:
            text = write(f"abacus_{name}", arguments)
            ((state, call, observed),) = runner.step([state], [text])
            turns.append(EpisodeTurn(text, call, see(observed)))
        ((_, _, other),) = runner.step([start.state], [write("abacus_push", count=1)])
    texts = [see(turn.observed).text for turn in turns]
    assert texts[0] == "2 of 3"
    assert "no bead goes back" in texts[1]
    assert texts[2:] == ["3 of 3", "here<image>"]
    assert see(turns[-1].observed).images[0].size == (256, 64)
    assert see(other).text == "1 of 3"  # each episode has a state of its own
    with RewardScorer(workers=1) as in_worker:
        for scorer in (in_worker, RewardScorer()):
            whole, part = scorer(task, ["3", "2"], [example] * 2, turns=[turns, turns[:1]])
            # Both beads' rewards; that for some beads is the row's bonus.
            assert whole.rewards == {"right": 1.0, "pushed": 1.5, "taskset_reward": 1.75}
            assert part.rewards == {"right": 0.0, "pushed": 0.5, "taskset_reward": 0.25}
            assert whole.metrics["turns"] == 5.0
    (alone,) = RewardScorer()(task.without_tools(), ["3"], [example])
    assert alone.rewards == {"right": 1.0, "pushed": 0.0, "taskset_reward": 1.0}
    assert get_full_reward(task) == 1.5
    *_, told, _, last = check_task(task, [example])
    assert "for whole episodes" in told
    assert last.endswith("is sound on this data")


@needs_verifiers
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere", "taskset nowhere: taskset 'nowhere' not found"),
        ("textwrap", "taskset textwrap: taskset module 'textwrap' exports no Taskset"),
        ("openenv", "taskset openenv cannot be used: OpenEnvEnv plays with the model"),
    ],
)
def test_what_cannot_be_used_is_refused(name, problem):
    with pytest.raises(UserError, match=problem):
        load_task("verifiers", taskset=name)


def test_the_message_without_the_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", None)
    with pytest.raises(UserError, match=r"pip install 'vlm-grpo\[verifiers\]'"):
        load_environment({"name": "verifiers", "taskset": "absent"})
    with pytest.raises(UserError, match=r"pip install 'vlm-grpo\[verifiers\]'"):
        load_task("verifiers", taskset="absent")
