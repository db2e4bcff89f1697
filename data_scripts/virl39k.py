"""ViRL39K, the training data of VL-Rethinker: problems about figures, charts and documents.

--source: 39Krelease.parquet.
--images: the folder that holds the unpacked "images".
"""

from vlm_grpo.data_scripts.converter import Request, Rows, converter
from vlm_grpo.data_scripts.readers import pose_problem

_COLUMNS = ("qid", "question", "answer", "image", "category", "source")


@converter(tasks=("math",), splits={"train": 38_870})
def convert(request: Request) -> Rows:
    """Yield one row per problem, with the shares that two models solved, to filter by."""
    for row in request.read_table(*_COLUMNS):
        rates = {name: row[name] for name in row if name.startswith("PassRate")}
        meta = {"category": row["category"], "source": row["source"], **rates}
        images = row["image"] if isinstance(row["image"], list) else [row["image"]]
        yield pose_problem(str(row["qid"]), images, row["question"], row["answer"], meta)
