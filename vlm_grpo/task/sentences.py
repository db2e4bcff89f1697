"""Words around an answer: one reader of sentences for all tasks.

A task finds the candidates in a text (letters, numbers, boxes, …) and reads their values; the rules
here decide what the rest of the text makes of them. Everything takes linear time.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple


class Candidate(NamedTuple):
    """A part of a text, from ``start`` to ``end``, that may be the answer, and its value."""

    start: int
    end: int
    value: Any


ONES = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen"
    "|sixteen|seventeen|eighteen|nineteen"
)
TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
NUMBER_WORDS = {word: number for number, word in enumerate(ONES.split("|"))} | {
    word: 10 * number for number, word in enumerate(TENS.split("|"), start=2)
}
"""Zero to nineteen, and the tens up to ninety."""

_POSSIBLE = (
    r"might|could(?! (?:see|count|find|read|spot|locate))|(?-i:may)|unless|if|whether|depend\w*"
    r"|otherwise|(?:for|an|the|format|prompt['’]s) example"
)
# Words that deny an answer, offer another, doubt it, or quote it.
_UNSURE = re.compile(
    r"(?!\Ano,)\b(?:not(?! (?:counting|including|the other)\b)"
    r"(?! (?!sure|certain|clear)[^|.;]{1,60}\bbut (?:the|it|this|one|in|at|on)\b[^|]{0,60}\|)"
    r"|n?or|no|never|n?either|none|nothing|cannot|wrong(?:ly)?|incorrect(?:ly)?|false|mistaken?"
    r"|except|exclud\w+|avoid|ignore|reject\w*|instead|rather than|anything but|used to be"
    r"|opposite of|contrary|alternatively|vs|versus|maybe|perhaps|possibly|probably|hardly"
    r"|guess\w*|doubt\w*|(?:first|I) thought|unsure|uncertain|unclear|unable|give up|correction"
    r"|wait(?=[,.!:])|suppose|pretend|sorry|equally|whichever|crossed out|e\.g|in the form"
    r"|prompt['’]s table|refuse to (?:say|answer|name)|would (?:need|require|contain)|somewhere"
    r"|some(?:thing|one) else|(?:previous|last) (?:answer|response|click|box|point)"
    r"|too (?:many|few|much|high|low)|(?:of|for|belongs? to) (?:the other|another|a different)"
    r"|nicht|kein\w*|oder|vielleicht|pas|peut-être|quizás?)\b|n['’]t\b|~~|<!--|不|没|或"
    r"|(?:\A|[.;:\n] ?)(?:th(?:is|at) is )?(?:the |an)other \w+(?:['’]s \w+| of the \w+)?"
    r"(?: is\b| are\b|:)"
    # An answer that becomes another, or is said to be none.
    r"|\|\W{0,3}(?:[-=]>|[→⇒➜])|\| (?:(?:is|are) (?:empty|background)|was [^|.;]{0,20}\bbefore)\b"
    r"|, say,? ?\||\A\W*example:"
    # What is usual, or what others say, if it leads to the answer.
    r"|\b(?:usually|typically|unlike|such as|told [^|.;:,]{1,40} that"
    r"|(?:people|most|many|some|others) would"
    r"|(?:you|I was|he|she|they|people|some(?:one|body)|others?|friend|user|question|prompt)\b"
    r"[^|.;:,]{0,40}\b(?:claim(?:s|ed)?|told(?! to)|asks?|asked|wrote|thinks?|believes?))"
    r"\b[^|.;:,]{0,80}\|"
    r"|\|,? (?:usually|typically)\b"
    # Possibilities and conditions in the answer's own sentence.
    rf"|\b(?:{_POSSIBLE})\b[^|.;\n]{{0,200}}\||\|[^|.;\n]{{0,200}}\b(?:{_POSSIBLE})\b",
    re.IGNORECASE,
)
# What says nothing about the answer: offers of help, and that there is no more of it.
_POLITE = re.compile(
    r"\b(?:let me know|feel free|if you (?:need|want|have|would)|(?:would|do|can|shall) (?:you|I)"
    r"|is there anything|no other|nothing else|no one else)\b[^.!?|\n]{0,80}[.!?]?",
    re.IGNORECASE,
)
# Words that make a number a bound, a guess or a part, or that change its value.
_INEXACT = re.compile(
    r"\b(?:mindestens|höchstens|kaum|etwa|ungefähr|unos|unas|environ|au moins|least|most|more|less"
    r"|fewer|than|between(?! (?!and\b)(?:the )?[a-z])|up to|exceed\w*|approx\w*|roughly|circa"
    r"|nearly|almost|several|minus|negative|plus|point|dozens?|hundreds?|thousands?|lakhs?|crores?"
    r"|[mbtr]+illions?|percent)\b|[<>~≈±≤≥+%‰/^]"
    r"|[二两三四五六七八九十百千万亿半几约第负减]|至少|至多|最多|最少|超过|不到|以[上下内]|左右|\|[对双倍点]",
    re.IGNORECASE,
)
# Words directly before a place, a time or a number that make it another one.
_RELATIVE = re.compile(
    r"\b(?:(?:left|right|top|bottom|outside|inside|out|ahead) of|(?:next|close) to|away from|near"
    r"|beside|opposite|above|below|under|over|beyond|but|than|outside|behind|before|after|until)"
    r"\W*\Z",
    re.IGNORECASE,
)
_ABOUT = re.compile(r"\b(?:about|around)\W*\Z", re.IGNORECASE)
# Without "one", which is also a pronoun.
_ANY_NUMBER = re.compile(rf"\b(?:{ONES.replace('one|', '')}|{TENS})\b", re.IGNORECASE)


def fold(text: str) -> str:
    """Return a text in compatibility form (NFKC) without invisible marks, which hide words."""
    text = unicodedata.normalize("NFKC", text)
    return "".join(c for c in text if unicodedata.category(c) != "Cf")


def is_sure(words: str, exact: bool = False) -> bool:
    """Return whether the words around an answer leave it alone: none denies it, offers another,
    doubts it or quotes it, nor, if it is ``exact``, makes it a bound, a guess or a part. In the
    words, "|" stands for the answer."""
    words = _POLITE.sub(" ", fold(words))
    is_question = "?" in words.split("|", 1)[-1]  # before the answer, it is the prompt's
    return not (is_question or _UNSURE.search(words) or (exact and _INEXACT.search(words)))


def is_relative(before: str, exact: bool = False) -> bool:
    """Return whether the words directly before an answer make it another one ("left of")."""
    before = before[-20:]
    return bool(_RELATIVE.search(before) or (exact and _ABOUT.search(before)))


def has_number(words: str) -> bool:
    """Return whether words have a digit, a number such as ½, or a number word."""
    return any(map(str.isnumeric, words)) or _ANY_NUMBER.search(words) is not None


_TEXT_COMMANDS = r"\\(?:text|textbf|textit|mathrm|mathbf|f?boxed)"
_BRACES = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_WRAPPERS = re.compile(
    r"```(?:(?:json|text|txt|plaintext|plain|markdown|md|html|latex|tex|python|math)\b|\w+\n)?"
    r"([^`]*)```"
    rf"|\$?\$?{_TEXT_COMMANDS} ?{_BRACES}\$?\$?"
    r"|`([^`]*)`|\*{1,3}([^*]*)\*{1,3}|__([^_]*)__|\$\$?([^$]*)\$\$?"
    r"|\\\(((?:(?!\\\)).)*)\\\)|\\\[((?:(?!\\\]).)*)\\\]"
    r"|\"([^\"]*)\"|“([^”]*)”|'([^']*)'"
    r"|\{ ?\"(?:final_)?(?:answer|result|value|count|number|choice|option|text)\" ?: ?"
    r"\"?([^\"{}\[\],:]*)\"? ?\}",
    re.DOTALL,
)
_LEAD = re.compile(
    r"(?:#+ ?)?(?:(?:so|thus|therefore|hence),? )?(?:it(?:['’]s| is) |(?:the |my )?"
    r"(?:(?:final|correct|right|best) )?(?:answer|value|result|option|choice)"
    r"(?: is ?:?|[*_ ]*[:=][*_]*|(?= |\n))|(?:正确)?答案(?:[是为][:：]?|[:：]))\s*",
    re.IGNORECASE,
)
_BOLD_LEAD = re.compile(r"(?:#+ ?)?(\*\*|__)([^*_\n]{1,40}?)(?:[:=]\1|\1 ?[:=])\s*")
_DEEPEST = 6  # wrappers within each other


def unwrap(text: str, lead: bool = True) -> str:
    """Return a text without what models write around an answer: code fences, emphasis, quotes,
    LaTeX's delimiters and boxes, JSON with one value and, with ``lead``, "The answer is".

    >>> unwrap("**Answer:** $\\\\boxed{\\\\text{B}}$.")
    'B'
    """
    for _ in range(_DEEPEST):
        before, text = text, text.strip()
        if lead:
            text = _BOLD_LEAD.sub(lambda found: f"{found[2]}: ", text, count=1)
            text = _LEAD.sub("", text, count=1) if _LEAD.match(text) else text
        wrapped = _WRAPPERS.fullmatch(text) or _WRAPPERS.fullmatch(text.removesuffix("."))
        if wrapped is not None:
            text = next(inner for inner in wrapped.groups() if inner is not None)
        if text == before:
            break
    return text


def choose(text: str, candidates: Sequence[Candidate], exact: bool = False) -> Any:
    """Return the only value that a text states: that of all its candidates, if they agree and the
    words around them leave it alone and, if it is ``exact``, have no other number. None: it states
    none, or several."""
    words, position = [], 0
    for start, end, value in candidates:
        words.append(text[position:start])
        position = end
        if value != candidates[0].value or is_relative(words[-1], exact):
            return None
    words.append(text[position:])
    return candidates[0].value if candidates and is_sure("|".join(words), exact) else None
