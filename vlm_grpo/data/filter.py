"""The examples that ``data.filter`` keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlm_grpo.config.data import DataSettings
from vlm_grpo.config.filter import Filter
from vlm_grpo.errors import UserError, list_bad_rows
from vlm_grpo.types import Examples
from vlm_grpo.utils.jsonl import read_rows


def filter_examples(examples: Examples, data: DataSettings) -> tuple[Examples, str | None]:
    """Return the examples that ``data.filter`` accepts, and a line with their number.

    A column is that of ``data.difficulty`` for the example's id, or else that of its row.
    """
    if data.filter is None:
        return examples, None
    chosen = Filter(data.filter)
    known = {} if data.difficulty is None else _read_difficulty(data.difficulty)
    kept, problems = [], []
    for example in examples:
        values = {**example.meta, **known.get(example.id, {})}
        missing = chosen.find_missing(values)
        problems += (f"{example.name}: it has no number {name}" for name in missing)
        if not missing and chosen.accepts(values):
            kept.append(example)
    if problems:
        where = "its rows" if data.difficulty is None else f"{data.difficulty} or its rows"
        raise UserError(
            f"data.filter={data.filter!r} needs numbers in {where}:\n{list_bad_rows(problems, 5)}\n"
            "vlm-grpo sample RECIPE --difficulty FILE writes pass_rate by id, for "
            "data.difficulty=FILE"
        )
    if not kept:
        ranges = []
        for name in chosen.names:
            values = [{**e.meta, **known.get(e.id, {})}[name] for e in examples]
            ranges.append(f"{name} from {min(values):g} to {max(values):g}")
        raise UserError(
            f"data.filter={data.filter!r} accepts none of the {len(examples)} training examples; "
            f"they have {', '.join(ranges)}"
        )
    line = f"data.filter={data.filter!r} keeps {len(kept):,} of {len(examples):,} training examples"
    return kept, line


def _read_difficulty(path: Path) -> dict[str, Mapping[str, Any]]:
    rows: dict[str, Mapping[str, Any]] = {}
    try:
        for number, row in enumerate(read_rows(path), start=1):
            if not isinstance(name := row.get("id"), str):
                raise UserError(f"{path}:{number} has no id: give a file of sample --difficulty")
            rows[name] = row
    except OSError as error:
        raise UserError(f"data.difficulty={path} cannot be read: {error.strerror}") from error
    return rows
