"""FSC-147: crowds of one kind of object, 7 to 3,731 per image; scored by MAE and RMSE.

--source: the folder with annotation_FSC147_384.json, Train_Test_Val_FSC_147.json and
ImageClasses_FSC147.txt. --images: images_384_VarV2.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_json, read_text


@converter(tasks=("counting",), splits={"test": 1_190, "val": 1_286, "train": 3_659})
def convert(request: Request) -> Rows:
    """Yield one row per image; the answer is its number of annotated points."""
    annotations = read_json(request.path / "annotation_FSC147_384.json")
    lines = read_text(request.path / "ImageClasses_FSC147.txt").splitlines()
    kinds = dict(line.split("\t", 1) for line in lines if line.strip())
    for image in read_json(request.path / "Train_Test_Val_FSC_147.json")[request.split]:
        kind = kinds[image].strip()
        question = f"How many {kind} are there in the image?"
        count = len(annotations[image]["points"])
        yield ConvertedRow(f"{request.split}-{image}", (image,), question, count, {"kind": kind})
