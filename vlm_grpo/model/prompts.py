"""Prompts: examples as the input of one model, written by its chat template."""

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from PIL import Image

from vlm_grpo.config.prompt import PromptSettings
from vlm_grpo.errors import UserError, list_bad_rows
from vlm_grpo.model.chat_template import RESULT_FORMS, TOOLS, ChatTemplate
from vlm_grpo.model.engine.packing import RECENT_IMAGES
from vlm_grpo.model.families.family import Family, PixelBudget
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import FRAMES, CoordinateFrame
from vlm_grpo.types import Example, ImageRef, Observed, Prompt, VideoRef
from vlm_grpo.utils.chat import IMAGE, THINK_TAGS, ThinkingTags, Turn

logger = logging.getLogger(__name__)


class PromptWriter:
    """A writer of chats and of the images in them, for a generic model.

    Without a pixel budget, images keep their size.
    """

    resample: int = Image.Resampling.BICUBIC  # filter with which images are resized

    def __init__(
        self,
        frame: CoordinateFrame,
        budget: PixelBudget | None,
        settings: PromptSettings | None = None,
        thinking_tags: ThinkingTags = THINK_TAGS,
    ) -> None:
        self.frame, self.budget = frame, budget
        self.settings = settings or PromptSettings()
        self.thinking_tags = thinking_tags
        self.takes_videos = False
        # Examples share a decoded image, which the first of them counts.
        self._decode = lru_cache(RECENT_IMAGES)(self._load_image)

    def with_resized_sizes(self, example: Example) -> Example:
        """Return the example with each image's ``resized_size``; ``ValueError``: it has none."""
        if (budget := self.budget) is None:
            return example
        return example.with_resized_sizes(
            self._resized_size(image.size, budget.share(image)) for image in example.images
        )

    def adapt(self, task: Task) -> Task:
        """Return the task with the model's coordinate frame and thinking tags."""
        return replace(task, frame=self.frame, thinking_tags=self.thinking_tags)

    def write(self, example: Example, task: Task) -> tuple[Turn, ...]:
        """Return the chat of an example, as ``PromptSettings.write_chat``."""
        if not self.takes_videos and any(image.kind == "video" for image in example.images):
            raise UserError(
                f"{example.name}: it has a video, which only Qwen2-VL, Qwen2.5-VL, Qwen3-VL and "
                "Qwen3.5 take here: give its frames as images"
            )
        try:
            turns = self.settings.write_chat(example, task)
        except ValueError as error:
            raise UserError(f"{example.name}: {error}") from error
        environment = task.resolve(example)[1].environment
        if environment is None:
            return turns
        tools = self.describe_tools(environment.describe(example), environment.call_tags)
        if turns[0].role == "system":
            return (replace(turns[0], text=f"{turns[0].text}\n\n{tools}"), *turns[1:])
        return (Turn("system", tools), *turns)

    def describe_tools(self, schemas: Sequence[Mapping[str, Any]], tags: tuple[str, str]) -> str:
        """Return the text of the system message that describes tools, with the tags of a call."""
        return TOOLS.format("\n".join(json.dumps(schema) for schema in schemas), *tags)

    def write_result(self, observed: Observed) -> Turn:
        """Return a tool's result as a turn of the user, which shows its images everywhere."""
        _, before, after = RESULT_FORMS[-1]
        return Turn("user", f"{before}{self.remove_control_tokens(observed.text)}{after}")

    def remove_control_tokens(self, text: str) -> str:
        """Return a text without control tokens of the model, of which none is known."""
        return text

    def load_images(self, example: Example) -> list[tuple[Image.Image, bool]]:
        """Return the example's images with their changes, and whether this call decoded each."""
        references = [image for image in example.images if image.kind == "image"]
        try:
            decoded = [self._decode(reference.clean) for reference in references]
        except ValueError as error:
            raise UserError(f"{example.name}: {error}") from error
        return [
            (reference.change(image) if reference.change else image, new.pop(0, False))
            for reference, (image, new) in zip(references, decoded, strict=True)
        ]

    def load_videos(self, example: Example) -> list[tuple[VideoRef, list[Image.Image]]]:
        """Return the example's clips with their resized frames, which are not kept."""
        videos = [image for image in example.images if isinstance(image, VideoRef)]
        try:
            return [(v, v.load_frames(partial(self._fit, reference=v))) for v in videos]
        except ValueError as error:
            raise UserError(f"{example.name}: {error}") from error

    def select_usable(
        self,
        examples: Sequence[Example],
        task: Task,
        skip: bool = False,
        check: Callable[[Example], object] = lambda example: None,
    ) -> Sequence[Example]:
        """Return the examples that the model can use, as far as can be told without their pixels.

        ``check`` raises ``UserError`` for an example that cannot be used for another reason. With
        ``skip`` unusable examples are left out, but not if all are.
        """
        usable: list[Example] = []
        problems: list[str] = []
        for example in examples:
            try:
                resized = self.with_resized_sizes(example)
                self.write(resized, task)
                check(resized)
            except UserError as error:
                problems.append(str(error))
            except ValueError as error:  # of the resizing
                problems.append(f"{example.name}: {error}")
            else:
                usable.append(example)
        if problems and not (skip and usable):
            remedy = "remove them, or skip them with data.on_bad_row=skip" if usable else "fix them"
            raise UserError(
                f"{len(problems)} examples cannot be used with this model:\n"
                f"{list_bad_rows(problems)}\n{remedy}"
            )
        if problems:
            logger.warning(
                "skipped %d examples that cannot be used with this model:\n%s",
                len(problems),
                list_bad_rows(problems, 5),
            )
        return usable if problems else examples

    def _resized_size(self, size: tuple[int, int], budget: PixelBudget) -> tuple[int, int]:
        pixels = size[0] * size[1]
        scale = math.sqrt(min(max(pixels, budget.min_pixels), budget.max_pixels) / pixels)
        return max(1, int(size[0] * scale)), max(1, int(size[1] * scale))

    def _load_image(self, reference: ImageRef) -> tuple[Image.Image, dict[int, bool]]:
        return self._fit(reference.load(), reference), {0: True}  # as long as it is not counted

    def _fit(self, image: Image.Image, reference: ImageRef) -> Image.Image:
        if self.budget is None:
            return image
        size = self._resized_size(image.size, self.budget.share(reference))
        return image if size == image.size else image.resize(size, self.resample)


class PromptBuilder(PromptWriter):
    """A builder of one model's prompts, which needs the model's processor but not its weights.

    Without a ``budget`` the processor resizes; ``max_tokens`` fit into the context (None: unknown).
    """

    def __init__(
        self, chat: ChatTemplate, family: Family, budget: PixelBudget | None, max_tokens: int | None
    ) -> None:
        thinking_tags = chat.read_thinking(family.thinking_tags)
        super().__init__(FRAMES[family.frame], budget, chat.settings, thinking_tags)
        self.chat, self.processor = chat, chat.processor
        self.family, self.max_tokens, self._has_warned = family, max_tokens, False
        self.takes_videos = family.takes_videos
        if budget is not None:  # as the processor itself would
            self.resample = self.processor.image_processor.resample
        self._control_tokens = _compile_control_tokens(self.processor, family)
        if (token := self._control_tokens.search(chat.settings.system or "")) is not None:
            raise UserError(
                f"prompt.system has the text {token.group()}, a control token of the model: "
                "remove or rewrite it"
            )

    def estimate_tokens(self, example: Example, task: Task) -> int:
        """Estimate the tokens of the example's prompt, without reading its images.

        Image tokens are exact where the family's resize is known; a text token has 3 characters.
        """
        images = self.with_resized_sizes(example).images
        image_tokens = sum(self.family.count_tokens(image, self.processor) for image in images)
        texts = (part for turn in self.write(example, task) for part in turn.parts if part)
        return image_tokens + sum(map(len, texts)) // 3

    def write(self, example: Example, task: Task) -> tuple[Turn, ...]:
        """Return the chat of an example, without a control token of the model in a text."""
        turns = super().write(example, task)
        for turn in turns:
            try:
                self.chat.check_role(turn.role)
            except ValueError as error:
                raise UserError(f"{example.name}: {error}") from error
            after_text = dropwhile(lambda part: part is None, turn.parts)
            if None in after_text and self.chat.moves_images and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: the model's chat template places the images of a turn before its text",
                    example.name,
                )
            for text in filter(None, turn.parts):
                if (token := self._control_tokens.search(text)) is not None:
                    raise UserError(
                        f"{example.name}: its prompt has the text {token.group()}, a control token "
                        f"of the model: remove or rewrite it ({IMAGE} stands for an image)"
                    )
        text = "".join(part for turn in turns for part in turn.parts if part)
        if self.max_tokens is not None and len(text.encode("utf-8", "replace")) >= self.max_tokens:
            # A token has a byte at least. Tokens of images are counted when they are decoded.
            self._check_length(
                example, len(self.processor.tokenizer(text, verbose=False)["input_ids"])
            )
        return turns

    def _check_length(self, example: Example, count: int) -> None:
        if self.max_tokens is not None and count >= self.max_tokens:
            raise UserError(
                f"{example.name}: its prompt has {count} tokens, but the model's context holds "
                f"{self.max_tokens}: lower policy.max_pixels or shorten the question"
            )

    def build(self, example: Example, task: Task) -> Prompt:
        """Build the prompt of an example that has the resized sizes of its images."""
        turns = self.write(example, task)
        try:
            text = self.chat.render(turns, (image.kind for image in example.images))
        except (ValueError, TemplateError) as error:
            raise UserError(f"{example.name}: {error}") from error
        return self.encode_text(example, text)

    def observe(self, observed: Observed, role: str | None = None) -> Prompt:
        """Build the text between a call and the model's next turn; ``role`` as in
        ``ChatTemplate.observe``."""
        example = Example("observation", observed.images, "", None)
        # A space, as the rest of a text around a token could be another one.
        parts = (self._control_tokens.sub(" ", part) for part in observed.text.split(IMAGE))
        text = self.chat.observe(IMAGE.join(parts), role)
        return self.encode_text(self.with_resized_sizes(example), text, add_special_tokens=False)

    def describe_tools(self, schemas: Sequence[Mapping[str, Any]], tags: tuple[str, str]) -> str:
        try:
            self.find_result_role()  # before a model is trained
        except ValueError as error:
            raise UserError(f"task_options.environment: {error}: use another model") from error
        for tag in filter(self._control_tokens.search, tags):
            raise UserError(
                f"task_options.environment: call_tags has {tag!r}, a control token of the model, "
                "which is no part of its texts: choose others"
            )
        return self.chat.describe_tools(schemas, tags) or super().describe_tools(schemas, tags)

    def find_result_role(self) -> str:
        """Return the role in which results of tools are given; ``ValueError``: in none."""
        names = getattr(self.processor, "model_input_names", ())
        if self.family.completion_type is not None or "cross_attention_mask" in names:
            raise ValueError("the model reads images only before its own texts")
        return self.chat.result_form[0]

    def encode_text(self, example: Example, text: str, **options: Any) -> Prompt:
        """Build the prompt of a text of the chat template; ``options`` are of the tokenizer."""
        loaded, videos = self.load_images(example), self.load_videos(example)
        arguments: dict[str, Any] = {"text": [text], "return_tensors": "pt", **options}
        if videos:
            arguments |= self.family.prepare_videos(text, videos, self.processor)
        if loaded:
            # One list per text: LLaVA-OneVision prepares several images of a text differently.
            arguments["images"] = [[image for image, _ in loaded]]
            if self.budget is not None:  # else the processor would resize by the model's own
                arguments["images_kwargs"] = {"do_resize": False}
        try:
            inputs = dict(self.processor(**arguments))
        except ValueError as error:  # such as a prompt without an image, in PaliGemma
            raise UserError(
                f"{example.name}: the model's processor refuses the prompt: {error}"
            ) from error
        token_ids = tuple(inputs.pop("input_ids")[0].tolist())
        for name in ("attention_mask", "labels"):  # PaliGemma's processor adds labels
            inputs.pop(name, None)
        self._check_length(example, len(token_ids))
        num_decoded = sum(is_new for _, is_new in loaded) + len(videos)
        return Prompt(example, text, token_ids, inputs, num_decoded)

    def save_processor(self, folder: Path) -> None:
        """Write the processor, with the pixel budget, for transformers."""
        if self.budget is not None:
            self.family.set_pixel_budget(self.processor, self.budget)
        self.processor.save_pretrained(folder)

    def remove_control_tokens(self, text: str) -> str:
        """Return an output without the texts of special tokens that do not belong to an answer."""
        return self._control_tokens.sub("", text)

    def _resized_size(self, size: tuple[int, int], budget: PixelBudget) -> tuple[int, int]:
        return self.family.resized_size(size, budget, self.processor)


def get_context_length(config: Any) -> int | None:
    """Return the number of tokens in a model's context, or None if its configuration lacks it."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _compile_control_tokens(processor: Any, family: Family) -> re.Pattern[str]:
    """Return a pattern of the texts that the tokenizer or the processor would not read as text."""
    found = {value for name, value in vars(processor).items() if name.endswith("_token")}
    found = {name for name in found if isinstance(name, str) and name}
    found |= set(family.control_tokens(processor.tokenizer).values())
    found |= set(family.media_tokens(processor).values())
    kept = (name for name in found if not family.belongs_to_answer(name))
    names = sorted(kept, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")
