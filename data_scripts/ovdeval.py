"""OVDEval: open-vocabulary detection in nine subsets, each a separate COCO file.

The question names the labels that the image lists (text and neg_text). The subsets celebrity,
landmark and logo list none; their questions name all categories of the subset. The metric: NMS-AP.

--source: the file of one subset, such as color.json. --images: the folder of that subset's images.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import group_regions, label_regions, read_coco

_IMAGES = {
    "celebrity.json": 2_244,
    "color.json": 1_170,
    "landmark.json": 1_533,
    "logo.json": 1_935,
    "material.json": 2_124,
    "negation.json": 1_858,
    "position.json": 2_109,
    "relationship.json": 2_169,
}
"""Number of images of each subset; the ninth is COCO's val2017."""


@converter(tasks=("detection",), splits={"test": _IMAGES})
def convert(request: Request) -> Rows:
    """Yield one row per image; the question names present and absent labels."""
    path = request.find_file()
    coco = read_coco(path)
    categories = [category["name"] for category in coco.categories.values()]
    for number, regions in group_regions(coco).items():
        image = coco.images[number]
        labels = image.get("text", []) + image.get("neg_text", [])
        yield ConvertedRow(
            id=f"{path.stem}-{number}",
            images=(image["file_name"],),
            question=", ".join(labels or categories),
            answer=label_regions(coco, regions),
            meta={"part": path.stem, "image_id": number},
        )
