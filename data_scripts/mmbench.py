"""Files of multiple choice in the layout of MMBench: tab-separated, with images in base64.

Columns: index, question, A, B, …, answer (a letter) and image; perhaps hint, category and
l2-category. An image may be the index of the row that has it. Rows whose indices differ by
multiples of 1,000,000 are one question with its options rotated, for circular evaluation.

--source: a file such as MMBench_DEV_EN.tsv. --images: a folder to write the images into.
"""

import base64
from string import ascii_uppercase

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_table_with_images, to_choice

_CIRCLE = 1_000_000


@converter(tasks=("choice",), splits={"dev": None})
def convert(request: Request) -> Rows:
    """Yield one row per line of the file, also for the rotations of a question."""
    images: dict[str, bytes] = {}
    for row in read_table_with_images(request.find_file()):
        index, image = str(row["index"]), str(row["image"])
        if image not in images:
            images[index] = base64.b64decode(image, validate=True)
            image = index
        options = [row[letter] for letter in ascii_uppercase if row.get(letter) is not None]
        meta = {"circle": int(index) % _CIRCLE}
        meta |= {key: row[key] for key in ("category", "l2-category") if row.get(key)}
        question = "\n".join(filter(None, (row.get("hint"), row["question"])))
        if row.get("answer") is None:
            yield RefusedRow(index, "its answer is not published", kind="excluded")
            continue
        answer = to_choice(options, row["answer"])
        yield ConvertedRow(index, (images[image],), question, answer, meta)
