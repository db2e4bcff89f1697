"""Environments whose episodes are sessions: connections or objects that cannot be pickled.

An episode's session stays open in the worker process to which its calls go. Where there is none, as
for a branch of a forked episode or after a worker has ended, one is opened and the episode's calls
are repeated, which must be answered as they were before.
"""

import base64
import hashlib
import importlib
import inspect
import io
import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, ClassVar, Protocol

from PIL import Image

from vlm_grpo.errors import UserError
from vlm_grpo.task.coordinates import CoordinateFrame
from vlm_grpo.task.environment import Environment, Tool
from vlm_grpo.task.tool_calls import ToolError
from vlm_grpo.types import Example, Observed
from vlm_grpo.utils.worker_pool import WorkerError

Content = Sequence[Mapping[str, Any]]
"""Parts of a result as MCP has them: ``{"type": "text", "text"}``, or ``{"type": "image", "data"}``
with base64 data."""
_WAITS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds before each attempt to open a session


class Session(Protocol):
    """The tools and the state of one episode."""

    shown: Content  #: what the episode begins with

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[Content, float]:
        """Return what a call returns and its reward; ``ToolError``: it is refused."""
        ...

    def close(self) -> None:
        """End the session."""


_OPEN: dict[str, Session] = {}  # sessions of this process, the newest last


@dataclass(frozen=True)
class SchemaTool(Tool):
    """A tool whose arguments a JSON schema describes; its session checks them."""

    schema: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, description: str, schema: Mapping[str, Any]) -> "SchemaTool":
        hints = dict.fromkeys(schema.get("properties", ()), Any)
        required = tuple(schema.get("required", ()))
        return cls(name, inspect.cleandoc(description), hints, required, {}, schema)

    def describe(self, frame: CoordinateFrame, size: tuple[int, int]) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module of another package; the ``UserError`` names the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{error}: pip install 'vlm-grpo[{extra}]'") from error


class SessionEnvironment(Environment):
    """Tools of a session. A subclass defines ``load``, ``list_tools`` and ``open``.

    Attributes:
        sessions: number of sessions that each worker process keeps open at most.
    """

    keeps_worker: ClassVar[bool] = True

    sessions: int = 64
    found: tuple[SchemaTool, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.found = tuple(self.list_tools())

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.load()  # before the time limit of a call begins

    def load(self) -> Any:
        """Import what the sessions need."""
        raise NotImplementedError

    def list_tools(self) -> Iterable[SchemaTool]:
        """Return the tools; ``UserError``: they cannot be listed."""
        raise NotImplementedError

    def open(self, example: Example) -> Session:
        """Open a session, which begins as each one of the example does."""
        raise NotImplementedError

    @property
    def tools(self) -> Mapping[str, Tool]:
        return {found.name: found for found in self.found}

    def reset(self, example: Example) -> Any:
        self.key, self.earned = uuid.uuid4().hex, 0.0
        self.calls = list[tuple[str, Mapping[str, Any]]]()
        session = self._open()
        session.close()  # each episode of the example opens its own
        self.answers = [_digest(session.shown)]
        return session.shown or None

    def _invoke(self, name: str, arguments: Mapping[str, Any]) -> Any:
        session = _OPEN.pop(self.key, None) or self._repeat()
        try:
            content, self.earned = session.call(name, arguments)
        except ToolError:
            self._keep(session)
            raise
        except BaseException:  # the time limit, too
            session.close()
            raise
        self.calls = [*self.calls, (name, arguments)]
        self.answers = [*self.answers, _digest([content, self.earned])]
        self.key = uuid.uuid4().hex  # another episode with the same calls has a session of its own
        self._keep(session)
        return content

    def _keep(self, session: Session) -> None:
        _OPEN[self.key] = session
        while len(_OPEN) > self.sessions:
            _close_oldest()

    def _open(self) -> Session:
        """Open a session; ``WorkerError``, which ends the run: all attempts fail."""
        failure: Exception | None = None
        for wait in _WAITS:
            time.sleep(wait)
            try:
                return self.open(self.example)
            except Exception as error:  # of another package, perhaps as too many are open
                failure = error
                _close_oldest()
        reason = f"{type(failure).__name__}: {failure}"
        raise WorkerError(f"no session can be opened: {reason}") from failure

    def _repeat(self) -> Session:
        """Open a session and repeat the calls; ``WorkerError``: they are answered otherwise."""
        session = self._open()
        answers = [_digest(session.shown)]
        try:
            answers += (_digest([*session.call(*call)]) for call in self.calls)
        except ToolError as error:
            answers.append(str(error))
        except BaseException:
            session.close()
            raise
        if answers != self.answers:
            session.close()
            raise WorkerError(
                "the calls of an episode are answered in another way when they are repeated: the "
                "same row and seed must begin the same episode, and if later calls depend on chance"
                " each episode needs a session that stays open (sessions of the environment, those"
                " that the server allows, and rollout.forks=1)"
            )
        return session

    def _observe(self, shown: Any) -> Observed:
        return replace(super()._observe([*map(_read_part, shown)]), reward=self.earned)


def _close_oldest() -> None:
    if _OPEN:
        _OPEN.pop(next(iter(_OPEN))).close()


def _digest(answer: Any) -> str:
    return hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()


def _read_part(part: Mapping[str, Any]) -> str | Image.Image:
    if part["type"] == "image":
        return Image.open(io.BytesIO(base64.b64decode(part["data"])))
    return str(part.get("text", f"({part['type']} cannot be shown)"))
