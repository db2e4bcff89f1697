"""MathVerse: 788 geometry and function problems, in six versions that say more or less in text.

--source: testmini.json (five versions, with images) or testmini_text_only.json.
--images: the folder that holds "images_version_1-4", …; for text only, any folder.
"""

from vlm_grpo.data_scripts.converter import Request, Rows, converter
from vlm_grpo.data_scripts.readers import pose_problem, read_json_rows


@converter(tasks=("math",), splits={"testmini": 3_940, "text_only": 788})
def convert(request: Request) -> Rows:
    """Yield one row per problem and version, asked as in the authors' prompt with its answer."""
    name = f"testmini_{request.split}" if request.split == "text_only" else request.split
    for row in read_json_rows(request.find_file(f"**/{name}.json")):
        meta = {"version": row["problem_version"], "type": row["question_type"]}
        meta |= {name: row["metadata"][name] for name in ("subject", "subfield")}
        images = (row["image"],) if row["image"] else ()
        yield pose_problem(row["sample_index"], images, row["query_wo"], row["answer"], meta)
