"""Which models the check for an unreachable hub leaves to the loader."""

import socket

from huggingface_hub import constants

from vlm_grpo.model import hub


def test_what_is_left_to_the_loader(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.check_reachable("nobody/nothing")
    for source in (str(tmp_path), "not/a/hub/name"):  # nothing listens at the port now
        hub.check_reachable(source)
