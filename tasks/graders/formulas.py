"""Formulas in LaTeX: what they look like, and whether one contains another."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Any

from vlm_grpo.tasks.graders.tables import import_extra

MAX_FORMULA = 4_000  #: Maximum length of a formula that is normalized
# Environments in which the borders of cells do not show.
_IN_LINES = re.compile(
    r"\{(?:align(?:ed)?|gather(?:ed)?|split|eqnarray|multline|equation|[dr]?cases)\*?"
    r"\}|\{array\}\s*\{[^{}]*[lr]"
)
# Commands that latex2mathml does not know or reads wrongly, and environments that align lines.
_REPLACEMENTS = (
    (re.compile(r"\{(?:aligned|gathered|gather|split|eqnarray|multline|equation)\*?\}"),
     "{align*}"),
    (re.compile(r"\\(?:[bB]igg?[lrm]?|allowbreak|displaylimits|enskip|nobreak|nonumber|notag|relax)"
                r"(?![A-Za-z])"), " "),
    (re.compile(r"\\\\\s*\[[\d. -]+[a-z]{2}\]"), r"\\\\ "),
    (re.compile(r"\\not\s*="), r"\\ne "),
    (re.compile(r"''\s*\^\s*(\{[^{}]*\}|\w)"), r"'^{\\prime \1}"),
    (re.compile(r"\\arg(?![A-Za-z])"), r"\\operatorname{arg}"),
    (re.compile(r"\\(d?dag)(?![A-Za-z])"), r"\\\1ger "),
    (re.compile(r"\\([lr]ang)(?![A-Za-z])"), r"\\\1le "),
)  # fmt: skip
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|%[^\n]*|[{}$]|#(?!\d)", re.DOTALL)
_MISTAKE = re.compile(
    r"[$#]|\\[()\[\]\d]|\\math(?!(?:bb|bf|bin|cal|clap|close|ellipsis|frak|inner|it|llap|normal|op|open"
    r"|ord|punct|rel|ring|rlap|rm|scr|sf|strut|tt)$)[a-z]+"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_UNKNOWN = re.compile(r"\x03[A-Za-z]+")
# Glyphs that look the same, and letters that Unicode's normal form takes for others.
_GLYPHS = str.maketrans(
    {"∣": "|", "∥": "‖", "∼": "~", "―": "¯", "⟂": "⊥", "⊧": "⊨", "⧵": "∖", "≔": ":=", "≕": "=:",
     "⤳": "⇝", "⬝": "·", "⋅": "·"}
    | {char: chr(0xE000 + place) for place, char in enumerate("ϵϕϑϖϱϰℜℑ")}
)  # fmt: skip
_WRAPPERS = ("math", "mrow", "mstyle", "mpadded", "semantics", "mo")
_SCRIPTS = frozenset({"msub", "msup", "msubsup"})
_PRIMES = ("′", "″", "‴")
_ALIASES = {"munder": "msub", "munderover": "msubsup"}
_ARITIES = {"mfrac": 2, "msub": 2, "msup": 2, "mover": 2, "mroot": 2, "msubsup": 3}


def contains_formula(formula: str, gold: str) -> bool:
    """Return whether a formula in LaTeX is, or has as a part, one that looks like ``gold``."""
    ways = (False, True) if _IN_LINES.search(formula + gold) else (False,)
    return formula == gold or any(
        _contains(normalize_formula(formula, way), normalize_formula(gold, way)) for way in ways
    )


def _contains(whole: str | None, part: str | None) -> bool:
    # A command that is unknown, unless the gold formula has it, is a mistake.
    if whole is None or part is None or part not in whole:
        return False
    return set(_UNKNOWN.findall(whole)) <= set(_UNKNOWN.findall(part))


@lru_cache(maxsize=4096)
def normalize_formula(latex: str, in_lines: bool = False) -> str | None:
    """Return the glyphs of a formula in LaTeX and how they are stacked; None if it is malformed.

    It is latex2mathml's MathML without spaces, fonts and groups that do not matter. Two formulas
    that look alike have the same normal form: ``\\frac12`` and ``\\dfrac{1}{2}``. ``in_lines``
    leaves out the borders of the cells of tables, and tables of one row.
    """
    if len(latex) > MAX_FORMULA or not _is_sound(latex):
        return None
    convert = import_extra("latex2mathml.converter").convert
    etree = import_extra("lxml.etree")
    for pattern, replacement in _REPLACEMENTS:
        latex = pattern.sub(replacement, latex)
    try:
        root = etree.fromstring(convert(latex).encode(), etree.XMLParser(resolve_entities=False))
        parts = _list_parts(root, in_lines)
    except Exception:  # the library raises anything on malformed formulas
        return None
    return "".join(parts) or None


def _is_sound(latex: str) -> bool:
    """Return whether braces match, without delimiters, unescaped signs and unknown fonts."""
    depth = 0
    for token in _TOKEN.findall(latex):
        depth += (token == "{") - (token == "}")
        if depth < 0 or _MISTAKE.fullmatch(token):
            return False
    return depth == 0


def _list_parts(node: Any, in_lines: bool) -> list[str]:
    name = _get_name(node)
    tag = _ALIASES.get(name, name)
    if tag == "mphantom":
        return []
    if not len(node):
        text = node.text or ""
        if _COMMAND.fullmatch(text):  # one that the library does not know
            return [f"\x03{text[1:]} "]
        text = unicodedata.normalize("NFKC", text.translate(_GLYPHS))
        return [text] if (text := "".join(text.split())) else []
    if len(node) != _ARITIES.get(tag, len(node)):
        raise ValueError(f"{tag} lacks an argument")
    if {name, _get_name(node[0])} <= _SCRIPTS and node[0][-1].text not in _PRIMES:
        raise ValueError(f"two of {tag}")  # x^1^2, but not x'^2
    children = [_list_parts(child, in_lines) for child in node]
    before: list[str] = []
    if tag in _SCRIPTS and children[0] and not children[0][-1].startswith("\x03"):
        # A script stands at the last glyph of its base: \left( a \right)^2 is (a)^2.
        *before, last = children[0]
        if not last.startswith("\x01"):
            before, last = [*before, last[:-1]], last[-1]
        children[0] = [last]
    is_flat = tag in _WRAPPERS or (
        in_lines and (tag in ("mtd", "mtr") or (tag == "mtable" and len(node) == 1))
    )
    if is_flat or tag in ("msqrt", "mtd"):
        parts = [part for child in children for part in child]
    else:  # the place of a child matters
        parts = [f"\x01{''.join(child)}\x02" for child in children]
    # The tag's name in letters of no formula: mtable must not contain ab.
    mark = "".join(chr(0xF000 + ord(letter)) for letter in tag)
    return parts if is_flat else [*before, f"\x01{mark}{''.join(parts)}\x02"]


def _get_name(node: Any) -> str:
    return node.tag.rpartition("}")[2]
