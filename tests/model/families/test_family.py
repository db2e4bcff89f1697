"""The base family: tokens of answers, and the shared form of any model, also of unknown ones."""

import numpy as np
import pytest
import torch
from family_policies import build_family_policy, make_batch
from PIL import Image
from qwen_vl_utils.vision_process import fetch_image
from tiny_models import FAMILIES as QWEN
from tiny_models import make_prompt, noise_example, sample_groups, tiny_policy, tiny_tokenizer
from transformers import CONFIG_MAPPING, Cache, InternVLConfig

from vlm_grpo.model.families.family import Family, PixelBudget
from vlm_grpo.model.families.known import load_family
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.model.sharing_check import why_not_shared
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.parsing import parse_boxes
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import VideoRef

INTERNVL = [f"<{mark}{name}>" for name in ("ref", "box", "quad", "img") for mark in ("", "/")]
PALIGEMMA = [f"<loc{number:04d}>" for number in range(1024)] + ["<seg000>", "<image>"]
GLM = ["<|begin_of_box|>", "<|end_of_box|>", "<|begin_of_image|>", "<|image|>"]
FAMILIES: dict[str, tuple[str, list[str]]] = {
    "qwen2_vl": ("qwen2_vl", []),
    "resized": ("qwen2_5_vl", []),
    "permille": ("qwen3_vl", []),
    "internvl": ("internvl", [*INTERNVL, "<IMG_CONTEXT>"]),
    "glm": ("glm4v", GLM),
    "paligemma": ("paligemma", PALIGEMMA),
    "gemma4": ("gemma4", ["<|image|>", "<image|>"]),
    "fraction": ("llava", ["<image>"]),
}
"""For each family, by its coordinate frame: the type of model and additional special tokens."""


@pytest.mark.parametrize("frame", FAMILIES)
def test_decoded_boxes_can_be_parsed_and_other_special_tokens_are_removed(frame):
    kind, special = FAMILIES[frame]
    family, tokenizer = load_family(CONFIG_MAPPING[kind]()), tiny_tokenizer(*special)
    assert family.frame == frame
    boxes, size = [(64.0, 48.0, 320.0, 240.0), (0.0, 24.0, 608.0, 456.0)], (640, 480)
    written = FRAMES[frame].write_all(boxes, size, size, labels=["red mug", "cat"])
    tokens = tokenizer(written)["input_ids"]
    others = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>", "<|image_pad|>"])
    text = family.decoder(tokenizer)([*tokens, *others])
    assert text == written
    read = parse_boxes(text, y_first=FRAMES[frame].y_first)
    assert read is not None
    assert [label for _, label in read] == ["red mug", "cat"]
    if frame in ("qwen2_vl", "internvl", "glm", "paligemma"):  # the others write plain JSON
        assert tokenizer.decode(tokens, skip_special_tokens=True) != written
    assert Family().decoder(tokenizer)(tokenizer.all_special_ids) == ""
    kept = family.decoder(tokenizer)(tokenizer.all_special_ids)
    for name in ("im_", "endoftext", "vision", "image", "img", "IMG", "video"):
        assert name not in kept


def test_completions_keep_the_special_tokens_of_answers():
    policy = tiny_policy("qwen2_vl", layers=3)
    task = load_task("detection", frame=policy.prompts.frame)
    example = policy.prompts.with_resized_sizes(noise_example("a", [(56, 56)]))
    prompt = policy.prompts.build(example, task)
    (members,) = sample_groups(policy, [prompt], 8, length=64)
    start = policy.tokenizer.convert_tokens_to_ids("<|box_start|>")
    # 512 samples from about 270 tokens of a random model contain each token about twice.
    assert any(start in completion.token_ids for completion in members)
    for completion in members:
        count = completion.token_ids.count(start)
        assert completion.text.count("<|box_start|>") == count
        assert "<|im_" not in completion.text
        assert "<|endoftext|>" not in completion.text


class OtherConfig(InternVLConfig):
    model_type = "other"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mllama", "its language model reads images by cross-attention"),
        ("florence2", "it is an encoder-decoder model"),
        (
            "kosmos-2",
            "its model takes no precomputed image features (transformers 5.18 and later may)",
        ),
        ("llama4", "it has layers of the type chunked_attention"),
        (OtherConfig, "its code does not come with transformers"),
    ],
)
def test_the_reason_against_the_shared_form(kind, reason):
    config = CONFIG_MAPPING[kind]() if isinstance(kind, str) else kind()
    assert why_not_shared(Family(), config) == reason


def test_recurrent_layers_need_the_cache_of_a_newer_transformers(monkeypatch):
    monkeypatch.delattr(Cache, "get_conv_state")
    reason = "its recurrent layers need transformers 5.21 or later"
    assert why_not_shared(Family(), CONFIG_MAPPING["qwen3_5"]()) == reason
    assert why_not_shared(Family(), CONFIG_MAPPING["gemma3"]()) is None


@pytest.mark.parametrize("name", ["internvl", "qwen3_vl_moe", "qwen3_5"])
def test_a_family_that_is_unknown_shares_its_prompt(name, monkeypatch):
    known = build_family_policy(name, torch.float64, shared=True, banned=())
    prompt = make_prompt(known, noise_example("a", [(60, 40), (90, 30)]))
    config = known.model.config
    monkeypatch.setattr(type(config), "model_type", "novel_vl")
    assert type(load_family(config)) is Family
    novel = build_family_policy(name, torch.float64, shared=True, banned=())
    assert type(novel.family) is Family
    [found], [expected] = (sample_groups(policy, [prompt]) for policy in (novel, known))
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    batch = make_batch([prompt])
    found, expected = novel.score(batch).logprobs, known.score(batch).logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [(60, 40), (10, 12), (500, 300)])
def test_images_of_qwen_are_those_that_its_package_makes(size):
    policy = tiny_policy("qwen3_vl")
    example = noise_example("a", [size])
    [(image, _)] = policy.prompts.load_images(example)
    bounds = vars(policy.prompts.budget) | {"image": example.images[0].load()}
    expected = fetch_image(bounds, image_patch_size=16)
    assert (image.size, image.tobytes()) == (expected.size, expected.tobytes())


def test_images_are_resized_with_the_filter_of_the_processor(monkeypatch):
    known = tiny_policy("qwen2_5_vl").prompts
    nearest = Image.Resampling.NEAREST
    monkeypatch.setattr(known.processor.image_processor, "resample", nearest)
    example = noise_example("a", [(500, 300)])
    builder = PromptBuilder(known.chat, known.family, known.budget, None)
    [(image, _)] = builder.load_images(builder.with_resized_sizes(example))
    assert image.size != (500, 300)
    assert image.tobytes() == example.images[0].load().resize(image.size, nearest).tobytes()


@pytest.mark.parametrize(("frames", "most"), [(2, 1000), (10, 300), (40, 100)])
def test_the_frames_of_a_clip_share_its_pixels_down_to_the_minimum(frames, most):
    clip = VideoRef("clip.mp4", (640, 480), (640, 480), times=(0.0,) * frames)
    assert PixelBudget(100, 1000, 3000).share(clip) == PixelBudget(100, most, 3000)


@pytest.mark.parametrize("family", QWEN)
def test_a_prompt_truncated_inside_an_image_is_refused(family):
    policy = tiny_policy(family)
    prompt = make_prompt(policy, noise_example("a", [(56, 56)]))
    image = policy.model.config.image_token_id
    first = prompt.token_ids.index(image)
    features = policy.family.encode_images(policy.model, policy.family.split_images(prompt))
    tokens = np.array([prompt.token_ids[: first + 1]])
    positions = torch.zeros(3, 1, first + 1, dtype=torch.long)
    with pytest.raises(ValueError, match="has 1 image tokens but its images have 4 features"):
        policy.family.run(policy.model, tokens, positions, features, None)
