"""A model's chat template: roles, images, the thinking switch, and the description of tools."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import repeat
from os.path import commonprefix
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from transformers.utils import chat_template_utils

from vlm_grpo.config.prompt import PromptSettings
from vlm_grpo.errors import UserError, nearest
from vlm_grpo.utils.chat import IMAGE, THINKING_SWITCHES, Role, ThinkingTags, Turn
from vlm_grpo.utils.template_sandbox import Sandbox

_SET_BY_RENDERER = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
}
"""Variables of a template that are no arguments of a user; special tokens are others."""
_QUESTION, _PROBE = Turn("user", "?"), "Be brief."
# Roles that templates give to the result of a tool, with the texts around it. Many leave out its
# images in turns of a tool, or know no such turns and write any role.
RESULT_FORMS = ("tool", "", ""), ("user", "<tool_response>\n", "\n</tool_response>")
_NO_ROLE = "nobody"
TOOLS = """# Tools

Before you answer you may call tools, one at a time. These are their signatures:
<tools>
{}
</tools>

To call one, end your text with its name and arguments as JSON between these tags:
{}
{{"name": NAME, "arguments": {{"ARGUMENT": VALUE}}}}
{}
You then read its result. When you know the answer, write it without a call."""


class ChatTemplate:
    """A model's chat template, which writes the turns of a chat as a prompt.

    ``settings`` have the system prompt and the template's arguments.
    """

    def __init__(self, processor: Any, settings: PromptSettings | None = None) -> None:
        self.processor, self.settings = processor, settings or PromptSettings()
        self._is_text: dict[Role, bool] = {}
        *_, self._known = _compile(self._text)
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

        ``TemplateError``, ``ValueError``: the template refuses the chat or has no place for a role.
        """
        parts, messages = ({"type": kind} for kind in kinds), []
        for turn in turns:
            self.check_role(turn.role)
            messages.append(_build_message(turn, self._is_text.get(turn.role, False), parts))
        return self.write(messages, self.arguments)

    def observe(self, text: str, role: str | None = None) -> str:
        """Return what stands in the prompt between a call of the model and its next text: the end
        of its turn, the result with its images, and the start of the next turn.

        ``role`` is that of what it reads; None: that of a tool's result. ``ValueError``: the
        template has no place for it behind a text of the model."""
        if role is None:
            return self._render_result(text, *self.result_form)
        self.check_role("assistant")
        return self._render_result(text, role)

    @cached_property
    def result_form(self) -> tuple[str, str, str]:
        """The role in which results of tools are given, and the texts around them.

        ``ValueError``: the template has no place for texts and images in any role."""
        self.check_role("assistant")
        text = f"left{IMAGE}right"
        shown = _find_insert(*(self.render([Turn("user", t)]) for t in (text, "leftright")))
        for role, before, after in RESULT_FORMS:
            rendered = self._render_result(text, role, before, after)
            unknown = self._render_result(text, _NO_ROLE).lower() if role == "tool" else ""
            is_known = unknown.replace(_NO_ROLE, role) != rendered.lower()
            is_dumped = re.search(r"""["']type["']: ["']""", rendered) is not None
            parts = ("left", shown or "no image", "right")
            if is_known and not is_dumped and all(part in rendered for part in parts):
                return role, before, after
        raise ValueError("the model's chat template has no place for the images of a tool's result")

    def _render_result(self, text: str, role: str, before: str = "", after: str = "") -> str:
        turn = Turn("user", f"{before}{text}{after}")
        messages = [
            _build_message(_QUESTION),
            _build_message(Turn("assistant", _PROBE), self._is_text["assistant"]),
            {"role": role, "content": turn.build_content(repeat({"type": "image"}))},
        ]
        try:
            return self.write(messages, self.arguments).partition(_PROBE)[2]
        except TemplateError:  # it refuses the role, or has no images
            return ""

    def describe_tools(self, schemas: Sequence[Mapping[str, Any]], tags: tuple[str, str]) -> str:
        """Return what the template writes of tools in the system message; empty: nothing, or it
        asks for calls that ``parse_call`` does not read between the tags."""
        messages = [_build_message(Turn("system", _PROBE), is_text=True), _build_message(_QUESTION)]
        try:
            plain = self.write(messages, self.arguments)
            written = self.write(messages, {**self.arguments, "tools": [*schemas]})
        except TemplateError:
            return ""
        found = _find_insert(written, plain)
        is_readable = tags[0] in found and ('"arguments"' in found or "<function=" in found)
        return found if is_readable else ""

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
                text = self.write([*before, message, question], self.arguments)
            except TemplateError as error:
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
            return self.write([_build_message(_QUESTION)], arguments)
        except TemplateError:  # one that needs an image
            return ""

    def write(
        self,
        messages: list[dict[str, Any]],
        arguments: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        """Return what the template makes of messages, as the processor's ``apply_chat_template``;
        raises what a template may raise."""
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        special = self.processor.tokenizer.special_tokens_map
        variables = {"tools": None, "documents": None, **special, **arguments, **given}
        sandbox, template, _ = _compile(self._text)
        return sandbox.render(template, variables)

    @property
    def _text(self) -> str:
        text = self.processor.chat_template or self.processor.tokenizer.chat_template
        return text["default"] if isinstance(text, dict) else text

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


@lru_cache(maxsize=8)
def _compile(text: str) -> tuple[Sandbox, Template, list[str]]:
    """Return the environment of transformers' chat templates, with bounds, a template of it, and
    the names of the template's arguments."""
    theirs = chat_template_utils._compile_jinja_template("").environment  # noqa: SLF001
    extensions = [type(extension) for extension in theirs.extensions.values()]
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    sandbox.globals |= {name: each for name, each in theirs.globals.items() if name != "lipsum"}
    sandbox.filters["tojson"] = sandbox.bound(theirs.filters["tojson"])
    try:
        parsed = sandbox.parse(text)
        known = find_undeclared_variables(parsed) - _SET_BY_RENDERER - set(sandbox.globals)
        template = sandbox.compile_bounded(parsed)
    except (TemplateError, RecursionError) as error:
        place = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        raise UserError(f"the model's chat template cannot be used: {place}{error}") from error
    return sandbox, template, sorted(name for name in known if not name.endswith("_token"))


def _find_insert(longer: str, shorter: str) -> str:
    """Return what a text has more than another, in one place."""
    texts = longer, shorter
    both = texts, [text[::-1] for text in texts]
    start, end = (len(commonprefix(pair)) for pair in both)  # noqa: RUF071, no paths
    return longer[start : len(longer) - end].strip()


def _build_message(
    turn: Turn, is_text: bool = False, images: Iterator[dict[str, Any]] | None = None
) -> dict[str, Any]:
    content = turn.text if is_text else turn.build_content(images or repeat({"type": "image"}))
    return {"role": turn.role, "content": content}
