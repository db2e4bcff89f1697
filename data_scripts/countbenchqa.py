"""CountBenchQA: 491 questions with counts from 2 to 10.

Copies differ in the number of images that could still be downloaded: convert one that lacks images
with --allow-partial, and report n with a score.

--source: hf:vikhyatk/CountBenchQA, or a folder with its parquet files.
--images: a folder to write the images into.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter


@converter(tasks=("counting",), splits={"test": 491})
def convert(request: Request) -> Rows:
    """Yield one row per question; questions without an image are refused."""
    for number, row in enumerate(request.read_table("image", "question", "number")):
        image = row["image"]
        yield ConvertedRow(f"countbenchqa-{number}", (image,), row["question"], row["number"])
