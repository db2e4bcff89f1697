"""Filters of training examples: comparisons of their columns with numbers."""

import ast
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vlm_grpo.config.combinations import evaluate, parse


class Filter:
    """Comparisons of training examples' numbers; ``names`` are the columns that they compare."""

    def __init__(self, text: str) -> None:
        self._condition: ast.expr = ast.Constant(None)
        with suppress(ValueError):
            self._condition = parse(text)
        clauses = [self._condition]
        if isinstance(self._condition, ast.BoolOp) and isinstance(self._condition.op, ast.And):
            clauses = self._condition.values
        comparisons = [clause for clause in clauses if isinstance(clause, ast.Compare)]
        parts = [part for clause in comparisons for part in (clause.left, *clause.comparators)]
        signs = {type(sign) for clause in comparisons for sign in clause.ops}
        self.names = tuple(dict.fromkeys(n.id for n in parts if isinstance(n, ast.Name)))
        are_operands = all(isinstance(part, ast.Name) or _is_number(part) for part in parts)
        is_whole = len(comparisons) == len(clauses) and signs <= _SIGNS
        if not self.names or not are_operands or not is_whole:
            raise ValueError(
                "is no filter: write comparisons of columns with numbers, such as "
                '"0.1 < pass_rate < 0.9", joined by and'
            )

    def find_missing(self, values: Mapping[str, Any]) -> list[str]:
        found = {n: v for n in self.names if isinstance(v := values.get(n), int | float)}
        numbers = {n for n, v in found.items() if not isinstance(v, bool) and v == v}
        return [name for name in self.names if name not in numbers]

    def accepts(self, values: Mapping[str, float]) -> bool:
        return evaluate(self._condition, values)


_SIGNS = {ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq}


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)
