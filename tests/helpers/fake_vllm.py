"""A stand-in for a vLLM server, which starts at once and fails as a test says.

    python fake_vllm.py FOLDER -m vllm.entrypoints.cli.main serve MODEL --host=H --port=P …

``FOLDER/plan.json`` says how it fails. ``FOLDER/calls.jsonl`` receives every request, and
``FOLDER/loaded`` the weights that were loaded last under each version. No library is imported.
"""

import base64
import json
import os
import random
import re
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from judge_server import Reply, build_server

PLAN: dict[str, Any] = {
    "version": "0.32.0",
    "served": "policy",
    "weights": "default",  # the name of the weights at the start
    "missing": [],  # paths that it does not have
    "starts": {},  # what happens at the k-th start, or at every one ("*"): "exit", "never"
    "faults": {},  # path: what happens at its k-th request over all starts, or at every one ("*")
    "keeps_version": False,  # forgets to tell a new version
    "ignores_sigterm": False,
    "has_child": False,  # starts a process of its own, as vLLM does
    "seconds": 0.0,  # for each request for completions
    "image_tokens": 0,  # additional tokens of each image
}
"""The plan of a server that works."""


class FakeVllm:
    """A server of the model in a folder; ``end`` ends it at once."""

    def __init__(self, folder: Path, model: Path, end: Callable[[], None]) -> None:
        self.folder, self.end = folder, end
        self.plan = PLAN | json.loads((folder / "plan.json").read_text())
        config = json.loads((model / "config.json").read_text())
        images = json.loads((model / "processor_config.json").read_text())["image_processor"]
        self.image_token = config["image_token_id"]
        self.side = images["patch_size"] * images["merge_size"]
        self.calls = folder / "calls.jsonl"
        earlier = [call["path"] for call in read_calls(folder)]
        self.count = {path: earlier.count(path) for path in set(earlier)}
        self.version, self.adapter = self.plan["weights"], False
        self.is_open, self.lock = threading.Event(), threading.Lock()
        self.is_open.set()

    def note(self, path: str, body: Any = None) -> str | None:
        """Note a request, and return what happens at it; None: it is answered."""
        with self.lock:
            number = self.count[path] = self.count.get(path, 0) + 1
            call = {"path": path, "pid": os.getpid(), "version": self.version, "body": body}
            with self.calls.open("a") as calls:
                calls.write(json.dumps(call) + "\n")
        faults = self.plan["starts"] if path == "start" else self.plan["faults"].get(path, {})
        return faults.get(str(number), faults.get("*"))

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Return the status and body of the response to a request."""
        if path in self.plan["missing"] or path not in ANSWERS:
            return 404, {"detail": "Not Found"}
        return ANSWERS[path](self, body)

    def generate(self, body: Any) -> tuple[int, Any]:
        if "token_ids" not in body:
            return 400, {"detail": "token_ids: field required"}
        if body["model"] == "policy-adapter" and not self.adapter:
            return 404, {"error": "The model `policy-adapter` does not exist."}
        self.is_open.wait()
        time.sleep(self.plan["seconds"])
        settings = body["sampling_params"]
        choices = [self._sample(settings, index) for index in range(settings["n"])]
        prompt = self._expand(body["token_ids"], body.get("content_parts", []))
        return 200, {"prompt_token_ids": prompt, "choices": choices[::-1]}

    def _sample(self, settings: Any, index: int) -> dict[str, Any]:
        """Return a choice of random tokens, which ends by a stop token or at the limit."""
        own = random.Random(f"{settings['seed']} {index}")
        count = own.randint(max(1, settings["min_tokens"]), settings["max_tokens"])
        allowed = [token for token in range(256) if str(token) not in settings["logit_bias"]]
        tokens, reason = own.choices(allowed, k=count), "length"
        if count < settings["max_tokens"]:
            tokens, reason = [*tokens[:-1], settings["stop_token_ids"][0]], "stop"
        return {
            "index": index,
            "token_ids": tokens,
            "finish_reason": reason,
            "logprobs": {"content": [{"logprob": -5.5} for _ in tokens]},
            "weight_versions": [{"version": self.version}],
        }

    def _expand(self, tokens: list[int], parts: list[Any]) -> list[int]:
        """Repeat each image's token, once for each of its merged patches."""
        images = iter(parts)
        found: list[int] = []
        for token in tokens:
            if token == self.image_token:
                found += [token] * (self._count(next(images)["url"]) + self.plan["image_tokens"])
            else:
                found.append(token)
        return found

    def _count(self, url: str) -> int:
        header = base64.b64decode(url.partition(",")[2][:40])
        width, height = struct.unpack(">II", header[16:24])
        return (width // self.side) * (height // self.side)

    def load(self, folder: str) -> tuple[int, Any]:
        if self.is_open.is_set():
            return 500, {"error": "weights are loaded while requests are served"}
        shutil.rmtree(self.folder / "last", ignore_errors=True)
        shutil.copytree(folder, self.folder / "last")
        return 200, {}

    def load_adapter(self, body: Any) -> tuple[int, Any]:
        self.adapter = True
        return self.load(body["lora_path"])

    def call_workers(self, body: Any) -> tuple[int, Any]:
        is_load = body["method"] == "reload_weights"
        return self.load(body["kwargs"]["weights_path"]) if is_load else (200, {})

    def set_version(self, body: Any) -> tuple[int, Any]:
        if not self.plan["keeps_version"]:
            self.version = body["new_version"]
            kept = self.folder / "loaded" / self.version.rpartition("/")[2]
            shutil.copytree(self.folder / "last", kept, dirs_exist_ok=True)
        return 200, {}

    def pause(self, body: Any) -> tuple[int, Any]:
        self.is_open.clear()
        return 200, {}

    def resume(self, body: Any) -> tuple[int, Any]:
        self.is_open.set()
        return 200, {}


ANSWERS: dict[str, Callable[[FakeVllm, Any], tuple[int, Any]]] = {
    "/v1/models": lambda fake, _: (200, {"data": [{"id": fake.plan["served"]}]}),
    "/version": lambda fake, _: (200, {"version": fake.plan["version"]}),
    "/weight_info": lambda fake, _: (200, {"weight_version": fake.version}),
    "/inference/v1/generate": FakeVllm.generate,
    "/v1/load_lora_adapter": FakeVllm.load_adapter,
    "/collective_rpc": FakeVllm.call_workers,
    "/pause": FakeVllm.pause,
    "/resume": FakeVllm.resume,
    "/reset_encoder_cache": lambda fake, _: (200, {}),
    "/reset_prefix_cache": lambda fake, _: (200, {"success": True}),
    "/update_weight_version": FakeVllm.set_version,
}


def listen(fake: FakeVllm, address: tuple[str, int]) -> ThreadingTCPServer:
    """Return a server that answers at an address once it serves."""

    def respond(path: str, headers: Any, body: Any) -> Reply:
        path, kept = path.partition("?")[0], body
        if isinstance(body, dict):
            kept = {key: value for key, value in body.items() if key != "content_parts"}
        match fake.note(path, kept):
            case "die":
                fake.end()
                return Reply(is_cut=True)
            case "hang":
                return Reply(seconds=1000, is_cut=True)
            case None | "abort" as fault:
                status, value = fake.answer(path, body)
                if fault is not None:
                    value["choices"][0]["finish_reason"] = "abort"
                return Reply(status=status, body=json.dumps(value).encode())
            case fault if fault.isdecimal():
                body = b'{"error": "a fault of status %s"}' % fault.encode()
                return Reply(status=int(fault), body=body)
            case fault:
                return Reply(body=fault.encode())

    return build_server(respond, address)


def read_calls(folder: Path, path: str = "") -> list[dict[str, Any]]:
    """Return the requests that a folder's servers were sent, of all paths or of one."""
    calls = folder / "calls.jsonl"
    lines = calls.read_text().splitlines() if calls.exists() else []
    return [call for call in map(json.loads, lines) if path in ("", call["path"])]


@contextmanager
def run_fake(folder: Path, model: Path, **plan: Any) -> Iterator[str]:
    """Run a server in threads of this process, and return its address."""
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan))

    def end() -> None:
        server.shutdown()
        server.server_close()

    fake = FakeVllm(folder, model, end)
    server = listen(fake, ("127.0.0.1", 0))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        end()


def write_python(folder: Path, **plan: Any) -> Path:
    """Write a program that starts servers in place of the Python of vLLM's environment."""
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    program = folder / "python"
    # Without site-packages, whose search takes longer than all else.
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -ESs {__file__} {folder} "$@"\n')
    program.chmod(0o755)
    return program


def main(arguments: list[str]) -> int:
    """Run a server as the process that a run starts."""
    folder, model = Path(arguments[0]), Path(arguments[arguments.index("serve") + 1])
    options = dict(text.split("=", 1) for text in arguments if re.match("--.+=", text))
    fake = FakeVllm(folder, model, end=lambda: os._exit(1))
    if fake.plan["ignores_sigterm"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fake.plan["has_child"]:
        child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
        (folder / "child").write_text(str(child))
    print("INFO fake vLLM loads the model", flush=True)
    fault = fake.note("start", arguments[1:])
    if fault == "exit":
        print("ValueError: No available memory for the cache blocks.", flush=True)
        return 1
    if fault == "never":
        time.sleep(1000)
    server = listen(fake, (options["--host"], int(options["--port"])))
    server.serve_forever(0.01)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
