"""Rows of a taskset of verifiers v1, for the task and the environment ``verifiers``.

    python -m vlm_grpo.data_scripts.taskset NAME --output rows.jsonl [--config JSON] [--limit N]

``NAME`` is an installed taskset, whose code runs, and ``--config`` its settings. A row has the
chat, the field ``answer`` of the task's data if there is one, and in the column ``verifiers`` all
of its data and settings, from which the task is built again when it is scored.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlm_grpo.environments.clients.sessions import import_extra
from vlm_grpo.environments.verifiers import COLUMN, load_taskset
from vlm_grpo.errors import UserError
from vlm_grpo.utils.atomic_io import write_atomic


def build_row(task: Any, name: str, number: int) -> dict[str, Any]:
    """Return the row of a task; ``UserError``: it cannot be used here."""
    data, config = task.data, task.config
    if data.prompt is None or data.image:
        reason = "it has no prompt" if data.prompt is None else "it needs a container"
        raise UserError(f"task {number} of {name} cannot be used: {reason}")
    if config.judges or config.rewards or config.metrics or config.stops:
        raise UserError(f"{name}: judges, rewards, metrics and stops in its settings are not used")
    if isinstance(data.prompt, str):
        messages = [{"role": "user", "content": data.prompt}]
    else:
        messages = [message.model_dump(mode="json", exclude_none=True) for message in data.prompt]
    if data.system_prompt:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    own = {"data": data.model_dump_json(exclude_none=True), "config": config.model_dump_json()}
    return {
        "id": data.id or data.name or f"{name}-{number}",
        "prompt": messages,
        "answer": str(getattr(data, "answer", "")),
        COLUMN: {"taskset": name, **own},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the rows of the taskset that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--config", type=json.loads, default={}, help="settings, as JSON")
    parser.add_argument("--limit", type=int, help="number of rows; needed if the tasks never end")
    given = parser.parse_args(arguments)
    taskset = load_taskset(given.name)
    loaders = import_extra("verifiers.v1.utils.loaders", "verifiers")
    kind = loaders.taskset_config_type(given.name)
    tasks = taskset(kind.model_validate({"id": given.name, **given.config}))
    if given.limit is None and not tasks.bounded:
        raise UserError(f"the tasks of {given.name} never end: add --limit")
    chosen = enumerate(itertools.islice(tasks, given.limit))
    rows = [build_row(task, given.name, number) for number, task in chosen]
    write_atomic(given.output, "".join(json.dumps(row) + "\n" for row in rows).encode())
    print(f"{given.output}: {len(rows)} rows")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
