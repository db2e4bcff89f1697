"""Settings of the prompt: the template of the user message, the system prompt, and moved names."""

from dataclasses import replace
from typing import Any

import pytest
from tiny_models import noise_example

from vlm_grpo import UserError, load_settings, load_task
from vlm_grpo.config.prompt import PromptSettings
from vlm_grpo.utils.chat import Turn

TASK = load_task("counting", tags=True, instruction="Be exact.")
EXAMPLE = replace(noise_example("a", [(8, 8)], "How many?"), meta={"hint": "Look left."})
HOW = "Be exact. Give only the final answer inside <answer> </answer>."


def write(text: str | None, **settings: Any) -> str:
    (turn,) = PromptSettings(template=text, **settings).write_chat(EXAMPLE, TASK)
    return turn.text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, f"<image>How many? {HOW}"),
        ("{{ question }}\n{{ instruction }}", f"<image>How many?\n{HOW}"),
        ("{{ meta.hint }} {{ question | upper }}\n", "<image>Look left. HOW MANY?"),
        ("Q{{ id }}: {{ question }} <image>", "Qa: How many? <image>"),
        ("{% if meta.hint %}{{ meta['hint'] }}{% endif %}", "<image>Look left."),
        ("{% for n in range(2) %}{{ n }}{% endfor %}", "<image>01"),
    ],
)
def test_a_template_writes_the_user_message(template, expected):
    assert write(template) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ question }\n", "line 1 is not Jinja: "),
        ("{{ question }}\n{% if id %}x", "line 2 is not Jinja: "),
        ("{{ question }}\n{{ qestion }}", r"line 2 has the unknown name qestion \(did you mean qu"),
        ("{{ answer }}", "line 1 has the unknown name answer; it may use question, "),
        ("{{ question | sqeeze }}", "line 1 is not Jinja: No filter named 'sqeeze'"),
        ("{{ " + 3000 * "(" + "id" + 3000 * ")" + " }}", "is nested too deeply"),
    ],
)
def test_a_wrong_template_is_refused_at_the_start_with_its_line(template, reason):
    with pytest.raises(UserError, match=f"prompt.template=.* {reason}"):
        load_settings("quickstart", prompt={"template": template})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ meta.clue }}", "prompt.template: UndefinedError: 'dict object' has no attribute"),
        ("{{ 9999 * ('x' * 9999) }}", "prompt.template: TemplateError: an operation may make"),
        ("{{ question.__class__.__mro__ }}", "prompt.template: SecurityError"),
        ("{{ meta.update(x=1) }}", "prompt.template: SecurityError"),
        ("{{ 1 / 0 }}", "prompt.template: TemplateError: ZeroDivisionError: division by zero"),
        ("<image> and <image>", "it has 2 <image> in its texts and 1 images"),
    ],
)
def test_a_template_that_fails_on_an_example_is_a_value_error(template, reason):
    with pytest.raises(ValueError, match=reason):
        write(template)


def test_the_system_prompt_of_a_row_replaces_that_of_the_settings():
    settings = PromptSettings(system="Be brief.")
    assert settings.write_chat(EXAMPLE, TASK)[0] == Turn("system", "Be brief.")
    own = replace(EXAMPLE, history=(Turn("system", "Be exact."),))
    assert settings.write_chat(own, TASK)[0] == Turn("system", "Be exact.")
    later = replace(EXAMPLE, history=(Turn("user", "a"), Turn("assistant", "b")))
    roles = [turn.role for turn in settings.write_chat(later, TASK)]
    assert roles == ["system", "user", "assistant", "user"]


def test_the_switch_of_the_thinking_has_one_name():
    with pytest.raises(UserError, match=r"enable_thinking: it is prompt\.thinking here"):
        load_settings("quickstart", ["prompt.chat_template_kwargs={enable_thinking: 1}"])


@pytest.mark.parametrize(
    "text", ["{{ question }} Twice: ?", "Twice: {{ question }}", "{% if id %}#1{% endif %}"]
)
@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_a_template_is_written_in_a_command_with_quotes_or_without(text, quote):
    settings = load_settings("quickstart", [f"prompt.template={quote}{text}{quote}"])
    assert settings.prompt.template == text
