"""Classes written for TRL's ``environment_factory``, which are environments without a change."""

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from vlm_grpo.task.environment import Environment, Tool, read_tool
from vlm_grpo.task.rewards import reward
from vlm_grpo.types import Candidate, Example, Observed


class Adapted(Environment):
    """An object of another class in each episode, whose public methods are tools."""

    factory: type
    instance: Any = field(default=None, init=False)

    @property
    def tools(self) -> Mapping[str, Tool]:
        methods = inspect.getmembers(self.factory, inspect.isfunction)
        own = ((n, m) for n, m in methods if n[0] != "_" and n not in ("reset", "get_reward"))
        return {name: read_tool(name, method) for name, method in own}

    @property
    def target(self) -> Any:
        return self.factory if self.instance is None else self.instance

    def reset(self, example: Example) -> Any:
        self.instance = self.factory()
        row = {"id": example.id, "question": example.question, "answer": example.answer}
        row |= {"prompt": [{"role": "user", "content": example.question}], **example.meta}
        row["images"] = [image.load() for image in example.images]
        known = inspect.signature(self.instance.reset).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
        return self.instance.reset(**{n: v for n, v in row.items() if takes_all or n in known})

    def _observe(self, shown: Any) -> Observed:
        shown = asyncio.run(shown) if inspect.iscoroutine(shown) else shown
        parts = shown if isinstance(shown, list | tuple) else [shown]
        return super()._observe([p[p["type"]] if isinstance(p, Mapping) else p for p in parts])


class Rewarding(Adapted):
    """An object with a reward of its own, computed after the calls of the episode are repeated."""

    @reward(weight=1.0, needs_answer=False)
    def get_reward(self, episode: Candidate) -> float:
        self.begin(episode.example)
        for turn in episode.turns:
            if turn.call is not None and turn.observed is not None and not turn.observed.is_error:
                self._observe(self._call(turn.call))
        return self.instance.get_reward()
