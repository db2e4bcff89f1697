"""COCO keypoints: the 17 points of a person, in images that show one person with labels.

--source: person_keypoints_val2017.json or person_keypoints_train2017.json, or their folder.
--images: the folder of the images, val2017 or train2017.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import group_regions, read_coco

_LEAST = 5  # Labeled points of a person that is asked about


@converter(tasks=("keypoints",), splits=dict.fromkeys(("val", "train")))
def convert(request: Request) -> Rows:
    """Yield one row per image with one person; points that are not labeled are only asked for."""
    coco = read_coco(request.find_file(f"**/person_keypoints_{request.split}*.json"))
    names = {key: category["keypoints"] for key, category in coco.categories.items()}
    for image, people in group_regions(coco).items():
        name = f"{request.split}-{image}"
        if len(people) != 1 or people[0].get("iscrowd") or people[0]["num_keypoints"] < _LEAST:
            reason = f"it does not show one person with {_LEAST} labeled points"
            yield RefusedRow(name, reason, f"{len(people)} people", kind="excluded")
            continue
        (person,) = people
        own, flat = names[person["category_id"]], person["keypoints"]
        triples = zip(own, flat[::3], flat[1::3], flat[2::3], strict=True)
        answer = {
            "names": own,
            "points": {point: [x, y] for point, x, y, visible in triples if visible > 0},
            "area": person["area"],
        }
        file = coco.images[image]["file_name"]
        yield ConvertedRow(name, (file,), "the person", answer, {"image_id": image})
