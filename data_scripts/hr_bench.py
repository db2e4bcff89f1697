"""HR-Bench: 200 questions about images of 4K or 8K, each in every rotation of its options.

Columns: index, question, A to D, answer (a letter), category (single, cross), cycle_category (the
rotation) and image, in base64.

--source: hr_bench_4k.tsv or hr_bench_8k.tsv. --images: a folder to write the images into.
"""

import base64
import hashlib

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_table_with_images, to_choice


@converter(tasks=("choice",), splits={"4k": None, "8k": None})
def convert(request: Request) -> Rows:
    """Yield one row per line of the file; rows of a question have the same ``circle``."""
    for row in read_table_with_images(request.find_file()):
        image = base64.b64decode(row["image"], validate=True)
        answer = to_choice([row[letter] for letter in "ABCD"], row["answer"])
        same = repr((row["question"], sorted(answer["options"]))).encode()
        meta = {"category": row["category"], "cycle": row["cycle_category"]}
        meta["circle"] = hashlib.sha256(image + same).hexdigest()[:16]
        name = f"{request.split}-{row['index']}"
        yield ConvertedRow(name, (image,), row["question"], answer, meta)
