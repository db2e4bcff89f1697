"""Tasksets of verifiers v1: the text after the thinking, scored by a taskset's own rewards."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from vlm_grpo.environments.clients.sessions import import_extra
from vlm_grpo.environments.verifiers import Verifiers as Environment
from vlm_grpo.environments.verifiers import list_hooks, load_taskset, open_tools, restore_task, run
from vlm_grpo.task import Task, metric, reward
from vlm_grpo.types import Candidate, Example

_PREFIX = "taskset_"  # of the names under which ``__getattr__`` finds the classes of tasksets


class Verifiers(Task):
    """Any text, scored by the rewards of a taskset of verifiers.

    An object is of a subclass of the taskset, which has these.

    Attributes:
        taskset: name of an installed taskset, for rows that ``data_scripts.taskset`` has written.
    """

    primary_metric = "taskset_reward"

    taskset: str

    def __new__(cls, taskset: str = "", **options: Any) -> "Verifiers":
        return object.__new__(_build_class(taskset) if taskset else cls)

    def parse(self, text: str, example: Example) -> str | None:
        return text or None

    def write(self, answer: Any, example: Example) -> str:
        return str(answer)

    @reward(weight=0.0, needs_answer=False)
    def taskset_reward(self, episode: Candidate) -> float:
        """Return the sum of the taskset's rewards with its own weights."""
        task = load_taskset(self.taskset).task_type()
        weights = {rule.__name__: _get_weight(rule) for rule in list_hooks(task, "reward")}
        return sum(weight * self.apply(name, episode) for name, weight in weights.items())

    def apply(self, name: str, episode: Candidate) -> float:
        """Return what a reward or metric of the taskset gives for an episode."""
        decorators = import_extra("verifiers.v1.utils.decorators", "verifiers")
        task = restore_task(self.taskset, episode.example)
        given = {"task": task.data, "trace": self._build_trace(task, episode)}
        value = run(decorators.invoke(getattr(task, name), given))
        return sum(value.values()) if isinstance(value, Mapping) else value

    def _build_trace(self, task: Any, episode: Candidate) -> Any:
        """Return the trace of an episode as verifiers records one; the calls are repeated for the
        state of the tools."""
        vf = import_extra("verifiers.v1", "verifiers")
        is_own = isinstance(self.environment, Environment)
        tools = open_tools(self.taskset, task) if is_own else None
        begin = (self.environment.call_tags[0] if is_own else "") or "\0"  # which is in no text
        prompt = task.data.prompt
        messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else [*prompt]
        if task.data.system_prompt:
            messages.insert(0, vf.SystemMessage(content=task.data.system_prompt))
        first = len(messages)
        for number, turn in enumerate(episode.turns):
            if turn.observed is None:
                continue
            calls = []
            if turn.call is not None:
                arguments = json.dumps({**turn.call.arguments})
                calls = [vf.ToolCall(id=str(number), name=turn.call.name, arguments=arguments)]
                if tools is not None and not turn.observed.is_error:
                    tools.call(turn.call.name, turn.call.arguments)
            said = turn.text.partition(begin)[0].strip()
            messages.append(vf.AssistantMessage(content=said, tool_calls=calls or None))
            messages.append(vf.ToolMessage(tool_call_id=str(number), content=turn.observed.text))
        messages.append(vf.AssistantMessage(content=episode.answer or ""))
        nodes = [
            vf.MessageNode(
                parent=number - 1 if number else None,
                message=message,
                sampled=number >= first and message.role == "assistant",
            )
            for number, message in enumerate(messages)
        ]
        own = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig())
        trace = vf.Trace(task=own, agent=agent, nodes=nodes, is_completed=True, ok=True)
        states = import_extra("verifiers.v1.state", "verifiers")
        trace.state = states.state_cls(type(task))() if tools is None else tools.state
        return trace


@cache
def _build_class(name: str) -> type[Verifiers]:
    """Return the class of a taskset, with its rewards and metrics."""
    task = load_taskset(name).task_type()
    rules = {}
    for decorate, kind in ((None, "reward"), (metric(None), "metric")):
        for found in list_hooks(task, kind):
            own = found.__name__
            marked = decorate or reward(_get_weight(found), needs_answer=False)
            rules[f"{own}_" if hasattr(Verifiers, own) else own] = marked(_make_rule(own))
    # Pickle finds the class in this module, in another process too.
    names = {"__module__": __name__, "__qualname__": f"{_PREFIX}{name}"}
    return type(names["__qualname__"], (Verifiers,), names | rules)


def __getattr__(name: str) -> Any:
    if not name.startswith(_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _build_class(name.removeprefix(_PREFIX))


def _make_rule(name: str) -> Callable[[Verifiers, Candidate], float]:
    def rule(self: Verifiers, episode: Candidate) -> float:
        return self.apply(name, episode)

    return rule


def _get_weight(rule: Any) -> float:
    return getattr(rule, "_vf_weight", 1.0)
