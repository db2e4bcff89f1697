"""ChartQA: questions about charts, written by people ("human") and by a program ("augmented").

--source: "ChartQA Dataset" with one folder for each split, or hf:HuggingFaceM4/ChartQA.
--images: the same folder; for the table, a folder to write the images into.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import list_texts, read_json

_TYPES = ("human", "augmented")


@converter(tasks=("numeric",), splits={"test": 2_500, "val": 1_920, "train": 28_299})
def convert(request: Request) -> Rows:
    if request.path.is_dir() and not any(request.path.glob("**/*.parquet")):
        for kind in _TYPES:
            path = request.find_file(f"**/{request.split}_{kind}.json")
            for number, row in enumerate(read_json(path)):
                image = f"{request.split}/png/{row['imgname']}"
                name = f"{request.split}-{kind}-{number}"
                yield ConvertedRow(name, (image,), row["query"], row["label"], {"type": kind})
        return
    for number, row in enumerate(request.read_table("image", "query", "label", "human_or_machine")):
        meta = {"type": _TYPES[row["human_or_machine"]]}
        images = (row["image"],)
        name = f"{request.split}-{number}"
        yield ConvertedRow(name, images, row["query"], list_texts(row["label"]), meta)
