"""Files of outputs, of any model or logged by lmms-eval, matched with the examples."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_grpo.data.files import read_jsonl
from vlm_grpo.errors import UserError, list_bad_rows
from vlm_grpo.types import Completion, EpisodeTurn, Example, ImageRef, Observed, ToolCall


def format_output(output: Completion) -> dict[str, Any]:
    """Return an output for JSON, with the turns of an episode."""
    turns = [turn.to_json() for turn in output.turns]
    return {"output": output.text, **({"turns": turns} if turns else {})}


def read_output(row: Mapping[str, Any]) -> Completion:
    """Read what ``format_output`` returned; the images that were read have no pixels.

    ``ValueError``: its turns are none.
    """
    turns = list[EpisodeTurn]()
    try:
        for turn in row.get("turns", ()):
            call, seen = turn["call"] and ToolCall(**turn["call"]), turn["observed"]
            if seen is not None:
                sizes = [(width, height) for width, height in seen["images"]]
                images = tuple(ImageRef("observation", size, size) for size in sizes)
                given = float(seen.get("reward", 0.0))
                seen = Observed(str(seen["text"]), images, bool(seen["is_error"]), given)
            turns.append(EpisodeTurn(str(turn["text"]), call, seen))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its turns cannot be read: {error!r}") from error
    return Completion.from_text(row["output"], turns=turns)


def read_outputs(
    path: Path, examples: Sequence[Example], needs_resized_size: bool = False
) -> tuple[list[Example], list[Completion]]:
    """Read a file of outputs, and match them with examples.

    A line is ``{"id", "output"[, "turns"][, "seen": [[width, height]]]}``, one for every example,
    with the turns of an episode as ``EpisodeTurn.to_json`` returns them; or a sample
    of ``lmms-eval --log_samples``, ``{"doc_id", "input", "resps", "filtered_resps", …}``, which is
    matched by its index in the dataset, and of which the file may lack some.

    Args:
        path: JSON Lines.
        needs_resized_size: boxes in the outputs are in pixels of the resized image, so each row
            must have its size.

    Returns:
        The matched examples in the order of the dataset, with the resized sizes of their images
        if the file has them, and one output per example.
    """
    indices = {example.id: index for index, example in enumerate(examples)}
    found: dict[int, tuple[Example, Completion]] = {}
    problems: list[str] = []
    is_log = False
    for row in read_jsonl(path):
        try:
            if row.problem is not None:
                raise ValueError(row.problem)
            if "doc_id" in row.values:
                is_log = True
                index, text = _read_sample(row.values, examples)
                output = Completion.from_text(text)
            else:
                index, output = _read_prediction(row.values, indices)
            example = examples[index]
            if index in found:
                raise ValueError(f"example {example.id} has an output already")
            found[index] = example, output
            sizes = row.values.get("seen") or []
            is_whole = isinstance(sizes, list) and len(sizes) == len(example.images)
            if is_whole and all(map(_is_size, sizes)):
                found[index] = example.with_resized_sizes([(w, h) for w, h in sizes]), output
            elif needs_resized_size:
                pairs = '"seen": [[width, height]], one pair per image'
                raise ValueError(f"--frame resized needs {pairs}")
        except ValueError as error:
            problems.append(f"{row.location}: {error}")
    if not is_log:
        missing = (name for name, index in indices.items() if index not in found)
        problems += (f"{path}: no output for id {name!r}" for name in missing)
    if problems:
        raise UserError(f"outputs that do not match the examples:\n{list_bad_rows(problems)}")
    matched = [own for _, own in sorted(found.items())]
    return [example for example, _ in matched], [output for _, output in matched]


def _is_size(value: Any) -> bool:
    """Return whether a value from JSON has two sides in pixels."""
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(isinstance(side, int) and side > 0 for side in value)


def _read_prediction(
    values: Mapping[str, Any], indices: Mapping[str, int]
) -> tuple[int, Completion]:
    name, output = values.get("id"), values.get("output")
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str) or not isinstance(output, str):
        raise ValueError('a row is {"id": …, "output": text}, or a sample logged by lmms-eval')
    if name not in indices:
        raise ValueError(f"no example has the id {name!r}")
    return indices[name], read_output(values)


def _read_sample(values: Mapping[str, Any], examples: Sequence[Example]) -> tuple[int, str]:
    """Return the index and the output of a sample as ``save_results_samples`` writes it: without
    ``resps`` if the filters changed nothing."""
    index, prompt = values["doc_id"], values.get("input")
    output = values.get("resps", values.get("filtered_resps"))
    while isinstance(output, list) and len(output) == 1:
        output = output[0]
    if not isinstance(index, int) or not isinstance(output, str):
        raise ValueError("a sample of lmms-eval must have doc_id, and one text as its response")
    if not 0 <= index < len(examples):
        raise ValueError(f"example number {index} (from 0) does not exist")
    question = examples[index].question
    if isinstance(prompt, str) and _normalize(question) not in _normalize(prompt):
        raise ValueError(
            f"its prompt does not contain {question!r}, example number {index}'s question: the "
            "data must have the rows of the evaluated split, in its order"
        )
    return index, output


def _normalize(text: str) -> str:
    return " ".join(text.casefold().split())
