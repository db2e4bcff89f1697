"""Write the shapes of well-known models, which ``vlm-grpo plan MODEL`` reads.

The values are excerpts of the models' public ``config.json``; everything else is counted on the
model that transformers builds from them, without weights.

    python perf/known_models.py vlm_grpo/planning/known_models.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.planning.activations import measure_layers
from vlm_grpo.planning.model_shape import read_model_shape

KINDS = {"full": {}, "bfloat16": {"master_weights": "bfloat16"}, "lora": {"lora": {"r": 64}}}
"""Settings of the policy whose shapes are stored."""

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


def build_configs() -> Iterator[tuple[str, Any]]:
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


def build(model_type: str, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    tied = text["tie_word_embeddings"]
    values = {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
    return AutoConfig.for_model(model_type, **values)


def read_facts(config: Any) -> dict[str, Any]:
    """Return what the file has about a model, for training of each kind on a GPU."""
    facts: dict[str, Any] = {}
    for kind, given in KINDS.items():
        policy = PolicySettings.model_validate(given)
        shape = read_model_shape(config, policy)
        values = asdict(measure_layers(shape, policy, on_cpu=False))
        values["doubled"] = values["layer"]  # what a layer saves with adapters of twice the rank
        if policy.lora is not None:
            doubled = policy.lora.model_copy(update={"r": 2 * policy.lora.r})
            policy = policy.model_copy(update={"lora": doubled})
            shape = replace(shape, lora_rank=doubled.r)
            values["doubled"] = asdict(measure_layers(shape, policy, on_cpu=False))["layer"]
        facts |= {part: values.pop(part) for part in ("text", "vision")}  # of every kind
        facts.setdefault("shapes", {})[kind] = values
    edge = config.vision_config.patch_size
    merge = getattr(config.vision_config, "spatial_merge_size", 2)
    return facts | {
        "patch_size": edge if isinstance(edge, int) else edge[0],
        "patches_per_token": merge**2,
    }


def main() -> None:
    facts = {name: read_facts(config) for name, config in build_configs()}
    rows = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in facts.items()]
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    for name, values in facts.items():
        print(name, f"{values['shapes']['full']['num_weights']:,}")


if __name__ == "__main__":
    main()
