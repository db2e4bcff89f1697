"""The calls of a function, for a test that looks at them afterwards."""

from typing import Any, NamedTuple

import pytest


class Call(NamedTuple):
    arguments: tuple[Any, ...]  # those of a method begin with its object
    named: dict[str, Any]
    result: Any


def record_calls(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Call]:
    """Return a list that receives the calls of a function, which runs as before."""
    function, calls = getattr(owner, name), list[Call]()

    def run(*arguments: Any, **named: Any) -> Any:
        calls.append(Call(arguments, named, function(*arguments, **named)))
        return calls[-1].result

    patch.setattr(owner, name, run)
    return calls
