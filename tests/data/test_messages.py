"""Chats in the forms of other trainers, and every broken form with its line."""

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml
from dataset_files import check_bad_row, get_load_error, load, png, write_files, write_rows
from hypothesis import given
from hypothesis import strategies as st
from video_files import make_video

from vlm_grpo.data.messages import read_chat
from vlm_grpo.task.registry import load_task

CHATS = yaml.safe_load(Path(__file__).with_name("chats.yaml").read_text("utf-8"))
KEYS = ["role", "content", "from", "value", "type", "text", "image", "image_url", "url"]
LEAVES = st.sampled_from([None, 0, 1, 2, 3, "", "<image>", "user", "gpt", "text", "image"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)
URL = "data:image/png;base64," + base64.b64encode(png(8, 6)).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {f"frames/{number}.png": png(9, 6) for number in range(4)} | {"a.mp4": make_video()}
    return write_files(tmp_path, {**files, "a.png": png(20, 10), "b.png": png(30, 10)})


def put_urls(value: Any) -> Any:
    """Return a value of the table with its data URLs."""
    if isinstance(value, dict):
        return {key: put_urls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [put_urls(item) for item in value]
    return {"URL": URL, "URL[:31]": URL[:31]}.get(value, value) if isinstance(value, str) else value


@pytest.mark.parametrize("case", CHATS["read"], ids=lambda case: case["about"])
def test_chats_are_read_without_conversion(folder, case):
    task = load_task(case.get("task", "ocr"), **case.get("options", {}))
    (example,) = load(write_rows(folder, put_urls(case["row"])), task)
    assert [f"{turn.role}: {turn.text}" for turn in example.history] == case["history"]
    assert (example.question, example.answer) == (case["question"], case["answer"])
    assert [image.size[0] for image in example.images] == case["widths"]
    assert example.meta == {}


@pytest.mark.parametrize("name", CHATS["broken"])
def test_a_broken_chat_is_refused_with_its_line(folder, name):
    case = CHATS["broken"][name]
    check_bad_row(folder, put_urls(case["row"]), case["reason"])


def test_a_box_of_two_numbers_is_refused_by_the_task(folder):
    row = {"messages": [{"role": "user", "content": "Find it."}], "objects": {"bbox": [[5, 3]]}}
    source = write_rows(folder, {**row, "images": ["a.png"]})
    assert "box [5, 3] must be four numbers" in get_load_error(source, "grounding")


def test_the_last_turn_of_the_assistant_has_the_readings_of_another_toolkit_s_answer(folder):
    texts = {"user": "How many?", "assistant": "<answer> 12 </answer>"}
    turns = [{"role": role, "content": text} for role, text in texts.items()]
    row = {"messages": turns, "images": ["a.png"], "id": 7}
    (example,) = load(write_rows(folder, row))
    assert (example.id, example.answer) == ("7", 12)
    source = write_rows(folder, {"chat": turns, "prompt": "kept"})
    (example,) = load(source, columns={"messages": "chat"})
    assert (example.question, example.answer, example.meta) == ("How many?", 12, {"prompt": "kept"})


@given(st.lists(VALUES, max_size=4) | VALUES, st.lists(st.just("a.png"), max_size=2), VALUES)
def test_any_other_value_is_a_chat_or_a_value_error(chat, beside, system):
    try:
        found = read_chat(chat, beside, system)
    except ValueError:
        return
    places = sum(turn.text.count("<image>") for turn in found.turns)
    assert places in (0, len(found.images))
