"""Jinja templates, perhaps somebody else's, with bounds on their time and memory."""

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

LARGEST = 1_000_000
"""Maximum number of characters and items, all levels together, of a value in a template."""
_MOST_STEPS = 1_000_000
"""Maximum number of operations, items of loops, and hundreds of characters of a rendering."""
_KEEP, _JOIN, _EACH = "(keep)", "(join)", "(each)"  # filters that no template can name


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment in which no template runs without end or makes texts and lists without limit.

    Sizes are known before an operation: its result is at most the product of its largest operand
    and the others, among which a number may be a width. What exceeds a bound is a
    ``TemplateError``.
    """

    intercepted_binops = frozenset(("+", "*", "%", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._left = threading.local()
        del self.globals["lipsum"]
        self.filters = {name: self.bound(each) for name, each in self.filters.items()}
        self.filters |= {_KEEP: self._keep, _JOIN: self._join_texts, _EACH: self._count_items}

    def compile_bounded(self, parsed: nodes.Template) -> Template:
        """Compile what ``parse`` has returned; raises what compiling a template raises."""
        return self.from_string(_Bounds().visit(parsed).set_environment(self))

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render a template that this environment has compiled; ``TemplateError``: it fails."""
        self._left.steps = _MOST_STEPS
        try:
            return template.render(variables)
        except TemplateError:
            raise
        except Exception as error:  # of the template's own operations
            raise TemplateError(f"{type(error).__name__}: {error}") from error

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter whose operands and results are bounded."""

        @functools.wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            if function.__name__ != "do_default":  # which only chooses
                self._check_growth(function, (*values, *named.values()))
            return self._keep(function(*values, **named))

        return call

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        return self._keep("".join(self._count_items(parts)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TemplateError("it has a power")
        if operator != "+":
            self._check_growth(str.format if operator == "%" else None, (left, right))
        self._measure((left, right))
        return self._keep(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *values: Any, **named: Any) -> Any:
        if not isinstance(function, Macro | type):  # which only hold their arguments
            own = getattr(getattr(function, "__wrapped__", function), "__self__", None)
            self._check_growth(function, (own, *values, *named.values()))
        return self._keep(super().call(context, function, *values, **named))

    def _spend(self, steps: int) -> None:
        self._left.steps = getattr(self._left, "steps", _MOST_STEPS) - steps
        if self._left.steps < 0:
            raise TemplateError(f"it takes more than {_MOST_STEPS:,} steps")

    def _measure(self, values: Iterable[Any]) -> tuple[int, int]:
        """Return the total size of values and the largest number in them."""
        todo, size, number = [*values], 0, 0
        while todo:
            value, before = todo.pop(), size
            if isinstance(value, str | bytes):
                size += len(value)
            elif isinstance(value, list | tuple | set):
                todo += value
                size += len(value)
            elif isinstance(value, dict):
                todo += [*value, *value.values()]
                size += len(value)
            elif isinstance(value, int):
                size += value.bit_length() // 8
                number = max(number, abs(value))
            if size > LARGEST:
                raise TemplateError(f"a value is longer than {LARGEST:,} characters")
            self._spend(1 + (size - before) // 100)
        return size, number

    def _check_growth(self, function: Any, values: tuple[Any, ...]) -> None:
        measured = [self._measure((value,)) for value in values]
        sizes, width = [size for size, _ in measured], max((n for _, n in measured), default=0)
        if "format" in getattr(function, "__name__", ""):  # with widths in a text
            texts = [value for value in values if isinstance(value, str)]
            digits = [found[:9] for text in texts for found in re.findall("[1-9][0-9]*", text)]
            width = max([width, *map(int, digits)])
        others = sum(sizes) - max(sizes, default=0) + width
        if (1 + sum(sizes)) * others > 100 * LARGEST:
            raise TemplateError(f"an operation may make more than {100 * LARGEST:,} characters")

    def _keep(self, value: Any) -> Any:
        self._measure((value,))
        return value

    def _join_texts(self, parts: tuple[Any, ...]) -> str:
        self._measure(parts)
        return "".join(map(str, parts))

    def _count_items(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._spend(1 + (len(item) // 100 if isinstance(item, str) else 0))
            yield item


class _Bounds(NodeTransformer):
    """Filters around what Jinja does not let an environment intercept."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        for at, part in enumerate(node.nodes):
            if not isinstance(part, nodes.TemplateData):
                node.nodes[at] = _apply(_JOIN, nodes.Tuple([part], "load"))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _apply(_JOIN, nodes.Tuple(node.nodes, "load"))

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _apply(_EACH, node.iter)  # type: ignore[arg-type]
        return node

    def visit_List(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        return node if is_target else _apply(_KEEP, node)

    visit_Dict = visit_Tuple = visit_List


def _apply(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
