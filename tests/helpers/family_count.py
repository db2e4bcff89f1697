"""Count the image-text types of transformers by what becomes of a group's prompt.

Run ``python tests/helpers/family_count.py`` to print the table of docs/families.md.
"""

from collections import Counter
from typing import Any

import transformers as hf
from benchmark_table import format_table
from family_models import BUILDERS
from tiny_models import FAMILIES
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from vlm_grpo.model.families.known import load_family

TYPES = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
COLUMNS = ("prompt", "types", "model types")


def classify(kind: str) -> str:
    """Return what becomes of the prompt of models of the type, by their configuration alone."""
    config = hf.CONFIG_MAPPING[kind]()
    model: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if model is not None and not issubclass(model, hf.GenerationMixin):
        return "refused: it does not write text token by token"
    if (reason := load_family(config).why_not_shared(config)) is not None:
        return f"repeated: {reason}"
    is_compared = kind in {*FAMILIES, *BUILDERS}
    return (
        "shared, compared with images above"
        if is_compared
        else "shared if a run's own check agrees"
    )


def build_count() -> str:
    found = {kind: classify(kind) for kind in TYPES}
    rows = []
    for what, count in sorted(Counter(found.values()).items(), key=lambda pair: -pair[1]):
        kinds = ", ".join(f"`{kind}`" for kind in TYPES if found[kind] == what)
        rows.append({"prompt": what, "types": f"{count}", "model types": kinds})
    return format_table(COLUMNS, rows)


if __name__ == "__main__":
    print(build_count())
