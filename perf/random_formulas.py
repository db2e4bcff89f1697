r"""Random formulas in LaTeX, and outputs near them: spelled in another way, wrong, a part, more.

A formula is a tree: a symbol such as ``"x"``, or a tuple of its kind and its parts. A ``Writer``
spells it, ``change`` makes one error.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from random_outputs import edit, make_example

from vlm_grpo.types import Example

_SYMBOLS, _OPERATORS, _NAMES = map(
    str.split,
    (
        r"x y z a b n i k f R 0 1 2 3 12 3.5 \alpha \beta \lambda \theta \Omega \phi \varphi "
        r"\epsilon \varepsilon \infty \partial \nabla \hbar \ell \emptyset",
        r"+ - = < > \le \ge \ne \to \in \times \cdot \pm \approx \subset \cup \mid , \dots \cdots "
        r"\mapsto \equiv \sim \otimes \Rightarrow \forall \exists ! : /",
        r"\sin \log \max \arg \operatorname{Ann} \mathrm{d} \text{if} \text{and} \lim",
    ),
)
_BRACKETS = [("(", ")"), ("[", "]"), (r"\{", r"\}"), ("|", "|"), (r"\langle", r"\rangle")]
_TABLES = ["matrix", "pmatrix", "bmatrix", "vmatrix", "cases", "aligned", "array"]
_MARKS = [r"\overline", r"\underbrace", r"\overset{!}", r"\boldsymbol", r"\mathbf"]
_ACCENTS = [r"\hat", r"\bar", r"\tilde", r"\dot", r"\vec", r"\mathbb", r"\mathcal", r"\mathrm"]
_BIG = [r"\sum", r"\int", r"\prod", r"\lim", r"\bigcup", r"\oint"]
_PRIMES = ["'", r"\prime"]
_SPELLINGS = {
    r"\le": [r"\leq"], r"\ge": [r"\geq"], r"\ne": [r"\neq", r"\not="], r"\to": [r"\rightarrow"],
    r"\dots": [r"\ldots"], "|": [r"\vert"], r"\lim": [r"\operatorname*{lim}"], "=": ["{=}"],
    r"\{": [r"\lbrace"], r"\}": [r"\rbrace"], r"\mid": [r"\vert", "|"], r"\cdot": [r"{\cdot}"],
    r"\sin": [r"\operatorname{sin}", r"\mathrm{sin}"], r"\log": [r"\operatorname{log}"],
    r"\operatorname{Ann}": [r"\mathrm{Ann}", r"\text{Ann}"], r"\mathrm{d}": [r"\text{d}"],
    r"\text{if}": [r"\mathrm{if}", r"\textrm{if}", r"\text{ if }"], r"\text{and}": [r"\mbox{and}"],
    r"\emptyset": [r"\varnothing"], r"\cdots": [r"\dotsb"], "x": ["{x}"], "12": ["{12}", "1 2"],
}  # fmt: skip
_SPACES = (r"\,", r"\!", r"\;", r"\quad ", "~", r"\ ", r"\qquad ", r"\hspace{1em}")
_DELIMITERS = [(r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$"), ("\\[\n", "\n\\]")]
_UNREADABLE = (
    r"\frac{a}|x^1^2|\left( x|{x|x}|\foo{x}|\begin{aligned} x|\sqrt|x_|\left x|&|#|\text{a|}{"
)
Tree = Any


def draw_tree(rng: random.Random, depth: int = 3) -> Tree:
    """Draw terms with operators between them."""
    terms = [_draw_term(rng, depth)]
    for _ in range(rng.choice([0, 1, 1, 2, 3] if depth == 3 else [0, 0, 1])):
        terms += [rng.choice(_OPERATORS), _draw_term(rng, depth)]
    return ("row", *terms)


def _draw_term(rng: random.Random, depth: int) -> Tree:
    symbol = rng.choice(_NAMES if rng.random() < 0.1 else _SYMBOLS)
    if depth == 0 or rng.random() < 0.3:
        return symbol

    def draw() -> Tree:
        return draw_tree(rng, depth - 1)

    def draw_table() -> Tree:
        width, height = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2)])
        rows = [("cells", *(draw() for _ in range(width))) for _ in range(height)]
        return ("table", rng.choice(_TABLES), *rows)

    def draw_script() -> Tree:
        base = rng.choice(_SYMBOLS) if rng.random() < 0.8 else ("pair", _BRACKETS[0], draw())
        sides = rng.choice([(1, 0), (0, 1), (1, 1)])
        return ("script", base, *(draw() if side else None for side in sides))

    kinds: list[Callable[[], Tree]] = [
        lambda: ("fraction", rng.choice([r"\frac", r"\frac", r"\binom"]), draw(), draw()),
        lambda: ("root", rng.choice(["", "", "[3]", "[n]"]), draw()),
        draw_script,
        draw_script,
        lambda: ("script", rng.choice(_SYMBOLS), None, rng.choice(_PRIMES)),
        lambda: ("row", ("script", rng.choice(_BIG), draw(), rng.choice([draw(), None])), symbol),
        lambda: ("pair", rng.choice(_BRACKETS), draw()),
        lambda: ("mark", rng.choice(_ACCENTS), rng.choice("xyRE")),
        lambda: ("mark", rng.choice(_MARKS), draw()),
        draw_table,
    ]
    return rng.choice(kinds)()


@dataclass(frozen=True)
class Writer:
    """Spells formulas: without ``rng`` in one way, with it in any; ``spaces``: those at random."""

    rng: random.Random | None = None
    spaces: float = 0.0

    def write(self, tree: Tree) -> str:
        if isinstance(tree, str):
            return self._pick(tree, *_SPELLINGS.get(tree, []))
        kind, *parts = tree
        if kind == "row":
            return "".join(map(self._space, map(self.write, parts)))
        return getattr(self, f"_write_{kind}")(*parts)

    def _pick(self, *ways: str) -> str:
        return self.rng.choice(ways) if self.rng else ways[0]

    def _space(self, text: str) -> str:
        is_spaced = self.rng and self.rng.random() < self.spaces
        return text + (self._pick(*_SPACES) if is_spaced else " ")

    def _group(self, tree: Tree) -> str:
        text = self.write(tree)
        bare = text.strip() if len(text.strip()) == 1 and text.strip().isalnum() else f"{{{text}}}"
        return self._pick(f"{{{text}}}", bare)

    def _write_fraction(self, name: str, upper: Tree, lower: Tree) -> str:
        other = self._pick(name, rf"\d{name[1:]}", rf"\t{name[1:]}")
        return f"{other} {self._group(upper)}{self._group(lower)}"

    def _write_root(self, degree: str, tree: Tree) -> str:
        return rf"\sqrt{degree} {self._group(tree)}"

    def _write_script(self, base: Tree, lower: Tree, upper: Tree) -> str:
        scripts = [f"_{self._group(lower)}"] if lower else []
        if upper in _PRIMES:
            scripts.append(self._pick(f"^{{{upper}}}" if upper == r"\prime" else "'", r"^{\prime}"))
        elif upper:
            scripts.append(f"^{self._group(upper)}")
        limits = self._pick("", r"\limits") if base in (r"\sum", r"\lim", r"\prod") else ""
        name = base if limits else self.write(base)
        return name + limits + "".join(scripts[:: -1 if self._pick("", "turned") else 1])

    def _write_pair(self, sides: tuple[str, str], tree: Tree) -> str:
        (left, right), inner = map(self.write, sides), self.write(tree)
        forms = (r"\left{} {}\right{}", "{} {}{}", r"\bigl{} {}\bigr{}", r"\Big{} {}\Big{}")
        return self._pick(*forms).format(left, inner, right)

    def _write_mark(self, name: str, tree: Tree) -> str:
        return f"{name}{{{self.write(tree)}}}"

    def _write_table(self, name: str, *rows: Tree) -> str:
        cells = [" & ".join(map(self.write, row[1:])) for row in rows]
        body = self._pick(r" \\ ", r" \\[2pt] ").join(cells)
        column = "l" if name == "cases" else "c"
        array = rf"\begin{{array}}{{{column * (len(rows[0]) - 1)}}} {body} \end{{array}}"
        if name == "array":
            return array
        if name == "aligned":
            name = self._pick(name, "align*", "split", *["gathered"] * ("&" not in body))
        form = rf"\begin{{{name}}} {body} \end{{{name}}}"
        return self._pick(form, rf"\left\{{ {array} \right.") if name == "cases" else form


def list_places(tree: Tree, place: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Return the places of the parts of a formula that may be changed."""
    if not isinstance(tree, tuple):
        return [place] if isinstance(tree, str) else []
    first = 1 if tree[0] in ("row", "script", "cells") else 2
    inner = [p for i, part in enumerate(tree) if i >= first for p in list_places(part, (*place, i))]
    return inner if tree[0] == "cells" else [place, *inner]


def get_part(tree: Tree, place: tuple[int, ...]) -> Tree:
    return get_part(tree[place[0]], place[1:]) if place else tree


def replace_part(tree: Tree, place: tuple[int, ...], part: Tree) -> Tree:
    if not place:
        return part
    at, *rest = place
    return (*tree[:at], replace_part(tree[at], tuple(rest), part), *tree[at + 1 :])


def change(rng: random.Random, tree: Tree) -> tuple[str, Tree]:
    """Return what is wrong, and the formula with that error."""
    for _ in range(100):
        place = rng.choice(list_places(tree))
        part = get_part(tree, place)
        name, new = rng.choice(_list_errors(rng, part))
        if new is not None and new != part:
            return name, replace_part(tree, place, new)
    return "another symbol", ("row", "q")


def _list_errors(rng: random.Random, part: Tree) -> list[tuple[str, Tree | None]]:
    if isinstance(part, str):
        names = next((n for n in (_SYMBOLS, _OPERATORS, _NAMES) if part in n), _SYMBOLS)
        return [("another symbol", rng.choice(names))]
    kind, *parts = part
    if kind == "row":
        at = rng.randrange(len(parts))
        others = (*parts[:at], *parts[at + 1 :])
        back = (*others, parts[at])
        return [("another order", ("row", *back)), ("a gap", ("row", *others) if others else None)]
    if kind == "fraction":
        turned, line = (kind, parts[0], parts[2], parts[1]), ("row", parts[1], "/", parts[2])
        return [("another order", turned), ("no fraction", line)]
    if kind == "script":
        base, lower, upper = parts
        moved = None if upper in _PRIMES else (kind, base, upper, lower)
        on_line = ("row", *(part for part in parts if part is not None))
        return [("a script moved", moved), ("a script on the line", on_line)]
    if kind == "pair":
        return [("other brackets", (kind, rng.choice(_BRACKETS), parts[1]))]
    if kind == "table":
        return [("other brackets", (kind, rng.choice(_TABLES[1:5]), *parts[1:]))]
    names = {"root": "no root", "mark": f"no {parts[0].split('{')[0]}"}
    return [(names[kind], parts[1])]


def draw_output(rng: random.Random, tree: Tree) -> tuple[str, str]:
    """Return what an output of a formula is like, and its LaTeX."""
    writer = Writer()
    gold, other, more = writer.write(tree), Writer(rng), draw_tree(rng, 1)
    error, wrong = change(rng, tree)
    parts = list_places(tree)[1:]
    wholes = [
        ("row", tree, "=", more), ("row", more, "=", tree), ("row", tree, "."),
        ("fraction", r"\frac", tree, more), ("script", "q", None, tree),
        ("table", "aligned", ("cells", tree), ("cells", more)),
    ]  # fmt: skip
    wrongs = (f"{error}, {{passed}} passes", rng.choice([writer, other]).write(wrong))
    spelled = ("another spelling, {failed} fails", other.write(tree))
    return rng.choice(
        [
            ("the same, {failed} fails", gold),
            spelled,
            spelled,
            ("other spaces, {failed} fails", Writer(rng, 0.1).write(tree)),
            wrongs,
            wrongs,
            wrongs,
            ("a part, {passed} passes", writer.write(get_part(tree, rng.choice(parts)))),
            ("more, {failed} fails", writer.write(rng.choice(wholes))),
            ("malformed, {passed} passes", gold + rng.choice(_UNREADABLE.split("|"))),
            ("malformed, {passed} passes", gold[: rng.randrange(len(gold))]),
            ("edited, {passed} passes", edit(rng, gold, rng.choice([1, 1, 2]))),
        ]
    )


def draw_formula(rng: random.Random) -> tuple[Example, str]:
    """Draw a test of a formula, and an output near it."""
    tree = draw_tree(rng)
    gold = Writer().write(tree).strip()
    kind, output = draw_output(rng, tree)
    left, right = rng.choice(_DELIMITERS)
    is_odd = rng.random() < 0.1
    output, kind = (gold, "odd delimiters, {passed} passes") if is_odd else (output, kind)
    text = f"{left}{output}{right}"
    if is_odd:
        text = rng.choice(
            [output, f"{left}{output}", f"{output}{right}", rf"${output}\]", f"${output}$$",
             f"{left}{output[:3]}{right}{output[3:]}{right}", f"costs $5. {text}"]
        )  # fmt: skip
    if rng.random() < 0.3:
        text = f"First {left}q{right}.\n\n{text}\n\nThen \\(p\\)."
    return make_example({"tests": [{"type": "math", "math": gold}]}, kind=kind), text
