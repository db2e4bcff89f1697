"""Small random models of each family's real architecture, their prompts and their completions."""

from collections.abc import Iterable, Sequence
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from PIL import Image
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from vlm_grpo.data_scripts.tiny_vlm import CHAT_TEMPLATE, SPECIAL_TOKENS
from vlm_grpo.media.images import encode_png
from vlm_grpo.model.chat_template import ChatTemplate
from vlm_grpo.model.engine.attention import use_shared_attention
from vlm_grpo.model.engine.linear import use_fast_linears
from vlm_grpo.model.engine.packing import GroupSlice, MicroBatch
from vlm_grpo.model.engine.sampling import SamplingDistribution, SamplingSettings
from vlm_grpo.model.families.known import load_family
from vlm_grpo.model.loading import LoadedModel
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.prompts import PromptBuilder, get_context_length
from vlm_grpo.task import PlainQuestion
from vlm_grpo.types import Completion, Example, ImageRef, Prompt, VideoRef
from vlm_grpo.utils.chat import Turn

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ENDS = tuple(range(70, 110))
"""So many tokens that end completions that they have many lengths."""
NORMALIZATION: dict[str, Any] = {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD}
"""That of the images, which is a clip's, too, as in Qwen3-VL's own files."""


def tiny_tokenizer(*special: str, **named: str) -> Any:
    """Build a tokenizer with one token per byte, Qwen's special tokens and additional ones; those
    in ``named`` are attributes of it, as some processors expect."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return hf.Qwen2Tokenizer(
        vocab={c: i for i, c in enumerate(alphabet)},
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*SPECIAL_TOKENS, *special],
        model_specific_special_tokens=named,
        padding_side="left",
    )


ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def text_config(tokenizer: Any, **more: Any) -> dict[str, Any]:
    """Return the settings of a small language model."""
    end, padding = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    return {
        "vocab_size": len(tokenizer), "max_position_embeddings": 4096,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]},
        "bos_token_id": None, "eos_token_id": end, "pad_token_id": padding,
        **more,
    }  # fmt: skip


VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}),
    "qwen2_5_vl": ("Qwen2_5_VL", {"depth": 2, "hidden_size": 32, "fullatt_block_indexes": [1]}),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "depth": 3, "hidden_size": 32, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
}  # fmt: skip
"""The prefix of each family's classes in transformers, and the settings of its vision tower."""


def tiny_model(
    family: str, dtype: torch.dtype = torch.float32, seed: int = 0, layers: int = 2, **own: Any
) -> tuple[Any, Any]:
    """Build a model and its processor; ``own`` are settings of the vision tower."""
    tokenizer, (prefix, vision), third = tiny_tokenizer(), VISION[family], family == "qwen3_vl"
    edge = 32 if third else 28  # of an image token in pixels
    pixels = {"shortest_edge": edge**2, "longest_edge": 64 * edge**2}
    if family != "qwen2_vl":
        vision = {"intermediate_size": 48, "out_hidden_size": 64, **vision}
    head = {"head_dim": 16} if third else {}
    tokens = {f"{name}_token_id": f"<|{name}_pad|>" for name in ("image", "video")}
    tokens |= {f"vision_{side}_token_id": f"<|vision_{side}|>" for side in ("start", "end")}
    torch.manual_seed(seed)
    config = getattr(hf, f"{prefix}Config")(
        text_config=text_config(tokenizer, num_hidden_layers=layers, **head),
        vision_config={"num_heads": 2, **vision, **own},
        tie_word_embeddings=False,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()},
    )
    model = getattr(hf, f"{prefix}ForConditionalGeneration")(config)
    videos: Any = hf.Qwen2VLVideoProcessor(size=pixels)
    if third:
        videos = hf.Qwen3VLVideoProcessor(**NORMALIZATION)
    processor = getattr(hf, f"{prefix}Processor")(
        image_processor=hf.Qwen2VLImageProcessor(size=pixels, patch_size=edge // 2),
        tokenizer=tokenizer,
        video_processor=videos,
        chat_template=CHAT_TEMPLATE,
    )
    initialize(model, tokenizer)
    return model.to(dtype), processor


def initialize(model: Any, tokenizer: Any) -> None:
    """Fill the weights with random values, and set the tokens that end a completion."""
    for module in model.modules():
        is_convolution = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        for parameter in module.parameters(recurse=False):
            if parameter.dim() >= 2:
                inputs = parameter[0].numel() if is_convolution else parameter.shape[-1]
                # Large enough to keep attention and logits far from uniform.
                nn.init.normal_(parameter, std=1.5 * inputs**-0.5)
    end, padding = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.generation_config = hf.GenerationConfig(eos_token_id=end, pad_token_id=padding)


def tiny_policy(
    family: str,
    shared: bool = True,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    **distribution: Any,
) -> Policy:
    """Build a policy from ``tiny_model(family)``, whose weights do not depend on ``shared``."""
    model, processor = tiny_model(family, dtype, layers=layers)
    if shared:
        use_shared_attention(load_family(model.config), model)
    # Chunks smaller than any batch here, so that chunking is always exercised.
    return wrap_model(model, processor, shared, chunk_tokens=7, **distribution)


def wrap_model(
    model: Any,
    processor: Any,
    shared: bool,
    adapters: Any = None,
    chunk_tokens: int = 0,
    **distribution: Any,
) -> Policy:
    """Build the policy of a model, which samples under its own distribution with these changes."""
    family = load_family(model.config)
    loaded = LoadedModel(model, make_builder(model, processor), shared, adapters)
    distribution.setdefault("banned", family.banned_token_ids(model.config, processor))
    distribution.setdefault("eos", (model.generation_config.eos_token_id,))
    return Policy(loaded, SamplingDistribution(**distribution), chunk_tokens)


def make_builder(model: Any, processor: Any) -> PromptBuilder:
    """Build the builder of a model's prompts, with its processor's own pixel budget."""
    family, limit = load_family(model.config), get_context_length(model.config)
    budget = family.pixel_budget(processor)
    return PromptBuilder(ChatTemplate(processor), family, budget, limit)


def noise_example(
    name: str, sizes: list[tuple[int, int]], question: str = "What is it?", seed: int = 0
) -> Example:
    """Build an example whose images are noise of the given sizes (width, height)."""
    random = np.random.default_rng(seed)
    images = []
    for index, (width, height) in enumerate(sizes):
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        data, size = encode_png(Image.fromarray(pixels)), (width, height)
        images.append(ImageRef(f"{name}-{index}", size, size, data=data))
    return Example(name, tuple(images), question, 0)


def noise_clip(
    name: str, size: tuple[int, int], count: int, seed: int = 0, fps: float = 2.0
) -> VideoRef:
    """Build a reference to a clip whose frames are noise of the given size."""
    frames = noise_example(name, [size] * count, seed=seed).images
    times = tuple(index / fps for index in range(count))
    return VideoRef(name, size, size, times=times, seconds=count / fps, frames=frames)


def clip_examples() -> list[Example]:
    """Build examples of clips: one with half a last pair of frames, one beside an image, two, and
    one of 40 seconds, whose last frames have larger positions in Qwen2.5-VL than later text."""
    image = noise_example("i", [(56, 84)], seed=3).images[0]
    odd, beside = noise_clip("c", (60, 40), 5, seed=1), noise_clip("d", (56, 90), 4, seed=2)
    two = noise_clip("e", (28, 56), 2), noise_clip("f", (84, 28), 6)
    return [
        Example("odd", (odd,), "When?", 0),
        Example("mixed", (image, beside), "<image> in <image>?", 0),
        Example("clips", two, "Which?", 0),
        Example("long", (noise_clip("l", (64, 64), 20, seed=4, fps=0.5),), "?", 0),
    ]


CHAT = (Turn("system", "Be brief."), Turn("user", "Is <image> like <image>"))
CHAT += (Turn("assistant", "Yes."),)


def make_prompt(policy: Policy, example: Example) -> Prompt:
    return policy.prompts.build(policy.prompts.with_resized_sizes(example), PlainQuestion())


def text_prompts(policy: Policy, words: Iterable[int]) -> list[Prompt]:
    """Build prompts without images, with questions of these numbers of words."""
    return [make_prompt(policy, noise_example(str(n), [], "What? " * n)) for n in words]


def image_prompts(policy: Policy, sizes: list[list[tuple[int, int]]]) -> list[Prompt]:
    """Build prompts with images of these sizes."""
    return [make_prompt(policy, noise_example(str(len(own)), own)) for own in sizes]


def mixed_prompts(policy: Policy, count: int) -> list[Prompt]:
    """Build prompts with zero to two images of many sizes, and questions of many lengths."""
    random = np.random.default_rng(0)
    prompts = []
    for index in range(count):
        sizes = random.integers(20, 150, (random.integers(0, 3), 2)).tolist()
        question = "What? " * int(random.integers(1, 8))
        prompts.append(make_prompt(policy, noise_example(str(index), sizes, question, seed=index)))
    return prompts


def sample_groups(
    policy: Policy,
    prompts: list[Prompt],
    group_size: int = 3,
    max_tokens: int = 100_000,
    length: int = 12,
    **settings: Any,
) -> list[tuple[Completion, ...]]:
    """Sample completions of at most ``length`` tokens, with a seed for each prompt."""
    sampling = SamplingSettings(policy.distribution, length, **settings)
    seeds = [(0, index) for index in range(len(prompts))]
    return policy.sample(prompts, sampling, group_size, seeds, max_tokens)


Groups = Sequence[tuple[Completion, ...]]


def pack_groups(prompts: list[Prompt], groups: Groups) -> MicroBatch:
    return pack_tokens(prompts, read_tokens(groups))


def pack_tokens(prompts: list[Prompt], groups: Sequence[Sequence[tuple[int, ...]]]) -> MicroBatch:
    """Build a micro-batch of the tokens of each prompt's completions."""
    slices, row = [], count()
    for prompt, group in zip(prompts, groups, strict=True):
        slices.append(GroupSlice(prompt, tuple(group), tuple(islice(row, len(group)))))
    return MicroBatch(tuple(slices))


def read_tokens(groups: Groups) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def assert_same_samples(found: Groups, expected: Groups) -> None:
    """Compare samples of models in float64: equal tokens, and log-probs that differ by rounding."""
    assert read_tokens(found) == read_tokens(expected)
    for one, other in zip(chain(*found), chain(*expected), strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-9)


def sampled_logprobs(groups: Groups) -> Tensor:
    """Return the log-probabilities recorded while sampling, of all tokens in order."""
    return torch.tensor([value for group in groups for c in group for value in c.logprobs])


def fill_adapters(model: nn.Module) -> None:
    """Draw the factors that are initially 0, which would leave the model's output unchanged."""
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)


def add_lora(policy: Policy, target_modules: list[str]) -> None:
    torch.manual_seed(1)
    get_peft_model(policy.model, LoraConfig(r=4, target_modules=target_modules))
    fill_adapters(policy.model)
    policy.adapted_layers = use_fast_linears(policy.model)
