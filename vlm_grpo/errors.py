"""The one exception that is the user's to mend, and how it names what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input, settings or files: the message names the culprit and the remedy.

    The command line prints the message alone and exits with status 2; ``--debug`` shows the
    traceback. Anything else that is raised is a defect of the program and keeps its traceback.
    """


class Stopped(Exception):
    """A run that ended on request, its state saved: not an error, but not the end either.

    Attributes:
        status: the process's exit status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` for the known name closest to ``name``, or nothing if none is near.

    >>> nearest("countin", ["counting", "ocr"])
    ' (did you mean counting?)'
    >>> nearest("zebra", ["counting", "ocr"])
    ''
    """
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


def bullets(problems: Iterable[str], limit: int = 50) -> str:
    """One line for each problem, the first ``limit`` of them, then how many more there are.

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
