"""Formulas in LaTeX: spellings that look alike, those that do not, parts, and malformed ones."""

import sys
from pathlib import Path

import pytest
import yaml

from vlm_grpo.errors import UserError
from vlm_grpo.tasks.graders.formulas import MAX_FORMULA, contains_formula, normalize_formula

TABLE = yaml.safe_load(Path(__file__).with_name("formulas.yaml").read_text("utf-8"))


@pytest.mark.parametrize("kind", ["alike", "different"])
def test_formulas_that_look_alike_have_one_form(kind):
    for first, second in TABLE[kind]:
        assert normalize_formula(first) is not None, first
        is_alike = normalize_formula(first) == normalize_formula(second)
        assert is_alike == (kind == "alike"), (first, second)
        if is_alike:
            assert contains_formula(first, second)
            assert contains_formula(second, first)


@pytest.mark.parametrize("kind", ["contains", "lacks"])
def test_a_formula_contains_another(kind):
    for formula, gold in TABLE[kind]:
        assert contains_formula(formula, gold) == (kind == "contains"), (formula, gold)


@pytest.mark.parametrize("mistake", [*TABLE["malformed"], "b" * MAX_FORMULA])
def test_a_malformed_formula_contains_none(mistake):
    assert normalize_formula("a" + mistake) is None
    assert not contains_formula("a" + mistake, "a")
    assert contains_formula("a" + mistake, "a" + mistake)  # but for the same letters


@pytest.mark.parametrize("library", ["latex2mathml.converter", "lxml.etree"])
def test_a_missing_library_is_named(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=r"needs \w+: pip install 'vlm-grpo\[documents\]'"):
        contains_formula("a+missing", "a")
