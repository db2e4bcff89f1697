"""RefCOCO, RefCOCO+ and RefCOCOg in their official form: a pickle of refs and instances.json.

--source: the folder with refs(unc).p or refs(umd).p and instances.json, or one such pickle.
--images: COCO's train2014 folder.
For the task segmentation, the answer also has the region's mask in instances.json.
RefCOCO and RefCOCO+ have the splits val, testA and testB; RefCOCOg has val and test (UMD's).
"""

from dataclasses import replace
from pathlib import Path

from vlm_grpo.data_scripts.converter import (
    ConvertedRow,
    RawRecord,
    RefusedRow,
    Request,
    Rows,
    converter,
)
from vlm_grpo.data_scripts.readers import (
    clean_mask,
    locate_phrase,
    read_coco,
    read_pickle,
    xywh_to_xyxy,
)
from vlm_grpo.errors import UserError

# In order of preference: results are published on these splits; Google's has no test set.
_PICKLES = ("refs(unc).p", "refs(umd).p", "refs(google).p")

_SPLITS = {
    "val": {
        "RefCOCO": 10_834,
        "RefCOCO+": 10_758,
        "RefCOCOg": 4_896,
        "RefCOCOg, Google's split": 9_536,
    },
    "testA": {"RefCOCO": 5_657, "RefCOCO+": 5_726},
    "testB": {"RefCOCO": 5_095, "RefCOCO+": 4_889},
    "test": {"RefCOCOg": 9_602},
    "train": {
        "RefCOCO": 120_624,
        "RefCOCO+": 120_191,
        "RefCOCOg": 80_512,
        "RefCOCOg, Google's split": 85_474,
    },
}


def _is_in_split(ref: RawRecord, split: str) -> bool:
    """Return whether refer.py assigns a region to a split: "testAB" belongs to testA and testB."""
    if split in ("testA", "testB"):
        return "test" in ref["split"] and split[-1] in ref["split"]
    return ref["split"] == split


@converter(tasks=("grounding", "segmentation"), splits=_SPLITS)
def convert(request: Request) -> Rows:
    """Yield one row per sentence; the sentences of a region are separate questions."""
    pickle = request.find_file(*_PICKLES)
    coco = read_coco(replace(request, source=str(pickle.parent)).find_file("instances.json"))
    annotations = {entry["id"]: entry for entry in coco.annotations}
    refs = [ref for ref in read_pickle(pickle) if _is_in_split(ref, request.split)]
    if not refs:
        raise UserError(f"{pickle} has no regions of split {request.split}")
    for ref in refs:
        annotation = annotations.get(ref["ann_id"])
        for sentence in ref["sentences"]:
            name = f"{request.split}-{ref['ref_id']}-{sentence['sent_id']}"
            if annotation is None:
                yield RefusedRow(name, "its region is not in instances.json", f"{ref['ann_id']}")
                continue
            # file_name contains the region's number in the pickle, but not in instances.json.
            image = coco.images[ref["image_id"]]["file_name"]
            meta = {
                "dataset": Path(pickle).resolve().parent.name,
                "split": ref["split"],
                "category": coco.categories[ref["category_id"]]["name"],
                "ref_id": ref["ref_id"],
                "image_id": ref["image_id"],
            }
            box = xywh_to_xyxy(annotation["bbox"])
            if request.task == "segmentation":
                answer = {"boxes": [box], "masks": [clean_mask(annotation["segmentation"])]}
                yield ConvertedRow(name, (image,), sentence["sent"], answer, meta)
            else:
                yield locate_phrase(name, image, sentence["sent"], box, meta)
