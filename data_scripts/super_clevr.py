"""Super-CLEVR: the counting questions of its official files. For R1-V's 200 questions see r1_v.

One file has the questions of all splits: train is the first 20,000 images, val the next 5,000, test
the last 5,000.

--source: superCLEVR_questions_30k.json, or its folder. --images: the folder of the images.
"""

from vlm_grpo.data_scripts.clevr import convert_question
from vlm_grpo.data_scripts.converter import Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_json

_IMAGES = {"train": range(20_000), "val": range(20_000, 25_000), "test": range(25_000, 30_000)}
"""Indices of each split's images; one file has the questions about all of them."""


@converter(tasks=("counting",), splits=dict.fromkeys(_IMAGES))
def convert(request: Request) -> Rows:
    """Yield one row per question about an image of the split; leave out all but counts."""
    path = request.find_file("superCLEVR_questions_30k.json", "superCLEVR_questions*.json")
    images = _IMAGES[request.split]
    for row in read_json(path)["questions"]:
        if row["image_index"] in images:
            yield convert_question(row, request.split)
