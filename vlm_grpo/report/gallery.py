"""The entries that the page shows, filters and sorts, and their pictures, within a size limit."""

import base64
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlm_grpo.eval.scored import is_number
from vlm_grpo.report.run import Row, Run
from vlm_grpo.utils.chat import ThinkingTags

TEXT_CHARACTERS = 4_000  # longest text on the page; the file of samples has the full text
ANSWERS_SHOWN = 16
"""Most answers to a held-out example: of up to 8 evaluations of each run, and of the last one."""

Entry = dict[str, Any]
"""One example with its answers, as ``gallery.js`` reads it.

Keys: ``view`` ("training" or "held-out"), ``id``, ``step`` (of the last answer), ``question``,
``prompt``, ``gold``, ``pictures`` and ``goldMarks`` (file names of pictures), ``marked`` (the
number of the picture that is drawn on), ``layers`` (further drawings on it, by name), ``sizes``
and ``resizedSizes`` (pixels), ``answers``, ``change`` (since the example was first answered) and
``spread`` (of a group's rewards); the last two are None if undefined.

An answer has ``label``, ``step``, ``kind`` (one of ``KINDS``), ``parts`` (pairs of a part's name,
thinking, text or answer, and its text), ``parsed`` (the parsed answer), ``marks`` (a picture's file
name), ``reward``, ``rewards``, ``metrics``, ``score``, ``advantage``, ``stop``, ``tokens``,
``failures``, and ``turns`` of an episode. These have ``parts``, ``boxes`` (a drawing of the call
over the first picture), and what was read next: ``read`` (None: it is the last turn), ``pictures``,
``sizes`` and ``isError``.
"""

KINDS = ("correct", "incorrect", "no answer", "truncated", "unscorable", "target")

_MALFORMED = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
_PICTURE = re.compile(r"[0-9a-f]{32}\.webp")
# Control characters, and characters that are invisible or change the writing direction. They are
# shown as their code points, so that they do not affect the text around them.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


def build_training_entries(run: Run) -> tuple[list[Entry], int]:
    """Return one entry per sampled group, and the number of malformed rows.

    Its ``change`` is that of the mean reward since the example was first sampled.
    """
    entries = []
    rows = [row for row in run.samples if row["source"].startswith("step-")]
    for row in rows:
        with suppress(*_MALFORMED):  # not written by vlm-grpo
            answers = [
                _build_answer(completion, row, f"completion {number}")
                for number, completion in enumerate(row["completions"], start=1)
            ]
            entries.append(_build_entry(row, "training") | {"answers": answers})
    skipped = len(rows) - len(entries)
    first: dict[str, float | None] = {}
    for entry in sorted(entries, key=lambda entry: entry["step"]):
        rewards = [a["reward"] for a in entry["answers"] if a["reward"] is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        entry["spread"] = max(rewards) - min(rewards) if rewards else None
        if entry["id"] in first:
            entry["change"] = _subtract(mean, first[entry["id"]])
        first.setdefault(entry["id"], mean)
    return entries, skipped


def build_held_out_entries(runs: Sequence[tuple[str, Run]]) -> tuple[list[Entry], int]:
    """Return one entry per held-out example, and the number of malformed rows.

    An entry has the answers of all runs and evaluations. Its ``change`` is that of the primary
    metric: from the first evaluation to the last, or from the first run's last evaluation to the
    last run's.
    """
    entries: dict[str, Entry] = {}
    skipped = 0
    for label, run in runs:
        rows = [row for row in run.samples if row["source"].startswith("held-out-")]
        count = max(1, min(8, ANSWERS_SHOWN // len(runs)))
        steps = select_evenly(sorted({row["step"] for row in rows}), count)
        for row in (row for row in rows if row["step"] in steps):
            name = f"{label} · step {row['step']}" if label else f"step {row['step']}"
            try:
                answer = _build_answer(row["completions"][0], row, name) | {"run": label}
                entry = entries.setdefault(str(row["id"]), _build_entry(row, "held-out"))
            except _MALFORMED:
                skipped += 1
                continue
            entry["answers"].append(answer)
            entry["step"] = max(entry["step"], row["step"])
    for entry in entries.values():
        answers = entry["answers"]
        last_scores = list({answer["run"]: answer["score"] for answer in answers}.values())
        first_score = answers[0]["score"] if len(last_scores) == 1 else last_scores[0]
        entry["change"] = _subtract(last_scores[-1], first_score)
    return list(entries.values()), skipped


def to_script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element: nothing in it ends one or opens a tag."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def display_text(text: str, limit: int = TEXT_CHARACTERS) -> str:
    """Return the text's first characters, with invisible ones written as ``⟨U+202E⟩``.

    >>> display_text("a\\u202eb")
    'a⟨U+202E⟩b'
    >>> display_text("abcdef", limit=4)
    'abcd … (2 characters more)'
    """
    shown = _INVISIBLE.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text[:limit])
    shown = shown.encode("utf-8", "replace").decode()  # a lone surrogate is not a character
    return shown if len(text) <= limit else f"{shown} … ({len(text) - limit:,} characters more)"


def split_text(text: str, tags: Mapping[str, Any] | None = None) -> list[tuple[str, str]]:
    """Split a completion into pairs of a part's name, "thinking", "text" or "answer", and its text.

    ``tags`` are the fields of its model's ``ThinkingTags``; None: ``<think>`` and ``</think>``.

    >>> split_text("<think>two rows</think>So <answer>4</answer>")
    [('thinking', 'two rows'), ('text', 'So '), ('answer', '4')]
    >>> split_text("4")
    [('answer', '4')]
    """
    text = ThinkingTags(**(tags or {})).normalize(text)
    thinking, closed, rest = text.rpartition("</think>")
    if not closed and text.lstrip().startswith("<think>"):  # truncated before the closing tag
        thinking, rest = text, ""
    parts = [("thinking", thinking.replace("<think>", "", 1).strip())]
    before, opened, inner = rest.partition("<answer>")
    if opened:
        answer, _, after = inner.partition("</answer>")
        parts += [("text", before), ("answer", answer), ("text", after)]
    else:
        parts.append(("answer", rest))
    return [(part, display_text(content)) for part, content in parts if content.strip()]


def _get_picture_names(entries: Sequence[Entry]) -> set[str]:
    names = {n for e in entries for n in (*e["pictures"], e["goldMarks"], *e["layers"].values())}
    for answer in (answer for entry in entries for answer in entry["answers"]):
        names.add(answer["marks"])
        names.update(
            name for turn in answer["turns"] for name in (turn["boxes"], *turn["pictures"])
        )
    return names - {None}


def select_evenly(values: Sequence[int], count: int) -> set[int]:
    """Return at most ``count`` evenly spaced values: the last, and then also the first."""
    if len(values) <= count:
        return set(values)
    if count == 1:
        return {values[-1]}
    return {values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)}


def _build_entry(row: Row, view: str) -> Entry:
    return {
        "view": view,
        "id": display_text(str(row["id"]), 200),
        "step": row["step"],
        "question": display_text(_format_chat(row)),
        "prompt": display_text(str(row.get("prompt", ""))),
        "gold": _format_value(row["gold"]),
        "goldMarks": _check_picture_name(row.get("gold_marks")),
        "layers": {
            display_text(str(name), 60): _check_picture_name(file)
            for name, file in (row.get("layers") or {}).items()
        },
        "marked": int(row.get("marked", 0)),
        "pictures": [_check_picture_name(name) for name in row.get("pictures", ())],
        "sizes": [[int(width), int(height)] for width, height in row.get("sizes", ())],
        "resizedSizes": [[int(width), int(height)] for width, height in row.get("seen", ())],
        "answers": [],
        "change": None,
        "spread": None,
    }


def _format_chat(row: Row) -> str:
    turns = [f"{turn['role']}: {turn['text']}" for turn in row.get("history", ())]
    question = str(row.get("question", ""))
    return "\n\n".join([*turns, f"user: {question}"]) if turns else question


def _build_answer(completion: Mapping[str, Any], row: Row, label: str) -> dict[str, Any]:
    rewards, metrics = (
        {display_text(str(name), 60): _number_or_none(value) for name, value in values.items()}
        for values in (completion["rewards"], completion.get("metrics") or {})
    )
    reward, primary_metric = _number_or_none(completion["reward"]), row.get("headline")
    is_named = isinstance(primary_metric, str)
    score = (rewards | metrics).get(primary_metric) if is_named else reward
    answer, stop = completion["answer"], completion.get("stop")
    if reward is None:
        kind = "unscorable" if rewards else "target"
    elif answer is None:
        kind = "truncated" if stop == "length" else "no answer"
    else:
        kind = "correct" if score is not None and score >= 1.0 else "incorrect"
    return {
        "label": label,
        "step": row["step"],
        "kind": kind,
        "parts": split_text(str(completion["text"]), row.get("thinking_tags")),
        "turns": [_build_turn(turn, row) for turn in completion.get("turns") or ()],
        "parsed": None if answer is None else _format_value(answer),
        "marks": _check_picture_name(completion.get("marks")),
        "reward": reward,
        "rewards": rewards,
        "metrics": metrics,
        "score": score,
        "advantage": _number_or_none(completion.get("advantage")),
        "stop": None if stop is None else display_text(str(stop), 40),
        "tokens": _number_or_none(completion.get("tokens")),
        "failures": {
            display_text(str(name), 60): display_text(str(message)[-TEXT_CHARACTERS:])
            for name, message in (completion.get("failures") or {}).items()
        },
    }


def _build_turn(turn: Mapping[str, Any], row: Row) -> dict[str, Any]:
    seen = turn.get("observed")
    sizes = () if seen is None else seen.get("images", ())
    return {
        "parts": split_text(str(turn["text"]), row.get("thinking_tags")),
        "boxes": _check_picture_name(turn.get("boxes")),
        "pictures": [_check_picture_name(name) for name in turn.get("pictures", ())],
        "sizes": [[int(width), int(height)] for width, height in sizes],
        "read": None if seen is None else display_text(str(seen["text"])),
        "isError": seen is not None and bool(seen.get("is_error")),
    }


def _subtract(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _format_value(value: Any) -> str:
    if not isinstance(value, str):  # a hundredth of a pixel is precise enough
        rounded = json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 2))
        value = json.dumps(rounded, ensure_ascii=False)
    return display_text(value)


def _number_or_none(value: Any) -> float | None:
    return value if is_number(value) else None


def _check_picture_name(name: Any) -> str | None:
    """Return the name if it is a thumbnail's, so that a malformed row cannot read another file."""
    return name if isinstance(name, str) and _PICTURE.fullmatch(name) else None


GALLERY_BYTES = 23_000_000  # limit on entries and pictures together that keeps the page below 25 MB


@dataclass(frozen=True)
class Gallery:
    """Entries and their pictures."""

    entries: Sequence[Entry]
    pictures: dict[str, str]  # data URI by file name, for the pictures of the entries that exist
    omitted: int  # number of entries omitted to keep the page small
    skipped: int  # number of malformed rows


def build_gallery(runs: Sequence[tuple[str, Run]], limit: int = GALLERY_BYTES) -> Gallery:
    """Build the gallery: held-out answers of all runs, and the training groups of a single run.

    Over the limit in bytes, training groups are first thinned out evenly over the steps; then the
    last held-out examples are omitted.
    """
    held_out, skipped = build_held_out_entries(runs)
    training, more = build_training_entries(runs[0][1]) if len(runs) == 1 else ([], 0)
    entries = [*held_out, *training]
    folders = [run.folder / "samples" / "images" for _, run in runs]
    files: dict[str, Path] = {}  # files with the same name are identical
    for folder, name in itertools.product(folders, _get_picture_names(entries)):
        if name not in files and (folder / name).is_file():
            files[name] = folder / name
    sizes = {name: path.stat().st_size * 4 // 3 + 100 for name, path in files.items()}
    texts = {id(entry): len(to_script_json(entry)) for entry in entries}

    def fits(selected: Sequence[Entry]) -> bool:
        size = sum(sizes.get(name, 0) for name in _get_picture_names(selected))
        return size + sum(texts[id(entry)] for entry in selected) <= limit

    selected, steps = entries, sorted({entry["step"] for entry in training})
    count = len(steps)
    while count > 1 and not fits(selected):
        count = count * 9 // 10
        kept = select_evenly(steps, count) if count > 1 else set()
        selected = [*held_out, *(entry for entry in training if entry["step"] in kept)]
    while selected and not fits(selected):
        selected = selected[: len(selected) * 9 // 10]
    pictures = {
        name: f"data:image/webp;base64,{base64.b64encode(files[name].read_bytes()).decode()}"
        for name in sorted(_get_picture_names(selected) & files.keys())
    }
    return Gallery(selected, pictures, len(entries) - len(selected), skipped + more)
