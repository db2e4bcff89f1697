"""What vLLM makes of an exported model, without a GPU: class, weights, tokens and pixels.

``python perf/vllm_loading.py EXPORTED IMAGE`` in an environment with vLLM, which needs nothing
of this package. It asks vLLM for its engine's settings and its own class of the model, loads the
weights into it, and compares these with the file's, and what its processor makes of an image and a
question with what transformers' makes of them. Nothing is generated: the CUDA build of vLLM has no
kernels for a CPU. Environment: ``VLLM_TARGET_DEVICE=cpu``.
"""

from __future__ import annotations

import argparse
import os

import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs

QUESTION = "How many circles are there?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder that vlm-grpo export wrote")
    parser.add_argument("image")
    given = parser.parse_args()
    config = EngineArgs(
        model=given.model, dtype="float32", max_model_len=512, enforce_eager=True
    ).create_engine_config()
    print("class     ", config.model_config.architecture)
    compare_weights(config, given.model)
    compare_inputs(config, given.model, Image.open(given.image).convert("RGB"))


def compare_weights(config: VllmConfig, folder: str) -> None:
    """vLLM merges and pads tensors, so sums over all of them are compared."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29655")
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        initialize_model_parallel(1, 1)
        loaded = [p.detach().double() for p in get_model(vllm_config=config).parameters()]
    stored = [tensor.double() for tensor in load_file(f"{folder}/model.safetensors").values()]
    for name, total in (("sum", torch.Tensor.sum), ("sum of squares", squares)):
        ours, theirs = (sum(float(total(t)) for t in tensors) for tensors in (stored, loaded))
        print(f"weights    {name} {ours:.9g} in the file, {theirs:.9g} in vLLM")


def squares(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * tensor).sum()


def compare_inputs(config: VllmConfig, folder: str, image: Image.Image) -> None:
    theirs = MULTIMODAL_REGISTRY.create_processor(config.model_config)
    ours = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = ours.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    wanted = ours(text=[text], images=[image], return_tensors="pt")
    prompt = ours.tokenizer.encode(text, add_special_tokens=False)
    items = theirs.info.parse_mm_data({"image": [image]})
    found = theirs.apply(ProcessorInputs(prompt, items), TimingContext(enabled=False))
    tokens = wanted["input_ids"][0].tolist()
    print(f"tokens     {len(tokens)}, equal: {found['prompt_token_ids'] == tokens}")
    data = found["mm_kwargs"].get_data()
    pixels = data["pixel_values"]
    if pixels.dtype == torch.uint8:  # vLLM normalises them in the model
        repeat = pixels.shape[1] // 3
        mean, std = (
            torch.tensor(values).repeat_interleave(repeat)
            for values in (ours.image_processor.image_mean, ours.image_processor.image_std)
        )
        pixels = (pixels.float() / 255 - mean) / std
    off = float((pixels - wanted["pixel_values"]).abs().max())
    grids = data["image_grid_thw"].tolist(), wanted["image_grid_thw"].tolist()
    print(f"pixels     {tuple(pixels.shape)}, largest difference {off:.2g}; grids {grids}")


if __name__ == "__main__":
    main()
