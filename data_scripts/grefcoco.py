"""gRefCOCO: expressions that refer to one object, to several, or to none, with their masks.

--source: the folder with grefs(unc).json and instances.json, or the former.
--images: COCO's train2014 folder.
"""

from dataclasses import replace

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import clean_mask, read_coco, read_json, xywh_to_xyxy
from vlm_grpo.errors import UserError


@converter(
    tasks=("segmentation", "grounding"), splits=dict.fromkeys(("val", "testA", "testB", "train"))
)
def convert(request: Request) -> Rows:
    """Yield one row per sentence; its answer has no box where it refers to nothing."""
    path = request.find_file("grefs(unc).json", "grefs*.json")
    coco = read_coco(replace(request, source=str(path.parent)).find_file("instances.json"))
    annotations = {entry["id"]: entry for entry in coco.annotations}
    refs = [ref for ref in read_json(path) if ref["split"] == request.split]
    if not refs:
        raise UserError(f"{path} has no expressions of split {request.split}")
    for ref in refs:
        listed = ref["ann_id"] if isinstance(ref["ann_id"], list) else [ref["ann_id"]]
        wanted = [number for number in listed if number != -1]  # -1: it refers to nothing
        regions = [annotations[number] for number in wanted if number in annotations]
        image = coco.images[ref["image_id"]]["file_name"]
        answer = {"boxes": [xywh_to_xyxy(region["bbox"]) for region in regions]}
        if request.task == "segmentation":
            answer["masks"] = [clean_mask(region["segmentation"]) for region in regions]
        kind = "none" if not wanted else "one" if len(wanted) == 1 else "several"
        meta = {"split": ref["split"], "image_id": ref["image_id"], "kind": kind}
        for sentence in ref["sentences"]:
            name = f"{request.split}-{ref['ref_id']}-{sentence['sent_id']}"
            if len(regions) < len(wanted):
                yield RefusedRow(name, "a region is not in instances.json", f"{wanted}")
                continue
            yield ConvertedRow(name, (image,), sentence["sent"], answer, meta)
