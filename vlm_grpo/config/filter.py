"""Filters of training examples: comparisons of numbers, such as ``0.1 < pass_rate < 0.9``."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

_COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_SIGNS = re.compile("(<=|>=|==|!=|<|>)")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?")
_NAME = re.compile(r"[A-Za-z_]\w*")


class Filter:
    """A filter of examples; ``names`` are the columns that it compares."""

    def __init__(self, text: str) -> None:
        parts = [_SIGNS.split(chain) for chain in re.split(r"\band\b", text)]
        self._chains = [[_read(part.strip()) for part in chain] for chain in parts]
        operands = [operand for chain in self._chains for operand in chain[::2]]
        self.names = tuple(dict.fromkeys(name for name in operands if isinstance(name, str)))
        if None in operands or min(map(len, self._chains)) < 3 or not self.names:
            raise ValueError(
                "is no filter: write comparisons of columns with numbers, such as "
                '"0.1 < pass_rate < 0.9", joined by and'
            )

    def accepts(self, values: Mapping[str, float]) -> bool:
        return all(
            _COMPARE[sign](values.get(left, left), values.get(right, right))
            for chain in self._chains
            for left, sign, right in zip(chain[::2], chain[1::2], chain[2::2], strict=False)
        )


def _read(text: str) -> Any:
    """Return a number, or the name of a column, or a sign; None for other text."""
    if text in _COMPARE or _NAME.fullmatch(text):
        return text
    return float(text) if _NUMBER.fullmatch(text) else None


def check_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
