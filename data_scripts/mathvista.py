"""MathVista: 1,000 questions with answers (testmini), asked with the hints of the authors' queries.

--source: testmini.json, hf:AI4Math/MathVista, or a folder with its parquet files.
--images: the folder that holds "images"; for the table, a folder to write them into.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, RawRecord, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_json

_HINTS = {
    "text": "and provide the correct option letter, e.g., A, B, C, D",
    "integer": "requiring an integer answer and provide the final value, e.g., 1, 2, 3",
    "float1": "requiring a floating-point number with one decimal place and provide the final "
    "value, e.g., 1.2, 1.3, 1.4",
    "float2": "requiring a floating-point number with two decimal places and provide the final "
    "value, e.g., 1.23, 1.34, 1.45",
    "list": "requiring a Python list as an answer and provide the final list, e.g., [1, 2, 3], "
    "[1.2, 1.3, 1.4]",
}
_COLUMNS = ("pid", "question", "answer", "choices", "answer_type", "precision", "unit", "metadata")


def _write_query(row: RawRecord) -> str:
    precision = int(row["precision"]) if row["answer_type"] == "float" else ""
    kind = "text" if row["choices"] else f"{row['answer_type']}{precision}"
    unit = f" (Unit: {row['unit']})" if row["unit"] else ""
    lines = [f"Hint: Please answer the question {_HINTS[kind]}, at the end."]
    lines.append(f"Question: {row['question']}{unit}")
    if row["choices"]:
        letters = map(chr, range(ord("A"), ord("A") + len(row["choices"])))
        lines.append("Choices:")
        lines += [f"({a}) {choice}" for a, choice in zip(letters, row["choices"], strict=True)]
    return "\n".join(lines).strip()


@converter(tasks=("numeric",), splits={"testmini": 1_000})
def convert(request: Request) -> Rows:
    """Yield one row per question; the gold answer of a choice is its text."""
    if request.source.endswith(".json"):
        rows = [(row, row["image"]) for row in read_json(request.path).values()]
    else:
        columns = (*_COLUMNS, "decoded_image")
        table = request.read_table(*columns)
        rows = ((row, row["decoded_image"]) for row in table)
    for row, image in rows:
        meta = {name: row[name] for name in ("choices", "answer_type", "precision")}
        more = ("task", "category", "source")
        meta |= {name: row["metadata"].get(name) for name in more}
        yield ConvertedRow(str(row["pid"]), (image,), _write_query(row), row["answer"], meta)
