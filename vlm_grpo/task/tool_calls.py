"""Reading the call of a tool that a model wrote."""

import json
import re
from typing import Any

from vlm_grpo.types import ToolCall

MAX_CALL = 20_000  # characters of a call that are read
MAX_PARTS = 200  # lists and objects in a call
_FUNCTION = re.compile(r"<function=([\w.-]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class ToolError(Exception):
    """A call that a tool refuses; the model reads the message."""


def parse_call(text: str, tags: tuple[str, str]) -> ToolCall | None:
    """Return the call at the end of a turn; None: it has none. ``ToolError``: it cannot be read.

    Calls are JSON, or ``<function=…>`` with ``<parameter=…>``, between the tags.
    """
    before, end, _ = text.partition(tags[1])
    if not end:
        return None
    _, begin, body = before.rpartition(tags[0])
    if not begin:
        raise ToolError(f"the call does not begin with {tags[0]}")
    body = body.strip()
    if len(body) > MAX_CALL:
        raise ToolError(f"the call has {len(body)} characters, more than {MAX_CALL}")
    if function := _FUNCTION.fullmatch(body):
        pairs = _PARAMETER.findall(function[2])
        return ToolCall(function[1], {name: _read_value(v) for name, v in pairs})
    try:
        found = _read_json(body)
    except ValueError as error:
        raise ToolError(f"the call is not JSON ({str(error)[:200]})") from error
    arguments = (
        found.get("arguments", found.get("parameters", {})) if isinstance(found, dict) else 0
    )
    if not isinstance(arguments, dict) or not isinstance(found.get("name"), str):
        form = '{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}'
        raise ToolError(f"the call must have the form {form}")
    return ToolCall(found["name"], arguments)


def _read_json(text: str) -> Any:
    """Read JSON without surrogates; ``ValueError``: it is none, or has numbers that are not."""
    if sum(map(text.count, "[{")) > MAX_PARTS:
        raise ToolError(f"the call has more than {MAX_PARTS} lists and objects")
    found = json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    return json.loads(found.encode("utf-8", "replace"))


def _read_value(text: str) -> Any:
    try:
        return _read_json(text)
    except ValueError:
        return text
