"""Object detection in COCO's JSON format: COCO, ODinW's parts, Roboflow exports.

Every question names all categories of the file, including those absent from the image, as COCO AP
requires. Crowd regions are not part of the answer: meta.crowd has them, because AP ignores boxes on
them, and meta.crowds counts them.

--source: the annotation file, or a folder with instances_SPLIT*.json or _annotations.coco.json.
--images: the folder of its images.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import group_regions, label_regions, read_coco, refuse_incomplete

_IMAGES = {
    "instances_val2017.json": 5_000,
    "instances_val2014.json": 40_504,
    "instances_train2017.json": 118_287,
    "instances_train2014.json": 82_783,
}
_CATEGORIES = 80  # Number of COCO's categories: other datasets have files of the same names


@converter(tasks=("detection",), splits=dict.fromkeys(("val", "valid", "test", "train")))
def convert(request: Request) -> Rows:
    """Yield one row per image, including images without objects."""
    patterns = (f"**/instances_{request.split}*.json", f"{request.split}/_annotations.coco.json")
    path = request.find_file(*patterns)
    coco = read_coco(path)
    if len(coco.categories) == _CATEGORIES and path.name in _IMAGES:
        yield from refuse_incomplete(path.name, len(coco.images), _IMAGES[path.name])
    question = ", ".join(category["name"] for category in coco.categories.values())
    for image, regions in group_regions(coco).items():
        objects = [a for a in regions if not a.get("iscrowd")]
        crowd = [a for a in regions if a.get("iscrowd") and min(a["bbox"][2:]) > 0]
        yield ConvertedRow(
            id=f"{request.split}-{image}",
            images=(coco.images[image]["file_name"],),
            question=question,
            answer=label_regions(coco, objects),
            meta={
                "image_id": image,
                "crowds": len(regions) - len(objects),
                "crowd": label_regions(coco, crowd) if crowd else None,
            },
        )
