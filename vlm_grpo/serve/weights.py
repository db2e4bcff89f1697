"""The transfer of a policy's weights to vLLM servers: by files, or from memory to memory.

vLLM's protocol for weights in memory has five requests: it initializes a channel, starts an update,
receives parts of it, and finishes it. The tensors themselves take one of two ways: on the same GPU
the server maps a buffer of this process (CUDA IPC); from other GPUs it receives a broadcast (NCCL).
"""

import base64
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl as torch_nccl
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers.core_model_loading import revert_weight_conversion

from vlm_grpo.config.rollout import WeightTransfer
from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import any_rank, fail_together, split_into_buckets
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.dist.weights import find_layer, gather_full, get_local_names
from vlm_grpo.errors import UserError
from vlm_grpo.serve.server import ADAPTER_NAME, Server
from vlm_grpo.utils.atomic_io import share_weights
from vlm_grpo.utils.http_json import ServiceError

KEPT = 3  # versions whose files are kept: one for each rollout that may not have begun
INIT, UPDATE = "/init_weight_transfer_engine", "/update_weights"
PART_BYTES = 256 * 2**20  # sent at once; a larger tensor is sent alone


class FileTransfer:
    """Weights in files of a folder, which all processes and servers can read."""

    def __init__(self, strategy: Strategy, folder: Path) -> None:
        self.strategy, self.policy, self.folder = strategy, strategy.policy, folder

    def stage(self, version: int) -> None:
        """Write the current weights. All ranks must call it."""
        ranks, target = self.strategy.accelerator, self._find(version)
        with fail_together(ranks):
            if ranks.is_main_process:
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir(parents=True)
        weights = self.strategy.weights()
        names = get_local_names(ranks, weights)  # no rank holds more in full than it writes
        if (adapters := self.policy.adapters) is not None:  # small: one file
            names = weights.keys() if ranks.is_main_process else ()
        share = gather_full(weights, names)
        with fail_together(ranks):  # also lets nobody read before all have written
            if adapters is None and share:
                self.policy.save_shard(target, share, f"model-{ranks.process_index:05d}")
            elif adapters is not None and share:
                adapters.save_pretrained(str(target), state_dict=share)
        if ranks.is_main_process:
            share_weights(target)

    def load(self, server: Server, version: int) -> None:
        """Load a version that was staged into a server that is paused."""
        folder = str(self._find(version).absolute())
        if self.policy.adapters is not None:
            body = {"lora_name": ADAPTER_NAME, "lora_path": folder, "load_inplace": True}
            server.command("/v1/load_lora_adapter", body)
            return
        call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        server.post("/collective_rpc", call)
        if self.policy.device.type == "cpu":  # with worker/vlm_grpo_worker.py
            server.post("/collective_rpc", {"method": "pack_tied_weights"})

    def close(self) -> None:
        """Delete the files, on the main process."""
        if self.strategy.accelerator.is_main_process:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _find(self, version: int) -> Path:
        return self.folder / f"weights-{version % KEPT}"


class IpcChannel:
    """A buffer on a GPU that a server on the same GPU maps into its memory.

    Its handle is pickled here and unpickled by the server, which the run has started itself and
    which listens on this machine only.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffer: Tensor | None = None
        self._handle: Any = None

    def open(self, server: Server) -> None:
        server.command(INIT, {"init_info": {"packed": True}})

    def send(self, server: Server, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        sizes = [tensor.nbytes for tensor in tensors]
        size = sum(sizes)
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.empty(max(size, PART_BYTES), dtype=torch.uint8, device=self.device)
            _, self._handle = reduce_tensor(self._buffer)  # once: a server counts the exports
        for place, tensor in zip(self._buffer[:size].split(sizes), tensors, strict=True):
            place.copy_(tensor.reshape(-1).view(torch.uint8))
        _synchronize(self.device)
        handles = {get_device_id(self.device): self._handle}
        pickled = base64.b64encode(pickle.dumps(handles)).decode()
        info = _describe(names, tensors)
        info |= {"tensor_sizes": sizes, "ipc_handles_pickled": pickled}
        server.command(UPDATE, {"update_info": info})

    def release(self) -> None:
        """Free the memory that an update took and the next one does not need."""
        self._buffer = self._handle = None
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()


class NcclChannel:
    """A broadcast to each server, whose workers are on other GPUs than this process.

    Each server has a group of its own, with this process as rank 0, so that one that fails takes no
    other with it.
    """

    def __init__(self, device: torch.device, nccl: Any = torch_nccl) -> None:
        self.device, self.nccl = device, nccl

    def open(self, server: Server) -> None:
        if server.nccl_group is not None:
            return
        # The server's workers, each with a GPU of its own, and this process.
        count = 1 + int(server.get("/get_world_size", "world_size"))
        identifier = self.nccl.unique_id()
        encoded = base64.b64encode(identifier).decode()
        info = {"nccl_unique_id_b64": encoded, "rank_offset": 1, "world_size": count}

        def join() -> Any:
            group = self.nccl.init_rank(count, identifier, 0)
            # vLLM's workers begin with the sum of one element.
            self.nccl.all_reduce([torch.zeros(1, device=self.device)], comms=[group])
            return group

        request = {"init_info": info}
        server.nccl_group = self._run_beside(lambda: server.command(INIT, request), join)

    def send(self, server: Server, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        info = {"update_info": _describe(names, tensors)}
        # A failed request leaves this thread behind: it must not meet the server's next group.
        group = server.nccl_group

        def broadcast() -> None:
            for tensor in tensors:
                self.nccl.broadcast([tensor], comms=[group])

        self._run_beside(lambda: server.command(UPDATE, info), broadcast)

    def release(self) -> None:
        """Do nothing: a broadcast takes no memory."""

    def _run_beside(self, ask: Callable[[], None], communicate: Callable[[], Any]) -> Any:
        """Run this process's part of what a request makes the server do, and return its result."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                result = communicate()
                _synchronize(self.device)
                future.set_result(result)
            except RuntimeError as error:
                future.set_exception(ServiceError(f"NCCL failed: {error}"))
            except BaseException as error:  # the one that waits must not hang
                future.set_exception(error)

        threading.Thread(target=run, daemon=True, name="nccl").start()
        ask()  # if it fails, the thread that waits for the server is left behind
        return future.result()


class DirectTransfer:
    """Full weights from memory to memory, from the main thread of all ranks.

    Sharded weights are gathered layer by layer, so that no rank ever holds more of them. With
    ``may_load``, no update changes the weights while servers sample: one that was restarted gets
    them at once, unless they are sharded.
    """

    def __init__(
        self, strategy: Strategy, channel: IpcChannel | NcclChannel, may_load: bool
    ) -> None:
        self.strategy, self.policy, self.channel = strategy, strategy.policy, channel
        self.may_load = may_load

    def load(self, server: Server, version: int) -> None:
        """Send the weights to a server that has lost them, or refuse to."""
        sharded = any(isinstance(w, DTensor) for w in self.strategy.weights().values())
        if sharded or not self.may_load:
            raise UserError(
                f"the vLLM server {server.url} was restarted, and the weights of step {version} "
                "cannot be sent before the next step begins: continue with resume=true; "
                "rollout.vllm.weight_transfer=files can send them again at any time"
            )
        for error in self.send([server]).values():
            raise error

    @torch.no_grad()
    def send(self, servers: Sequence[Server]) -> dict[str, ServiceError]:
        """Send the current weights to paused servers, and return the failures by their address.

        All ranks must call it if the weights are sharded, also those without a server.
        """
        failures: dict[str, ServiceError] = {}

        def ask(request: Callable[[Server], None]) -> None:
            for server in servers:
                if server.url not in failures:
                    try:
                        request(server)
                    except ServiceError as error:
                        failures[server.url] = error
                        server.nccl_group = None

        ask(self.channel.open)
        ask(lambda server: server.command("/start_weight_update"))
        for layer in self._iterate_layers(is_needed=bool(servers)):
            ordered = sorted(layer.items(), key=lambda item: str(item[1].dtype))
            names = iter(name for name, _ in ordered)
            for part in split_into_buckets([tensor for _, tensor in ordered], PART_BYTES):
                labels = [next(names) for _ in part]
                ask(lambda server, n=labels, t=part: self.channel.send(server, n, t))
        ask(lambda server: server.command("/finish_weight_update", {}))
        self.channel.release()
        return failures

    def close(self) -> None:
        self.channel.release()

    def _iterate_layers(self, is_needed: bool) -> Iterator[dict[str, Tensor]]:
        """Yield the weights of each layer, named and shaped as in the model's files."""
        device = self.strategy.accelerator.device
        for layer in group_by_layer(self.strategy.weights()):
            full = {}
            for name, tensor in layer.items():
                value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if not is_needed:
                    continue
                value = value.detach().to(device)
                if value.is_floating_point() and value.dim() > 1:
                    # As the policy rounds them; both sides may hold vectors in float32.
                    value = value.to(self.policy.compute_dtype)
                full[name] = value
            if is_needed:
                converted = revert_weight_conversion(self.policy.model, full)
                yield {name: tensor.contiguous() for name, tensor in converted.items()}


def group_by_layer(weights: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Group weights by the first number in their names; tied weights have their first name.

    The model's files may join or split what belongs to one layer, but not what belongs to two.

    >>> weights = {"a.0.w": torch.zeros(1), "a.1.w": torch.ones(1), "a.0.v": torch.ones(2)}
    >>> [list(layer) for layer in group_by_layer(weights)]
    [['a.0.w', 'a.0.v'], ['a.1.w']]
    """
    layers: dict[str, dict[str, Tensor]] = {}
    seen: set[Any] = set()
    for name, tensor in weights.items():
        identity = id(tensor) if isinstance(tensor, DTensor) else (tensor.data_ptr(), tensor.shape)
        if identity in seen:
            continue
        seen.add(identity)
        layers.setdefault(find_layer(name), {})[name] = tensor
    return list(layers.values())


def _describe(names: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, Any]:
    return {
        "names": list(names),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }


def get_device_id(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def replace_refused(
    transfer: FileTransfer | DirectTransfer, servers: Sequence[Server], settings: Settings
) -> FileTransfer | DirectTransfer:
    """Return the transfer, or files in place of NCCL if a server has another version, which NCCL
    refuses. All ranks must call it."""
    if not (isinstance(transfer, DirectTransfer) and isinstance(transfer.channel, NcclChannel)):
        return transfer
    own, ranks = ".".join(map(str, transfer.channel.nccl.version())), transfer.strategy.accelerator
    others = {server.find_nccl() for server in servers} - {own, ""}
    if not any_rank(ranks, bool(others)):
        return transfer
    ranks.print(
        f"weights are sent as files (rollout.vllm.weight_transfer=files): NCCL {own} here and "
        f"{', '.join(sorted(others)) or 'another version'} in the servers do not work together"
    )
    return FileTransfer(transfer.strategy, settings.run_dir / "vllm")


def choose_transfer(settings: Settings, on_gpu: bool) -> WeightTransfer:
    """Return the way in which weights reach the servers of a run; refuse one that needs a GPU."""
    vllm = settings.rollout.vllm
    assert vllm is not None
    if vllm.weight_transfer is not None:
        if vllm.weight_transfer != "files" and not on_gpu:
            raise UserError(
                f"rollout.vllm.weight_transfer={vllm.weight_transfer} needs a GPU, and this run is "
                "on a CPU: remove it"
            )
        return vllm.weight_transfer
    is_own_gpu = on_gpu and vllm.python is not None
    is_direct = is_own_gpu and settings.policy.lora is None and settings.rollout.steps_ahead < 2
    return "ipc" if is_direct else "files"


def build_transfer(strategy: Strategy, settings: Settings) -> FileTransfer | DirectTransfer:
    """Build the transfer of a run (``rollout.vllm.weight_transfer``)."""
    device = strategy.policy.device
    way = choose_transfer(settings, device.type == "cuda")
    if way == "files":
        return FileTransfer(strategy, settings.run_dir / "vllm")
    channel = IpcChannel(device) if way == "ipc" else NcclChannel(device)
    return DirectTransfer(strategy, channel, may_load=settings.rollout.steps_ahead == 0)
