"""Exceptions for the user's mistakes and for stopped runs, and helpers for their messages."""

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator


class UserError(Exception):
    """An error that the user can fix: bad input, settings or files.

    The message names the culprit and the remedy. The command line prints only the message and
    exits with status 2; ``--debug`` adds the traceback. Any other exception is a bug of the
    program and keeps its traceback. What it quotes, such as a server's answer, is printable.
    """

    def __str__(self) -> str:
        return printable(shorten(super().__str__()))


class Stopped(Exception):
    """A run was stopped on request before its last step, and its state has been saved.

    Attributes:
        status: exit status of the process.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


# Terminals obey the control characters of C0, except tabs and line breaks, and C1; bidirectional
# controls show a text in another order.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return text from elsewhere with its control characters as escape sequences.

    >>> print(printable("\\033[31mred\\n"), end="")
    \\x1b[31mred
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def shorten(text: str, part: int = 4000) -> str:
    """Return a text without its middle, if it has more than two ``part`` characters.

    >>> shorten("abcdef", 2)
    'ab\\n… 2 characters …\\nef'
    """
    left_out = len(text) - 2 * part
    return f"{text[:part]}\n… {left_out} characters …\n{text[-part:]}" if left_out > 0 else text


def find_nearest(name: str, known: Iterable[str], least: float = 0.6) -> str | None:
    """Return the known name closest to ``name``, if ``least`` of their characters match."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=least)), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean X?)`` for the known name closest to ``name``, or an empty string.

    >>> nearest("countin", ["counting", "ocr"])
    ' (did you mean counting?)'
    >>> nearest("zebra", ["counting", "ocr"])
    ''
    """
    found = find_nearest(name, known)
    return f" (did you mean {found}?)" if found else ""


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


def list_bad_rows(problems: Iterable[str], limit: int = 50) -> str:
    """Return the problems of rows, each ``ROW: [example ID: ]PROBLEM``, as ``bullets`` does.

    Of three or more rows whose problems differ in numbers and quoted texts alone, the first stands
    for all.

    >>> print(list_bad_rows(f"row {n}: '{n}' has {n} tokens" for n in range(9)))
      - row 0: '0' has 0 tokens
        8 more like it: row 1, row 2, row 3, row 4, …
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        reason = re.sub("^example .*?: ", "", problem.partition(": ")[2] or problem)
        kinds[re.sub(r"'[^']*'|\d+", "", reason)].append(problem)

    def describe(alike: list[str]) -> Iterator[str]:
        _, *others = rows = [*dict.fromkeys(problem.partition(": ")[0] for problem in alike)]
        if not len(rows) == len(alike) > 2:  # two, or problems with one file
            yield from alike
            return
        shown = ", ".join([*others[:4], *(["…"] if len(others) > 4 else [])])
        yield f"{alike[0]}\n    {len(others):,} more like it: {shown}"

    return bullets((line for alike in kinds.values() for line in describe(alike)), limit)


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
