"""Render formulas as MathML, which browsers display without a script.

docutils converts LaTeX; a command that it does not know is an error, so a formula is never shown as
source text.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.writers.html5 import HTML5Translator

_TAG = re.compile(r"\\tag\{(.*?)\}")


def convert(formula: str, as_block: bool = False) -> str:
    try:
        return tex2mathml(formula, as_block=as_block)
    except MathError as error:
        raise ExtensionError(f"{error} In the formula: {formula}") from error


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def visit_display(translator: HTML5Translator, node: nodes.math_block) -> None:
    source = node.astext()
    formula = convert(_TAG.sub("", source), as_block=True)
    number = _TAG.search(source)
    label = f'<span class="equation-number">({number[1]})</span>' if number else ""
    translator.body.append(f'<div class="math">{formula}{label}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_display, None))
    return {"parallel_read_safe": True}
