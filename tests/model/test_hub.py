"""An unreachable hub is an error at once; uploads send what they should to a local stand-in."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants
from judge_server import Reply, build_server

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model import hub
from vlm_grpo.model.loading import load_model, load_processor


@pytest.fixture(autouse=True)
def _unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the hub to a port of this machine on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)


def test_an_unreachable_hub_is_an_error_before_any_retry():
    settings = load_settings("counting", ["model=nobody/nothing"])
    for load in (load_model, load_processor):
        with pytest.raises(UserError, match=r"neither a folder nor in the hub's cache.*127"):
            load(settings)


def test_what_is_left_to_the_loader(tmp_path, monkeypatch):
    for source in (str(tmp_path), "not/a/hub/name"):
        hub.check_reachable(source)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.check_reachable("nobody/nothing")


class StandIn:
    """The parts of the hub's interface that an upload of small files needs."""

    def __init__(self) -> None:
        self.url, self.refuses = "", "nothing"  # the address, and the start of refused paths
        self.calls: list[str] = []  # paths
        self.created: list[dict[str, Any]] = []  # bodies that create repositories
        self.files: dict[str, bytes] = {}  # that were committed, by path

    def answer(self, path: str, body: Any) -> Any:
        if path == "/api/whoami-v2":
            return {"name": "someone", "type": "user", "orgs": []}
        if path == "/api/repos/create":
            self.created.append(body)
            return {"url": f"{self.url}/someone/counter"}
        if "/preupload/" in path:
            kind = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": f["path"], **kind} for f in body["files"]]}
        if "/commit/" in path:
            for row in map(json.loads, body.splitlines()):
                if row["key"] == "file":
                    self.files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
            commit = {"commitUrl": f"{self.url}/someone/counter/commit/1", "commitOid": "1"}
            return {**commit, "success": True}
        return {"id": "someone/counter", "sha": "1", "siblings": []}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()

    def respond(path: str, headers: Mapping[str, str], body: Any) -> Reply:
        path = path.partition("?")[0]
        stand_in.calls.append(path)
        refused = path.startswith(stand_in.refuses)
        values = {"error": "no"} if refused else stand_in.answer(path, body)
        content = {"Content-Type": "application/json"}
        return Reply(
            status=403 if refused else 200, headers=content, body=json.dumps(values).encode()
        )

    tcp = build_server(respond, ("127.0.0.1", 0))
    stand_in.url = f"http://127.0.0.1:{tcp.server_address[1]}"
    Thread(target=tcp.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield stand_in
    tcp.shutdown()
    tcp.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text("---\ntags: [grpo]\n---\n\n# counter\n")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "weights.safetensors").write_bytes(bytes(1234))
    return tmp_path


@pytest.mark.parametrize("public", [False, True])
def test_a_folder_is_uploaded_to_a_private_repository_unless_public(server, folder, public):
    hub.check_pushable("someone/counter")
    assert hub.push(folder, "someone/counter", public) == f"{server.url}/someone/counter"
    (created,) = server.created
    assert (created["organization"], created["name"]) == ("someone", "counter")
    assert created["visibility"] == ("public" if public else "private")
    expected = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    assert server.files == {name: path.read_bytes() for name, path in expected.items()}


def test_a_dry_run_lists_the_files_and_sends_nothing(server, folder):
    lines = list(hub.describe_push(folder, "someone/counter", public=False))
    assert lines == [
        f"would push to {server.url}/someone/counter, private if it is new:",
        "     32 bytes  README.md",
        "      2 bytes  config.json",
        "  1,234 bytes  sub/weights.safetensors",
        "  1,268 bytes in all",
        "README.md begins:",
        "  ---",
        "  tags: [grpo]",
        "  ---",
        "",
        "  # counter",
    ]
    assert server.calls == []


def test_problems_are_found_before_the_export(server, monkeypatch):
    with pytest.raises(UserError, match=r"--push a/b/c is not a name on the hub"):
        hub.check_pushable("a/b/c")
    server.refuses = "/api/whoami"
    with pytest.raises(UserError, match=r"refuses the token .*; nothing was exported"):
        hub.check_pushable("a/b")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9 cannot be reached .*; nothing was"):
        hub.check_pushable("a/b")
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="run hf auth login, or set HF_TOKEN"):
        hub.check_pushable("a/b")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        hub.check_pushable("a/b")


def test_a_failed_upload_names_the_command_that_repeats_it(server, folder):
    server.refuses = "/api/models"
    with pytest.raises(UserError, match=rf"hf upload someone/counter {folder}"):
        hub.push(folder, "someone/counter", public=False)
    assert server.files == {}
