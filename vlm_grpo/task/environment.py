"""The base class of environments: tools that a model calls before it answers.

An environment is one class in one file. A task reads and rewards the final answer; an environment
beside it answers the model's calls with text and images::

    class Zoom(Environment):
        \"\"\"Look closer at parts of the image.\"\"\"

        @tool
        def zoom(self, bbox_2d: Box, label: str = "") -> Image.Image:
            \"\"\"Return an enlarged part of the image.\"\"\"
            return self.image.crop(bbox_2d)

Each method marked as a tool is described to the model by its name, the hints of its arguments and
its docstring. Boxes and points arrive in pixels of the original image, whatever frame the model
writes. What a tool returns, text or images, is what the model reads next; an exception is read as
its message.
"""

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, dataclass_transform

from PIL import Image
from pydantic import TypeAdapter, ValidationError

from vlm_grpo.media.images import decode_image, encode_png
from vlm_grpo.task.coordinates import ORIGINAL, Box, BoxError, CoordinateFrame
from vlm_grpo.task.rewards import FAILURES
from vlm_grpo.task.task import check_names
from vlm_grpo.task.tool_calls import ToolError, parse_call
from vlm_grpo.types import Example, ImageRef, Observed, ToolCall
from vlm_grpo.utils.chat import IMAGE
from vlm_grpo.utils.worker_pool import WorkerError

Point = tuple[float, float]  # x and y
MAX_TEXT = 8_000  # characters of an observation; longer ones are cut
MAX_IMAGES, MAX_PIXELS, MAX_ASPECT, MIN_SIDE = 8, 2**25, 200, 2  # of an observation
_NUMBERS = {Box: 4, Point: 2}
_build_adapter = cache(TypeAdapter)
_SECTION = re.compile(r"\s*(Args|Arguments|Returns|Raises|Yields|Examples?):\s*")
_ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.+)", re.DOTALL)


@dataclass(frozen=True)
class Tool:
    """A method that the model can call."""

    name: str
    description: str
    parameters: Mapping[str, Any]  #: the hints of its arguments by name
    required: tuple[str, ...]
    notes: Mapping[str, str]  #: descriptions of arguments, from the docstring

    def describe(self, frame: CoordinateFrame, size: tuple[int, int]) -> dict[str, Any]:
        """Return the JSON schema of a call, as chat templates take it, for an image of a size."""
        properties = {}
        for name, hint in self.parameters.items():
            schema, note = _describe_hint(hint), self.notes.get(name, "")
            if kind := _find_numbers(hint):
                form = "[y1, x1, y2, x2]" if frame.y_first else "[x1, y1, x2, y2]"
                form = form if kind == Box else ("[y, x]" if frame.y_first else "[x, y]")
                note = " ".join(filter(None, (note, f"{form}, {frame.describe_units(size)}.")))
            properties[name] = {**schema, **({"description": note} if note else {})}
        parameters = {"type": "object", "properties": properties, "required": [*self.required]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def tool(method: Callable) -> Callable:
    """Mark a method of an environment as a tool.

    Its arguments need hints of which JSON can hold the values; ``Box`` and ``Point``, lists of one
    or ``… | None``, are converted to pixels of the original image. The first paragraph of its
    docstring describes it, and the section ``Args`` its arguments. ``TypeError``: an argument has
    no hint, or takes any number of values.
    """
    name, found = method.__qualname__, [*inspect.signature(method).parameters.values()][1:]
    if not inspect.getdoc(method):
        raise TypeError(f"tool {name} has no docstring, from which the model learns what it does")
    for parameter in found:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tool {name}: write each argument instead of {parameter}")
        if parameter.annotation is parameter.empty:
            raise TypeError(f"tool {name}: the argument {parameter.name} has no type hint")
    method.is_tool = True  # type: ignore[attr-defined]
    return method


@cache
def find_tools(environment: type) -> dict[str, Tool]:
    """Return the tools of a class and its bases by name, those of the bases first."""
    found: dict[str, Tool] = {}
    for base in reversed(environment.__mro__):
        for name, member in vars(base).items():
            if getattr(member, "is_tool", False):
                found[name] = read_tool(name, member)
    return found


def read_tool(name: str, method: Callable) -> Tool:
    hints = typing.get_type_hints(method)
    parameters = [*inspect.signature(method).parameters.values()][1:]
    required = tuple(p.name for p in parameters if p.default is p.empty)
    doc = inspect.getdoc(method) or ""
    summary, notes = " ".join(doc.partition("\n\n")[0].split()), {}
    section, entries = "", list[str]()
    for line in doc.splitlines():
        if header := _SECTION.fullmatch(line):
            section = header[1]
        elif section.startswith("Arg") and line.strip():
            indent = len(line) - len(line.lstrip())
            if indent > 4 and entries:
                entries[-1] += " " + line.strip()
            else:
                entries.append(line.strip())
    for entry in entries:
        if match := _ENTRY.fullmatch(entry):
            notes[match[1]] = match[2]
    return Tool(name, summary, {p.name: hints[p.name] for p in parameters}, required, notes)


def _find_numbers(hint: Any) -> Any:
    """Return which of ``Box`` and ``Point`` a hint is, or is a list of, or may be; else None."""
    is_part = typing.get_origin(hint) in (list, Union, UnionType)
    return next((k for k in (hint, *typing.get_args(hint) * is_part) if k in _NUMBERS), None)


def _describe_hint(hint: Any) -> dict[str, Any]:
    if (kind := _find_numbers(hint)) is None:
        return {k: v for k, v in _build_adapter(hint).json_schema().items() if k != "title"}
    count, numbers = _NUMBERS[kind], {"type": "number"}
    schema = {"type": "array", "items": numbers, "minItems": count, "maxItems": count}
    return {"type": "array", "items": schema} if typing.get_origin(hint) is list else schema


def clean_text(text: str) -> str:
    """Return a text that every tokenizer reads, not too long and without places of images."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode().replace(IMAGE, " ")


@dataclass_transform(kw_only_default=True, frozen_default=False)
@dataclass(kw_only=True)
class Environment:
    """Tools and their state during one episode.

    A subclass defines at least one ``@tool``; its options are annotated class attributes. Other
    attributes may change during an episode and are pickled between its turns.
    """

    call_tags: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")
    """Texts before and after a call."""
    keeps_worker: ClassVar[bool] = False
    """Whether the calls of an episode go to one worker, in which a part of its state remains."""

    max_turns: int = 6  #: number of texts that the model may sample in an episode
    #: an episode that still calls in its last turn is left out of the loss ("mask"), or is scored
    #: as any other ("score"), where a text that calls has no answer and earns nothing
    over_turn: Literal["mask", "score"] = "mask"
    frame: CoordinateFrame = ORIGINAL  #: coordinate frame of boxes; set from the model
    example: Example = field(default=None, init=False, repr=False)  # type: ignore[assignment]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_names(cls, Environment)
        for name, member in vars(cls).items():
            if getattr(member, "is_tool", False) and hasattr(Environment, name):
                raise TypeError(f"{cls.__qualname__}.{name}: a tool cannot have this name")
        known = typing.get_type_hints(Environment)
        hints = {found.name: known[found.name] for found in dataclasses.fields(Environment)}
        # A dataclass would ignore another default of an option that has no hint beside it.
        again = {name: hint for name, hint in hints.items() if name in vars(cls)}
        cls.__annotations__ = {**again, **inspect.get_annotations(cls)}
        dataclass(kw_only=True)(cls)

    def __post_init__(self) -> None:
        if self.max_turns < 2:
            raise ValueError(f"max_turns is {self.max_turns}; a call and an answer are two turns")

    # Methods that a subclass defines or overrides.

    def reset(self, example: Example) -> Any:
        """Begin an episode of an example; return text or images that the question ends with."""

    def demonstrate(self, example: Example) -> Sequence[ToolCall]:
        """Return the calls of a good episode, in original pixels, for warm starts and checks."""
        return ()

    def preview(self, example: Example) -> Sequence[str | tuple[int, int]]:
        """Return texts, and widths and heights of images, of the longest result, for ``plan``; by
        default one image as large as the example's first, or an empty text."""
        return [example.images[0].size] if example.images else [""]

    # What a subclass uses.

    @property
    def tools(self) -> Mapping[str, Tool]:
        return find_tools(type(self))

    @property
    def target(self) -> Any:
        """The object whose methods are the tools; its class may be of another file."""
        return self

    @cached_property
    def image(self) -> Image.Image:
        """The example's first image, in its original size."""
        return self.example.images[0].load()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "image"}

    # What the library calls.

    def begin(self, example: Example) -> Observed | None:
        """Begin an episode; return what the prompt shows besides the question, or None."""
        self.example = example
        shown = self.reset(example)
        return None if shown is None else self._observe(shown)

    def describe(self, example: Example) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools, for the example's images."""
        size = example.images[0].size if example.images else (1, 1)
        return [found.describe(self.frame, size) for found in self.tools.values()]

    def write(self, call: ToolCall) -> str:
        """Return a call, with boxes and points in original pixels, as the model writes it."""
        hints = {n: found.parameters for n, found in self.tools.items()}.get(call.name, {})
        values = {n: self._to_frame(v, hints.get(n)) for n, v in call.arguments.items()}
        body = json.dumps({"name": call.name, "arguments": values}, ensure_ascii=False)
        return f"{self.call_tags[0]}\n{body}\n{self.call_tags[1]}"

    def _to_frame(self, value: Any, hint: Any) -> Any:
        if value is None or (kind := _find_numbers(hint)) is None:
            return value
        if typing.get_origin(hint) is list:
            return [self._to_frame(item, kind) for item in value]
        image, digits = self.example.images[0], self.frame.decimals or None
        corners = (*value, *value)[:4]
        corners = self.frame.from_pixels(corners, image.size, image.resized_size)  # type: ignore[arg-type]
        x1, y1, x2, y2 = (round(number, digits) for number in corners)
        return list((y1, x1, y2, x2) if self.frame.y_first else (x1, y1, x2, y2))[: len(value)]

    def step(self, text: str) -> tuple[ToolCall | None, Observed | None]:
        """Return the call in a text that the model wrote, and what it reads next.

        Nothing that a tool raises is raised; without a call there is nothing to read.
        """
        call = None
        try:
            call = parse_call(text, self.call_tags)
            if call is None:
                return None, None
            return call, self._observe(self._call(call))
        except WorkerError:  # no tool can be called any more
            raise
        except FAILURES as error:  # the user's tool may raise anything
            kind = "" if isinstance(error, ToolError) else f"{type(error).__name__}: "
            return call, Observed(clean_text(f"Error: {kind}{error}"), is_error=True)

    def _call(self, call: ToolCall) -> Any:
        if (found := self.tools.get(call.name)) is None:
            known = ", ".join(self.tools)
            raise ToolError(f"there is no tool {call.name[:100]!r}; there is {known}")
        if unknown := [name for name in call.arguments if name not in found.parameters]:
            raise ToolError(
                f"{call.name} has no argument {unknown[0][:100]!r}; "
                f"it has {', '.join(found.parameters) or 'none'}"
            )
        if missing := [name for name in found.required if name not in call.arguments]:
            raise ToolError(f"{call.name} needs the argument {missing[0]}")
        values = {n: self._convert(n, v, found.parameters[n]) for n, v in call.arguments.items()}
        return self._invoke(call.name, values)

    def _invoke(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return getattr(self.target, name)(**arguments)

    def _convert(self, name: str, value: Any, hint: Any) -> Any:
        if kind := _find_numbers(hint):
            if typing.get_origin(hint) is list:
                if not isinstance(value, list):
                    raise ToolError(f"{name} must be a list of lists of numbers")
                return [self._to_pixels(name, item, _NUMBERS[kind]) for item in value]
            is_left_out = value is None and kind != hint
            return None if is_left_out else self._to_pixels(name, value, _NUMBERS[kind])
        try:
            return _build_adapter(hint).validate_python(value)
        except ValidationError as error:
            raise ToolError(f"{name}: {error.errors()[0]['msg'].lower()}") from error

    def _to_pixels(self, name: str, value: Any, count: int) -> tuple[float, ...]:
        if not self.example.images:
            raise ToolError(f"there is no image for {name}")
        image = self.example.images[0]
        try:
            return self.frame.find_place(value, count, image.size, image.resized_size)
        except BoxError as error:
            raise ToolError(f"{name} {error}") from error

    def find_boxes(self, call: ToolCall, example: Example) -> list[Box]:
        """Return the boxes of a call in pixels of the example's first image, without wrong ones."""
        found, boxes = find_tools(type(self)).get(call.name), list[Box]()
        if self.example is not example:
            own = self.adapt(self.frame)
            own.example = example
            return own.find_boxes(call, example)
        for name, hint in () if found is None else found.parameters.items():
            if hint == Box and name in call.arguments and example.images:
                with suppress(ToolError):
                    boxes.append(self._to_pixels(name, call.arguments[name], 4))  # type: ignore[arg-type]
        return boxes

    def _observe(self, shown: Any) -> Observed:
        texts, images, left = [""], list[ImageRef](), MAX_TEXT
        for part in shown if isinstance(shown, list | tuple) else [shown]:
            if isinstance(part, Image.Image):
                images.append(_keep_image(part, f"observation {len(images)}"))
                texts.append("")
                if len(images) > MAX_IMAGES:
                    raise ToolError(f"the tool returned more than {MAX_IMAGES} images")
            elif isinstance(part, str | int | float) or part is None:
                text = "" if part is None else str(part)[:left]
                texts[-1] += text
                left -= len(text)
            else:
                raise ToolError(f"the tool returned {type(part).__name__}, not text or an image")
        return Observed(IMAGE.join(map(clean_text, texts)), tuple(images))

    def adapt(self, frame: CoordinateFrame) -> Self:
        """Return a copy for a model that writes boxes in a frame."""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self), frame=frame)
        return other


def _keep_image(image: Image.Image, name: str) -> ImageRef:
    """Encode an observed image; ``ToolError``: it is too small, too large or too thin."""
    width, height = image.size
    if min(width, height) < MIN_SIDE:
        raise ToolError(f"the image has only {width}x{height} pixels")
    if width * height > MAX_PIXELS or max(width, height) > MAX_ASPECT * min(width, height):
        raise ToolError(f"an image of {width}x{height} pixels is too large or too thin")
    upright = decode_image(image)
    data = encode_png(upright, compress_level=1)
    return ImageRef(name, upright.size, upright.size, data=data)
