"""Reading chats: lists of turns with ``role`` and ``content``, or with ``from`` and ``value``.

These are the forms of OpenAI and of ShareGPT, in which TRL, LLaMA-Factory, ms-swift and VLM-R1 have
their data. Images are parts of a content, or stand in a column beside the turns, in the order of
the ``<image>`` in the texts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from vlm_grpo.data.images import Clip
from vlm_grpo.utils.chat import IMAGE, VIDEO, Role, Turn

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_IMAGE_PARTS = ("image", "image_url")
_IMAGE_KEYS = ("image", "image_url", "url", "path")
"""Keys of the image in a part; without one, it stands beside the turns."""
_BESIDE, _CLIP_BESIDE = object(), object()
"""In the place of an image or a clip that stands in a column beside the turns."""
_NAME, _BOX = "<ref-object>", "<bbox>"  # in the texts of ms-swift
_PLACEHOLDER = re.compile(f"{IMAGE}|{VIDEO}")
_FIRST_IMAGES = re.compile(rf"(\s*{IMAGE}\s*)*")
_REC_PREFIX = "Please provide the bounding box coordinate of the region this sentence describes:"
"""Text before the expression in VLM-R1's grounding questions; here the task adds its own."""


@dataclass(frozen=True)
class Chat:
    turns: tuple[Turn, ...]  # the turns before the answer, the last one of the user
    images: tuple[Any, ...]  # the images and clips (``Clip``), not yet read, in their order
    answer: Any | None  # the content of the assistant's last turn; None: the user has the last turn


def read_question(question: str, beside: Sequence[Any]) -> Chat:
    """Return the chat of a question about the images and clips of the row's own columns."""
    found: list[Any] = []
    text = _read_text(question, found)
    return Chat((Turn("user", text),), _place(found, beside), None)


def read_chat(messages: Any, beside: Sequence[Any] = (), system: Any = None) -> Chat:
    """Read the chat of a row; a ``ValueError`` names the turn that is malformed.

    ``beside`` are the images and clips, and ``system`` the system prompt, of the row's own columns.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"a chat must be a list of turns, not {shorten(messages)}")
    turns: list[Turn] = []
    images: list[Any] = []
    answer = None
    for number, message in enumerate(messages, start=1):
        try:
            role, content = _read_turn(message)
            _check_order(role, turns)
            text = _read_content(content, images if role == "user" else None)
            if role == "assistant" and number == len(messages):
                answer = content if text is None else text
            elif text is None:
                raise ValueError(
                    f"its content must be text or a list of parts, not {shorten(content)}"
                )
            else:
                turns.append(Turn(role, text))
        except ValueError as error:
            raise ValueError(f"turn {number} of the chat: {error}") from error
    if not turns or turns[-1].role != "user":
        raise ValueError("the chat has no question: a turn of the user before the answer")
    if system:
        if not isinstance(system, str) or turns[0].role == "system":
            raise ValueError("system must be text, in a column or as the first turn, not both")
        turns.insert(0, Turn("system", system))
    placed = _place(images, beside)
    return Chat(_strip_first_images(turns, len(placed)), placed, answer)


def fill_objects(messages: Any, objects: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """Return the turns of a grounding row of ms-swift, with the names of its objects in place of
    ``<ref-object>``, and the answer: the boxes in place of its ``<bbox>``, or all without a turn of
    the assistant; None if it has none. ``ValueError``: they do not fit the turns."""
    names, boxes, places = (objects.get(name) or [] for name in ("ref", "bbox", "image_id"))
    if not all(isinstance(value, list) for value in (names, boxes, places)):
        raise ValueError("objects.ref, objects.bbox and objects.image_id must be lists")
    if any(places):
        raise ValueError("objects.image_id: boxes must be on the first image")
    if not isinstance(messages, list | tuple):
        return messages, None  # ``read_chat`` says what is wrong
    left, labels, count = iter(names), [], 0
    turns: list[Any] = []
    is_answer = False
    for message in messages:
        turn = dict(message) if isinstance(message, Mapping) else message
        for key in ("content", "value") if isinstance(turn, dict) else ():
            text = turn.get(key)
            if not isinstance(text, str):
                continue
            role = turn.get("role", turn.get("from"))
            is_answer = message is messages[-1] and role in ("assistant", "gpt")
            if _BOX in text and not is_answer:
                raise ValueError(f"it has a {_BOX} before the answer: give it as text")
            count += text.count(_BOX)
            parts = text.split(_NAME)
            own = [str(name) for _, name in zip(parts[1:], left, strict=False)]
            if len(own) < len(parts) - 1:
                raise ValueError(f"it has more {_NAME} than the {len(names)} names of objects.ref")
            labels += own if is_answer else []
            turn[key] = "".join(chain.from_iterable(zip(parts, [*own, ""], strict=True)))
        turns.append(turn)
    if is_answer and count == 0:
        return turns, None
    if is_answer and count != len(boxes):
        raise ValueError(f"its answer has {count} {_BOX} and objects.bbox {len(boxes)} boxes")
    labels = names * len(boxes) if len(names) == 1 else labels
    return turns, {"boxes": boxes, **({"labels": labels} if len(labels) == len(boxes) else {})}


def get_box_scale(objects: Mapping[str, Any]) -> int | None:
    """Return the units of ms-swift's boxes along a side of the image; None: they are pixels."""
    if (kind := objects.get("bbox_type")) not in (None, "real", "norm1"):
        raise ValueError(f"objects.bbox_type must be real or norm1, not {shorten(kind)}")
    return 1 if kind == "norm1" else None


def _read_turn(message: Any) -> tuple[Role, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"it must be an object with role and content, not {shorten(message)}")
    keys = ("from", "value") if message.get("from") is not None else ("role", "content")
    for key in keys:
        if message.get(key) is None:
            raise ValueError(f"it has no {key}; it has {', '.join(map(str, message)) or 'nothing'}")
    if message.get("tool_calls"):
        raise ValueError("it calls tools, which are not supported")
    name, content = (message[key] for key in keys)
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise ValueError(f"its role {shorten(name)} is none of {', '.join(_ROLES)}")
    return role, content


def _check_order(role: Role, turns: Sequence[Turn]) -> None:
    before = turns[-1].role if turns else None
    expected = {None: ("system", "user"), "user": ("assistant",)}.get(before, ("user",))
    if role not in expected:
        where = f"after a turn of {before}" if before else "first"
        raise ValueError(f"{where} comes one of {' or '.join(expected)}, not of {role}")


def _read_content(content: Any, images: list[Any] | None) -> str | None:
    """Return the text of a text or a list of parts, with an ``<image>`` for each image; None if it
    is neither. ``images`` receives the images; None: there must be none."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, Sequence) or not all(
        isinstance(part, Mapping) and "type" in part for part in parts
    ):
        return None
    texts, found = [], []
    for part in parts:
        kind = part["type"]
        if kind == "text" and isinstance(text := part.get("text"), str):
            texts.append(_read_text(text, found))
        elif kind in _IMAGE_PARTS:
            texts.append(IMAGE)
            found.append(_get_image(part))
        elif kind == "video":
            texts.append(IMAGE)
            found.append(_get_clip(part))
        else:
            known = "text, image, image_url and video"
            raise ValueError(f"its part {shorten(dict(part))} is none of {known}")
    if found and images is None:
        raise ValueError(f"it has an {IMAGE}: only turns of the user may have images")
    if images is not None:
        images += found
    return "".join(texts)


def _read_text(text: str, found: list[Any]) -> str:
    """Return a text with ``<image>`` for each image and clip, and add their places to ``found``."""
    names = _PLACEHOLDER.findall(text)
    found += [_BESIDE if name == IMAGE else _CLIP_BESIDE for name in names]
    return text.replace(VIDEO, IMAGE)


def _get_clip(part: Mapping[str, Any]) -> Any:
    """Return the clip of a part, whose list of frames may have a rate, as in qwen-vl-utils."""
    value = part.get("video", part.get("path"))
    if value is None:
        return _CLIP_BESIDE
    if isinstance(value, list | tuple):
        value = {"frames": value, "fps": part.get("sample_fps", part.get("fps"))}
    return Clip(value)


def _get_image(part: Mapping[str, Any]) -> Any:
    image = next((part[key] for key in _IMAGE_KEYS if part.get(key) is not None), _BESIDE)
    if isinstance(image, Mapping) and "url" in image:
        image = image["url"]
    if part["type"] == "image_url" and not isinstance(image, str):
        raise ValueError(f"its part {shorten(dict(part))} has no url of an image")
    return image


def _place(images: Sequence[Any], beside: Sequence[Any]) -> tuple[Any, ...]:
    """Return the images and clips of a chat, with those beside it in their places."""
    if not images:
        return tuple(beside)
    clips = [value for value in beside if isinstance(value, Clip)]
    others = [value for value in beside if not isinstance(value, Clip)]
    for mark, values, name in ((_BESIDE, others, IMAGE), (_CLIP_BESIDE, clips, VIDEO)):
        count = sum(image is mark for image in images)
        if count != len(values):
            kind = name.strip("<>")
            raise ValueError(f"it has {count} {name} in its turns and {len(values)} {kind}s")
    rest = {_BESIDE: iter(others), _CLIP_BESIDE: iter(clips)}
    return tuple(next(rest[i]) if i is _BESIDE or i is _CLIP_BESIDE else i for i in images)


def _strip_first_images(turns: Sequence[Turn], count: int) -> tuple[Turn, ...]:
    """Return the turns without the ``<image>`` if all stand before the first question.

    That is where images stand without any, and tasks then get the question alone.
    """
    first = next(i for i, turn in enumerate(turns) if turn.role == "user")
    images = _FIRST_IMAGES.match(text := turns[first].text)
    if images is None or images[0].count(IMAGE) < count:
        return tuple(turns)
    question = text[images.end() :].strip().removeprefix(_REC_PREFIX).strip()
    return (*turns[:first], Turn("user", question), *turns[first + 1 :])


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
