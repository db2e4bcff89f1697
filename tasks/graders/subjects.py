"""Subjects: is an answer about what its question asks for, or about another thing?

An answer that calls the thing another name ("the bike" for a bicycle) is honest. So a subject is
another one only where the words show it: it has a place beside the thing of the question ("the tree
next to the dog"), a word that excludes the question's ("the dog on the right", where the left one
is asked for), is of another category, or is what the question names to tell which.
"""

from __future__ import annotations

import re

from vlm_grpo.task.sentences import is_sure

# Nothing has two of a line.
_EXCLUSIVE = [
    {*line.split()}
    for line in (
        "left right",
        "top bottom",
        "upper lower",
        "first second third fourth fifth last",
        "black white red green blue yellow brown orange pink purple gray",
        "open close",
    )
]
# COCO's, without those that share a thing, such as car and truck.
CATEGORY = (
    r"\b(bicycle|car|motorcycle|airplane|bus|train|boat|traffic light|fire hydrant|stop sign"
    r"|parking meter|bench|bird|cat|dog|horse|sheep|cow|elephant|bear|zebra|giraffe|backpack"
    r"|umbrella|handbag|suitcase|frisbee|snowboard|kite|baseball bat|skateboard|surfboard|bottle"
    r"|tennis racket|cup|fork|knife|spoon|bowl|banana|apple|sandwich|broccoli|carrot"
    r"|hot dog|pizza|donut|cake|chair|potted plant|dining table|toilet|laptop|keyboard"
    r"|cell phone|microwave|oven|toaster|sink|refrigerator|clock|vase|scissors"
    r"|hair drier|toothbrush)(?:es|s)?\b"
)
_BESIDE = (
    r"(?:next to|beside|near|behind|above|below|under|underneath|(?:to the )?(?:left|right) of"
    r"|in front of|close to|opposite)"
)
_START = r"(?:\A|[.;:\n] ?|[\])] (?:is|shows|marks|contains|would contain) (?:where )?)"
_THE = r"\b(?:the|an?|this|that) "
_NEIGHBOR = re.compile(
    rf"{_START}(?:the|an?|this|that) (?:(?!with|and|is|has|on|in)[\w-]+ ){{0,3}}?"
    rf"(?P<head>(?!is )[\w-]+) (?:[a-z]+(?:ly|ing) |just |right )?{_BESIDE} "
    r"(?:the |an? )?(?P<other>[\w-]+(?: [\w-]+){0,3}?)"
    r"(?= ?[:=]| (?:is|are|was|were|sits|stands|lies|has|says|reads|shows)\b)"
)
_MODIFIED = re.compile(
    rf"{_THE}(?=(?P<before>[\w-]+) (?P<noun>[\w-]+))"
    r"|(?<![\w-])(?P<subject>[\w-]{1,30}),? (?:on|at|in) the (?:far |very )?"
    r"(?P<after>[\w-]+)(?! of)"
)
_SUBJECT = re.compile(rf"{_START}(?:the|an?) (?:[\w-]+ )?([\w-]+) (?:is|are|sits|stands|lies)\b")
_KIND = re.compile(rf"{_START}(?:the|an?) (?:[\w-]+ ){{0,2}}?{CATEGORY}")
_COUNTED = re.compile(
    r"\bnumber of ([\w-]+)(?= is\b| are\b|\W*\Z)"
    r"|\b(?:\d+|two|three|four|five|six|seven|eight|nine|ten) ([\w-]+)(?=\W*\Z)"
)
_AFTERWARDS = re.compile(r"\d[^\d.]{0,80} (?:before|after|until|once)\b")
# Words of a question that name nothing.
_EMPTY = re.compile(
    "an?|the|this|that|of|to|in|on|at|by|is|are|be|do|does|there|its?|any|one|all|each|what|which"
    "|who|where|when|how|many|much|find|locate|point|box|bounding|give|show|click"
)


def forget(text: str, phrase: str) -> str:
    """Return a text with "it" for the prompt's own phrase, whose words ("the other dog") are not
    held against an answer."""
    phrase = rf"(?<!\w){re.escape(phrase)}(?!\w)" if " " in phrase else r"\Z\A"
    return re.sub(phrase, "it", text, flags=re.IGNORECASE)


def is_beside_it(text: str, question: str) -> bool:
    """Return whether an answer is about what is beside the question's thing ("the car next to it"),
    and the question names no place itself."""
    others = {found["other"] for found in _NEIGHBOR.finditer(text.lower())}
    return bool(others & {"it", "him", "her"}) and not re.search(_BESIDE, question.lower())


def is_about(text: str, question: str, finds: bool = False, counts: bool = False) -> bool:
    """Return whether an answer's words show no other subject than the question's.

    Args:
        text: the answer.
        question: the question, or the phrase that names the thing.
        finds: whether a thing is to be found, which the question may tell by others near it.
        counts: whether things are to be counted, of which the same holds.
    """
    text, question = (" ".join(t.lower().replace("*", "").split()) for t in (text, question))
    question = re.split(r"[?.(\n]", question)[0]
    place = re.search(rf"(?<=\w) (?:on|at|by|against|over|{_BESIDE}) (.*)", question)
    phrase = question[: place.start()] if place else question
    main = _list_words(phrase)
    near = _list_words(place[1]) - main if place and main else set()
    if is_beside_it(text, question):
        return False
    if finds:
        for found in _NEIGHBOR.finditer(text):
            other = _list_words(found["other"])
            if other & main and other <= main | near and _fold(found["head"]) not in main | near:
                return False
    for found in _MODIFIED.finditer(text):
        modifier, noun = found["before"] or found["after"], found["noun"] or found["subject"]
        for words in _EXCLUSIVE:
            wanted = words & {*question.split()}
            known = modifier in words and _fold(noun) in main | {"button", "icon"}
            if known and wanted and not wanted & {*re.findall(r"\w+", text)}:
                return False
    nouns = [_fold(a or b) for a, b in _COUNTED.findall(text)] if counts else []
    if not near.isdisjoint(nouns + [_fold(noun) for noun in _SUBJECT.findall(text) if finds]):
        return False
    kinds = {*re.findall(CATEGORY, phrase)}
    others = {*re.findall(CATEGORY, " ".join(nouns))} if counts else {*_KIND.findall(text)}
    return not (kinds and others) or bool(kinds & others) or bool(others & near)


def _list_words(text: str) -> set[str]:
    """Return the words of a text that name something."""
    words = re.findall(r"[\w-]+", text)
    return {_fold(word) for word in words if not _EMPTY.fullmatch(word)}


def _fold(word: str) -> str:
    """Return a word in the singular."""
    return word.removesuffix("s") if len(word) > 3 else word


def is_before(text: str, question: str) -> bool:
    """Return whether an interval is that of something else, before or after the question's event:
    most of the words of the event follow it, and "before".

    >>> is_before("He sits from 2 to 5, before he cuts the bread.", "a man cuts the bread")
    True
    """
    text, asked = text.lower(), _list_words(question.lower())
    if (found := _AFTERWARDS.search(text)) is None:
        return False
    first, rest = _list_words(text[: found.end()]), _list_words(text[found.end() :])
    return 2 * len(asked & rest - first) > len(asked)


def is_introduced(before: str, after: str) -> bool:
    """Return whether the sentence that leads to a table or a page, on its line, with a colon at its
    end or about what follows, and the one after it, if it is about the answer, leave it alone."""
    before, after = (re.sub(r"```\w*", "", text) for text in (before[-300:], after[:300]))
    lead = re.search(
        r"([^.;\n]*\b(?:following|below)\b[^.;\n]*)\.\s*\Z|([^.;:：\n]*)(?:[:：]\s*| *)\Z", before
    )
    about = re.match(
        r"\s*(?:(?:this|it (?:is|may|might|could)|I|or|the table)\b|→)[^.;\n]*",
        after,
        re.IGNORECASE,
    )
    return is_sure(f"{lead[1] or lead[2] if lead else ''}:|{about[0].strip() if about else ''}")
