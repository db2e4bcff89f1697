"""SROIE 2019: company, date, address and total of scanned receipts, as one question per field.

--source: the folder with train and test, which hold img and entities; or one of the two.
--images: the folder with the split's img.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_json

_QUESTIONS = {
    "company": "What is the name of the company on the receipt?",
    "date": "What is the date on the receipt?",
    "address": "What is the address on the receipt?",
    "total": "What is the total amount on the receipt?",
}

_SPLITS = {"test": 4 * 347, "train": 4 * 626}  # four questions about each receipt


@converter(tasks=("ocr",), splits=_SPLITS)
def convert(request: Request) -> Rows:
    """Yield one row per field and receipt; fields without a value are excluded."""
    for path in request.list_files("entities/*.txt"):
        entities = read_json(path)
        for field, question in _QUESTIONS.items():
            name = f"{request.split}-{path.stem}-{field}"
            if not entities.get(field):
                yield RefusedRow(name, f"the receipt has no {field}", kind="excluded")
                continue
            images = (f"img/{path.stem}.jpg",)
            yield ConvertedRow(name, images, question, [entities[field]], {"field": field})
