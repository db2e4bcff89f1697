"""Outputs that other projects' evaluations have written, paired with a dataset's examples.

Their rows carry no id of ours. They are paired by what they say of their example: its image, its
question and its gold answer, or its place in the dataset.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from vlm_grpo.data.jsonl import read_jsonl
from vlm_grpo.errors import UserError, bullets
from vlm_grpo.types import Example

_PIXEL = 1.0
"""By how much the edges of one and the same gold box may differ: datasets round them."""


@dataclass(frozen=True)
class ForeignRow:
    """One output, and what its file says of the example that it answers.

    Attributes:
        where: the file and the row, for messages.
        output: what the model wrote.
        image: the image's path as the other project has it; None: not told.
        question: the question or the whole prompt; None: not told.
        gold: the gold answer as the other project has it; None: not told.
        resized_size: width and height at which the model saw the image; None: not told.
        place: the example's index in its dataset; None: not told.
    """

    where: str
    output: str
    image: str | None = None
    question: str | None = None
    gold: Any = None
    resized_size: tuple[int, int] | None = None
    place: int | None = None


def read_foreign(
    layout: str, path: Path, examples: Sequence[Example], needs_resized_size: bool = False
) -> tuple[list[Example], list[str]]:
    """The examples that a file of another project answers, and its outputs for them.

    Args:
        layout: a key of ``LAYOUTS``.
        path: the file.
        examples: the dataset, which may hold more rows than the file answers.
        needs_resized_size: the outputs mean nothing without the size at which the model saw the
        image.

    Returns:
        The answered examples in the dataset's order, with the sizes at which their images were
        resized_size where the file tells them, and an output for each.

    Raises:
        UserError: the file has another layout, or its rows and the examples do not fit together;
            every such row is named.
    """
    rows = LAYOUTS[layout](path)
    pairing = _Pairing(examples)
    found: dict[int, ForeignRow] = {}
    problems = []
    for row in rows:
        if needs_resized_size and row.resized_size is None:
            problems.append(f"{row.where}: --frame resized needs the size that the model saw")
            continue
        try:
            found[pairing.take(row)] = row
        except ValueError as error:
            problems.append(f"{row.where}: {error}")
    if problems:
        raise UserError(f"rows that do not fit the examples:\n{bullets(problems)}")
    if not found:
        raise UserError(f"{path} holds no outputs")
    order = sorted(found)
    return [_with_resized_size(examples[i], found[i].resized_size) for i in order], [
        found[i].output for i in order
    ]


class _Pairing:
    """Finds the example of each row; no example is given away twice."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples
        self.left = set(range(len(examples)))
        self.by_image: dict[str, list[int]] = defaultdict(list)
        for index, example in enumerate(examples):
            for image in example.images:
                self.by_image[PurePosixPath(image.name).name].append(index)

    def take(self, row: ForeignRow) -> int:
        """The index of the row's example.

        Raises:
            ValueError: there is none; the message says what does not fit.
        """
        index = self._at_place(row) if row.place is not None else self._search(row)
        gold = self.examples[index].answer
        if row.place is None and not _same_gold(row.gold, gold):
            name = self.examples[index].id
            raise ValueError(f"its gold answer {row.gold!r} is not example {name}'s, {gold!r}")
        self.left.discard(index)
        return index

    def _at_place(self, row: ForeignRow) -> int:
        index = row.place or 0
        if index not in self.left:
            what = "has an output already" if 0 <= index < len(self.examples) else "does not exist"
            raise ValueError(f"example number {index} (from 0) {what}")
        question = self.examples[index].question
        if row.question is not None and _plain(question) not in _plain(row.question):
            raise ValueError(
                f"its prompt does not hold example number {index}'s question {question!r}: the "
                "data must have the rows of the evaluated split, in its order"
            )
        return index

    def _search(self, row: ForeignRow) -> int:
        """By the image; among several examples of one, by question and by gold answer."""
        found: list[int] = sorted(self.left)
        if row.image is not None:
            name = PurePosixPath(row.image).name
            found = [index for index in self.by_image.get(name, []) if index in self.left]
            if not found:
                more = "is left" if name in self.by_image else "there is"
                raise ValueError(f"no example {more} with image {name}")
        if row.question is not None and (row.image is None or len(found) > 1):
            asked = _plain(row.question)
            found = [i for i in found if _plain(self.examples[i].question) in asked]
            if not found:
                raise ValueError(f"no example is left with the question {row.question[:80]!r}")
        same = [index for index in found if _same_gold(row.gold, self.examples[index].answer)]
        # The longest question fits best: "the red cup" is also in "the red cup on the left".
        return max(same or found, key=lambda i: (len(self.examples[i].question), -i))


def _vlm_r1(path: Path) -> list[ForeignRow]:
    """``{"accuracy", "results": [{"image", "question", "ground_truth", "model_output", …}]}``.

    Source: VLM-R1, src/eval/test_rec_r1.py and its siblings.
    """
    rows = []
    for where, result in _results(path, "vlm_r1", str, lambda r: r.get("image")):
        size = result.get("input_size")
        if size is not None and not _is_size(size):
            raise UserError(f"{where}: input_size is {size!r}, not [height, width] in pixels")
        rows.append(
            ForeignRow(
                where,
                result["model_output"],
                image=result.get("image"),
                question=result["question"],
                gold=result["ground_truth"],
                resized_size=None if size is None else (size[1], size[0]),
            )
        )
    return rows


def _r1_v(path: Path) -> list[ForeignRow]:
    """``{"accuracy", "results": [{"question": {"image_path", "question"}, "model_output", …}]}``.

    Source: R1-V, src/eval/test_qwen2vl_counting_superclevr.py and its siblings.
    """
    rows = []
    for where, result in _results(path, "r1_v", dict, lambda r: r["question"].get("image_path")):
        asked = result["question"]
        rows.append(
            ForeignRow(
                where,
                result["model_output"],
                image=asked.get("image_path"),
                question=asked.get("question"),
                gold=result["ground_truth"],
            )
        )
    return rows


def _results(
    path: Path, layout: str, question: type, image: Callable[[Any], Any]
) -> list[tuple[str, Mapping[str, Any]]]:
    """The ``results`` of a JSON file, each with its place.

    Args:
        path: the file.
        layout: its name, for messages.
        question: the type of a result's question.
        image: the image's path, or None, of a result.

    Raises:
        UserError: the file cannot be read, or has another form.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON file, as {layout} writes: {error}") from error
    results = content.get("results") if isinstance(content, dict) else None
    if not isinstance(results, list):
        raise UserError(f'{path} is no output of {layout}: it lacks {{"results": […]}}')
    found = []
    for number, result in enumerate(results):
        where = f"{path}: results[{number}]"
        keys = ("question", "ground_truth", "model_output")
        if not isinstance(result, dict) or any(key not in result for key in keys):
            raise UserError(f"{where} must have {', '.join(keys)}, as {layout} writes")
        if not isinstance(result["question"], question):
            raise UserError(
                f"{where}: its question is a {type(result['question']).__name__}, where {layout} "
                f"writes a {question.__name__}: is it another --format?"
            )
        texts = (result["model_output"], image(result) or "")
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"{where}: its output and its image must be texts")
        found.append((where, result))
    return found


def _lmms_eval(path: Path) -> list[ForeignRow]:
    """A line ``{"doc_id", "input", "resps", "filtered_resps", "target", …}`` for each document.

    ``resps`` is what the model wrote, and is left out where its filters changed nothing.

    Source: lmms-eval, EvaluationTracker.save_results_samples, of ``--log_samples``.
    """
    rows = []
    for row in read_jsonl(path):
        place = row.values.get("doc_id")
        responses = row.values.get("resps", row.values.get("filtered_resps"))
        if row.problem is not None or not isinstance(place, int) or responses is None:
            problem = row.problem or "it lacks doc_id, or resps and filtered_resps"
            raise UserError(
                f"{row.location}: this is no sample that lmms-eval logs (--log_samples): {problem}"
            )
        while isinstance(responses, list) and len(responses) == 1:
            responses = responses[0]
        if not isinstance(responses, str):
            count = len(responses)
            raise UserError(f"{row.location}: it holds {count} responses; only one is scored")
        prompt = row.values.get("input")
        prompt = prompt if isinstance(prompt, str) else None
        rows.append(ForeignRow(row.location, responses, question=prompt, place=place))
    return rows


LAYOUTS: dict[str, Callable[[Path], list[ForeignRow]]] = {
    "vlm_r1": _vlm_r1,
    "r1_v": _r1_v,
    "lmms_eval": _lmms_eval,
}
"""Readers of other projects' files by the name that ``--format`` takes."""


def _with_resized_size(example: Example, resized_size: tuple[int, int] | None) -> Example:
    if resized_size is None:
        return example
    return replace(
        example, images=tuple(replace(image, resized_size=resized_size) for image in example.images)
    )


def _is_size(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(side, int) and side > 0 for side in value)
    )


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _same_gold(given: Any, answer: Any) -> bool:
    """Whether two gold answers may be the same; True where they cannot be compared."""
    if given is None:
        return True
    if isinstance(answer, Mapping):
        boxes = answer.get("boxes")
        several = isinstance(given, list) and given and isinstance(given[0], list)
        rows = given if several else [given]
        try:
            first, second = _numbers(rows), _numbers(boxes)
        except (TypeError, ValueError):
            return True
        close = [math.isclose(a, b, abs_tol=_PIXEL) for a, b in zip(first, second, strict=False)]
        return len(first) == len(second) and all(close)
    if isinstance(answer, int):
        return str(given).strip() == str(answer)
    accepted = [answer] if isinstance(answer, str) else answer
    return not isinstance(accepted, list | tuple) or _plain(str(given)) in map(_plain, accepted)


def _numbers(boxes: Any) -> list[float]:
    return [float(number) for box in boxes for number in box]
