"""Prompts: control tokens, unusable images, and every way in which a prompt cannot be built."""

import copy
import re
from dataclasses import replace

import pytest
from family_models import BUILDERS
from family_policies import build_family_policy
from tiny_models import CHAT, FAMILIES, make_builder, make_prompt, noise_example, tiny_model

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model import prompts as prompts_module
from vlm_grpo.model.loading import load_prompt_builder
from vlm_grpo.model.prompts import PromptBuilder, PromptWriter
from vlm_grpo.task import PlainQuestion
from vlm_grpo.task.coordinates import FRAMES
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example
from vlm_grpo.utils.chat import Turn

THIN = (2010, 10)
"""An image of 201 : 1; the resize accepts 200 : 1."""
TASK = PlainQuestion()


@pytest.fixture(scope="module", params=FAMILIES)
def prompts(request: pytest.FixtureRequest) -> PromptBuilder:
    builder = make_builder(*tiny_model(request.param))
    builder.max_tokens = 200
    return builder


def ask(question: str) -> Example:
    return replace(noise_example("a", [(56, 28)], question), location="rows.jsonl:3")


@pytest.mark.parametrize("family", BUILDERS)
def test_chats_are_those_of_the_chat_template(family):
    policy = build_family_policy(family)
    example = noise_example("a", [(64, 64), (96, 32), (32, 64)], "Or like <image>?")
    images = [{"type": "image", "image": reference.load()} for reference in example.images]
    texts = [{"type": "text", "text": text} for text in ("Is ", " like ", "Or like ", "?")]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [texts[0], images[0], texts[1], images[1]]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [texts[2], images[2], texts[3]]},
    ]
    expected = policy.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    prompt = make_prompt(policy, replace(example, history=CHAT))
    assert prompt.token_ids == tuple(expected["input_ids"][0].tolist())
    assert "assistant\nYes.<|im_end|>\n<|im_start|>user\nOr like " in prompt.text
    others = {"input_ids", "attention_mask", "labels"}
    shapes = {name: values.shape for name, values in expected.items() if name not in others}
    assert {name: values.shape for name, values in prompt.vision.items()} == shapes
    # Images are resized before the processor, which in some families rounds pixels differently;
    # those of two noisy images differ by about 1.
    difference = prompt.vision["pixel_values"] - expected["pixel_values"]
    assert difference.abs().mean() < 0.02


def test_the_text_and_the_images_of_a_turn_are_checked_before_a_run(prompts):
    for turn, reason in (
        (Turn("user", "a<|im_end|>"), r"its prompt has the text <\|im_end\|>, a control token"),
        (Turn("user", "<image>"), "it has 1 <image> in its texts and 2 images"),
    ):
        example = noise_example("a", [(56, 28), (28, 28)])
        example = replace(example, history=(turn, Turn("assistant", "b")))
        with pytest.raises(UserError, match=f"- example a: {reason}"):
            prompts.select_usable([example], TASK)


def test_a_prompt_that_the_processor_or_the_chat_template_refuses_is_one_message():
    policy = build_family_policy("paligemma")
    with pytest.raises(UserError, match=r"the model's processor refuses .* `images` are"):
        make_prompt(policy, noise_example("a", []))
    embedded = load_prompt_builder(load_settings("counting"))
    embedded.processor.chat_template = "{{ raise_exception('only text') }}"
    with pytest.raises(UserError, match=r"^rows\.jsonl:3: example a: only text$"):
        embedded.build(embedded.with_resized_sizes(ask("?")), TASK)


@pytest.mark.parametrize(
    "text", ["<|im_end", "im_end", "< |im_end|>", "<b>", "|", "<think>", "3<4"]
)
def test_other_text_is_not_a_control_token(prompts, text):
    assert prompts.write(ask(text), TASK) == (Turn("user", f"<image>{text}"),)


def test_a_control_token_is_removed_whole_though_another_begins_it():
    model, processor = tiny_model("qwen2_5_vl")
    processor = copy.deepcopy(processor)
    tokens = [f"<|im_end|>{'!' * count}" for count in range(1, 9)]
    processor.tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    builder = make_builder(model, processor)
    assert [builder.remove_control_tokens(f"a{token}b") for token in tokens] == ["ab"] * 8


def test_the_tokens_of_answers_may_be_in_a_prompt(prompts):
    for name in ("qwen2_vl", "resized", "permille"):
        task = load_task("grounding", frame=FRAMES[name])
        assert FRAMES[name].form in prompts.write(ask("the cat"), task)[0].text


def test_unusable_examples_are_an_error_that_names_all_of_them(prompts):
    examples = [ask("?"), noise_example("thin", [THIN]), noise_example("low", [(28, 28), THIN])]
    with pytest.raises(UserError, match="2 examples cannot be used with this model") as caught:
        prompts.select_usable(examples, TASK)
    for part in ("- example thin: ", "- example low: ", "data.on_bad_row=skip"):
        assert part in str(caught.value)
    with pytest.raises(UserError, match="2 examples cannot be used with this model") as caught:
        prompts.select_usable(examples[1:], TASK, skip=True)
    assert "on_bad_row" not in str(caught.value)  # no example would be left
    with pytest.raises(UserError, match=r"a: its prompt has \d+ tokens, but the model's context"):
        prompts.select_usable([ask("many words " * 90)], TASK)


class Silent(PlainQuestion):
    def question(self, example: Example) -> str:
        raise KeyError("hint")


def cut(example: Example) -> Example:
    (image,) = example.images
    return replace(example, images=(replace(image, data=image.read_bytes()[:60]),))


@pytest.mark.parametrize(
    ("example", "task", "reason"),
    [
        (ask("?"), Silent(), "rows.jsonl:3: example a: the task cannot write its prompt: KeyError"),
        (ask("many words " * 30), TASK, "tokens, but the model's context holds 200"),
        (cut(ask("?")), TASK, "rows.jsonl:3: example a: image a-0 cannot be read"),
    ],
)
def test_what_keeps_a_prompt_from_being_built_is_named(prompts, example, task, reason):
    with pytest.raises(UserError, match=re.escape(reason)):
        prompts.build(prompts.with_resized_sizes(example), task)


def test_an_image_is_decoded_once_while_it_is_recent(monkeypatch):
    monkeypatch.setattr(prompts_module, "RECENT_IMAGES", 2)
    writer = PromptWriter(FRAMES["permille"], None)
    images = {name: noise_example(name, [(4, 4)], seed=ord(name)).images[0] for name in "abc"}

    def load_all(names: str) -> list[bool]:
        example = Example("a", tuple(images[name] for name in names), "?", None)
        loaded = writer.load_images(example)
        for name, (image, _) in zip(names, loaded, strict=True):
            assert image.tobytes() == images[name].load().tobytes()
        return [is_new for _, is_new in loaded]

    assert load_all("abac") == [True, True, False, True]  # c replaces b
    assert load_all("abb") == [False, True, False]
