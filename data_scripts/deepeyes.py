"""DeepEyes-47k: questions about high-resolution images, charts and problems, with free answers.

The answer is a text: for the task judged, or ocr where an answer must be the reference itself. The
prompt of the file, which describes DeepEyes' own tool, is left out: an environment adds its own.

--source: one of its parquet files: data_0.1.2_visual_toolbox_v2.parquet (V*),
  data_v0.8_visual_toolbox_v2.parquet (charts) or data_thinklite_reasoning_acc.parquet (problems).
--images: a folder to write the images into.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter

_FILES = {"V*": 22_362, "charts": 13_659, "problems": 11_031}


@converter(tasks=("ocr",), splits={"train": _FILES})
def convert(request: Request) -> Rows:
    """Yield the file's rows; ``extra_info`` has the question that DeepEyes' judge reads."""
    columns = ("images", "data_source", "reward_model", "extra_info")
    for number, row in enumerate(request.read_table(*columns)):
        name = f"{row['data_source']}-{number}"
        question = row["extra_info"]["question"].replace("<image>", "").strip()
        answer = str(row["reward_model"]["ground_truth"]).strip()
        if not question or not answer:
            yield RefusedRow(name, "it has no question or no answer")
            continue
        meta = {"data_source": row["data_source"]}
        yield ConvertedRow(name, tuple(row["images"]), question, answer, meta)
