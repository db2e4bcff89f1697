"""A local server with vLLM's interface that receives weights from memory, and answers prompts."""

import base64
import json
import pickle
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Barrier, Event
from typing import Any

import torch
from judge_server import Reply, run_judge
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_tensor

GPU = "GPU-1"  # the identifier of the only device

ANSWERS: dict[str, Any] = {
    "/get_world_size": {"world_size": 2},
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [{"id": "policy"}]},
    "/weight_info": {"weight_version": "default"},
}
"""Responses to the requests that only ask."""


class TransferServer:
    def __init__(self) -> None:
        self.url = ""
        self.calls: list[str] = []  # paths, without those that only ask
        self.weights: dict[str, Tensor] = {}  # received since the last start of an update
        self.fails: set[str] = set()  # paths that it refuses
        self.fails_once = False  # it refuses each of them once
        self.nccl = FakeNccl()
        self.identifier = b""  # of the group that it has joined
        self.name = "default"  # of its weights
        self.may_answer = Event()  # to prompts
        self.may_answer.set()

    def respond(self, path: str, body: Any) -> dict[str, Any]:
        if path in ANSWERS:
            return ANSWERS[path]
        self.calls.append(path)
        if path == "/inference/v1/generate":
            return self._generate(body)
        if path == "/init_weight_transfer_engine" and "world_size" in body["init_info"]:
            self.identifier = self.nccl.join(body["init_info"])
        elif path == "/start_weight_update":
            self.weights = {}
        elif path == "/update_weights":
            self._receive(body["update_info"])
        elif path == "/update_weight_version":
            self.name = body["new_version"]
        return {"success": True}

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a prompt without images by its end."""
        assert self.may_answer.wait(20)
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": body["sampling_params"]["stop_token_ids"][:1],
            "logprobs": {"content": [{"logprob": -0.5}]},
            "weight_versions": [{"version": self.name}],
        }
        return {"prompt_token_ids": body["token_ids"], "choices": [choice]}

    def _receive(self, info: dict[str, Any]) -> None:
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        shaped = list(zip(info["names"], dtypes, info["shapes"], strict=True))
        if "tensor_sizes" in info:
            handle = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))[GPU]
            parts = rebuild_tensor(*handle)[: sum(info["tensor_sizes"])].split(info["tensor_sizes"])
            for part, (name, dtype, shape) in zip(parts, shaped, strict=True):
                self.weights[name] = part.view(dtype).view(shape).clone()
            return
        for name, dtype, shape in shaped:
            tensor = self.nccl.sent[self.identifier].get(timeout=10)
            assert (tensor.dtype, list(tensor.shape)) == (dtype, shape), name
            self.weights[name] = tensor


class FakeNccl:
    """NCCL's functions between this process and servers, over queues; joining a group waits."""

    def __init__(self) -> None:
        self.barrier = Barrier(2, timeout=10)
        self.sent: dict[bytes, queue.Queue[Tensor]] = {}
        self.log: list[Any] = []

    def join(self, info: dict[str, Any]) -> bytes:
        identifier = base64.b64decode(info["nccl_unique_id_b64"])
        self.log.append((identifier, info["rank_offset"]))
        self.barrier.wait()
        return identifier

    def unique_id(self) -> bytes:
        identifier = bytes([len(self.sent)] * 128)
        self.sent[identifier] = queue.Queue()
        return identifier

    def init_rank(self, count: int, identifier: bytes, rank: int) -> bytes:
        self.barrier.wait()
        self.log.append((count, identifier, rank))
        return identifier

    def all_reduce(self, inputs: list[Tensor], comms: list[bytes]) -> None:
        self.log.append(("all_reduce", [tensor.numel() for tensor in inputs], comms))

    def broadcast(self, inputs: list[Tensor], comms: list[bytes]) -> None:
        assert inputs[0].is_contiguous()
        self.sent[comms[0]].put(inputs[0].clone())


@contextmanager
def run_transfer_server() -> Iterator[TransferServer]:
    server = TransferServer()

    def respond(body: Any) -> Reply:
        path = judge.requests[-1][0]
        if body == {} and path == "/inference/v1/generate":
            return Reply(status=400)  # the client only asks whether there is this path
        if path in server.fails:
            server.calls.append(path)
            if server.fails_once:
                server.fails.discard(path)
            return Reply(status=500, body=b"out of memory")
        return Reply(body=json.dumps(server.respond(path, body)).encode())

    with run_judge(respond) as judge:
        server.url = judge.address.removesuffix("/v1")
        yield server
