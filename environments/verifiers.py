"""The tools of a taskset of verifiers v1, called in this process without verifiers' servers."""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from vlm_grpo.environments.clients.sessions import (
    Content,
    SchemaTool,
    SessionEnvironment,
    import_extra,
)
from vlm_grpo.errors import UserError
from vlm_grpo.task.tool_calls import ToolError
from vlm_grpo.types import Example
from vlm_grpo.utils import trust

COLUMN = "verifiers"
"""The column of a row with the name of its taskset, and its task's data and settings as JSON."""


class Verifiers(SessionEnvironment):
    """The tools of a taskset.

    Attributes:
        taskset: name of an installed taskset, for rows that ``data_scripts.taskset`` has written.
    """

    taskset: str

    def load(self) -> Any:
        return load_taskset(self.taskset)

    def list_tools(self) -> Iterable[SchemaTool]:
        task = self.load().task_type()
        tools = Tools(self.taskset, task, task.config_type()()).tools
        if not tools:
            raise UserError(f"taskset {self.taskset} has no tools: leave the environment out")
        for name, (_, found) in tools.items():
            yield SchemaTool.read(name, found.description or "", found.input_schema)

    def open(self, example: Example) -> "Tools":
        return open_tools(self.taskset, restore_task(self.taskset, example))


class Tools:
    """The tools of a task and their state."""

    def __init__(self, name: str, kind: Any, config: Any, data: Any = None) -> None:
        mcp = import_extra("mcp.server.mcpserver", "verifiers")
        self.shown: Content = []
        self.state = import_extra("verifiers.v1.state", "verifiers").state_cls(kind)()
        self.tools: dict[str, tuple[Callable[..., Any], Any]] = {}
        self._share = _share_toolsets(name)
        self._own = kind.toolsets(config)
        for toolset in (*self._share, *self._own):
            if toolset.config.url:
                raise UserError(f"taskset {name} has tools at {toolset.config.url}: not supported")
            self._bind(toolset)
            if data is not None and toolset in self._own:
                run(toolset.setup())
                run(toolset.setup_task(data))
            toolset.register(server := mcp.MCPServer(toolset.server_name or name))
            for found in run(server.list_tools()):
                full = "_".join(filter(None, (toolset.server_name, found.name)))
                self.tools[full] = partial(server.call_tool, found.name), found

    def _bind(self, toolset: Any) -> None:
        """Give a toolset the state, which it would otherwise get from a server for each call."""

        async def pull() -> Any:
            return self.state

        async def push(before: bytes) -> None:
            pass

        vars(toolset).update(_pull_state=pull, _push_state=push)

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[Content, float]:
        """Return what a tool returns; ``ToolError``: it refuses the call."""
        failures = import_extra("mcp.server.mcpserver.exceptions", "verifiers")
        for toolset in self._share:
            self._bind(toolset)
        try:
            result = run(self.tools[name][0]({**arguments}))
        except failures.ToolError as error:
            raise ToolError(str(error)) from error
        content = [part.model_dump(mode="json") for part in result.content]
        if result.is_error:
            raise ToolError(" ".join(str(part.get("text", "")) for part in content))
        return content, 0.0

    def close(self) -> None:
        """Do nothing: there is no server."""


def open_tools(name: str, task: Any) -> Tools:
    """Return the tools of a task, as an episode begins."""
    return Tools(name, type(task), task.config, task.data)


def load_taskset(name: str) -> Any:
    """Return the class of an installed taskset; ``UserError``: it cannot be used here."""
    trust.check(name)
    loaders = import_extra("verifiers.v1.utils.loaders", "verifiers")
    try:
        found, own = loaders.taskset_class(name), loaders.environment_class(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"taskset {name}: {error}") from error
    task, base = found.task_type(), loaders.Task
    rules = [*list_hooks(task, "reward"), *list_hooks(task, "metric")]
    runtime = ", ".join(rule.__name__ for rule in rules if _requires_runtime(rule))
    problems = {
        f"{own.__name__} plays with the model, or scores episodes together": (
            own is not loaders.SingleAgentEnv
        ),
        "its tasks need a container": task.NEEDS_CONTAINER,
        f"{runtime} needs a runtime": bool(runtime),
        "its tasks prepare a runtime (setup or finalize)": (
            task.setup is not base.setup or task.finalize is not base.finalize
        ),
        "its tasks stop episodes (@stop)": bool(list_hooks(task, "stop")),
    }
    if problem := next((text for text, is_true in problems.items() if is_true), None):
        raise UserError(f"taskset {name} cannot be used: {problem}")
    return found


def list_hooks(task: Any, kind: str) -> Sequence[Any]:
    """Return the rewards, metrics or conditions of a class of tasks with its usual settings."""
    bare = object.__new__(task)
    bare.config = task.config_type()()
    return bare.hooks(kind)


def restore_task(name: str, example: Example) -> Any:
    """Return the task of a row."""
    row = example.meta.get(COLUMN)
    if not isinstance(row, Mapping) or row.get("taskset") != name:
        raise UserError(
            f"{example.name} is no row of taskset {name}: write them with "
            f"python -m vlm_grpo.data_scripts.taskset {name}"
        )
    task = load_taskset(name).task_type()
    data, config = (json.loads(row[part]) for part in ("data", "config"))
    return task(task.data_type().model_validate(data), task.config_type().model_validate(config))


def run(found: Any) -> Any:
    """Return the result of a coroutine; a value that is none is returned as it is."""
    return _get_loop().run_until_complete(found) if inspect.isawaitable(found) else found


@cache
def _get_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def _share_toolsets(name: str) -> tuple[Any, ...]:
    """Return the toolsets that all tasks of a taskset share, after their setup."""
    loaders = import_extra("verifiers.v1.utils.loaders", "verifiers")
    found = loaders.taskset_class(name).toolsets(loaders.taskset_config_type(name)(id=name))
    for toolset in found:
        run(toolset.setup())
    return tuple(found)


def _requires_runtime(function: Callable[..., Any]) -> bool:
    found = inspect.signature(function).parameters.get("runtime")
    return found is not None and found.default is found.empty
