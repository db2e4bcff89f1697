"""A thousand corrupt rows of two dozen kinds: each is reported with its line and reason."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dataset_files import make_row, png_with_claimed_size
from PIL import Image

from vlm_grpo.config.data import DataSettings
from vlm_grpo.data import load_examples
from vlm_grpo.data.checks import check_source
from vlm_grpo.errors import UserError
from vlm_grpo.task.registry import load_task

ROWS_PER_KIND = 50


def row(number: int, **changes: Any) -> bytes:
    return json.dumps(make_row(**{"id": f"row-{number}", **changes})).encode()


def conversation(questions: int) -> bytes:
    turns = [{"from": "human", "value": "How many?"}] * questions
    return json.dumps({"image": "a.png", "conversations": turns}).encode()


# By name of the kind: a function from a number to a row, and the expected reason.
KINDS: dict[str, tuple[Callable[[int], bytes], str]] = {
    "truncated": (lambda n: row(n)[: 10 + n % 40], "the line is not JSON"),
    "not UTF-8": (lambda n: row(n).replace(b"many", b"m\xffny"), "not UTF-8"),
    "no object": (lambda n: b"[" + row(n) + b"]", "must be a JSON object, not a list"),
    "NaN": (lambda n: row(n).replace(b": 3", b": NaN"), "it contains NaN"),
    "too deep": (lambda n: b'{"a":' * (40 + n) + b"1" + b"}" * (40 + n), "nested deeper"),
    "endless number": (lambda n: row(n).replace(b": 3", b": " + b"9" * 5000), "not JSON"),
    "id is no text": (lambda n: row(n, id=[n]), "id must be non-empty text"),
    "empty id": (lambda n: row(n, id=""), "id must be non-empty text"),
    "same id": (lambda n: row(0), "is a duplicate of"),
    "no question": (lambda n: row(n, question=...), "it has no question"),
    "question is no text": (lambda n: row(n, question=[n]), "question must be text"),
    "no answer": (lambda n: row(n, answer=...), "it has no answer"),
    "answer of another form": (lambda n: row(n, answer=f"{n} or so"), "must be an integer"),
    "negative answer": (lambda n: row(n, answer=-1 - n), "must be an integer of at least 0"),
    "meta is no object": (lambda n: row(n, meta=[n]), "meta must be an object"),
    "image is no path": (lambda n: row(n, images=[n]), "an image must be a path"),
    "missing image": (lambda n: row(n, images=[f"{n}.png"]), "is missing in"),
    "image elsewhere": (
        lambda n: row(n, images=["../" * (n % 9 + 1) + "x.png"]),
        "is outside the image folder",
    ),
    "URL": (lambda n: row(n, images=[f"https://example.org/{n}.png"]), "is a URL"),
    "zeros": (lambda n: row(n, images=["zeros.png"]), "corrupt or of a format"),
    "text": (lambda n: row(n, images=["text.png"]), "corrupt or of a format"),
    "bomb": (lambda n: row(n, images=["bomb.png"]), "10000x9000 pixels, more than"),
    "two names": (lambda n: row(n, image="a.png"), ": keep one of them"),
    "half a conversation": (lambda n: conversation(1), "it has no answer: a last turn of the"),
    "only questions": (lambda n: conversation(2 + n % 5), "turn 2 of the chat: after a turn"),
}


@pytest.fixture
def source(tmp_path: Path) -> tuple[str, dict[int, str]]:
    """Return the path of a file and the expected reason of each bad line by line number."""
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    (tmp_path / "zeros.png").write_bytes(bytes(300))
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "bomb.png").write_bytes(png_with_claimed_size(10_000, 9_000))
    bad = [
        (make_line(1000 * kind + number), reason)
        for kind, (make_line, reason) in enumerate(KINDS.values(), start=1)
        for number in range(ROWS_PER_KIND)
    ]
    lines = [*bad, *((row(100_000 + number), "") for number in range(200))]
    random.Random(0).shuffle(lines)
    lines.insert(0, (row(0), ""))  # the row that others duplicate
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in lines) + b"\n")
    return str(path), {n: reason for n, (_, reason) in enumerate(lines, start=1) if reason}


def test_every_corrupt_row_is_reported_with_its_line_and_reason(
    source: tuple[str, dict[int, str]],
) -> None:
    path, expected = source
    assert len(expected) == len(KINDS) * ROWS_PER_KIND >= 1000
    care = check_source(path, load_task("counting"), DataSettings(train=path))
    assert len(care.examples) == 201
    found = {int(line.removeprefix(f"{path}:").split(":")[0]): line for line in care.bad_rows}
    assert set(found) == set(expected)
    wrong = {n: found[n] for n, reason in expected.items() if reason not in found[n]}
    assert not wrong


def test_training_refuses_or_skips_corrupt_rows(source: tuple[str, dict[int, str]]) -> None:
    path, expected = source
    task = load_task("counting")
    with pytest.raises(UserError, match=rf"{len(expected)} bad rows \(good rows: 201\)"):
        load_examples(path, task, DataSettings(train=path))
    kept = load_examples(path, task, DataSettings(train=path, on_bad_row="skip"))
    assert len(kept) == 201
