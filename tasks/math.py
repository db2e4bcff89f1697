"""Math: questions about figures whose answer is a formula, compared by the library math-verify."""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from vlm_grpo.task import Task, reward
from vlm_grpo.task.sentences import is_sure, unwrap
from vlm_grpo.types import Example
from vlm_grpo.utils.time_limit import CallTimeout, can_interrupt, time_limit
from vlm_grpo.utils.worker_pool import WorkerPool, is_worker

_LONGEST = 300  # Maximum number of characters of an answer
_SECONDS = 3.0
"""Time limit of a comparison; towers of powers never end, and such an answer is wrong."""
_MEMORY = 8 << 30
"""Maximum number of bytes that a comparison may allocate, where the system can limit them."""
_ONE_FORMULA = re.compile(r"([^$\d]*)\$([^$]+)\$([^$\d]*)")
_WORDS = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf)\{ *)?([A-Za-z][A-Za-z ,'-]*?) *\}?")
_OPTION_IN_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf) *\{ *(\([A-J]\)) *\}")
_OPTION = re.compile(r"\(?([A-J])(?:\)|[.:)] [^A-J]*(?:[A-J]\w[^A-J]*)*)?\.?")
_TEXT = r"\\(?:text|mathrm|mbox) *\{([^{}]*)\}"
_UNITS = re.compile(
    rf"(?:{_TEXT}(?:\^\{{?[23]\}}?)?|\\ |°|\\degree|\\?%|\^\{{?\\circ\}}?"
    r"|(?<=[\d})πi ])(?:[cdkm]m|kg|厘?米|千?克|元|度)(?:\^\{?[23]\}?|[²³])?)+$"
)
_LETTER_UNITS = re.compile(r"(?<=[\d})πi ])[mgsh](?:\^\{?[23]\}?|[²³])?$")
_OR = re.compile(r"(?:\\text *\{ *or *\}|\bor\b|\\lor\b|或)")
_HIDDEN = re.compile(r"\\(?:[hv]?phantom|[bx]?cancel|sout)\b")
_SPACE = r"(?: |\\[ ,;:!]|\\q?quad)+"
_THOUSANDS = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_SPACE}\d{{3}})+(?![\d.])")
_TWO_NUMBERS = re.compile(rf"(?<![_^\w.])[\d.]+{_SPACE}\d")
_ROOT = re.compile(r"√ ?(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
_SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d*)?[eE](?:[-+]\d\d|\d\d?)")
_INFINITE = re.compile(r"[-+]?(?:[\d.]+e\+?\d{3,}|inf|infinity|nan)", re.IGNORECASE)


class Math(Task):
    """Solve a problem about a figure; the gold answer is a number, a formula or a word, as text.

    The answer is the content of ``\\boxed{}``; several boxes must be equal.
    Without it, all the text is the answer. Units and percent signs are ignored on both sides, and
    of an equation the right side counts unless the gold answer is an equation too. Words and the
    letters of options are compared as text.

    A comparison runs in a process of its own, which is killed after 3 seconds: math-verify's time
    limit needs the main thread, and does not stop large powers. An answer that is not compared
    within this time is wrong.
    """

    primary_metric = "correct"
    instruction: str | None = "Put the final answer in \\boxed{}."

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_spec("math_verify") is None:
            raise ValueError("it needs math-verify: pip install 'vlm-grpo[math]'")

    def parse(self, text: str, example: Example) -> str | None:
        return read_answer(text)

    def write(self, answer: Any, example: Example) -> str:
        return f"\\boxed{{{answer}}}"

    def gold_answer(self, example: Example) -> str:
        return read_answer(str(example.answer)) or ""

    def check(self, example: Example) -> None:
        answer = example.answer
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise ValueError(f"the answer {answer!r:.80} must be a text or a number")
        if (read := read_answer(str(answer))) is None:
            raise ValueError(
                f"the answer {answer!r:.80} must be one formula of 1 to {_LONGEST} characters"
            )
        value = _get_value(read, read)
        if not any(map(str.isalnum, value)) or _INFINITE.fullmatch(value):
            raise ValueError(
                f"no answer can equal {answer!r:.80}: give a finite number, a formula or a word"
            )

    @reward(weight=1.0)
    def correct(self, answer: str, example: Example) -> float:
        """1 if the answer is equal to the gold answer, else 0."""
        gold = self.gold_answer(example)
        if (words := _WORDS.fullmatch(gold)) is not None:
            option = _OPTION_IN_TEXT.sub(r"\1", answer) if len(words[1]) == 1 else ""
            option = _OPTION.fullmatch(option)
            found = option or _WORDS.fullmatch(answer)
            return float(found is not None and found[1].casefold() == words[1].casefold())
        return float(_compare_limited(_get_value(gold, gold), _get_value(answer, gold)))


def read_answer(text: str) -> str | None:
    """Return the only boxed answer in a text, or all of a text without a box; None: not one."""
    boxed, words = find_boxed(text)
    if boxed is None or len({*boxed}) > 1 or re.match(r"\s?[{\d]", words[-1] if boxed else ""):
        return None
    if not boxed:
        return clean(text)
    # The words of its sentence must not deny the box; those before it derive it.
    before, after = re.split(r"[.,;:\n]", words[0])[-1], re.split(r"[.;\n]", words[-1])[0]
    before = re.sub(r"\b(?:if|whether)\b", "", before, flags=re.IGNORECASE)
    return clean(boxed[0]) if is_sure(f"{before}|{after}") else None


def find_boxed(text: str) -> tuple[list[str] | None, list[str]]:
    """Return the contents of all ``\\boxed{}`` in a text, None if one is unclosed or nested, and
    the parts of the text around them.

    >>> find_boxed(r"so \\boxed{\\frac{1}{2}}.")
    (['\\\\frac{1}{2}'], ['so ', '.'])
    """
    first, *parts = re.split(r"\\f?boxed *(?=\{)", text)
    found, words = [], [first]
    for part in parts:
        depth = 0
        for place, character in enumerate(part):
            depth += (character == "{") - (character == "}")
            if not depth:
                found.append(" ".join(part[1:place].split()))
                words.append(part[place + 1 :])
                break
        else:
            return None, []
    return found, words


def clean(text: str) -> str | None:
    """Return an answer in one line, without delimiters; None if it is empty, too long or several.

    Of a text with one formula in dollar signs and no other number it is the formula.

    >>> clean("$ x = 4 $."), clean("$4$ or $5$")
    ('x = 4', None)
    """
    text = " ".join(unwrap(text).split()).removesuffix(".")
    one = _ONE_FORMULA.fullmatch(text)
    if one and is_sure(f"{one[1]}|{one[3]}"):
        text = one[2].strip()
    text = _THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), _OR.sub(", ", text))
    is_several = "$" in text.replace("\\$", "") or re.search(r"\\[][()]|\\f?boxed", text)
    if is_several or _HIDDEN.search(text) or _TWO_NUMBERS.search(text):
        return None
    has_digits = any(map(str.isdecimal, text))
    words = " ".join(re.findall(_TEXT, text)).replace("~", " ") if has_digits else ""
    return text if is_sure(f"|{words}", exact=True) and 0 < len(text) <= _LONGEST else None


def _get_value(text: str, gold: str) -> str:
    """Return the side of an answer that is compared with the gold answer, without units."""
    if "=" not in gold and "," not in text:
        text = re.split(r"(?<![\\<>!])=", text)[-1]
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2] or root[3]}}}", text)
    text = _UNITS.sub("", text.strip()).strip() or text
    if not re.search(r"(?<![\\a-z])[a-z]", gold):
        text = _LETTER_UNITS.sub("", text).strip() or text
    text = text.replace("π", r"\pi ")
    return f"{Decimal(text):f}" if _SCIENTIFIC.fullmatch(text) else text


def _compare_limited(gold: str, answer: str) -> bool:
    """Return whether two formulas are equal; false if that takes too long or ends the process."""
    if gold == answer:
        return True
    if is_worker():  # of rewards, in a process of its own already
        _load_library()
        with time_limit(_SECONDS if can_interrupt() else None) as call:
            try:
                return call(compare, gold, answer)
            except (CallTimeout, MemoryError):
                return False
    future = _start_pool().schedule(_compare, (_Ready(), gold, answer), _SECONDS)
    return not isinstance(future.exception(), Exception) and future.result()


@cache
def _start_pool() -> WorkerPool:
    return WorkerPool(1, "comparison")


class _Ready:
    """A part of a call whose loading, before the time limit begins, prepares a worker."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _prepare, ()


@cache
def _prepare() -> None:
    """Import the library and compare once, which takes longer than a comparison may the first time;
    limit the memory."""
    compare("2", "1+1")
    if find_spec("resource") is not None:  # not on Windows
        resource = import_module("resource")
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def _compare(_: None, gold: str, answer: str) -> bool:
    return compare(gold, answer)


@cache
def _load_library() -> tuple[Any, Any]:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
    return import_module("math_verify.parser"), import_module("math_verify.grader")


def compare(gold: str, answer: str) -> bool:
    """Return whether two formulas in LaTeX are equal, by math-verify; it may take forever."""
    parser, grader = _load_library()
    settings = [parser.LatexExtractionConfig(boxed_match_priority=-1)]
    sides = (parser.parse(f"${side}$", settings, parsing_timeout=None) for side in (gold, answer))
    return bool(grader.verify(*sides, timeout_seconds=None))
