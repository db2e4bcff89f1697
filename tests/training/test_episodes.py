"""Training with an environment: episodes are sampled turn by turn, and their gradient is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_runs import make_trainer, read_metrics, save_tiny_model, small_run

from vlm_grpo.training.trainer import train

ENVIRONMENT = '''
from PIL import Image
from vlm_grpo.task.environment import Environment, tool
from vlm_grpo.task import reward
from vlm_grpo.types import ToolCall

class Peek(Environment):
    """Every text that ends with a frequent character reads an image."""

    call_tags = ("", "a")
    max_turns: int = 3
    count: int = 0

    @tool
    def peek(self) -> Image.Image:
        """Show a part."""

    def step(self, text):
        if "a" not in text:
            return None, None
        self.count += 1
        part = self.image.resize((28 * self.count, 56))
        return ToolCall("peek", {}), self._observe([f"number {self.count}", part])

    @reward(weight=0.5)
    def turns(self, episode):
        return len(episode.turns) / self.max_turns
'''


def settings_of(folder: Path, source: Path, **changes):
    (folder / "peek.py").write_text(ENVIRONMENT)
    options = {"environment": {"name": str(folder / "peek.py"), "max_turns": 3}}
    rollout = {"num_generations": 4, "max_completion_length": 60}
    return small_run(folder, source, task_options=options, rollout=rollout, **changes)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_x(tmp_path, source):
    settings = settings_of(tmp_path, source)
    train(settings)
    for row in read_metrics(tmp_path / "runs" / "run"):
        print(row)
    assert 0
