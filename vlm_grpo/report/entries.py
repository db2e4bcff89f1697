"""Rows of what the policy wrote, made into entries that the page can show, filter and sort."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_grpo.report.run import Row, Run, is_number

TEXT_CHARACTERS = 4_000
"""Of a text that the page shows; the whole is in the samples' file."""
ANSWERS_SHOWN = 8
"""Held-out answers to one example, over the evaluations."""

Entry = dict[str, Any]
"""One example with its answers, as ``gallery.js`` takes it:

``view`` "training" or "held-out"; ``id``, ``step`` (of the last answer), ``question``, ``prompt``
and ``gold``; ``pictures`` and ``goldMarks``, names of pictures; ``sizes`` and ``seen`` in pixels;
``answers``; ``change`` since the first time that the example was asked, ``spread`` of a group's
rewards, None where there is none.

An answer has ``label``, ``step``, ``kind`` (``KINDS``), ``parts`` (pairs of thinking | text |
answer and a text), ``read`` (the parsed answer), ``marks`` (a picture's name), ``reward``,
``rewards``, ``metrics``, ``score``, ``advantage``, ``stop``, ``tokens``, ``failures``, ``file``.
"""

KINDS = ("right", "wrong", "no answer", "truncated", "unscorable")

_MALFORMED = (KeyError, TypeError, AttributeError, ValueError, IndexError)
_PICTURE = re.compile(r"[0-9a-f]{32}\.webp")
# Control characters and those that steer the writing direction or are not seen at all: shown by
# their number, they can disturb nothing around them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


def training_entries(run: Run) -> tuple[list[Entry], int]:
    """One entry for each sampled group, and how many rows have a form that cannot be shown."""
    entries, skipped = [], 0
    for row in run.samples:
        if not row["source"].startswith("step-"):
            continue
        try:
            answers = [
                _answer(completion, row, f"completion {number}")
                for number, completion in enumerate(row["completions"], start=1)
            ]
            entry = _entry(row, "training") | {"answers": answers}
        except _MALFORMED:  # written by something else
            skipped += 1
            continue
        rewards = [a["reward"] for a in answers if a["reward"] is not None]
        entry["spread"] = max(rewards) - min(rewards) if rewards else None
        entries.append(entry)
    _note_changes(entries)
    return entries, skipped


def held_out_entries(runs: Sequence[tuple[str, Run]]) -> tuple[list[Entry], int]:
    """One entry for each held-out example: its answers over the evaluations, and over the runs.

    ``change`` is the primary metric metric's: from the first evaluation to the last one, or,
    where there
    are several runs, from the first run's last to the last run's.

    Args:
        runs: what to call a run ("" where there is but one), and the run.
    """
    found: dict[str, Entry] = {}
    skipped = 0
    for label, run in runs:
        rows = [row for row in run.samples if row["source"].startswith("held-out-")]
        shown = spread_out(sorted({row["step"] for row in rows}), ANSWERS_SHOWN)
        for row in (row for row in rows if row["step"] in shown):
            name = f"{label} · step {row['step']}" if label else f"step {row['step']}"
            try:
                answer = _answer(row["completions"][0], row, name) | {"run": label}
                entry = found.setdefault(str(row["id"]), _entry(row, "held-out"))
            except _MALFORMED:
                skipped += 1
                continue
            entry["answers"].append(answer)
            entry["step"] = max(entry["step"], row["step"])
    for entry in found.values():
        last = {answer["run"]: answer["score"] for answer in entry["answers"]}
        first = entry["answers"][0]["score"] if len(last) == 1 else next(iter(last.values()))
        entry["change"] = _difference(first, list(last.values())[-1])
    return list(found.values()), skipped


def as_json(value: Any) -> str:
    """JSON that can stand inside a script element: no character of it ends one or opens a tag."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def visible(text: str, limit: int = TEXT_CHARACTERS) -> str:
    """The text's beginning, with its unseen characters written as ``⟨U+202E⟩``.

    >>> visible("a\\u202eb")
    'a⟨U+202E⟩b'
    >>> visible("abcdef", limit=4)
    'abcd … (2 characters more)'
    """
    shown = _UNSEEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text[:limit])
    shown = shown.encode("utf-8", "replace").decode()  # half a surrogate pair is no character
    return shown if len(text) <= limit else f"{shown} … ({len(text) - limit:,} characters more)"


def split_text(text: str) -> list[tuple[str, str]]:
    """A completion's parts in order: pairs of "thinking", "text" or "answer" and its text.

    >>> split_text("<think>two rows</think>So <answer>4</answer>")
    [('thinking', 'two rows'), ('text', 'So '), ('answer', '4')]
    >>> split_text("4")
    [('answer', '4')]
    """
    thinking, closed, rest = text.rpartition("</think>")
    if not closed and text.lstrip().startswith("<think>"):  # cut off before it was closed
        thinking, rest = text, ""
    parts = [("thinking", thinking.replace("<think>", "", 1).strip())]
    before, opened, inner = rest.partition("<answer>")
    if opened:
        answer, _, after = inner.partition("</answer>")
        parts += [("text", before), ("answer", answer), ("text", after)]
    else:
        parts.append(("answer", rest))
    return [(part, visible(words)) for part, words in parts if words.strip()]


def picture_names(entry: Entry) -> set[str]:
    """Names of all pictures that an entry shows."""
    names = {*entry["pictures"], entry["goldMarks"], *(a["marks"] for a in entry["answers"])}
    return names - {None}


def spread_out(values: Sequence[int], count: int) -> set[int]:
    """At most ``count`` of the values, the first and the last among them, evenly chosen."""
    if len(values) <= count:
        return set(values)
    return {values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)}


def _entry(row: Row, view: str) -> Entry:
    return {
        "view": view,
        "id": visible(str(row["id"]), 200),
        "step": row["step"],
        "question": visible(str(row.get("question", ""))),
        "prompt": visible(str(row.get("prompt", ""))),
        "gold": _shown(row["gold"]),
        "goldMarks": _picture(row.get("gold_marks")),
        "pictures": [_picture(name) for name in row.get("pictures", ())],
        "sizes": [[int(width), int(height)] for width, height in row.get("sizes", ())],
        "seen": [[int(width), int(height)] for width, height in row.get("seen", ())],
        "answers": [],
        "change": None,
        "spread": None,
    }


def _answer(completion: Mapping[str, Any], row: Row, label: str) -> dict[str, Any]:
    rewards, metrics = _numbers(completion["rewards"]), _numbers(completion.get("metrics") or {})
    reward = _number(completion["reward"])
    values = rewards | metrics
    primary_metric = row.get("headline")
    score = values.get(primary_metric) if isinstance(primary_metric, str) else reward
    answer, stop = completion["answer"], completion.get("stop")
    return {
        "label": label,
        "step": row["step"],
        "kind": _kind(answer is not None, stop, reward, score),
        "parts": split_text(str(completion["text"])),
        "read": None if answer is None else _shown(answer),
        "marks": _picture(completion.get("marks")),
        "reward": reward,
        "rewards": rewards,
        "metrics": metrics,
        "score": score,
        "advantage": _number(completion.get("advantage")),
        "stop": None if stop is None else visible(str(stop), 40),
        "tokens": _number(completion.get("tokens")),
        "failures": {
            visible(str(name), 60): visible(str(why)[-TEXT_CHARACTERS:])
            for name, why in (completion.get("failures") or {}).items()
        },
        "file": row["source"],
    }


def _kind(answered: bool, stop: Any, reward: float | None, score: float | None) -> str:
    if reward is None:
        return "unscorable"
    if not answered:
        return "truncated" if stop == "length" else "no answer"
    return "right" if score is not None and score >= 1.0 else "wrong"


def _note_changes(entries: Sequence[Entry]) -> None:
    """Of an example that was sampled again: how its mean reward changed since the first time."""
    first: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda entry: entry["step"]):
        earlier = first.setdefault(entry["id"], entry)
        if earlier is not entry:
            entry["change"] = _difference(_mean_reward(earlier), _mean_reward(entry))


def _mean_reward(entry: Entry) -> float | None:
    rewards = [a["reward"] for a in entry["answers"] if a["reward"] is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(_rounded(value), ensure_ascii=False)
    return visible(text)


def _rounded(value: Any) -> Any:
    """Numbers to two decimals: a hundredth of a pixel is enough to look at."""
    if isinstance(value, float) and math.isfinite(value):
        return round(value, 2)
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def _numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    return {visible(str(name), 60): _number(value) for name, value in values.items()}


def _number(value: Any) -> float | None:
    return value if is_number(value) else None


def _picture(name: Any) -> str | None:
    """The name, if it is one that an album gives: a row from elsewhere reads no other file."""
    return name if isinstance(name, str) and _PICTURE.fullmatch(name) else None
