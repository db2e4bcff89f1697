"""OmniMedVQA: questions about medical images with two to four options.

--source: QA_information or one of its folders, with a .json file per dataset; or one file, also of
  the parts that Med-R1 (problem and solution) and MedVLM-R1 (options and answer) have published.
--images: the folder that its paths are relative to, with "Images".
"""

import re
from string import ascii_uppercase

from vlm_grpo.data_scripts.converter import (
    ConvertedRow,
    RawRecord,
    RefusedRow,
    Request,
    Rows,
    converter,
)
from vlm_grpo.data_scripts.readers import read_json_rows
from vlm_grpo.errors import UserError

_PROBLEM = re.compile(r"(?s)(.*?)\sA\)(.*?)(?:,\s*B\)(.*?))?(?:,\s*C\)(.*?))?(?:,\s*D\)(.*?))?")
"""Med-R1's question with its options: "Which? A)Lung, left, B)Heart"."""


def _read(row: RawRecord) -> tuple[str, list[str], str]:
    """Return the question, the options and the right one of a row of any of the three files."""
    if "gt_answer" in row:
        given = (row.get(f"option_{letter}") for letter in "ABCD")
        options = [str(option).strip() for option in given if option]
        return row["question"], options, row["gt_answer"].strip()
    if "options" in row:
        return row["question"], [text.strip() for text in row["options"]], row["answer"].strip()
    found = _PROBLEM.fullmatch(row["problem"])
    texts = [text.strip(" ,") for text in found.groups() if text is not None] if found else [""]
    question, *options = texts
    letter = row["solution"].replace("<answer>", "").replace("</answer>", "").strip()
    place = ascii_uppercase.find(letter)
    return question, options, options[place] if 0 <= place < len(options) else letter


@converter(tasks=("choice",), splits=dict.fromkeys(("test", "train")))
def convert(request: Request) -> Rows:
    """Yield one row per question, with the kinds of question and of image to group scores by."""
    is_file = request.path.is_file()
    files = [request.path] if is_file else sorted(request.path.rglob("*.json"))
    if not files:
        raise UserError(f"{request.source} is not a file and holds no .json")
    for file in files:
        for number, row in enumerate(read_json_rows(file), start=1):
            name = str(row.get("question_id", f"{file.stem}-{number}"))
            question, options, right = _read(row)
            if len({option.strip(" .").casefold() for option in options}) < len(options):
                yield RefusedRow(name, "two of its options are the same", f"{options}", "excluded")
                continue
            if right not in options or len(options) < 2:
                reason = "its answer is not one of its options"
                yield RefusedRow(name, reason, f"{right!r} of {options}"[:200])
                continue
            image = row.get("image_path", row.get("image"))
            images = tuple(image) if isinstance(image, list) else (image,)
            meta = {
                "type": row.get("question_type", ""),
                "modality": row.get("modality_type", row.get("modality", row.get("subset", ""))),
                "dataset": row.get("dataset", file.stem),
            }
            answer = {"options": options, "answer": right}
            yield ConvertedRow(name, images, question, answer, meta)
