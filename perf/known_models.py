"""Write the shapes of well-known models, which ``vlm-grpo plan MODEL`` reads.

The values are excerpts of the models' public ``config.json``; everything else is counted on the
model that transformers builds from them, without weights.

    python perf/known_models.py vlm_grpo/model/known_models.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from vlm_grpo.planning.known import TABLE_KINDS, build_known_settings
from vlm_grpo.planning.layer_memory import measure_layers
from vlm_grpo.planning.model_shape import read_model_shape

# Width, intermediate width, layers, query heads, key heads, vocabulary, tied embeddings.
QWEN2 = {
    "Qwen2-VL-2B-Instruct": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2-VL-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False),
}
QWEN25 = {
    "Qwen2.5-VL-3B-Instruct": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-VL-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-VL-32B-Instruct": (5120, 27648, 64, 40, 8, 152064, False),
    "Qwen2.5-VL-72B-Instruct": (8192, 29568, 80, 64, 8, 152064, False),
}
QWEN3 = {
    "Qwen3-VL-2B-Instruct": (2048, 6144, 28, 16, 8, 151936, True),
    "Qwen3-VL-4B-Instruct": (2560, 9728, 36, 32, 8, 151936, True),
    "Qwen3-VL-8B-Instruct": (4096, 12288, 36, 32, 8, 151936, False),
    "Qwen3-VL-32B-Instruct": (5120, 25600, 64, 64, 8, 151936, False),
}
INTERN = {
    "InternVL3-2B-hf": (1536, 8960, 28, 12, 2, 151674, False),
    "InternVL3-8B-hf": (3584, 18944, 28, 28, 4, 151674, False),
    "InternVL3-14B-hf": (5120, 13824, 48, 40, 8, 151674, False),
}


def build_text(sizes: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
    return dict(zip(names, sizes, strict=True)) | more


def build_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the configuration of each model."""
    for name, sizes in QWEN2.items():
        vision = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4}
        vision |= {"hidden_size": sizes[0]}
        yield f"Qwen/{name}", build("qwen2_vl", build_text(sizes), vision)
    for name, sizes in QWEN25.items():
        vision = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "out_hidden_size": sizes[0]}
        vision |= {"intermediate_size": 3456 if sizes[0] > 4096 else 3420}
        yield f"Qwen/{name}", build("qwen2_5_vl", build_text(sizes), vision)
    for name, sizes in QWEN3.items():
        vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
        vision |= {"deepstack_visual_indexes": [5, 11, 17]}
        if sizes[0] >= 4096:
            vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
            vision |= {"deepstack_visual_indexes": [8, 16, 24]}
        vision |= {"out_hidden_size": sizes[0], "patch_size": 16}
        yield f"Qwen/{name}", build("qwen3_vl", build_text(sizes, head_dim=128), vision)
    for name, sizes in INTERN.items():
        text = build_text(sizes, model_type="qwen2")
        vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
        vision |= {"num_attention_heads": 16, "image_size": [448, 448], "patch_size": [14, 14]}
        yield f"OpenGVLab/{name}", build("internvl", text, vision)


def build(model_type: str, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    parts = {"model_type": model_type, "text_config": text, "vision_config": vision}
    return parts | {"tie_word_embeddings": text["tie_word_embeddings"]}


def read_shape(config: Any, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the shape of a model that is trained so on a GPU."""
    policy = build_known_settings("none", overrides).policy
    return asdict(measure_layers(read_model_shape(config, policy), policy, on_cpu=False))


def main() -> None:
    rows = []
    for name, values in build_configs():
        config = AutoConfig.for_model(**values)
        shapes = {kind: read_shape(config, given) for kind, given in TABLE_KINDS.items()}
        rows.append(f"{json.dumps(name)}: {json.dumps({'config': values, 'shapes': shapes})}")
        print(name, f"{shapes['full']['num_weights']:,}", flush=True)
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
