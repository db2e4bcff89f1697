"""CoSyn-400K: questions about images that programs drew: charts, tables, documents, formulas, ….

--source: hf:allenai/CoSyn-400K:validation:chart, with chart, chemical, circuit, diagram, document,
graphic, math, music, nutrition or table as the kind; or the folder of one kind.
--images: a folder to write the images into.
"""

from vlm_grpo.data_scripts.converter import ConvertedRow, RefusedRow, Request, Rows, converter
from vlm_grpo.tasks.numeric import clean


@converter(tasks=("numeric",), splits={"validation": None, "train": None})
def convert(request: Request) -> Rows:
    """Yield one row per question; meta.type is the kind of figure. Answers that are no number and
    no short text are left out."""
    for row in request.read_table("id", "image", "qa_pairs"):
        image, pairs = row["image"], row["qa_pairs"]
        meta = {"type": (row.get("metadata") or {}).get("figure_type")}
        texts = zip(pairs["question"], pairs["answer"], strict=True)
        for number, (question, answer) in enumerate(texts):
            name = f"{row['id']}-{number}"
            if clean(answer) is None:
                reason = "its answer is no short text"
                yield RefusedRow(name, reason, f"{answer!r:.80}", kind="excluded")
            else:
                yield ConvertedRow(name, (image,), question, answer, meta)
