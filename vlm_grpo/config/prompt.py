"""Settings of the prompt: the system message, the user message and the model's chat template."""

from functools import lru_cache
from typing import Annotated, Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.meta import find_undeclared_variables
from pydantic import AfterValidator, Field, field_validator

from vlm_grpo.config.section import Frozen
from vlm_grpo.errors import nearest
from vlm_grpo.task import FAILURES, Task, write_prompt
from vlm_grpo.types import Example
from vlm_grpo.utils.chat import THINKING_SWITCHES, Turn, place_images
from vlm_grpo.utils.template_sandbox import Sandbox

VARIABLES = ("question", "instruction", "id", "source", "meta")
"""Variables of ``prompt.template``."""
_SANDBOX = Sandbox(undefined=StrictUndefined)
MessageTemplate = Annotated[str, AfterValidator(lambda text: compile_template(text) and text)]


class PromptSettings(Frozen):
    """The prompt around each question."""

    system: str | None = Field(default=None, min_length=1)
    """System message of examples whose row has none; None: none, or what the chat template adds
    itself."""
    template: MessageTemplate | None = None
    """Jinja template of the user message, with the variables ``question``, ``instruction`` (the
    task's, on how to answer), ``id``, ``source`` (its name in a mixture) and ``meta`` (the row's
    other columns); ``<image>`` stands for an image. None: the question and the instruction."""
    thinking: bool | None = None
    """Switch of the model's own thinking, in its chat template; None: the template's default."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of the model's chat template; empty: its defaults."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in THINKING_SWITCHES:
            if name in value:
                raise ValueError(f"has {name}: it is prompt.thinking here")
        return value

    def write_chat(self, example: Example, task: Task) -> tuple[Turn, ...]:
        """Return the chat of an example, in which each image has its ``<image>``; raise
        ``ValueError`` if the task or the template cannot write it."""
        turns = example.history
        if self.system is not None and not (turns and turns[0].role == "system"):
            turns = Turn("system", self.system), *turns
        message = Turn("user", self._write_message(example, task))
        return place_images((*turns, message), len(example.images))

    def _write_message(self, example: Example, task: Task) -> str:
        if self.template is None:
            return write_prompt(task, example)
        try:
            variables = {
                "question": task.question(example),
                "instruction": task.instructions(example),
                "id": example.id,
                "source": example.source,
                "meta": example.meta,
            }
            return _SANDBOX.render(compile_template(self.template), variables)
        except FAILURES as error:  # of the template, or of a user's question
            raise ValueError(f"prompt.template: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=8)
def compile_template(text: str) -> Template:
    """Compile the template of a user message, which runs in a sandbox, or raise ``ValueError``."""
    try:
        parsed = _SANDBOX.parse(text)
        unknown = find_undeclared_variables(parsed) - {*VARIABLES, *_SANDBOX.globals}
        for name in parsed.find_all(nodes.Name):
            if name.name in unknown:
                raise ValueError(
                    f"line {name.lineno} has the unknown name {name.name}"
                    f"{nearest(name.name, VARIABLES)}; it may use {', '.join(VARIABLES)}"
                )
        return _SANDBOX.compile_bounded(parsed)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} is not Jinja: {error.message}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except TemplateError as error:
        raise ValueError(f"is not Jinja: {error}") from error
