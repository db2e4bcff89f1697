"""The client of a chat-completions server: its requests, and what each failure says."""

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from chat_model import ChatModel, get_images, serve
from judge_server import Reply, run_judge
from PIL import Image

from vlm_grpo.errors import UserError
from vlm_grpo.serve.chat_client import ChatClient, Endpoint, build_messages
from vlm_grpo.utils.chat import ThinkingTags, Turn
from vlm_grpo.utils.http_json import ServiceError

QUESTION = build_messages([Turn("user", "?")], [])
OPTIONS = {"temperature": 0.0, "max_tokens": 9}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_grpo.utils.http_json.FIRST_WAIT", 0.0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_a_request_has_the_turns_of_a_chat_with_their_images():
    red, blue = Image.new("RGB", (4, 2), "red"), Image.new("RGB", (2, 4), "blue")
    chat = [Turn("system", "Be brief."), Turn("user", "<image>?")]
    chat += [Turn("assistant", "Red."), Turn("user", "And <image>?")]
    with serve(ChatModel()) as server:
        ChatClient(Endpoint(server.address)).ask(build_messages(chat, [red, blue]), OPTIONS)
    (listed, (path, headers, body)) = server.requests
    assert listed[0] == "/v1/models"
    assert (path, body["model"], body["max_tokens"]) == ("/v1/chat/completions", "policy", 9)
    assert "Authorization" not in headers
    system, first, answer, second = body["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert answer == {"role": "assistant", "content": "Red."}
    assert [part["type"] for part in first["content"]] == ["image_url", "text"]
    assert [part.get("text") for part in second["content"]] == ["And ", None, "?"]
    for turn, size, color in ((first, (4, 2), (255, 0, 0)), (second, (2, 4), (0, 0, 255))):
        (image,) = get_images({"messages": [turn]})
        assert (image.size, image.getpixel((0, 0))) == (size, color)


def test_the_key_of_the_environment_is_sent_and_an_empty_one_or_a_missing_server_named(monkeypatch):
    with pytest.raises(UserError, match=r"no server .* answers: http://127.0.0.1:1/v1/models: 2 "):
        ChatClient(Endpoint("http://127.0.0.1:1"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with serve(ChatModel()) as server:
        ChatClient(Endpoint(server.address)).ask(QUESTION, {})
    assert {headers["Authorization"] for _, headers, _ in server.requests} == {"Bearer sk-secret"}
    monkeypatch.setenv("OPENAI_API_KEY", " ")
    with pytest.raises(UserError, match="OPENAI_API_KEY holds no API key: set it"):
        ChatClient(Endpoint("http://127.0.0.1:1"))


def test_without_a_name_the_server_must_list_one_model_and_one_that_is_not_served_is_named():
    for models, message in (
        (("a", "b"), r"serves\n  - a\n  - b\n.*--served-model"),
        ((), r"lists no models.*served-mod"),
    ):
        with serve(ChatModel(models=models)) as server:
            for name in (None, ""):
                with pytest.raises(UserError, match=message):
                    ChatClient(Endpoint(server.address, name))
            assert ChatClient(Endpoint(server.address, "b")).model == "b"
    with run_judge(lambda body: Reply("4") if body else Reply(status=404)) as server:
        answer = ChatClient(Endpoint(server.address, "b")).ask(QUESTION, {})
    assert (answer.completion.text, answer.prompt_tokens) == ("4", None)
    model = ChatModel(models=("a", "b"), fail=lambda text, earlier: Reply(status=404, body=b"no c"))
    with serve(model) as server:
        client = ChatClient(Endpoint(server.address, "c"))
        with pytest.raises(UserError, match=r"no model c, .* no c; it serves\n  - a\n  - b"):
            client.ask(QUESTION, OPTIONS)


def test_a_refused_or_missing_key_is_named_without_its_value(monkeypatch):
    for key, message in {
        "sk-secret": "the server refuses the API key in OPENAI_API_KEY: .*status 401",
        "": "asks for an API key: put it into the environment variable OPENAI_API_KEY ",
    }.items():
        monkeypatch.setenv("OPENAI_API_KEY", key)
        refusal = Reply(status=401, body=b'{"error": "bad key sk-secret"}' if key else b"no key")
        refused = pytest.raises(UserError, match=message)
        with run_judge(lambda _, reply=refusal: reply) as server, refused as caught:
            ChatClient(Endpoint(server.address))
        assert "sk-secret" not in str(caught.value)


def test_a_server_that_renamed_the_limit_gets_its_new_name_from_then_on():
    refusal = Reply(status=400, body=b"use 'max_completion_tokens' instead of 'max_tokens'")
    model = ChatModel()
    with run_judge(lambda b: refusal if b and "max_tokens" in b else model.respond(b)) as server:
        client = ChatClient(Endpoint(server.address))
        for _ in range(2):
            client.ask(QUESTION, OPTIONS)
    limits = [body.get("max_completion_tokens") for _, _, body in server.requests[1:]]
    assert limits == [None, 9, 9]


def test_an_answer_is_read():
    tags = ThinkingTags("[T]", "[/T]", is_open=False, is_native=True)
    opened = replace(tags, is_open=True)
    for message, reason, text, stop in (
        ({"content": "4"}, "stop", "4", "eos"),
        ({"content": "4"}, "length", "4", "length"),
        ({"content": None}, "length", "", "length"),
        # Thinking that the server returns apart is part of the text.
        ({"content": "3", "reasoning_content": "4?"}, "stop", "[T]4?[/T]3", "eos"),
        ({"content": None, "reasoning": "4?"}, "length", "[T]4?", "length"),
        ({"content": "3", "reasoning": None}, "stop", "3", "eos"),
    ):
        choice = {"message": message, "finish_reason": reason}
        reply = Reply(body=json.dumps({"choices": [choice], "usage": None}).encode())
        with run_judge(lambda _, reply=reply: reply) as server:
            client = ChatClient(Endpoint(server.address, "a"))
            completion = client.ask([], {}, tags).completion
            assert client.ask([], {}, opened).completion.text == text.removeprefix("[T]")
        assert (completion.text, completion.stop, completion.token_ids) == (text, stop, ())


def test_a_response_without_an_answer_is_a_failure():
    bodies = '{"error": "busy"}', "[]", '{"choices": []}', '{"choices": [{"message": {}}]}'
    for body in bodies:
        with run_judge(lambda _, body=body: Reply(body=body.encode())) as server:
            client = ChatClient(Endpoint(server.address, "a"))
            with pytest.raises(ServiceError, match="the response has no answer"):
                client.ask([], {})


@pytest.mark.parametrize(
    ("replies", "warned", "message"),
    [
        (("a", None, "org/a", "a-2025"), False, None),
        (("x.gguf", "x.gguf"), True, None),  # some servers know the name of a file only
        (("a", "a-mini"), False, "asked for a, and a-mini answered"),
        (("a", "b"), False, "asked for a, and b answered: give the name .* with --served-model"),
        (("x.gguf", "y.gguf"), True, "asked for x.gguf, and y.gguf answered"),
    ],
)
def test_another_model_that_answers_is_named(replies, warned, message, caplog):
    turns, model = iter(replies), ChatModel(models=("a", "a-mini", "b"))

    def respond(body):
        reply = json.loads(model.respond(body).body or b"")
        return Reply(body=json.dumps({**reply, "model": next(turns)} if body else reply).encode())

    with run_judge(respond) as server:
        client = ChatClient(Endpoint(server.address, "a"))
        for _ in replies[:-1]:
            client.ask(QUESTION, {})
        with pytest.raises(UserError, match=message) if message else nullcontext():
            client.ask(QUESTION, {})
    assert caplog.messages == [f"{server.address} answers as x.gguf, asked for a"] * warned


def test_a_value_that_is_not_valid_is_named_and_an_address_gets_the_path_of_the_interface():
    wrong: Any = (
        ({"url": "localhost:8000"}, "'localhost:8000' must start with http://"),
        ({"url": "http://"}, "must start with"),
        ({"url": "http://["}, r"^server 'http://\[' must start with http.* or https.* and a host"),
        ({"url": "http://host:x"}, "must start with"),
        ({"url": "https://me:sk-secret@host/v1"}, r"https://host/…: an address has no user"),
        ({"url": "https://host/v1?key=sk-secret"}, r"https://host/…: an address has no user"),
        ({"url": "http://host", "concurrency": 0}, "concurrency is 0; it must be at least 1"),
    )
    for values, message in wrong:
        with pytest.raises(UserError, match=message) as caught:
            Endpoint(**values)
        assert "sk-secret" not in str(caught.value)
    for url, base in {
        "http://localhost:8000": "http://localhost:8000/v1",
        "http://localhost:8000/": "http://localhost:8000/v1",
        "https://api.openai.com/v1/": "https://api.openai.com/v1",
        "https://host/v1beta/openai": "https://host/v1beta/openai",
    }.items():
        assert Endpoint(url).base == base
