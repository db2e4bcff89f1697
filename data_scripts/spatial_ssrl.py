"""Spatial-SSRL-81k: questions about order, depth and place in images, made without labels.

The answer is a text, a letter or an order, which must be given exactly: Spatial-SSRL's reward
compares texts.

--source: spatialssrl.parquet. --images: the unpacked images, or a folder to write them into.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter


@converter(tasks=("ocr",), splits={"train": None})
def convert(request: Request) -> Rows:
    """Yield one row per question, whose columns are those of EasyR1, which Spatial-SSRL uses."""
    for number, row in enumerate(request.read_table("problem", "answer", "images"), start=1):
        name, answer = f"{request.split}-{number}", str(row["answer"]).strip()
        if not answer:
            yield RefusedRow(name, "it has no answer")
            continue
        yield ConvertedRow(name, tuple(row["images"]), row["problem"], answer)
