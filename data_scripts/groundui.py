"""GroundUI-18K and GroundUI-1K (AgentStudio): one box of an element per instruction, in pixels.

--source: hf:agent-studio/GroundUI-18K, hf:agent-studio/GroundUI-1K, a folder with the parquet
  files of one, or AgentStudio's metadata.jsonl or metadata_1k.jsonl.
--images: the folder of the images; for a table, a folder to write them into.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, Request, Rows, converter
from vlm_grpo.data_scripts.readers import read_rows


@converter(
    tasks=("gui", "grounding"), splits={"train": {"GroundUI-18K": 18_026, "GroundUI-1K": 1_000}}
)
def convert(request: Request) -> Rows:
    rows = read_rows(
        request, ("instruction", "bbox", "source", "platform"), lambda row: row["image"]
    )
    for number, (row, image) in enumerate(rows, start=1):
        meta = {"platform": row["platform"], "source": row["source"]}
        answer = {"boxes": [row["bbox"]]}
        yield ConvertedRow(f"groundui-{number}", (image,), row["instruction"], answer, meta)
