"""Chat templates: system prompts and arguments reach every prompt, or are one clear error."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tiny_models import noise_example, tiny_model

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.run import Settings
from vlm_grpo.data_scripts.tiny_vlm import CHAT_TEMPLATE
from vlm_grpo.errors import UserError
from vlm_grpo.families import load_family
from vlm_grpo.model.chat import ChatTemplate
from vlm_grpo.model.policy import load_policy
from vlm_grpo.model.prompts import PromptBuilder, load_prompt_builder
from vlm_grpo.planning.prompt_sizes import PromptCounter
from vlm_grpo.task import PlainQuestion

THINKING = CHAT_TEMPLATE + (
    "{% set tokens = bos_token is defined %}"
    "{% generation %}{% if add_generation_prompt and enable_thinking is defined "
    "and not enable_thinking %}<think></think>{% endif %}{% endgeneration %}"
)
TEXT_ONLY = CHAT_TEMPLATE.replace("{% if message['content'] is string %}", "{% if false %}")
NO_SYSTEM = CHAT_TEMPLATE.replace(
    "<|im_start|>{{ message['role'] }}",
    "{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}",
)
IGNORED = "{% for message in messages if message['role'] == 'user' %}User{% endfor %}"
DUMPED = CHAT_TEMPLATE.replace(
    "{% if message['content'] is string %}{{ message['content'] }}",
    "{% if message['content'] is string %}{% elif message['role'] == 'system' %}"
    "{{ message['content'] }}",
)


def make_chat(template: str, **policy: Any) -> ChatTemplate:
    processor = tiny_model("qwen2_5_vl")[1]
    processor.chat_template = template
    return ChatTemplate(processor, PolicySettings(**policy))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, TEXT_ONLY])
def test_a_system_prompt_precedes_the_question(template: str) -> None:
    chat = make_chat(template, system_prompt="Be brief.")
    assert chat.render("Where?", 1) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Where?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_arguments_reach_the_template() -> None:
    end = "<|im_start|>assistant\n"
    assert make_chat(THINKING).render("Where?", 0).endswith(end)
    chat = make_chat(THINKING, chat_template_kwargs={"enable_thinking": False})
    assert chat.render("Where?", 0).endswith(f"{end}<think></think>")


@pytest.mark.parametrize(
    "name", ["enable_thinkin", "messages", "bos_token", "add_generation_prompt"]
)
def test_an_argument_that_the_template_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(
        UserError, match=r"has no such variable.*; it has enable_thinking$"
    ) as error:
        make_chat(THINKING, chat_template_kwargs={name: False})
    assert str(error.value).startswith(f"policy.chat_template_kwargs.{name}: ")
    with pytest.raises(UserError, match=r"; it has none$"):
        make_chat(CHAT_TEMPLATE, chat_template_kwargs={name: False})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (NO_SYSTEM, r"refuses it \(no system role\): remove it"),
        (IGNORED, "leaves it out: remove it"),
        (DUMPED, "leaves it out: remove it"),
    ],
)
def test_a_system_prompt_without_a_place_is_refused(template: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"^policy.system_prompt: the model's .* {reason}"):
        make_chat(template, system_prompt="Be brief.")


def test_a_control_token_in_the_system_prompt_is_refused() -> None:
    model, processor = tiny_model("qwen2_5_vl")
    chat = ChatTemplate(processor, PolicySettings(system_prompt="See <|image_pad|>."))
    with pytest.raises(UserError, match=r"system_prompt has the text <\|image_pad\|>, a control"):
        PromptBuilder(chat, load_family(model.config), None, None)


def test_all_prompts_of_a_run_have_its_system_prompt() -> None:
    policy = {"system_prompt": "Be brief.", "dtype": "float32"}
    settings = Settings.model_validate(
        {"task": "counting", "data": {"train": "embedded:counting"}, "policy": policy}
    )
    example, task = noise_example("a", [(56, 28)]), PlainQuestion()
    builder = load_prompt_builder(settings)
    prompt = builder.build(builder.with_resized_sizes(example), task)
    assert prompt.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    loaded = load_policy(settings, training=False)
    copies = loaded.prompts, pickle.loads(pickle.dumps(builder))
    for other in copies:  # in the process of the policy, and in a worker process
        assert other.build(other.with_resized_sizes(example), task).text == prompt.text
    sizes = PromptCounter([example], task, builder.family, builder.chat).count(builder.budget)
    assert [size.tokens for size in sizes] == [len(prompt.token_ids)]
