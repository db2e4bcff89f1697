"""R1-V's counting data: its test .jsonl file and its training table.

The test file (Super-CLEVR-200) has the fields image_path, question and ground_truth; the training
table (CLEVR-70k) has image, problem and a solution in <answer> tags. Rows whose answer is not an
integer (R1-V's geometry) are refused.

--source: the .jsonl file, hf:leonardPKU/clevr_cogen_a_train, or a folder with its parquet files.
--images: the folder that holds the test images by name; for the table, a folder to write them into.
"""

from pathlib import PurePosixPath

from vlm_grpo.data.rows import get_answer_candidates
from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_rows

_FIELDS = ("question", "ground_truth")
_COLUMNS = ("problem", "solution")


@converter(tasks=("counting",), splits={"test": 200, "train": 70_000})
def convert(request: Request) -> Rows:
    rows = read_rows(request, _COLUMNS, lambda row: PurePosixPath(row["image_path"]).name)
    for number, (row, image) in enumerate(rows, start=1):
        question, solution = (row[name] for name in (_COLUMNS if "problem" in row else _FIELDS))
        name = f"{request.split}-{number}"
        counts = [a for a in get_answer_candidates(solution) if isinstance(a, int)]
        if not counts:
            yield RefusedRow(name, "its answer is not an integer", f"{solution!r:.80}")
            continue
        yield ConvertedRow(name, (image,), question, counts[0])
