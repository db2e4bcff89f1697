"""PixMo-Count: labels and counts of web images, given by URL and SHA-256 hash.

Download the images first, each into a file named by its hash (image_sha256, any suffix). A row is
refused if its image's bytes have another hash, because the image has changed since. Some links are
dead, so that --allow-partial is needed. Copies of the table that contain the images are supported
too.

--source: hf:allenai/pixmo-count, or a folder with its parquet files.
--images: the folder of the downloaded files.
"""

import hashlib
from dataclasses import replace

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter


@converter(tasks=("counting",), splits={"test": 540, "val": 540, "train": 36_916})
def convert(request: Request) -> Rows:
    files = {path.stem: path for path in request.images.glob("*") if path.is_file()}
    split = {"val": "validation"}.get(request.split, request.split)
    table = replace(request, split=split).read_table("image_sha256", "count", "label")
    for number, row in enumerate(table):
        name, digest = f"{request.split}-{number}", row["image_sha256"]
        image: str | bytes | None = row.get("image")
        if image is None and digest in files:
            image = files[digest].name
            if hashlib.sha256(files[digest].read_bytes()).hexdigest() != digest:
                yield RefusedRow(name, "its image has changed since publication", image)
                continue
        question = f"How many {row['label']} are there in the image?"
        yield ConvertedRow(name, (image,), question, row["count"], {"label": row["label"]})
