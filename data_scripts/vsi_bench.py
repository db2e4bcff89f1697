"""VSI-Bench: questions about videos of rooms, with options or numbers as answers.

--source: hf:nyu-visionx/VSI-Bench, or its parquet file.
--images: the folder with its videos, DATASET/SCENE.mp4.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import remove_letter, to_choice


@converter(tasks=("spatial",), splits={"test": 5_130})
def convert(request: Request) -> Rows:
    """Yield one row per question, with its kind as the score groups them: meta.type, meta.level."""
    columns = "id", "dataset", "scene_name", "question_type", "question", "ground_truth", "options"
    for row in request.read_table(*columns):
        kind, _, level = row["question_type"].partition("direction_")
        meta = {"type": f"{kind}direction" if level else kind, "level": level or "all"}
        options = [remove_letter(text) for text in row["options"] or ()]
        truth = str(row["ground_truth"])
        answer = to_choice(options, truth) if options else float(truth)
        video = f"{row['dataset']}/{row['scene_name']}.mp4"
        yield ConvertedRow(str(row["id"]), (), row["question"], answer, meta, (video,))
