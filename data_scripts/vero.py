"""Vero-600k: the mixture of 59 datasets on which Vero is trained, with a task for each row.

Each task's rows are converted by themselves: --task math (numbers and options by their letters),
ocr (short texts), counting, grounding and gui (clicks). Left out are rows of other rewards of Vero:
orders of pieces, actions on websites, instructions, and what only a language model can judge.

--source: vero_600k_train.verl.jsonl or vero_600k_val.verl.jsonl, as Vero's
  scripts/download_and_format_vero_600k.py writes them, or their folder.
--images: that folder.
"""

import ast
from typing import Any

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import parse_foreign_answer, pose_problem, read_json_rows

_TASKS = {
    **dict.fromkeys(("multiple_choice", "numeric"), "math"),
    **dict.fromkeys(("string_match", "list_string_match", "search"), "ocr"),
    "counting": "counting",
    "grounding": "grounding",
    "clicking": "gui",
}
"""The task of each of Vero's reward types."""


def _read(truth: str, task: str, kind: str) -> Any | None:
    """Return the answer in the task's form; None: it cannot be read as one."""
    if task != "ocr":
        return parse_foreign_answer(truth, "grounding" if task == "gui" else task)
    if kind != "list_string_match":
        return truth.strip() or None
    try:
        texts = ast.literal_eval(truth)  # a list as Python writes it
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # of text that is nested deeply
        texts = truth
    found = texts if isinstance(texts, list | tuple) else [texts]
    return [str(text) for text in found if str(text).strip()] or None


@converter(
    tasks=("math", "ocr", "counting", "grounding", "gui"), splits=dict.fromkeys(("train", "val"))
)
def convert(request: Request) -> Rows:
    """Yield the rows of one task, with Vero's domain, to weigh by."""
    for row in read_json_rows(request.find_file(f"vero_600k_{request.split}*.jsonl")):
        extra, name = row["extra_info"], str(row["id"])
        kind, truth = extra["reward_type"], row["reward_model"]["ground_truth"]
        if _TASKS.get(kind) != request.task:
            yield RefusedRow(name, "its reward is that of another task", kind, "excluded")
            continue
        meta = {"source": row["data_source"], "domain": row["ability"], "reward": kind}
        question = extra["question"].replace("<image>", "").strip()
        if request.task == "math":
            yield pose_problem(name, row["images"], question, truth, meta)
            continue
        answer = _read(truth, request.task, kind)
        if answer is None:
            yield RefusedRow(name, f"its answer is not valid for {request.task}", truth[:80])
            continue
        yield ConvertedRow(name, tuple(row["images"]), question, answer, meta)
