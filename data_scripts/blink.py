"""BLINK: questions about one to four images, in 14 subtasks; the test split has no answers.

--source: a folder with the parquet files of all subtasks, a folder each; for one subtask,
  hf:BLINK-Benchmark/BLINK:val:Counting (with --allow-partial).
--images: a folder to write the images into.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import to_choice


@converter(tasks=("choice",), splits={"val": 1_901})
def convert(request: Request) -> Rows:
    for row in request.read_table("idx", "question", "sub_task", "image_1", "choices", "answer"):
        found = (row.get(f"image_{number}") for number in range(1, 5))
        images = tuple(image for image in found if image is not None)
        answer = to_choice(row["choices"], row["answer"])
        yield ConvertedRow(row["idx"], images, row["question"], answer, {"task": row["sub_task"]})
