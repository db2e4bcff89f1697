"""Weights for servers: in files, and from memory into servers that have vLLM's interface."""

import time
import weakref
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from forked import run_ranks
from processes import wait_for
from rank_cases import prepare, send_weights
from safetensors.torch import load_file
from small_runs import LORA
from tiny_models import make_prompt, noise_example, tiny_policy
from torch import Tensor
from transfer_server import GPU, TransferServer, run_transfer_server
from transformers.core_model_loading import revert_weight_conversion

from vlm_grpo import UserError, load_policy, load_settings
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.serve import sampler, weights
from vlm_grpo.serve.sampler import VllmSampler
from vlm_grpo.serve.server import Server
from vlm_grpo.training.update import build_updater
from vlm_grpo.utils.http_json import ServiceError


@pytest.mark.parametrize("policy", [{}, LORA], ids=["full weights", "adapters"])
def test_the_last_versions_have_files_of_their_own(policy, settings, tmp_path, monkeypatch):
    build = settings(policy=policy)
    strategy = build_updater(load_policy(build), build, Accelerator(cpu=True)).strategy
    monkeypatch.chdir(tmp_path)  # a server has another folder of its own
    transfer, calls = weights.FileTransfer(strategy, Path("files")), []
    call: Any = lambda path, body: calls.append((path, body))  # noqa: E731
    target: Any = SimpleNamespace(command=call, post=call)
    is_full = strategy.policy.adapters is None
    for version in range(5):
        transfer.stage(version)
    for version in range(2, 5):
        calls.clear()
        transfer.load(target, version)
        folder = str(tmp_path / f"files/weights-{version % 3}")
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        body = {"lora_name": "policy-adapter", "lora_path": folder, "load_inplace": True}
        expected = [("/v1/load_lora_adapter", body)]
        if is_full:
            expected = [("/collective_rpc", b) for b in (reload, {"method": "pack_tied_weights"})]
        assert calls == expected
    folders = list((tmp_path / "files").iterdir())
    assert len(folders) == 3
    modes = {path.stat().st_mode & 0o777 for folder in folders for path in folder.glob("*.s*")}
    assert modes == {folders[0].stat().st_mode & 0o666}  # a server of another user may read them
    transfer.close()
    assert not (tmp_path / "files").exists()
    if is_full:
        on_gpu: Any = SimpleNamespace(adapters=None, device=torch.device("cuda"))
        transfer.policy = on_gpu
        calls.clear()
        transfer.load(target, 4)
        assert [body["method"] for _, body in calls] == ["reload_weights"]


CPU = torch.device("cpu")
WAYS = ("ipc", "nccl")


@pytest.fixture
def server() -> Iterator[TransferServer]:
    with run_transfer_server() as found:
        yield found


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "get_device_id", lambda device: GPU)
    # On a CPU a handle has the buffer's content.
    monkeypatch.setattr(weights, "PART_BYTES", 1 << 21)
    monkeypatch.setattr(sampler, "POLL_SECONDS", 0.01)
    # Shards that are gathered by ``full_tensor``.
    monkeypatch.setattr(weights, "DTensor", SimpleNamespace)


def make_transfer(
    way: str, server: TransferServer, strategy: Any, may_load: bool = True
) -> weights.DirectTransfer:
    channel = weights.IpcChannel(CPU) if way == "ipc" else weights.NcclChannel(CPU, server.nccl)
    return weights.DirectTransfer(strategy, channel, may_load)


@cache
def make_strategy(dtype: str = "float32") -> Strategy:
    settings = load_settings("quickstart", [f"policy.dtype={dtype}"])
    return Strategy(load_policy(settings), Accelerator(cpu=True))


@pytest.mark.parametrize("part_bytes", [1 << 21, 1000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_a_server_gets_what_the_files_have(way, dtype, part_bytes, server, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "PART_BYTES", part_bytes)
    strategy = make_strategy(dtype)
    assert make_transfer(way, server, strategy).send([Server(server.url, 10)]) == {}
    strategy.policy.save_shard(tmp_path, strategy.policy.weights())
    files = load_file(tmp_path / "model.safetensors")
    assert set(server.weights) == set(files)
    assert len(files) == len(strategy.weights()) - 1  # tied weights are sent once
    for name, expected in files.items():
        found = server.weights[name]
        is_rounded = dtype == "bfloat16" and expected.dim() > 1
        assert found.dtype == (torch.bfloat16 if is_rounded else expected.dtype), name
        assert torch.equal(found, expected.to(found.dtype)), name
    updates = server.calls.count("/update_weights")
    layers = len(weights.group_by_layer(strategy.weights()))
    # A request per layer and dtype; a tensor over 1,000 bytes takes a request for itself.
    assert updates > 3 * layers if part_bytes == 1000 else layers <= updates <= 2 * layers
    assert server.calls == [
        "/init_weight_transfer_engine",
        "/start_weight_update",
        *["/update_weights"] * updates,
        "/finish_weight_update",
    ]


def test_a_group_with_nccl_begins_as_vllm_s_workers_do_and_may_fail(server, monkeypatch):
    transfer, target = make_transfer("nccl", server, make_strategy()), Server(server.url, 10)
    transfer.send([target])
    transfer.send([target])
    name = bytes(128)
    # Two workers and this process, which is the first; the group serves both updates.
    assert server.nccl.log == [(name, 1), (3, name, 0), ("all_reduce", [1], [name])]
    assert server.calls.count("/start_weight_update") == 2
    target.note("it has failed")
    transfer.send([target])
    assert server.calls.count("/init_weight_transfer_engine") == 2
    target.note("it has failed")
    monkeypatch.setattr(server.nccl, "all_reduce", Mock(side_effect=RuntimeError("cuda error")))
    assert "NCCL failed: cuda error" in str(transfer.send([target])[server.url])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights"])
def test_a_server_that_fails_stops_no_other(way, path):
    with run_transfer_server() as good, run_transfer_server() as bad:
        bad.fails.add(path)
        bad.nccl = good.nccl
        targets = [Server(server.url, 10) for server in (bad, good)]
        failures = make_transfer(way, good, make_strategy()).send(targets)
        assert list(failures) == [bad.url]
        assert "out of memory" in str(failures[bad.url])
        assert bad.calls[-1] == path, "nothing is asked after a failure"
        assert good.calls[-1] == "/finish_weight_update"


@pytest.mark.parametrize("packages", ["torch==2.13.0\nnvidia-nccl-cu13==2.29.7", "torch==2.15.0"])
def test_another_version_of_nccl_is_not_tried(packages, server, tmp_path, monkeypatch, capsys):
    info = {"system_env": {"pip_packages": packages}}
    monkeypatch.setattr("vlm_grpo.serve.server.get_json", lambda *_, **__: info)
    server.nccl.version = lambda: (2, 30, 7)
    settings: Any = SimpleNamespace(run_dir=tmp_path)
    transfer = make_transfer("nccl", server, make_strategy())
    found = weights.replace_refused(transfer, [Server(server.url, 10)], settings)
    told = capsys.readouterr().out
    assert isinstance(found, weights.FileTransfer) == ("NCCL 2.30.7 here and 2.29.7 in" in told)
    assert (found is transfer) == ("nccl" not in packages)
    server.nccl.version = lambda: (2, 29, 7)
    assert weights.replace_refused(transfer, [Server(server.url, 10)], settings) is transfer


def test_a_broadcast_that_is_left_behind_keeps_its_group(server, monkeypatch):
    transfer, target = make_transfer("nccl", server, make_strategy()), Server(server.url, 10)
    channel: Any = transfer.channel
    channel.open(target)
    began, free, groups = Event(), Event(), []

    def broadcast(tensors: Any, comms: Any) -> None:
        groups.append(comms)
        began.set()
        free.wait(10)

    def fail(path: str, body: Any = None) -> None:
        began.wait(10)
        raise ServiceError("gone")

    first = target.nccl_group
    monkeypatch.setattr(server.nccl, "broadcast", broadcast)
    monkeypatch.setattr(target, "command", fail)
    with pytest.raises(ServiceError, match="gone"):
        channel.send(target, ["a", "b"], [torch.zeros(1), torch.zeros(1)])
    target.nccl_group = "the next group"
    free.set()
    while len(groups) < 2:
        time.sleep(0.001)
    assert groups == [[first], [first]]


class ShardedStrategy:
    """A strategy whose weights must be gathered, and which counts what is gathered at once."""

    def __init__(self) -> None:
        self.policy, self.accelerator = tiny_policy("qwen2_5_vl"), Accelerator(cpu=True)
        self.gathered, self.alive, self.most = list[str](), dict[int, int](), 0

    def weights(self) -> dict[str, Any]:
        weights = self.policy.weights()
        shards = {n: partial(self._gather, n, w) for n, w in weights.items()}
        return {n: SimpleNamespace(full_tensor=gather) for n, gather in shards.items()}

    def _gather(self, name: str, weight: Tensor) -> Tensor:
        full = weight.detach().clone()
        self.gathered.append(name)
        self.alive[id(full)] = full.nbytes
        weakref.finalize(full, self.alive.pop, id(full))
        self.most = max(self.most, sum(self.alive.values()))
        return full


@pytest.mark.parametrize("way", WAYS)
def test_sharded_weights_are_gathered_by_all_ranks_layer_by_layer(way, server):
    strategy: Any = ShardedStrategy()
    transfer = make_transfer(way, server, strategy)
    own = strategy.policy.weights()
    assert transfer.send([Server(server.url, 10)]) == {}
    assert sorted(strategy.gathered) == sorted(own)
    layers = [sum(own[n].nbytes for n in layer) for layer in weights.group_by_layer(own)]
    # While a layer is gathered, the last one that was sent may still be there.
    assert strategy.most <= 2 * max(layers) < sum(layers)
    # A rank without a server takes part in the gathering, and holds one tensor at a time.
    strategy.gathered, strategy.most = [], 0
    assert transfer.send([]) == {}
    assert sorted(strategy.gathered) == sorted(own)
    assert strategy.most <= 2 * max(weight.nbytes for weight in own.values())


@pytest.mark.slow
def test_shards_of_two_processes_arrive_whole(tmp_path):
    prepare(tmp_path)
    run_ranks(tmp_path / "log", 2, send_weights, tmp_path, "fsdp")


def test_a_server_that_lost_its_weights_gets_them_if_nothing_changes_them(server):
    target, sharded = Server(server.url, 10), ShardedStrategy()
    make_transfer("ipc", server, make_strategy()).load(target, 3)
    assert server.calls[-1] == "/finish_weight_update"
    ahead = make_transfer("ipc", server, make_strategy(), may_load=False)
    for transfer in (ahead, make_transfer("ipc", server, sharded)):
        with pytest.raises(UserError, match="step 3 cannot be sent before"):
            transfer.load(target, 3)
    assert sharded.gathered == []


RESUME = ["/reset_encoder_cache", "/reset_prefix_cache", "/update_weight_version", "/resume"]
UPDATE = ["/init_weight_transfer_engine", "/start_weight_update", "…", "/finish_weight_update"]


class Run:
    """A sampler of full weights whose only server is on this machine's stand-in of a GPU."""

    def __init__(
        self, server: TransferServer, folder: Path, level: int | None, may_load: bool = True
    ) -> None:
        overrides = ["rollout.sampler=vllm", f"rollout.vllm.urls=[{server.url}]"]
        settings = load_settings("quickstart", [*overrides, f"output_dir={folder}"])
        self.server, self.policy = server, load_policy(settings)
        strategy = Strategy(self.policy, Accelerator(cpu=True))
        self.sampler = VllmSampler(strategy, settings)
        self.sampler.transfer = make_transfer("ipc", server, strategy, may_load)
        self.sampler.servers[0].sleep_level = level
        self.prompt = make_prompt(self.policy, noise_example("a", []))

    def start(self) -> Any:
        sampling = SamplingSettings(self.policy.distribution, 4)
        return self.sampler.start([self.prompt], sampling, [range(1)], [(0, 0)])

    def take_calls(self) -> list[str]:
        """Return the calls since the last time; those that bring weights are one."""
        calls = ["…" if call == "/update_weights" else call for call in self.server.calls]
        self.server.calls.clear()
        return [c for i, c in enumerate(calls) if c != "…" or calls[i - 1] != "…"]

    def has_weights(self) -> bool:
        expected = revert_weight_conversion(self.policy.model, self.policy.weights())
        found = self.server.weights
        return len(found) > 50 and all(torch.equal(found[name], expected[name]) for name in found)


def test_a_step_wakes_loads_samples_and_rests(server, tmp_path):
    run = Run(server, tmp_path, level=2)
    run.sampler.publish(0)
    assert run.take_calls() == ["/pause?mode=wait", *UPDATE, *RESUME]
    ((completion,),) = run.start().result(20)
    run.sampler.rest()
    assert (completion.version, completion.logprobs) == (0, (-0.5,))
    assert run.take_calls() == ["/inference/v1/generate", "/sleep?level=2&mode=wait"]
    with torch.no_grad():
        next(run.policy.model.parameters()).add_(1)
    assert not run.has_weights()
    run.sampler.publish(1)
    wake = ["/wake_up?tags=weights", *UPDATE, "/wake_up?tags=kv_cache", *RESUME]
    assert run.take_calls() == wake
    assert run.has_weights()
    assert run.start().result(20)[0][0].version == 1
    run.sampler.close()


def test_weights_wait_for_what_is_being_sampled(server, tmp_path, monkeypatch):
    run = Run(server, tmp_path, level=None, may_load=False)
    run.sampler.publish(0)
    server.may_answer.clear()
    ahead = run.start()
    wait_for(lambda: "/inference/v1/generate" in server.calls)
    run.take_calls()
    finished: list[bool] = []
    pause = Server.open
    monkeypatch.setattr(Server, "open", lambda s: (finished.append(ahead.done()), pause(s)))
    Timer(0.5, server.may_answer.set).start()
    run.sampler.publish(1)
    assert finished == [True], "weights changed while completions were being sampled"
    assert ahead.result()[0][0].version == 0
    assert run.take_calls()[0] == "/pause?mode=wait"
    run.sampler.close()


@pytest.mark.parametrize("path", ["/wake_up?tags=weights", "/update_weights", "/resume"])
def test_a_failure_while_weights_are_loaded_is_repeated(path, server, tmp_path):
    run = Run(server, tmp_path, level=1)
    run.sampler.publish(0)
    run.sampler.rest()
    server.fails, server.fails_once = {path}, True
    run.sampler.publish(1)
    assert not server.fails
    assert run.has_weights()
    assert run.start().result(20)[0][0].version == 1
    run.sampler.close()
