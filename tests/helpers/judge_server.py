"""A local server with the interface of OpenAI's chat completions, whose replies a test chooses."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import Any


@dataclass(frozen=True)
class Reply:
    """A response: its text (JSON of a chat completion, or ``body`` as it is), status and delay; if
    ``is_cut``, the connection ends without one."""

    text: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    seconds: float = 0.0
    pause: float = 0.0  # seconds after each byte of the body
    is_cut: bool = False


@dataclass
class JudgeServer:
    address: str  # up to /v1
    requests: list[tuple[str, Mapping[str, str], Any]] = field(default_factory=list)  # with headers

    @property
    def texts(self) -> list[str]:
        return [body["messages"][-1]["content"][-1]["text"] for _, _, body in self.requests]


def build_server(
    respond: Callable[[str, Mapping[str, str], Any], Reply], address: tuple[str, int]
) -> ThreadingTCPServer:
    """Build a server; ``respond`` returns the reply to a request's path, headers and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null"
            with suppress(ValueError):  # of JSON Lines
                body = json.loads(body)
            reply = respond(self.path, dict(self.headers), body)
            time.sleep(reply.seconds)
            if reply.is_cut:
                self.close_connection = True
                return
            message = {"role": "assistant", "content": reply.text}
            data = json.dumps({"choices": [{"message": message}]}).encode()
            data = data if reply.body is None else reply.body
            with suppress(OSError):  # the client has stopped waiting
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                parts = [data[i : i + 1] for i in range(len(data))] if reply.pause else [data]
                for part in parts:
                    self.wfile.write(part)
                    time.sleep(reply.pause)

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingTCPServer):  # not HTTPServer, which looks up the name of its address
        allow_reuse_address = daemon_threads = True
        block_on_close = False
        request_queue_size = 128

    return Server(address, Handler)


@contextmanager
def run_judge(respond: Callable[[Any], Reply]) -> Iterator[JudgeServer]:
    """Run a server; ``respond`` returns the reply to the body of a request."""

    def note(path: str, headers: Mapping[str, str], body: Any) -> Reply:
        judge.requests.append((path, headers, body))
        return respond(body)

    server = build_server(note, ("127.0.0.1", 0))
    judge = JudgeServer(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
