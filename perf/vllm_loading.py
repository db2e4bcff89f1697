"""Load an exported model in vLLM without a GPU, and compare weights, tokens and pixels.

Run ``VLLM_TARGET_DEVICE=cpu python perf/vllm_loading.py EXPORTED IMAGE`` in an environment with
vLLM; this package is not needed. The script loads the weights into vLLM's class of the model and
compares them with the file, and it compares the outputs of vLLM's and transformers' processors for
an image and a question. Nothing is generated: the CUDA build of vLLM has no kernels for a CPU.
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
    parser.add_argument("model", help="folder written by vlm-grpo export")
    parser.add_argument("image")
    arguments = parser.parse_args()
    config = EngineArgs(
        model=arguments.model, dtype="float32", max_model_len=512, enforce_eager=True
    ).create_engine_config()
    print("class     ", config.model_config.architecture)
    compare_weights(config, arguments.model)
    compare_inputs(config, arguments.model, Image.open(arguments.image).convert("RGB"))


def compare_weights(config: VllmConfig, folder: str) -> None:
    """Compare sums over all weights, since vLLM merges and pads tensors."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29655")
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        initialize_model_parallel(1, 1)
        loaded = [p.detach().double() for p in get_model(vllm_config=config).parameters()]
    stored = [tensor.double() for tensor in load_file(f"{folder}/model.safetensors").values()]
    for name, total in (("sum", torch.Tensor.sum), ("sum of squares", sum_of_squares)):
        ours, theirs = (sum(float(total(t)) for t in tensors) for tensors in (stored, loaded))
        print(f"weights    {name} {ours:.9g} in the file, {theirs:.9g} in vLLM")


def sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * tensor).sum()


def compare_inputs(config: VllmConfig, folder: str, image: Image.Image) -> None:
    theirs = MULTIMODAL_REGISTRY.create_processor(config.model_config)
    ours = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = ours.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    expected = ours(text=[text], images=[image], return_tensors="pt")
    prompt = ours.tokenizer.encode(text, add_special_tokens=False)
    items = theirs.info.parse_mm_data({"image": [image]})
    output = theirs.apply(ProcessorInputs(prompt, items), TimingContext(enabled=False))
    tokens = expected["input_ids"][0].tolist()
    print(f"tokens     {len(tokens)}, equal: {output['prompt_token_ids'] == tokens}")
    data = output["mm_kwargs"].get_data()
    pixels = data["pixel_values"]
    if pixels.dtype == torch.uint8:  # vLLM normalizes them in the model
        repeat = pixels.shape[1] // 3
        mean, std = (
            torch.tensor(values).repeat_interleave(repeat)
            for values in (ours.image_processor.image_mean, ours.image_processor.image_std)
        )
        pixels = (pixels.float() / 255 - mean) / std
    difference = float((pixels - expected["pixel_values"]).abs().max())
    grids = data["image_grid_thw"].tolist(), expected["image_grid_thw"].tolist()
    print(f"pixels     {tuple(pixels.shape)}, largest difference {difference:.2g}; grids {grids}")


if __name__ == "__main__":
    main()
