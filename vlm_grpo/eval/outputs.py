"""Files of outputs, of vlm-grpo or of other projects' evaluations, matched with the examples.

The rows of other projects do not have the ids of the dataset. Each is matched by the image,
question and gold answer of its example, or by its index in the dataset.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from vlm_grpo.data.files import read_jsonl
from vlm_grpo.data.rows import list_boxes
from vlm_grpo.errors import UserError, list_bad_rows, nearest
from vlm_grpo.task.coordinates import PERMILLE
from vlm_grpo.types import Example

_BOX_TOLERANCE = 1.0  # between the edges of equal gold boxes, which datasets round differently


@dataclass(frozen=True)
class OutputRow:
    """One output, with its file's information about the example; missing fields are None."""

    location: str  # file and row, for messages
    output: str = ""
    problem: str | None = None  # why the row cannot be read
    id: str | None = None  # of the example
    index: int | None = None  # of the example in its dataset
    image: str | None = None  # its path in the other project
    question: str | None = None  # or the full prompt
    gold: Any = None  # in the other project's format
    resized_sizes: Sequence[tuple[int, int]] = ()  # width, height of each image


def read_outputs(
    path: Path,
    layout: str | None,
    examples: Sequence[Example],
    needs_resized_size: bool = False,
) -> tuple[list[Example], list[str]]:
    """Read outputs in vlm-grpo's format, or in another project's, and match them with examples.

    Args:
        path: the file.
        layout: a key of ``LAYOUTS``; None: ``predictions``, which must have every example.
        examples: the dataset; the file of another project may have outputs for some of them only.
        needs_resized_size: boxes in the outputs are in pixels of the resized image, so each row
            must have its size.

    Returns:
        The matched examples in the order of the dataset, with the resized sizes of their images
        if the file has them, and one output per example.
    """
    layout = layout or "predictions"
    if layout not in LAYOUTS:
        raise UserError(
            f"there is no format {layout!r}{nearest(layout, LAYOUTS)}: give one of "
            f"{', '.join(LAYOUTS)}"
        )
    is_own = layout == "predictions"
    size = "the size of the resized image"
    if is_own:
        size = '"seen": [[width, height]], one pair per image'
    matcher, problems = _Matcher(examples), []
    found: dict[int, tuple[Example, str]] = {}
    for row in LAYOUTS[layout](path):
        try:
            index = matcher.match(row)
        except ValueError as error:
            problems.append(f"{row.location}: {error}")
            continue
        example = examples[index]
        if len(row.resized_sizes) == len(example.images):
            example = example.with_resized_sizes(row.resized_sizes)
        elif needs_resized_size:
            problems.append(f"{row.location}: --frame resized needs {size}")
        found[index] = example, row.output
    if is_own:
        missing = (examples[index].id for index in sorted(matcher.unmatched))
        problems += (f"{path}: no prediction for id {name!r}" for name in missing)
    if problems:
        what = "rows that do not match the examples"
        if is_own:
            what = "the predictions and the examples do not match one to one"
        raise UserError(f"{what}:\n{list_bad_rows(problems)}")
    if not found:
        raise UserError(f"{path} has no outputs")
    matched = [own for _, own in sorted(found.items())]
    return [example for example, _ in matched], [output for _, output in matched]


def _is_size(value: Any) -> bool:
    """Return whether a value from JSON has two sides in pixels."""
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(isinstance(side, int) and side > 0 for side in value)


class _Matcher:
    """A matcher of rows with examples that uses each example at most once."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples
        self.unmatched = set(range(len(examples)))
        self.by_id = {example.id: index for index, example in enumerate(examples)}
        self.by_image: dict[str, list[int]] = defaultdict(list)
        for index, example in enumerate(examples):
            for image in example.images:
                self.by_image[PurePosixPath(image.name).name].append(index)

    def match(self, row: OutputRow) -> int:
        """Return the index of the row's example; a ``ValueError`` names what does not match."""
        if row.problem is not None:
            raise ValueError(row.problem)
        if row.id is not None:
            index = self._match_id(row.id)
        elif row.index is not None:
            self._check_index(row, index := row.index)
        else:
            index = self._match_content(row)
        self.unmatched.discard(index)
        return index

    def _match_id(self, name: str) -> int:
        if (index := self.by_id.get(name)) is None:
            raise ValueError(f"no example has the id {name!r}")
        if index not in self.unmatched:
            raise ValueError(f"id {name!r} has a prediction already")
        return index

    def _check_index(self, row: OutputRow, index: int) -> None:
        if index not in self.unmatched:
            exists = 0 <= index < len(self.examples)
            problem = "has an output already" if exists else "does not exist"
            raise ValueError(f"example number {index} (from 0) {problem}")
        question = self.examples[index].question
        if row.question is not None and _normalize(question) not in _normalize(row.question):
            raise ValueError(
                f"its prompt does not contain {question!r}, example number {index}'s question: the "
                "data must have the rows of the evaluated split, in its order"
            )

    def _match_content(self, row: OutputRow) -> int:
        # By image, and among several examples of one image by question and gold answer.
        found: list[int] = sorted(self.unmatched)
        if row.image is not None:
            name = PurePosixPath(row.image).name
            found = [index for index in self.by_image.get(name, []) if index in self.unmatched]
            if not found:
                kind = "unmatched example" if name in self.by_image else "example"
                raise ValueError(f"no {kind} has an image {name}")
        if row.question is not None and (row.image is None or len(found) > 1):
            prompt = _normalize(row.question)
            found = [i for i in found if _normalize(self.examples[i].question) in prompt]
            if not found:
                raise ValueError(f"no unmatched example has the question {row.question[:80]!r}")
        equal = [index for index in found if _same_gold(row.gold, self.examples[index].answer)]
        # The longest question is the best match: "the red cup on the left" contains "the red cup".
        index = max(equal or found, key=lambda i: (len(self.examples[i].question), -i))
        if not equal:
            example = self.examples[index]
            units = ", in thousandths of the image's sides: such a file cannot be scored"
            raise ValueError(
                f"its gold answer {row.gold!r} is not that of example {example.id}, "
                f"{example.answer!r}{units * _is_in_thousandths(row.gold, example)}"
            )
        return index


def _is_in_thousandths(gold: Any, example: Example) -> bool:
    """Return whether a box is that of an example in thousandths, as in some of VLM-R1's files."""
    boxes = list_boxes(example)
    if len(boxes) != 1 or not isinstance(gold, list) or len(gold) != 4:
        return False
    box = PERMILLE.from_pixels(boxes[0], example.images[0].size, example.images[0].size)
    return all(abs(a - b) <= 1 for a, b in zip(box, gold, strict=True))


def _read_predictions(path: Path) -> Iterator[OutputRow]:
    """Read lines of ``{"id", "output"[, "seen": [[width, height]]]}``."""
    for row in read_jsonl(path):
        name, output, sizes = (row.values.get(key) for key in ("id", "output", "seen"))
        if isinstance(name, int) and not isinstance(name, bool):
            name = str(name)
        if row.problem is not None or not isinstance(name, str) or not isinstance(output, str):
            problem = row.problem or 'a prediction is {"id": …, "output": text}'
            yield OutputRow(row.location, problem=problem)
            continue
        seen = ()
        if isinstance(sizes, list) and all(map(_is_size, sizes)):
            seen = [(width, height) for width, height in sizes]
        yield OutputRow(row.location, output, id=name, resized_sizes=seen)


def _read_results(
    path: Path, layout: str, question_type: type, image_key: str
) -> Iterator[OutputRow]:
    """Read ``{"results": [{"question", "ground_truth", "model_output", …}], …}``.

    VLM-R1 has the image beside the question, a text; R1-V has both in the object "question".
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a JSON file, which {layout} writes: {error}") from error
    results = content.get("results") if isinstance(content, dict) else None
    if not isinstance(results, list):
        raise UserError(f'{path} is not an output of {layout}: it lacks {{"results": […]}}')
    for number, result in enumerate(results):
        location = f"{path}: results[{number}]"
        keys = ("question", "ground_truth", "model_output")
        if not isinstance(result, dict) or any(key not in result for key in keys):
            raise UserError(f"{location} must have {', '.join(keys)}, as {layout} writes")
        question, gold, output = (result[key] for key in keys)
        if not isinstance(question, question_type):
            raise UserError(
                f"{location}: its question is a {type(question).__name__}, but {layout} "
                f"writes a {question_type.__name__}: is it another --format?"
            )
        asked = question if isinstance(question, dict) else result
        image, size = asked.get(image_key), result.get("input_size")
        if not all(isinstance(text, str) for text in (output, image or "")):
            raise UserError(f"{location}: its output and its image must be strings")
        if size is not None and not _is_size(size):
            raise UserError(f"{location}: input_size is {size!r}, not [height, width] in pixels")
        yield OutputRow(
            location,
            output,
            image=image,
            question=asked.get("question"),
            gold=gold,
            resized_sizes=() if size is None else [(size[1], size[0])],
        )


def _read_lmms_eval(path: Path) -> Iterator[OutputRow]:
    """Read lines of ``{"doc_id", "input", "resps", "filtered_resps", …}``.

    ``resps`` is the model's output; it is missing if the filters changed nothing.
    """
    for row in read_jsonl(path):
        index = row.values.get("doc_id")
        responses = row.values.get("resps", row.values.get("filtered_resps"))
        if row.problem is not None or not isinstance(index, int) or responses is None:
            problem = row.problem or "it lacks doc_id, or resps and filtered_resps"
            raise UserError(
                f"{row.location}: not a sample logged by lmms-eval --log_samples: {problem}"
            )
        while isinstance(responses, list) and len(responses) == 1:
            responses = responses[0]
        if not isinstance(responses, str):
            count = len(responses)
            raise UserError(f"{row.location}: it has {count} responses; only one can be scored")
        given = row.values.get("input")
        prompt = given if isinstance(given, str) else None
        yield OutputRow(row.location, responses, question=prompt, index=index)


LAYOUTS: dict[str, Callable[[Path], Iterable[OutputRow]]] = {
    "predictions": _read_predictions,
    # VLM-R1, src/eval/test_rec_r1.py and its siblings
    "vlm_r1": partial(_read_results, layout="vlm_r1", question_type=str, image_key="image"),
    # R1-V, src/eval/test_qwen2vl_counting_superclevr.py and its siblings
    "r1_v": partial(_read_results, layout="r1_v", question_type=dict, image_key="image_path"),
    # lmms-eval, EvaluationTracker.save_results_samples, for --log_samples
    "lmms_eval": _read_lmms_eval,
}
"""Readers of files of outputs, by the value of ``--format``."""


def _normalize(text: str) -> str:
    return " ".join(text.casefold().split())


def _same_gold(given: Any, answer: Any) -> bool:
    """Return whether two gold answers may be equal; True if they cannot be compared."""
    if given is None:
        return True
    if isinstance(answer, Mapping):
        several = isinstance(given, list) and given and isinstance(given[0], list)
        boxes: Any = (given if several else [given], answer.get("boxes"))
        try:
            first, second = ([*map(float, chain.from_iterable(own))] for own in boxes)
        except (TypeError, ValueError):
            return True
        pairs = zip(first, second, strict=False)
        close = [math.isclose(a, b, abs_tol=_BOX_TOLERANCE) for a, b in pairs]
        return len(first) == len(second) and all(close)
    if isinstance(answer, int):
        return str(given).strip() == str(answer)
    accepted = [answer] if isinstance(answer, str) else answer
    if not isinstance(accepted, list | tuple):
        return True
    return _normalize(str(given)) in map(_normalize, accepted)
