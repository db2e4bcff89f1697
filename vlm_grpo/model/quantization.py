"""Loading weights in 4 or 8 bits, by bitsandbytes.

In 4 bits, 64 consecutive weights share a scale (QLoRA: Dettmers et al., 2023, arXiv:2305.14314);
in 8 bits, a row does (LLM.int8: Dettmers et al., 2022, arXiv:2208.07339). ``engine/linear.py``
computes with them.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch import nn
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig
from transformers.utils.import_utils import is_bitsandbytes_available

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.errors import UserError
from vlm_grpo.model.families import find_part


def check_quantization(policy: PolicySettings) -> None:
    """Refuse settings by which quantized weights would be trained themselves, or sharded."""
    if policy.load_in == "none":
        return
    name = f"policy.load_in={policy.load_in}"
    if policy.lora is None:
        raise UserError(
            f"{name}: quantized weights cannot be trained themselves: add policy.lora.r=16, or "
            "remove it"
        )
    for kind, title in (("FSDP", "FSDP2"), ("DEEPSPEED", "DeepSpeed")):
        if parse_flag_from_env(f"ACCELERATE_USE_{kind}"):
            raise UserError(
                f"{name} does not work with {title}, which cannot shard quantized weights: launch "
                "with plain data parallelism (configs/accelerate/ddp.yaml), where each device "
                "holds all of them"
            )


def find_quantized(model: Any, policy: PolicySettings) -> list[str]:
    """Return the names of the linear layers that the settings hold in 4 or 8 bits."""
    if policy.load_in == "none":
        return []
    head = model.get_output_embeddings()
    modules = ((n, m) for n, m in model.named_modules() if type(m) is nn.Linear and m is not head)
    return [name for name, _ in modules if find_part(name) in policy.quantized_parts]


def build_quantization(source: str, config: Any, policy: PolicySettings) -> dict[str, Any]:
    """Build the arguments of ``from_pretrained`` that quantize the weights of model ``source``.

    There are none if the weights are whole, or quantized in their files already.
    """
    name, held = f"policy.load_in={policy.load_in}", _describe_files(config)
    if held not in ("whole", policy.load_in):
        remedy = f"set policy.load_in={held}" if held in ("4bit", "8bit") else "name another form"
        raise UserError(f"the weights of model {source} are quantized ({held}): {remedy} of it")
    if policy.load_in == "none":
        return {}
    if not is_bitsandbytes_available():
        raise UserError(
            f"{name} needs the package bitsandbytes: pip install 'vlm-grpo[quantization]'"
        )
    if held != "whole":
        options = {"quant_type", "double_quant", "quantized_parts"}
        if ignored := sorted(policy.model_fields_set & options):
            raise UserError(
                f"policy.{ignored[0]} has no effect on model {source}, whose files have quantized "
                "weights: remove it"
            )
        return {}
    with torch.device("meta"):
        auto: Any = AutoModelForImageTextToText
        model = auto.from_config(config, trust_remote_code=policy.trust_remote_code)
    quantized = set(find_quantized(model, policy))
    if missing := set(policy.quantized_parts) - {find_part(name) for name in quantized}:
        raise UserError(
            f"policy.quantized_parts: no linear layer of model {source} is in "
            f"{', '.join(missing)}: name other parts"
        )
    whole = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in quantized]
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=policy.load_in == "4bit",
            load_in_8bit=policy.load_in == "8bit",
            llm_int8_skip_modules=whole,
            bnb_4bit_compute_dtype=policy.dtype,
            bnb_4bit_quant_type=policy.quant_type,
            bnb_4bit_use_double_quant=policy.double_quant,
        )
    }


def _describe_files(config: Any) -> str:
    """Return how weights are held in a model's files: ``whole``, or the kind of quantization."""
    settings = getattr(config, "quantization_config", None) or {}
    if not settings:
        return "whole"
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    bits = [bits for bits in ("4bit", "8bit") if settings.get(f"load_in_{bits}")]
    return bits[0] if bits else str(settings.get("quant_method"))
