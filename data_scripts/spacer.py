"""SpaceR-151k: questions about videos and images. Rows with options or numbers are kept.

--source: SpaceR-151k.jsonl. --images: the folder that its paths are relative to.
"""

import re

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_json_rows, remove_letter, to_choice

_KINDS = ("multiple choice", "numerical", "regression")


@converter(tasks=("spatial",), splits={"train": None})
def convert(request: Request) -> Rows:
    for number, row in enumerate(read_json_rows(request.find_file("*.jsonl")), start=1):
        name, kind = f"{request.split}-{row.get('problem_id', number)}", row["problem_type"]
        kind = kind[0] if isinstance(kind, list) else kind
        if kind not in _KINDS:
            yield RefusedRow(name, "its answer is no option and no number", kind, "excluded")
            continue
        found = re.fullmatch(r"\s*<answer>(.*)</answer>\s*", row["solution"], re.DOTALL)
        truth = (found[1] if found else row["solution"]).strip()
        if kind == "multiple choice":
            options = [remove_letter(text) for text in row["options"]]
            answer = to_choice(options, truth[:1])
        else:
            answer = float(truth.replace(",", ""))
        path = row["path"].removeprefix("./")
        is_video = row["data_type"] == "video"
        meta = {"type": kind, "source": row.get("data_source", "")}
        images, videos = ((), (path,)) if is_video else ((path,), ())
        yield ConvertedRow(name, images, row["problem"], answer, meta, videos)
