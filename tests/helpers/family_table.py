"""Build the tables of docs/families.md from the families and their small models; as a program,
print them."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers as hf
from benchmark_table import format_table
from family_models import BUILDERS
from family_policies import build_family_model, compare_with_transformers
from tiny_models import FAMILIES
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from vlm_grpo.model.families.known import load_family
from vlm_grpo.model.sharing_check import why_not_shared
from vlm_grpo.task.coordinates import FRAMES

GUIDE = (Path(__file__).parents[2] / "docs/families.md").read_text("utf-8")
TITLES = {name: title for title, name in re.findall(r"^\| (.+?) \| `(\w+)` \| `", GUIDE, re.M)}
"""Names of models by model type, in the order of the guide's table, to which new ones are added."""
TYPES = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
COLUMNS = ("models", "model type", "a box", "pixel budget", "source of the frame")
VARIANTS = {
    "pixtral": "Pixtral",
    "fast_vlm": "FastVLM",
    "gemma4_causal": "Gemma 4 (causal over images)",
    "gemma4_moe": "Gemma 4, mixture of experts",
    "paligemma2": "PaliGemma 2",
    "mllama": "Llama 3.2 Vision",
}
"""Names of compared models that have the type of another one, or no facts of their own."""
FORM_COLUMNS = ("model", "prompt", "log-probs", "gradient")
# Names that image processors give to what determines the size of an image.
_SIZE_SETTINGS = (
    *("size", "crop_size", "max_image_size", "image_grid_pinpoints", "tile_size", "max_tiles"),
    *("scale_resolution", "max_slice_nums", "max_crops"),
    *("min_patches", "max_patches", "min_image_tokens", "max_image_tokens", "max_soft_tokens"),
)


def find_size_settings(processor: Any) -> dict[str, Any]:
    """Return what determines the size of images, by the image processor's names."""
    values = vars(getattr(processor, "image_processor", None) or processor)
    found = {key: values[key] for key in _SIZE_SETTINGS if values.get(key) is not None}
    for key in found.keys() & {"size", "crop_size", "max_image_size"}:
        found[key] = {edge: length for edge, length in dict(found[key]).items() if length}
    return found


def build_table(build: Callable[[str], tuple[Any, Any]] = build_family_model) -> str:
    """Return the table; ``build`` returns the small model and the processor of a name."""
    return format_table(COLUMNS, [build_cells(name, build(name)[1]) for name in TITLES])


def build_cells(name: str, processor: Any) -> dict[str, str]:
    config: Any = SimpleNamespace(model_type=name)  # all that selects a family
    family = load_family(config)
    names = find_size_settings(processor)
    has_budget = family.pixel_budget(processor) is not None
    box = FRAMES[family.frame].write_all([(64, 96, 192, 240)], (640, 480), (320, 240))
    return {
        "models": TITLES[name],
        "model type": f"`{name}`",
        "a box": "`{}`".format(box.replace("|", "\\|")),
        "pixel budget": "yes" if has_budget else "no: " + ", ".join(f"`{n}`" for n in names),
        "source of the frame": family.frame_source or "none found",
    }


def build_form_table() -> str:
    """Compare both forms of every family, and return the table of their differences."""
    names = TITLES | VARIANTS
    assert set(names) == {*FAMILIES, *BUILDERS}
    rows = []
    for name, title in names.items():
        config = build_family_model(name)[0].config
        reason = why_not_shared(load_family(config), config)
        cells = [title, f"repeated: {reason}", "—", "—"]
        if reason is None:
            figures = (f"{figure:.0e}" for figure in compare_with_transformers(name))
            cells = [title, "shared", *figures]
        rows.append(dict(zip(FORM_COLUMNS, cells, strict=True)))
    return format_table(FORM_COLUMNS, rows)


def classify(kind: str) -> str:
    """Return what becomes of the prompt of models of the type, by their configuration alone."""
    config = hf.CONFIG_MAPPING[kind]()
    model: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if model is not None and not issubclass(model, hf.GenerationMixin):
        return "refused: it does not write text token by token"
    if (reason := why_not_shared(load_family(config), config)) is not None:
        return f"repeated: {reason}"
    if kind in {*FAMILIES, *BUILDERS}:
        return "shared, compared with images above"
    return "shared if a run's own check agrees"


def build_count() -> str:
    """Return the numbers of types of transformers by what becomes of a group's prompt."""
    found = {kind: classify(kind) for kind in TYPES}
    rows = []
    for what, count in sorted(Counter(found.values()).items(), key=lambda pair: -pair[1]):
        kinds = ", ".join(f"`{kind}`" for kind in TYPES if found[kind] == what)
        rows.append({"prompt": what, "types": f"{count}", "model types": kinds})
    return format_table(("prompt", "types", "model types"), rows)


if __name__ == "__main__":
    print(build_table(), build_form_table(), build_count(), sep="\n\n")
