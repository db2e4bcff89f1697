"""RefCOCO, RefCOCO+ and RefCOCOg in two forms on the hub, recognized by their columns.

lmms-lab/RefCOCO (also RefCOCOplus, RefCOCOg): embedded images, xywh boxes, several expressions in
each row's answer. Its val has 8,811 regions and differs from UNC's: do not compare with published
numbers. jxu124/refcoco (also refcocoplus, refcocog): xyxy boxes, images from COCO's train2014.

--source: hf:lmms-lab/RefCOCO, hf:jxu124/refcoco, or a folder with their parquet files.
--images: train2014 for jxu124; for lmms-lab, a folder to write the images into.
"""

import json
from pathlib import PurePosixPath

from vlm_grpo.data_scripts.converter import RawRecord, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import locate_phrase, xywh_to_xyxy
from vlm_grpo.errors import UserError

_ROUNDING = 0.5  # Largest difference in pixels between jxu124's box and the original annotation


def _convert_lmms_lab(row: RawRecord, name: str) -> Rows:
    for i, expression in enumerate(row["answer"]):
        image, box = row["image"], xywh_to_xyxy(row["bbox"])
        meta = {"file_name": row.get("file_name"), "question_id": row["question_id"]}
        yield locate_phrase(f"{name}-{i}", image, expression, box, meta)


def _convert_jxu124(row: RawRecord, split: str) -> Rows:
    annotated_box = xywh_to_xyxy(json.loads(row["raw_anns"])["bbox"])
    agrees = all(abs(a - b) <= _ROUNDING for a, b in zip(row["bbox"], annotated_box, strict=True))
    for sentence in row["sentences"]:
        name = f"{split}-{row['ref_id']}-{sentence['sent_id']}"
        if not agrees:
            detail = f"{row['bbox']} instead of {annotated_box}"
            yield RefusedRow(name, "its bbox differs from its annotation", detail)
            continue
        image = PurePosixPath(json.loads(row["raw_image_info"])["file_name"]).name
        meta = {"split": row["split"], "ref_id": row["ref_id"], "image_id": row["image_id"]}
        yield locate_phrase(name, image, sentence["sent"], annotated_box, meta)


@converter(
    tasks=("grounding",),
    # A table's rows have several expressions each, whose number is not published.
    splits=dict.fromkeys(("val", "validation", "test", "testA", "testB", "train")),
)
def convert(request: Request) -> Rows:
    for number, row in enumerate(request.read_table("bbox")):
        if "raw_anns" in row:
            yield from _convert_jxu124(row, request.split)
        elif "question_id" in row and "answer" in row:
            yield from _convert_lmms_lab(row, f"{request.split}-{number}")
        else:
            raise UserError(
                f"{request.source} is neither lmms-lab's nor jxu124's RefCOCO: "
                f"its columns are {', '.join(row)}"
            )
