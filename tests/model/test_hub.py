"""An unreachable hub is an error at once."""

import socket

import pytest
from huggingface_hub import constants

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model import hub
from vlm_grpo.model.loading import load_config, load_model


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
    for load in (load_model, load_config):
        with pytest.raises(UserError, match=r"neither a folder nor in the hub's cache.*127"):
            load(settings)


def test_what_is_left_to_the_loader(tmp_path, monkeypatch):
    for source in (str(tmp_path), "not/a/hub/name"):
        hub.check_reachable(source)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.check_reachable("nobody/nothing")
