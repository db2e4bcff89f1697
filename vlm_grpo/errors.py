"""Exceptions for the user's mistakes and for stopped runs, and helpers for their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can fix: bad input, settings or files.

    The message names the culprit and the remedy. The command line prints only the message and
    exits with status 2; ``--debug`` adds the traceback. Any other exception is a bug of the
    program and keeps its traceback.
    """


class Stopped(Exception):
    """A run was stopped on request before its last step, and its state has been saved.

    Attributes:
        status: exit status of the process.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean X?)`` for the known name closest to ``name``, or an empty string.

    >>> nearest("countin", ["counting", "ocr"])
    ' (did you mean counting?)'
    >>> nearest("zebra", ["counting", "ocr"])
    ''
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {matches[0]}?)" if matches else ""


def bullets(problems: Iterable[str], limit: int = 50) -> str:
    """Return the first ``limit`` problems as a bulleted list, then the number of the others.

    >>> print(bullets(["a", "b", "c"], limit=2))
      - a
      - b
      … and 1 more
    """
    problems = list(problems)
    lines = [f"  - {problem}" for problem in problems[:limit]]
    if len(problems) > limit:
        lines.append(f"  … and {len(problems) - limit} more")
    return "\n".join(lines)


_PLAIN_TERMS = {
    "a valid integer": "a whole number",
    "a valid array": "a list",
    "a valid list": "a list",
    "a valid tuple": "a list",
    "a valid dictionary": "a mapping of keys",
    "an object": "a mapping of keys",
    "a valid string": "text",
    "a valid number": "a number",
    "a valid boolean": "true or false",
}


def simplify(message: str) -> str:
    """Return the expectation in a pydantic message, in a form that follows "should".

    >>> simplify("Input should be a valid integer")
    'be a whole number'
    """
    message = message.rpartition("should ")[2]
    for term, ours in _PLAIN_TERMS.items():
        message = message.replace(term, ours)
    return message
