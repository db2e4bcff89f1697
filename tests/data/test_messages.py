"""Chats in the forms of other trainers, and every broken form with its line."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from dataset_files import check_bad_row, png, write_files, write_rows
from hypothesis import given
from hypothesis import strategies as st

from vlm_grpo.config.data import DataSettings
from vlm_grpo.data import load_examples
from vlm_grpo.data.messages import read_chat
from vlm_grpo.task.registry import load_task
from vlm_grpo.types import Example

OCR, COUNTING = load_task("ocr"), load_task("counting")
URL = "data:image/png;base64," + base64.b64encode(png(8, 6)).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path, {"a.png": png(20, 10), "b.png": png(30, 10)})


def turns(*texts: Any, roles: str = "user assistant") -> list[dict[str, Any]]:
    """Return turns of the roles in turn, as OpenAI writes them."""
    names = roles.split()
    return [{"role": names[i % len(names)], "content": text} for i, text in enumerate(texts)]


def shared(*texts: str) -> list[dict[str, str]]:
    """Return turns of a human and a model in turn, as ShareGPT writes them."""
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]


def part(kind: str, value: Any = None) -> dict[str, Any]:
    return {"type": kind} if value is None else {"type": kind, kind: value}


def load(folder: Path, row: dict[str, Any], task: Any = OCR) -> Example:
    (example,) = load_examples(write_rows(folder, row), task)
    return example


INTERLEAVED = [part("text", "Is "), part("image", "a.png"), part("text", " like"), part("image")]


@pytest.mark.parametrize(
    ("row", "history", "question", "answer", "images"),
    [
        pytest.param(
            {"messages": turns("Who?", "Kane.", "Where?", "A field."), "images": ["a.png"]},
            ["user: Who?", "assistant: Kane."],
            "Where?",
            "A field.",
            [20],
            id="LLaMA-Factory, an image without its place",
        ),
        pytest.param(
            {
                "messages": turns("<image>Who?", "Kane.", "And <image>?", "Mu"),
                "images": ["b.png", "a.png"],
            },
            ["user: <image>Who?", "assistant: Kane."],
            "And <image>?",
            "Mu",
            [30, 20],
            id="LLaMA-Factory and ms-swift, an image in each turn",
        ),
        pytest.param(
            {
                "conversations": shared("<image>\nText?", "STOP"),
                "image": "a.png",
                "system": "Be brief.",
            },
            ["system: Be brief."],
            "Text?",
            "STOP",
            [20],
            id="LLaVA, with LLaMA-Factory's column of a system prompt",
        ),
        pytest.param(
            {
                "messages": turns(
                    "Read.",
                    [part("image_url", {"url": URL}), part("text", "Text?")],
                    [part("text", "GO")],
                    roles="system user assistant",
                )
            },
            ["system: Read."],
            "Text?",
            "GO",
            [8],
            id="OpenAI, with a system prompt and an image in a URL",
        ),
        pytest.param(
            {"messages": turns(INTERLEAVED, "no"), "images": ["b.png"]},
            [],
            "Is <image> like<image>",
            "no",
            [20, 30],
            id="images in the parts and beside them",
        ),
        pytest.param(
            {
                "messages": turns("What is <image>?"),
                "images": [{"path": "a.png", "bytes": None}],
                "solution": "A cat",
            },
            [],
            "What is <image>?",
            "A cat",
            [20],
            id="ms-swift's GRPO, whose answer is a column",
        ),
        pytest.param(
            {
                "prompt": turns([part("image"), part("text", "Text?")]),
                "image": "a.png",
                "answer": "EXIT",
            },
            [],
            "Text?",
            "EXIT",
            [20],
            id="TRL's prompt",
        ),
        pytest.param(
            {"messages": turns("Text?", "GO", "Sure?", "unused"), "answer": "STOP"},
            ["user: Text?", "assistant: GO"],
            "Sure?",
            "STOP",
            [],
            id="an answer beside the assistant's last turn, which then is none",
        ),
    ],
)
def test_chats_are_read_without_conversion(
    folder: Path, row: dict[str, Any], history: list[str], question: str, answer: str, images: list
) -> None:
    example = load(folder, row)
    assert [f"{turn.role}: {turn.text}" for turn in example.history] == history
    assert (example.question, example.answer) == (question, answer)
    assert [image.size[0] for image in example.images] == images  # each image has its own width
    assert example.meta == {}


def test_the_last_turn_of_the_assistant_has_the_readings_of_another_toolkit_s_answer(
    folder: Path,
) -> None:
    row = {"messages": turns("How many?", "<answer> 12 </answer>"), "images": ["a.png"], "id": 7}
    example = load(folder, row, COUNTING)
    assert (example.id, example.answer) == ("7", 12)
    named = {"chat": row["messages"], "prompt": "kept"}
    source = write_rows(folder, named)
    data = DataSettings(train=source, columns={"messages": "chat"})
    (example,) = load_examples(source, COUNTING, data)
    assert (example.question, example.answer, example.meta) == ("How many?", 12, {"prompt": "kept"})


def test_an_image_stands_in_the_question_of_any_form(folder: Path) -> None:
    row = {"question": "Is <image> red?", "answer": "no", "images": ["a.png"]}
    assert load(folder, row).question == "Is <image> red?"


GOOD = turns("<image>Who?", "Kane.")
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"messages": "Who?"}, "a chat must be a list of turns, not 'Who?'"),
    "no turns": ({"messages": []}, "a chat must be a list of turns, not []"),
    "a turn of text": ({"messages": ["Who?"]}, "turn 1 of the chat: it must be an object"),
    "no role": ({"messages": [{"content": "?"}]}, "turn 1 of the chat: it has no role; it has"),
    "no content": (
        {"messages": [*turns("?"), {"role": "assistant", "content": None}]},
        "turn 2 of the chat: it has no content; it has role, content",
    ),
    "keys of both forms": (
        {"messages": [{"from": "human", "content": "?"}]},
        "turn 1 of the chat: it has no value; it has from, content",
    ),
    "an unknown role": (
        {"messages": turns("?", "x", roles="user tool")},
        "turn 2 of the chat: its role 'tool' is none of system, user, human, assistant, gpt",
    ),
    "a role that is no text": (
        {"messages": [*turns("?"), {"role": ["user"], "content": "?"}]},
        "turn 2 of the chat: its role ['user'] is none of",
    ),
    "the assistant first": (
        {"messages": turns("Hi", "?", roles="assistant user")},
        "turn 1 of the chat: first comes one of system or user, not of assistant",
    ),
    "two questions": (
        {"messages": turns("?", "??", roles="user user"), "answer": "x"},
        "turn 2 of the chat: after a turn of user comes one of assistant, not of user",
    ),
    "a system prompt in the middle": (
        {"messages": turns("?", "x", "Be brief.", roles="user assistant system")},
        "turn 3 of the chat: after a turn of assistant comes one of user, not of system",
    ),
    "two system prompts": (
        {"messages": turns("a", "?", "x", roles="system user assistant"), "system": "b"},
        "system must be text, in a column or as the first turn, not both",
    ),
    "a system prompt alone": (
        {"messages": turns("a", roles="system")},
        "the chat has no question: a turn of the user before the answer",
    ),
    "no answer": (
        {"messages": turns("?")},
        "it has no answer: a last turn of the assistant, or a column answer",
    ),
    "a content of numbers": (
        {"messages": turns([1, 2], "x")},
        "turn 1 of the chat: its content must be text or a list of parts, not [1, 2]",
    ),
    "an unknown part": (
        {"messages": turns([part("audio", "a.mp3")], "x")},
        "turn 1 of the chat: its part {'type': 'audio', 'audio': 'a.mp3'} is none of text, image",
    ),
    "a text that is none": (
        {"messages": turns([part("text", 5)], "x")},
        "turn 1 of the chat: its part {'type': 'text', 'text': 5} is none of",
    ),
    "a URL that is none": (
        {"messages": turns([part("image_url", {"detail": "low"})], "x")},
        "has no url of an image",
    ),
    "a tool call": (
        {"messages": [*turns("?"), {"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "turn 2 of the chat: it calls tools, which are not supported",
    ),
    "an image of the assistant": (
        {"messages": turns("?", "See <image>"), "images": ["a.png"]},
        "turn 2 of the chat: it has an <image>: only turns of the user may have images",
    ),
    "more places than images": (
        {"messages": turns("<image><image>?", "x"), "images": ["a.png"]},
        "it has 2 <image> in its turns and 1 images",
    ),
    "more images than places": (
        {"messages": GOOD, "images": ["a.png", "b.png"]},
        "it has 1 <image> in its turns and 2 images",
    ),
    "an image that is missing": ({"messages": GOOD, "images": ["c.png"]}, "image c.png is missing"),
    "an image on the web": (
        {"messages": turns([part("image_url", {"url": "https://x/a.png"})], "x")},
        "image https://x/a.png is a URL: download it",
    ),
    "a data URL that is cut off": (
        {"messages": turns([part("image_url", {"url": URL[:31]})], "x")},
        "image data:image/png;base64,",
    ),
    "a video beside the turns that is missing": (
        {"messages": turns("<video>?", "x"), "videos": ["b.mp4"]},
        "video b.mp4 is missing in",
    ),
    "a place of a video without one": (
        {"messages": turns("<video>?", "x")},
        "it has 1 <video> in its turns and 0 videos",
    ),
    "two chats": (
        {"messages": GOOD, "conversations": shared("?", "x")},
        "it has messages and conversations: keep one of them",
    ),
    "a misnamed column of images": (
        {"messages": turns("?", "x"), "img": "a.png"},
        "it has no images, but a column img that seems to hold them",
    ),
    "a misnamed column of videos": (
        {"question": "?", "answer": "x", "vidoes": ["a.mp4"]},
        "it has no videos, but a column vidoes that seems to hold them",
    ),
    "a column of videos by its values": (
        {"question": "?", "answer": "x", "path": "a.MP4"},
        "it has no videos, but a column path that seems to hold them",
    ),
    "a question with more places than images": (
        {"question": "<image><image>?", "answer": 3, "images": ["a.png"]},
        "it has 2 <image> in its texts and 1 images: each <image> stands for one image",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_chat_is_refused_with_its_line(folder: Path, name: str) -> None:
    row, reason = BROKEN[name]
    check_bad_row(folder, row, reason)


KEYS = ["role", "content", "from", "value", "type", "text", "image", "image_url", "url"]
VALUES = st.recursive(
    st.none()
    | st.integers(0, 3)
    | st.sampled_from(["", "<image>", "user", "gpt", "text", "image"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)


@given(st.lists(VALUES, max_size=4) | VALUES, st.lists(st.just("a.png"), max_size=2), VALUES)
def test_any_other_value_is_a_chat_or_a_value_error(chat: Any, beside: list[str], system: Any):
    try:
        found = read_chat(chat, beside, system)
    except ValueError:
        return
    places = sum(turn.text.count("<image>") for turn in found.turns)
    assert places in (0, len(found.images))


def test_a_chat_keeps_the_places_of_some_images() -> None:
    chat = read_chat(turns("<image>a", "b", "c<image>", "d"), ["x", "y"])
    assert [turn.text for turn in chat.turns] == ["<image>a", "b", "c<image>"]
    assert (chat.images, chat.answer) == (("x", "y"), "d")
