"""The chat template of a model, with the system prompt and the arguments of a run."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.errors import UserError, nearest

_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""transformers' own tag, which Jinja does not know."""
_SET_BY_RENDERER = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("raise_exception", "strftime_now"),
}
"""Variables of a template that are no arguments of a user; special tokens are others."""


class ChatTemplate:
    """A model's chat template, which writes a user message and its images as a prompt.

    Args:
        processor: the model's processor.
        policy: its ``system_prompt`` and ``chat_template_kwargs``.

    Raises:
        UserError: the template has no such argument, or no place for a system prompt.
    """

    def __init__(self, processor: Any, policy: PolicySettings | None = None) -> None:
        policy = policy or PolicySettings()
        self.processor, self.system_prompt = processor, policy.system_prompt
        self.arguments = policy.chat_template_kwargs
        self._system: list[dict[str, Any]] = []
        if self.arguments:
            self._check_arguments()
        if self.system_prompt is not None:
            self._system = self._find_system_message(self.system_prompt)

    def render(self, message: str, num_images: int) -> str:
        """Return the prompt of a user message, with its images before its text.

        Raises:
            TemplateError: the template refuses the message.
        """
        return self._render(self._system, message, num_images)

    def _render(self, system: list[dict[str, Any]], message: str, num_images: int) -> str:
        content: list[dict[str, str]] = [{"type": "image"} for _ in range(num_images)]
        content.append({"type": "text", "text": message})
        return self.processor.apply_chat_template(
            [*system, {"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
            **self.arguments,
        )

    def _check_arguments(self) -> None:
        template = self.processor.chat_template or self.processor.tokenizer.chat_template
        if isinstance(template, dict):
            template = template["default"]
        environment = SandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        parsed = environment.parse(_GENERATION_TAG.sub("", template))
        known = find_undeclared_variables(parsed) - _SET_BY_RENDERER - set(environment.globals)
        known = sorted(name for name in known if not name.endswith("_token"))
        for name in self.arguments:
            if name not in known:
                raise UserError(
                    f"policy.chat_template_kwargs.{name}: the model's chat template has no such "
                    f"variable{nearest(name, known)}; it has {', '.join(known) or 'none'}"
                )

    def _find_system_message(self, prompt: str) -> list[dict[str, Any]]:
        """Return the system message in the form that the template writes in full."""
        problem = "leaves it out"
        for content in (prompt, [{"type": "text", "text": prompt}]):
            system = [{"role": "system", "content": content}]
            try:
                text = self._render(system, "?", 0)
            except (TemplateError, TypeError) as error:
                problem = f"refuses it ({error})"
                continue
            if prompt.strip() in text and "'type': 'text'" not in text:
                return system
        raise UserError(
            f"policy.system_prompt: the model's chat template {problem}: remove it, and give the "
            "instruction in the question or with task_options.instruction"
        )
