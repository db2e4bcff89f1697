"""Each family's parts, special tokens and image sizes, on small models of real architectures."""

import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from family_models import BUILDERS
from family_policies import build_family_model
from family_table import TITLES, VARIANTS, build_count, build_table
from PIL import Image
from tiny_models import FAMILIES, tiny_model
from torch import nn

from vlm_grpo.config.policy import LoraSettings, PolicySettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.adapters import apply_lora_or_freeze
from vlm_grpo.model.chat_template import ChatTemplate
from vlm_grpo.model.engine.sampling import build_sampling_distribution
from vlm_grpo.model.families.family import Family, find_part
from vlm_grpo.model.families.known import FAMILIES as KNOWN
from vlm_grpo.model.families.known import load_family
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.model.sharing_check import why_not_shared
from vlm_grpo.task import PlainQuestion
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.types import Example

NAMES = [*FAMILIES, *BUILDERS]
GUIDE = (Path(__file__).parents[3] / "docs/families.md").read_text("utf-8")
build = cache(build_family_model)


def tokenize(processor: Any, family: Family, sizes: list[tuple[int, int]], text: str) -> list[int]:
    """Return the tokens of a prompt with blank images of the given sizes."""
    content = [*({"type": "image"} for _ in sizes), {"type": "text", "text": text}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    images: dict[str, Any] = {}
    if sizes:
        images["images"] = [[Image.new("RGB", size) for size in sizes]]
        if family.pixel_budget(processor) is not None:  # they have been resized
            images["images_kwargs"] = {"do_resize": False}
    return processor(text=[prompt], return_tensors="pt", **images)["input_ids"][0].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_has_a_part_and_freezing_a_part_freezes_exactly_it(name):
    model = build(name)[0]
    assert load_family(model.config).frame in FRAMES
    # What is never trained, and towers of sound.
    names = {n for n, w in model.named_parameters() if w.requires_grad and "audio" not in n}
    assert {find_part(n) for n in names} == {"vision", "projector", "language"}
    for part in ("vision", "projector", "language"):
        apply_lora_or_freeze(model, PolicySettings(freeze=(part,)))
        frozen = {n for n in names if not model.get_parameter(n).requires_grad}
        for n in names:
            model.get_parameter(n).requires_grad_(True)
        assert frozen == {n for n in names if find_part(n) == part}


@pytest.mark.parametrize("name", NAMES)
def test_default_adapters_are_on_the_linear_layers_of_the_language_model(name):
    model, _ = build_family_model(name)
    linear = {n for n, module in model.named_modules() if isinstance(module, nn.Linear)}
    expected = {n for n in linear if find_part(n) == "language" and not n.endswith("lm_head")}
    if name == "glm4v_moe":  # PEFT reads these names as those of the experts
        expected = {n for n in expected if not n.endswith(("gate_proj", "up_proj", "down_proj"))}
    apply_lora_or_freeze(model, PolicySettings(lora=LoraSettings(r=2)))
    trained = {n for n, weight in model.named_parameters() if weight.requires_grad}
    assert {n.partition(".lora_")[0] for n in trained} == expected
    kinds = {n.rpartition(".")[2] for n in expected}
    assert "q_proj" in kinds
    if name.startswith(("qwen3_5", "qwen4")):  # the projections of the gated-delta layers
        assert {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"} <= kinds
    # The experts of a layer are one tensor, which is no linear layer.
    assert not any(".experts." in n for n in expected)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_images_are_banned_and_refused_in_prompts(name):
    model, processor = build(name)
    family, tokenizer = load_family(model.config), processor.tokenizer
    with_images = tokenize(processor, family, [(224, 224), (448, 224)], "What?")
    question = [{"role": "user", "content": [{"type": "text", "text": "What?"}]}]
    text = processor.apply_chat_template(question, tokenize=False)
    text_alone = set(tokenizer(text)["input_ids"])
    inserted = (set(with_images) - text_alone) & set(tokenizer.added_tokens_decoder)
    inserted.discard(tokenizer.bos_token_id)
    rollout = load_settings("counting").rollout
    distribution = build_sampling_distribution(model, processor, family, rollout)
    banned = set(distribution.banned)
    assert {model.config.image_token_id} <= inserted <= banned
    assert not banned & {*distribution.eos, tokenizer.eos_token_id, None}
    builder = PromptBuilder(ChatTemplate(processor), family, None, None)
    for token in tokenizer.convert_ids_to_tokens(sorted(banned)):
        stands_for_image = "it has 1 <image> in its texts and 0 images"  # the form of all rows
        reason = stands_for_image if token == "<image>" else "a control token of the model"
        with pytest.raises(UserError, match=reason):
            builder.write(Example("a", (), f"What is {token}?", None), PlainQuestion())
    for mark in ("<|object_ref_start|>", "<box>", "<|begin_of_box|>", "<loc0001>"):
        assert tokenizer.convert_tokens_to_ids(mark) not in banned


@pytest.mark.parametrize("name", NAMES)
def test_resized_sizes_and_numbers_of_tokens_are_those_of_the_processor(name):
    model, processor = build(name)
    family, rng = load_family(model.config), random.Random(name)
    budget = family.pixel_budget(processor)
    for _ in range(8):
        size = (rng.randint(20, 300), rng.randint(20, 300))
        if budget is None:
            counted = family.image_tokens(size, processor)
            if name in ("internvl", "idefics3", "mistral3") or name.startswith("llava"):
                marks = tokenize(processor, family, [], "")  # of which one has the image's place
                found = len(tokenize(processor, family, [size], "")) - len(marks)
                assert found == counted
            continue
        resized = family.resized_size(size, budget, processor)
        assert budget.min_pixels <= resized[0] * resized[1] <= budget.max_pixels
        ids = tokenize(processor, family, [resized], "")
        assert ids.count(model.config.image_token_id) == family.image_tokens(resized, processor)
        # Alone, the processor resizes to the same number of tokens.
        alone = processor.image_processor(Image.new("RGB", size), return_tensors="pt")
        patch = processor.image_processor.patch_size
        assert alone["image_grid_thw"][0, 1:].tolist() == [resized[1] // patch, resized[0] // patch]


def test_tokens_of_images_that_are_not_marked_as_special_are_refused():
    model, processor = tiny_model("qwen2_5_vl")
    processor.tokenizer.add_tokens(["<row_7_col_7>"])
    builder = PromptBuilder(ChatTemplate(processor), load_family(model.config), None, None)
    with pytest.raises(UserError, match="<row_7_col_7>, a control token of the model"):
        builder.write(Example("a", (), "What is <row_7_col_7>?", None), PlainQuestion())


def test_the_guide_has_the_table_of_all_families_and_their_differences_from_transformers():
    # `python tests/helpers/family_table.py` prints the table, and measures the differences;
    # test_every_family.py has the bounds.
    assert build_table(build) in GUIDE
    assert build_count() in GUIDE
    known = {kind for family in KNOWN for kind in family.model_types}
    # The code of Kimi-VL comes with the model.
    assert known - {"gemma4_unified", "kimi_vl"} <= set(TITLES)
    rows = re.findall(r"^\| (.*) \| (shared|repeated: .*) \| (\S+) \| (\S+) \|$", GUIDE, re.M)
    assert [row[0] for row in rows] == list((TITLES | VARIANTS).values())
    for name, (_, prompt, logprobs, gradient) in zip(TITLES | VARIANTS, rows, strict=True):
        config = build(name)[0].config
        reason = why_not_shared(load_family(config), config)
        assert prompt == ("shared" if reason is None else f"repeated: {reason}")
        if reason is not None:
            assert (logprobs, gradient) == ("—", "—")
            continue
        # Gated-delta layers compute in float32, and so does a softmax of capped scores.
        bounds = (1e-4, 1e-3) if name.startswith(("qwen3_5", "minicpm")) else (1e-9, 1e-6)
        bounds = (1e-6, 1e-6) if name == "paligemma2" else bounds
        assert float(logprobs) <= bounds[0]
        assert 0 < float(gradient) <= bounds[1]
