"""Unit tests of a page's text in the format of olmOCR-Bench.

A test is a row such as ``{"type": "present", "text": "…", "max_diffs": 2}``. The types are present,
absent, order, table, math and baseline. Source: Poznanski et al. 2025, olmOCR 2 (arXiv:2510.19817).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from html import escape
from typing import Any

from rapidfuzz import fuzz

from vlm_grpo.tasks.graders.formulas import contains_formula
from vlm_grpo.tasks.graders.tables import Grid, Place, import_extra, read_grids

Test = Mapping[str, Any]

# The other cells that a test of a cell may name: how a grid finds them, and in which direction.
_RELATED = {
    **{"up": (Grid.neighbors, -1, 0), "down": (Grid.neighbors, 1, 0)},
    **{"left": (Grid.neighbors, 0, -1), "right": (Grid.neighbors, 0, 1)},
    **{"top_heading": (Grid.find_headings, -1, 0), "left_heading": (Grid.find_headings, 0, -1)},
}
_DELIMITERS = ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$"))
_DISALLOWED = re.compile(
    "[\u4e00-\u9fff\u3040-\u309f\u30a0-\u30ff\U0001f600-\U0001f64f\U0001f300-\U0001f5ff"
    "\U0001f680-\U0001f6ff\U0001f1e0-\U0001f1ff]"
)
_MARKUP = (
    (re.compile(r"<br/?>"), " "),
    (re.compile(r"\*\*(.*?)\*\*"), r"\1"),
    (re.compile(r"__(.*?)__"), r"\1"),
    (re.compile(r"</?[bi]>"), ""),
    (re.compile(r"(\*\*|__)(.*?)\1"), r"\2"),
    (re.compile(r"(\*|_)(.*?)\1"), r"\2"),
    (re.compile(r"\s+"), " "),
)
_PLAIN = str.maketrans(
    dict.fromkeys("‘’‚", "'") | dict.fromkeys("“”„", '"') | dict.fromkeys("–—‑‒−", "-")
    | {"＿": "_", "µ": "μ"}
)  # fmt: skip


def normalize(text: str) -> str:
    """Return a text without emphasis, and with plain spaces, quotes and dashes.

    >>> normalize("**Total**  –  “5”")
    'Total - "5"'
    """
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return unicodedata.normalize("NFC", text).translate(_PLAIN)


class Page:
    """The text of a page in markdown, with tables in markdown or HTML and formulas between LaTeX's
    delimiters, which is read once for all tests."""

    def __init__(self, text: str) -> None:
        self.text = text

    def passes(self, test: Test) -> bool:
        """Return whether the page passes a test that ``check_test`` accepts."""
        return _RUNNERS[test["type"]](self, test)

    @cached_property
    def normalized(self) -> str:
        return normalize(self.text)

    @cached_property
    def grids(self) -> list[tuple[Grid, dict[Place, str], bool]]:
        """The tables, their cells' normalized texts, and whether they are in markdown."""
        return [
            (grid, {place: normalize(cell.text) for place, cell in grid.cells.items()}, is_markdown)
            for is_markdown in (True, False)
            for grid in read_grids(self.text, markdown=is_markdown, html=not is_markdown)
        ]

    def find_formulas(self, with_dollars: bool) -> list[str]:
        found: list[str] = []
        text = self.text
        for opening, closing in _DELIMITERS if with_dollars else _DELIMITERS[:2]:
            rest: list[str] = []
            start = 0
            while (at := text.find(opening, start)) >= 0:
                end = text.find(closing, at + len(opening) + 1)
                if end < 0:
                    break
                found.append(text[at + len(opening) : end].strip())
                rest.append(text[start:at])
                start = end + len(closing)
            text = "".join([*rest, text[start:]])
        return found


def _is_present(page: Page, test: Test) -> bool:
    query, text = normalize(test["text"]), page.normalized
    if not test.get("case_sensitive", True):
        query, text = query.lower(), text.lower()
    first, last = test.get("first_n"), test.get("last_n")
    if first or last:
        text = (text[:first] if first else "") + (text[-last:] if last else "")
    # partial_ratio finds the shorter text in the longer one: a page "e" would have every query. A
    # window that the test makes shorter than its query is compared as by the script.
    compare = fuzz.partial_ratio if len(page.normalized) >= len(query) else fuzz.ratio
    return compare(query, text) / 100.0 >= 1.0 - test.get("max_diffs", 0) / len(query)


def _is_ordered(page: Page, test: Test) -> bool:
    before, after = (
        find_near(normalize(test[key]), page.normalized, test.get("max_diffs", 0))
        for key in ("before", "after")
    )
    return bool(before and after) and min(before) < max(after)


def find_near(query: str, text: str, most: int) -> list[int]:
    """Return the starts of the best of each run of overlapping near matches.

    They are those of ``fuzzysearch.find_near_matches``, whose time grows with the square of their
    number.
    """
    find = import_extra("fuzzysearch.levenshtein").find_near_matches_levenshtein
    starts: list[int] = []
    best, end = (0, 0), -1
    for match in sorted(find(query, text, most)):
        rank = (match.dist, match.start - match.end)
        if match.start >= end or not most:  # exact matches may overlap
            starts.append(match.start)
            best = rank
        elif rank < best:
            starts[-1], best = match.start, rank
        end = max(end, match.end)
    return starts


def _has_cell(page: Page, test: Test) -> bool:
    def is_like(text: str, expected: str) -> bool:
        least = max(0.5, 1.0 - test.get("max_diffs", 0) / max(1, len(expected)))
        return fuzz.ratio(expected, text) / 100.0 >= least

    wanted = {name: text for name in _RELATED if (text := normalize(test.get(name) or ""))}
    cell = normalize(test["cell"])
    for grid, texts, is_markdown in page.grids:
        if is_markdown and test.get("ignore_markdown_tables"):
            continue
        for place in [place for place, text in texts.items() if is_like(text, cell)]:
            related = ((_RELATED[name], text) for name, text in wanted.items())
            if all(
                any(is_like(texts[other], text) for other in find(grid, place, down, right))
                for (find, down, right), text in related
            ):
                return True
    return False


def _has_formula(page: Page, test: Test) -> bool:
    formulas = page.find_formulas(with_dollars=not test.get("ignore_dollar_delimited"))
    return any(contains_formula(formula, test["math"]) for formula in formulas)


def _is_sound(page: Page, test: Test) -> bool:
    text = page.text
    longest = test.get("max_length")
    if longest is not None:
        if test.get("max_length_skips_image_alt_tags"):
            text = re.sub(r"!\[[^\]\n]*\]\([^)\n]*\)", "", text)
        return _count_alphanumeric(text) <= longest
    if not _count_alphanumeric(text):
        return False
    text = re.sub(r"\s+", " ", text)
    most = test.get("max_repeats", 30)
    # More than that many repetitions of up to five characters at the end.
    repeats = any(text.endswith(text[-n:] * (most + 1)) for n in range(1, 6) if len(text) >= n)
    return not repeats and not (
        test.get("check_disallowed_characters", True) and _DISALLOWED.search(text)
    )


def _count_alphanumeric(text: str) -> int:
    return sum(map(str.isalnum, text))


_RUNNERS: dict[str, Callable[[Page, Test], bool]] = {
    "present": _is_present,
    "absent": lambda page, test: not _is_present(page, test),
    "order": _is_ordered,
    "table": _has_cell,
    "math": _has_formula,
    "baseline": _is_sound,
}
_TEXTS = {
    "present": ("text",), "absent": ("text",), "order": ("before", "after"), "table": ("cell",),
    "math": ("math",), "baseline": (),
}  # fmt: skip
_NUMBERS = ("max_diffs", "first_n", "last_n", "max_length", "max_repeats")
TYPES = tuple(_RUNNERS)  #: The types of tests


def check_test(test: Any) -> None:
    """Raise ValueError, naming the field, if a test is malformed or of an unknown type."""
    kind = test.get("type") if isinstance(test, Mapping) else None
    if kind not in _RUNNERS:
        raise ValueError(f"a test must have a type of {', '.join(_RUNNERS)}: {test!r:.120}")
    for name in (*_TEXTS[kind], *_RELATED, "category"):
        text = test.get(name)
        if name in _TEXTS[kind] and not (isinstance(text, str) and normalize(text).strip()):
            raise ValueError(f"a test of type {kind} needs a non-empty {name}: {test!r:.120}")
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{name} of a test must be text: {test!r:.120}")
    for name in _NUMBERS:
        number = test.get(name)
        if number is not None and (type(number) is not int or number < 0):
            raise ValueError(f"{name} of a test must be an integer of at least 0: {test!r:.120}")
    for name in _TEXTS[kind] if kind in ("present", "absent", "order") else ():
        length = len(normalize(test[name]))
        most = length // 2 if kind == "order" else length - 1
        if test.get("max_diffs", 0) > most:
            raise ValueError(
                f"max_diffs of a test of type {kind} may be at most {most} for {name} of {length} "
                f"characters, or other texts pass: {test!r:.120}"
            )


def write_page(tests: Sequence[Test]) -> str:
    """Write a text that passes tests, unless they exclude each other."""
    parts = []
    for test in tests:
        if test["type"] in ("present", "order"):
            parts += [test[name] for name in _TEXTS[test["type"]]]
        elif test["type"] == "math":
            parts.append(rf"\[{test['math']}\]")
        elif test["type"] == "table":
            parts.append(_write_table(test))
    is_blank = any(test.get("max_length") is not None for test in tests)
    return "\n\n".join(parts) or ("…" if is_blank else "Text")


def _write_table(test: Test) -> str:
    def write_row(names: Sequence[str | None]) -> str:
        cells = (f"<td>{escape(test.get(name) or '') if name else ''}</td>" for name in names)
        return f"<tr>{''.join(cells)}</tr>"

    sides = [name for name in ("left_heading", "left", "cell", "right") if test.get(name)]
    column = sides.index("cell")
    rows = [
        write_row(sides if name == "cell" else [None] * column + [name])
        for name in ("top_heading", "up", "cell", "down")
        if test.get(name)
    ]
    return f"<table>{''.join(rows)}</table>"
