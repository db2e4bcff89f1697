"""The chat template of a model, with the arguments of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment

from vlm_grpo.config.prompt import THINKING_SWITCHES, PromptSettings
from vlm_grpo.errors import UserError, nearest
from vlm_grpo.utils.chat import IMAGE, Role, ThinkingTags, Turn

# transformers' own tag, which Jinja does not know.
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_SET_BY_RENDERER = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("raise_exception", "strftime_now"),
}
"""Variables of a template that are no arguments of a user; special tokens are others."""
_QUESTION, _PROBE = Turn("user", "?"), "Be brief."


class ChatTemplate:
    """A model's chat template, which writes the turns of a chat as a prompt.

    ``settings`` have the system prompt and the template's arguments.
    """

    def __init__(self, processor: Any, settings: PromptSettings | None = None) -> None:
        self.processor, self.settings = processor, settings or PromptSettings()
        self._is_text: dict[Role, bool] = {}
        self._known = self._find_arguments()
        self.switch = next(filter(self._is_switch, THINKING_SWITCHES), None)
        self.arguments = self._check_arguments()
        if self.settings.system is not None:
            try:
                self.check_role("system")
            except ValueError as error:
                raise UserError(
                    f"prompt.system: {error}: remove it, and give the instruction in the question "
                    "or with task_options.instruction"
                ) from error

    def render(self, turns: Sequence[Turn], kinds: Iterable[str] = repeat("image")) -> str:
        """Return the prompt of a chat; ``kinds`` tell what each ``<image>`` in it stands for.

        ``TemplateError`` and ``ValueError``: the template refuses the chat, or has no place for a
        role.
        """
        parts, messages = ({"type": kind} for kind in kinds), []
        for turn in turns:
            self.check_role(turn.role)
            messages.append(_build_message(turn, self._is_text.get(turn.role, False), parts))
        return self._render(messages, self.arguments)

    @cached_property
    def moves_images(self) -> bool:
        """Whether the template places an image elsewhere than between the texts of its turn."""
        text = self.render([Turn("user", f"left{IMAGE}right")])
        return not text.partition("left")[2].partition("right")[0].strip()

    def check_role(self, role: Role) -> None:
        """Raise ``ValueError`` if the template refuses texts of a role, or leaves them out."""
        if role == "user" or role in self._is_text:
            return
        question = _build_message(_QUESTION)
        before = [question] if role == "assistant" else []
        problem = "leaves it out"
        for is_text in (True, False):  # templates read one form or both
            message = _build_message(Turn(role, _PROBE), is_text)
            try:
                text = self._render([*before, message, question], self.arguments)
            except (TemplateError, TypeError) as error:
                problem = f"refuses it ({error})"
                continue
            if _PROBE in text and "'type': 'text'" not in text:
                self._is_text[role] = is_text
                return
        raise ValueError(f"the model's chat template has no place for a turn of {role}: {problem}")

    def read_thinking(self, tags: tuple[str, str]) -> ThinkingTags:
        """Return how completions mark their thinking, with the family's thinking tags."""
        text = self._probe(self.arguments)
        is_open = text.rstrip().endswith(tags[0])
        is_on = self.switch is not None and text == self._probe({self.switch: True})
        return ThinkingTags(*tags, is_open=is_open, is_native=is_open or is_on)

    def _is_switch(self, name: str) -> bool:
        return name in self._known and self._probe({name: True}) != self._probe({name: False})

    def _probe(self, arguments: Mapping[str, Any]) -> str:
        """Return the prompt of a question; empty if the template cannot write it."""
        arguments = {**self.settings.chat_template_kwargs, **arguments}
        try:
            return self._render([_build_message(_QUESTION)], arguments)
        except (TemplateError, TypeError, ValueError):  # such as one that needs an image
            return ""

    def _render(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        return self.processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **arguments
        )

    def _find_arguments(self) -> list[str]:
        template = self.processor.chat_template or self.processor.tokenizer.chat_template
        if isinstance(template, dict):
            template = template["default"]
        environment = SandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        parsed = environment.parse(_GENERATION_TAG.sub("", template))
        known = find_undeclared_variables(parsed) - _SET_BY_RENDERER - set(environment.globals)
        return sorted(name for name in known if not name.endswith("_token"))

    def _check_arguments(self) -> dict[str, Any]:
        arguments, thinking = dict(self.settings.chat_template_kwargs), self.settings.thinking
        for name in arguments:
            if name not in self._known:
                raise UserError(
                    f"prompt.chat_template_kwargs.{name}: the model's chat template has no such "
                    f"variable{nearest(name, self._known)}; it has "
                    f"{', '.join(self._known) or 'none'}"
                )
        if thinking is not None and self.switch is None:
            raise UserError(
                f"prompt.thinking={str(thinking).lower()}: the model's chat template has no switch "
                f"({' or '.join(THINKING_SWITCHES)}): remove it; task_options.thinking=true asks "
                "for a thinking in words"
            )
        return arguments if thinking is None else {**arguments, str(self.switch): thinking}


def _build_message(
    turn: Turn, is_text: bool = False, images: Iterator[dict[str, Any]] | None = None
) -> dict[str, Any]:
    content = turn.text if is_text else turn.build_content(images or repeat({"type": "image"}))
    return {"role": turn.role, "content": content}
