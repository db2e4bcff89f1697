"""The launch of a run: its processes, the launcher's settings, and a watch over the ranks."""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from accelerate import (
    Accelerator,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
)
from accelerate.utils import DistributedType, is_deepspeed_available, parse_flag_from_env
from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import StateDictType

from vlm_grpo.config.run import DDP_TIMEOUT, Settings
from vlm_grpo.dist.collectives import COLLECTIVES, explain_lost_rank
from vlm_grpo.errors import UserError

SUPPORTED = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
OFFLOADS = ("offload_optimizer", "offload_param")
"""The blocks of a DeepSpeed config that keep the optimizer's state and the weights on the host."""
MARGIN = 60
"""Seconds by which an exchange between ranks may exceed the timeout: the watch, which ends the run
before, names the late rank."""
LONGEST_BEAT = 5.0
"""Seconds between two heartbeats of a rank, or a tenth of the timeout if that is less."""


def initialize_distributed(timeout: float = DDP_TIMEOUT) -> PartialState:
    """Initialize the process group on the first call, and return this process's state.

    ``timeout``: seconds that a rank waits for the others. ``UserError``: the launch requests
    DeepSpeed, which is not installed."""
    if _requests("DEEPSPEED") and not is_deepspeed_available():
        raise UserError(
            "this launch requests DeepSpeed, which is not installed: pip install "
            "'vlm-grpo[deepspeed]', or launch with configs/accelerate/fsdp2.yaml"
        )
    if _on_cpu():  # otherwise DeepSpeed, which other libraries import, prints a line to stdout
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _initialize_after_restart(timeout)
    return PartialState(cpu=_on_cpu(), timeout=timedelta(seconds=timeout + MARGIN))


def _requests(feature: str) -> bool:
    return parse_flag_from_env(f"ACCELERATE_USE_{feature}")


def _on_cpu() -> bool:  # accelerate then needs cpu=True, or it would not connect the processes
    return _requests("CPU") or not torch.accelerator.is_available()


def _initialize_after_restart(timeout: float) -> None:
    """Initialize the process group after a restart by the launcher, under a prefix of its own.

    Without it the ranks would read the addresses of dead processes and wait for them.
    """
    if _get_attempt() == "0" or distributed.is_initialized():
        return
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rank = int(os.environ["RANK"])
    distributed.init_process_group(
        "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo",
        store=connect_store("group", timeout, is_master=not hosted and rank == 0),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout + MARGIN),
    )


def connect_store(name: str, timeout: float, is_master: bool = False) -> Store:
    """Connect to the ranks' key-value store, which launchers keep for all attempts of a run.

    ``name`` is a prefix of the keys, in addition to the attempt's; the master hosts the store.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    seconds = timedelta(seconds=timeout)
    store = TCPStore(address, port, is_master=is_master, timeout=seconds, wait_for_workers=False)
    return PrefixStore(f"attempt-{_get_attempt()}/{name}", store)


def _get_attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def build_accelerator(settings: Settings) -> Accelerator:
    """Build the accelerator of a run; ``UserError``: the launch requests what is not supported."""
    initialize_distributed(settings.ddp_timeout)
    get_dp_replicate_size()
    on_cpu, parallelism = _on_cpu(), None
    if on_cpu and _requests("PARALLELISM_CONFIG"):  # accelerate supports it on accelerators only
        parallelism = ParallelismConfig(1, 1, tp_size=1, cp_size=1, sp_size=1)
    # The policy sets the precision itself, both for the rollout and for the update.
    accelerator = Accelerator(mixed_precision="no", cpu=on_cpu, parallelism_config=parallelism)
    if accelerator.distributed_type.name not in SUPPORTED:
        raise UserError(
            f"{accelerator.distributed_type.value} is not supported: launch with plain data "
            "parallelism, FSDP2 or DeepSpeed; configs/accelerate has settings for each"
        )
    is_sharded = get_fsdp_plugin(accelerator) or get_deepspeed_config(accelerator)
    if settings.checkpoint.sharded and not is_sharded:
        raise UserError(
            "checkpoint.sharded=true needs weights sharded by FSDP2 or DeepSpeed: set it to false, "
            "or launch with configs/accelerate/fsdp2.yaml (a run resumes from checkpoints of "
            "either kind)"
        )
    for name in ("cuda_graphs", "torch_compile"):
        if getattr(settings.rollout, name) and get_fsdp_plugin(accelerator) is not None:
            raise UserError(f"rollout.{name}=true is not supported with sharded weights: remove it")
    if settings.optim.prompts_per_step < accelerator.num_processes:
        raise UserError(
            f"optim.prompts_per_step={settings.optim.prompts_per_step} is less than the number of "
            f"processes, {accelerator.num_processes}: each needs a prompt"
        )
    return accelerator


def get_fsdp_plugin(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    """Return the launch's FSDP settings, checked, or None if it does not request FSDP."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    # accelerate supports FSDP on accelerators only; tests run the same launch on CPUs.
    on_cpu = accelerator.distributed_type == DistributedType.MULTI_CPU
    if on_cpu and _requests("FSDP"):
        plugin = FullyShardedDataParallelPlugin()
    if plugin is None:
        return None
    wrong = {
        "fsdp_version must be 2": plugin.fsdp_version != 2,
        "fsdp_activation_checkpointing must be false (policy.gradient_checkpointing does it)": (
            plugin.activation_checkpointing
        ),
        "fsdp_cpu_ram_efficient_loading must be false: one process reads the model anyway": (
            plugin.cpu_ram_efficient_loading
        ),
        "fsdp_state_dict_type must be FULL_STATE_DICT (use checkpoint.sharded instead)": (
            plugin.state_dict_type != StateDictType.FULL_STATE_DICT
        ),
    }
    _refuse("FSDP", wrong)
    return plugin


def _refuse(kind: str, wrong: Mapping[str, bool]) -> None:
    if found := [problem for problem, is_wrong in wrong.items() if is_wrong]:
        raise UserError(f"accelerate's {kind} settings: {'; '.join(found)}")


def get_dp_replicate_size() -> int:
    """Return the number of replicas of the sharded weights, from the launch's parallelism config.

    With 1 the weights are sharded over all ranks. With more (hybrid sharding) each group of
    consecutive ranks, such as those of one machine, holds one sharded replica."""
    if not _requests("PARALLELISM_CONFIG"):
        return 1
    config, world = ParallelismConfig(), int(os.environ.get("WORLD_SIZE", "1"))
    if config.non_data_parallel_size != 1:
        raise UserError(
            "accelerate's parallelism_config: tp_size, cp_size and sp_size must be 1; "
            "only dp_replicate_size and dp_shard_size are supported"
        )
    if config.data_parallel_size != world or not config.dp_shard_enabled:
        raise UserError(
            f"accelerate's parallelism_config: dp_replicate_size={config.dp_replicate_size} times "
            f"dp_shard_size={config.dp_shard_size} must be the number of processes, {world}, and "
            "dp_shard_size must be more than 1"
        )
    return config.dp_replicate_size or 1


def get_deepspeed_config(accelerator: Accelerator) -> dict[str, Any] | None:
    """Return the launch's DeepSpeed config, checked, or None if it does not request DeepSpeed."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    # As with FSDP, accelerate supports DeepSpeed on accelerators only.
    if accelerator.distributed_type == DistributedType.MULTI_CPU and _requests("DEEPSPEED"):
        plugin = DeepSpeedPlugin()
    if plugin is None:
        return None
    config: dict[str, Any] = plugin.deepspeed_config
    zero = config["zero_optimization"]
    offloads = [(zero.get(part) or {}).get("device", "none") for part in OFFLOADS]
    wrong = {
        "zero_stage must be 2 or 3": zero["stage"] not in (2, 3),
        "offload_optimizer_device and offload_param_device must be none or cpu": (
            not {"none", "cpu"}.issuperset(offloads)
        ),
        "stage3_… must be left out: all weights are gathered at once": any(
            key.startswith("stage3_") and not key.endswith("on_model_save") for key in zero
        ),
        "zero3_init_flag must be false: every process reads the model": plugin.zero3_init_flag,
        "fp16 and bf16 must be off: policy.dtype sets the precision": any(
            config.get(dtype, {}).get("enabled") for dtype in ("fp16", "bf16")
        ),
        "optimizer and scheduler must be left out: the recipe's optim settings define them": (
            "optimizer" in config or "scheduler" in config
        ),
        "gradient_clipping must be left out: the recipe's optim.max_grad_norm sets it": (
            config.get("gradient_clipping", "auto") != "auto"
        ),
        "gradient_accumulation_steps must be 1: optim.max_tokens_per_batch splits the step": (
            config.get("gradient_accumulation_steps", "auto") not in ("auto", 1)
        ),
    }
    _refuse("DeepSpeed", wrong)
    return config


class RankWatch:
    """A thread that publishes this rank's progress, and ends a run in which a rank is late.

    All ranks make the same collectives in the same order, so the number that a rank has reached
    says how far it is, with every backend. A rank is late if it has not reached a collective
    ``timeout`` seconds after another one. The waiting ranks may be inside a kernel, where no
    exception reaches them, so the thread ends their processes, with status 2. ``store`` is the
    ranks' key-value store, on a connection of its own; ``place`` describes this rank's work."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self.store, self.rank, self.world_size, self.timeout = store, rank, world_size, timeout
        self.place: Callable[[], str] = lambda: "loading"
        self.beat = min(LONGEST_BEAT, timeout / 10)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def __enter__(self) -> RankWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        beats, reached, since = 0, -1, 0.0
        try:
            while not self._stopped.wait(self.beat):
                beats += 1
                if COLLECTIVES.count != reached:
                    reached, since = COLLECTIVES.count, time.monotonic()
                sign = {"beats": beats, "reached": reached, "place": self.place()}
                self.store.set(str(self.rank), json.dumps({**sign, "host": platform.node()}))
                if self.store.check(["end"]):
                    os._exit(2)
                is_long = time.monotonic() - since > self.timeout
                if is_long and self._find_late(reached) and self.store.add("claims", 1) == 1:
                    self._end(reached)
        except RuntimeError:  # the store is gone: its process has died, which the launcher reports
            return

    def _find_late(self, reached: int) -> dict[int, dict[str, Any]]:
        """Return the last heartbeats of the ranks that have not reached a collective."""
        signs = {}
        for rank in range(self.world_size):
            key, sign = str(rank), {"beats": 0, "reached": -1, "place": "starting", "host": "?"}
            signs[rank] = json.loads(self.store.get(key)) if self.store.check([key]) else sign
        return {rank: sign for rank, sign in signs.items() if sign["reached"] < reached}

    def _end(self, reached: int) -> None:
        """End all ranks, unless the late ones have arrived in the meantime."""
        before = self._find_late(reached)
        time.sleep(3 * self.beat)
        late = self._find_late(reached)
        if not late:
            self.store.add("claims", -1)
            return
        lines = [
            f"  rank {rank} on {sign['host']}: {sign['place']}"
            + ("" if sign["beats"] > before[rank]["beats"] else "; its process does not respond")
            for rank, sign in late.items()
        ]
        print(
            f"error: {len(late)} of {self.world_size} processes did not arrive within "
            f"ddp_timeout={self.timeout:g} s:",
            *lines,
            f"The others wait for them ({self.place()}). Find out why they are slow, or raise "
            "ddp_timeout if that work takes so long. Finished checkpoints are intact: resume=true "
            "continues from the newest one",
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
        self.store.set("end", "")
        time.sleep(3 * self.beat)  # otherwise the others would report that this process has died
        os._exit(2)


@contextmanager
def watch_ranks(timeout: float) -> Iterator[RankWatch]:
    """Watch the ranks of a launch inside, and explain the errors of lost ones.

    A rank that the others wait for ends the run after ``timeout`` seconds.
    """
    state = PartialState()
    rank, world_size = state.process_index, state.num_processes
    store: Any = connect_store("watch", timeout) if world_size > 1 else None
    watch = RankWatch(store, rank, world_size, timeout)
    with explain_lost_rank():
        if world_size == 1:
            yield watch
            return
        with watch:
            yield watch
