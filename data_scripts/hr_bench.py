"""HR-Bench: 200 questions about images of 4K or 8K, each in every rotation of its options.

Columns: index, question, A to D, answer (a letter), category (single, cross), cycle_category (the
rotation) and image, in base64.

--source: hr_bench_4k.tsv or hr_bench_8k.tsv. --images: a folder to write the images into.
"""

import base64
import csv
import hashlib
import sys

from vlm_grpo.data.files import read_csv
from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import to_choice
from vlm_grpo.errors import UserError


@converter(tasks=("choice",), splits={"4k": None, "8k": None})
def convert(request: Request) -> Rows:
    """Yield one row per line of the file; rows of a question have the same ``circle``."""
    csv.field_size_limit(sys.maxsize)  # a cell holds an image
    for line in read_csv(request.find_file()):
        if line.problem is not None:
            raise UserError(f"{line.location}: {line.problem}")
        row = line.values
        image = base64.b64decode(row["image"], validate=True)
        answer = to_choice([row[letter] for letter in "ABCD"], row["answer"])
        same = repr((row["question"], sorted(answer["options"]))).encode()
        meta = {"category": row["category"], "cycle": row["cycle_category"]}
        meta["circle"] = hashlib.sha256(image + same).hexdigest()[:16]
        name = f"{request.split}-{row['index']}"
        yield ConvertedRow(name, (image,), row["question"], answer, meta)
