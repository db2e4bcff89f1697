"""Formulas in LaTeX: spellings that look alike, those that do not, parts, and malformed ones."""

from __future__ import annotations

import sys

import pytest

from vlm_grpo.errors import UserError
from vlm_grpo.task.graders.formulas import MAX_FORMULA, contains_formula, normalize_formula


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (r"\frac12", r"\dfrac{1}{2}", True),
        (r"x^{2}_i", "x_{i}^2", True),
        (r"\left( a \right)", "(a)", True),
        (r"\mathbf{x}\,y", "xy", True),
        (r"\left(R / x_i\right)^{\times}", r"(R/x_i)^\times", True),
        (r"\sum_{i=1}^n i", r"\sum\limits_{i=1}^{n}{i}", True),
        (r"\sin^2 x", r"\operatorname{sin}^{2}x", True),
        (r"\begin{aligned}a&=b\end{aligned}", r"\begin{align*}a&=b\end{align*}", True),
        (r"x \ne y", r"x\not= y", True),
        (r"|x|", r"\bigl\vert x\Bigr|", True),
        (r"a\mid b", "a|b", True),
        (r"\|x\|", r"\lVert x\rVert", True),
        ("10^5", "{10}^5", True),
        ("12_i", "1 2_i", True),
        (r"\mathop{x}y", r"\vphantom{z}xy\nonumber", True),
        (r"\bar{x}", r"\overline{x}", True),
        (r"a:=\arg b^\dagger", r"a\coloneqq\operatorname{arg}b^\dag", True),
        (r"\langle x\rangle", r"\lang x\rang", True),
        (r"f'_a{}", r"f^{\prime}_a", True),
        ("x'_a^2", "x_a'^{2}", True),
        ("x''^2", r"x^{\prime\prime 2}", True),
        ("x''^{ab}", "x'^{ab}", False),
        (r"\begin{matrix}a\\[2pt]b\end{matrix}", r"\begin{matrix}a\\b\end{matrix}", True),
        ("(ab)^2", "a(b)^2", False),
        (r"\frac{1}{23}", r"\frac{12}{3}", False),
        ("x^{ab}", "{xa}^{b}", False),
        ("x^2", "x_2", False),
        ("x^2", "x2", False),
        (r"\sqrt{a}b", r"\sqrt{ab}", False),
        (r"\sqrt{x}", "x", False),
        (r"\vec{x}", "x", False),
        (r"\epsilon", r"\varepsilon", False),
        (r"\phi", r"\varphi", False),
        (r"\Re z", "Rz", False),
        (r"\begin{pmatrix}1&23\end{pmatrix}", r"\begin{pmatrix}12&3\end{pmatrix}", False),
    ],
)
def test_formulas_that_look_alike_have_one_form(first, second, equal):
    assert normalize_formula(first) is not None
    assert (normalize_formula(first) == normalize_formula(second)) == equal
    if equal:
        assert contains_formula(first, second)
        assert contains_formula(second, first)


@pytest.mark.parametrize(
    ("formula", "gold", "contained"),
    [
        ("a + b = c", "a+b", True),
        (r"\begin{align*}a &= b\\c &= d\end{align*}", "a=b", True),
        ("a=b", r"\begin{aligned}a &= b\end{aligned}", True),
        (r"\begin{cases}2 \text{ if } a\\1\end{cases}",
         r"\left\{\begin{array}{ll}2 & \text{if } a\\1\end{array}\right.", True),
        (r"\begin{aligned}a\\b\end{aligned}", "ab", False),
        ("=", "a=b", False),
        ("a", "a=b", False),
        # The names of MathML's tags are no letters of a formula: mtable, msup.
        (r"\begin{matrix}1\end{matrix}", "ab", False),
        ("x^2", "m", False),
        ("x^2", ":", False),
    ],
)  # fmt: skip
def test_a_formula_contains_another(formula, gold, contained):
    assert contains_formula(formula, gold) == contained


@pytest.mark.parametrize(
    "mistake",
    ["#", "$", r"\1", "{b", "b}", "}+{b", r"\frac{b}", "b^1^2", "b^1_2^3", r"\text{b", r"\(b",
     r"\mathf{b}", r"\left(b", "_", "b" * MAX_FORMULA],
)  # fmt: skip
def test_a_malformed_formula_contains_none(mistake):
    assert normalize_formula("a" + mistake) is None
    assert not contains_formula("a" + mistake, "a")
    assert contains_formula("a" + mistake, "a" + mistake)  # but for the same letters


@pytest.mark.parametrize("library", ["latex2mathml.converter", "lxml.etree"])
def test_a_missing_library_is_named(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=r"needs \w+: pip install 'vlm-grpo\[documents\]'"):
        contains_formula("a+missing", "a")


def test_an_unknown_command_passes_only_if_the_gold_formula_has_it():
    assert not contains_formula(r"a\foo{b}", "a")
    assert contains_formula(r"a \foo {b} = c", r"a\foo{b}")
    assert contains_formula(r"\foo^2", r"\foo")
