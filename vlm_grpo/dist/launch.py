"""The launch of a run: its processes, and the launcher's settings."""

import os
import re
from datetime import timedelta

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, parse_flag_from_env
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import StateDictType

from vlm_grpo.config.run import DDP_TIMEOUT, Settings
from vlm_grpo.errors import UserError

LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_STRAY = "is set, as in a launch of several processes"
_REMEDY = "remove it from the environment, or use accelerate launch"
SUPPORTED = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP")


def initialize_distributed(timeout: float = DDP_TIMEOUT) -> PartialState:
    """Initialize the process group on the first call, and return this process's state.

    ``timeout``: seconds that a rank waits for the others. ``UserError``: the launch requests
    DeepSpeed, or its variables are wrong or set only in part."""
    if _requests("DEEPSPEED"):
        raise UserError(
            "this launch requests DeepSpeed, which is not supported: FSDP2 shards the same, launch "
            "with configs/accelerate/fsdp2.yaml"
        )
    given = {name: os.environ.get(name) for name in ("LOCAL_RANK", *LAUNCH)}
    for name, value in given.items():
        if value is not None and name != "MASTER_ADDR" and not re.fullmatch(r"-?\d{1,9}", value):
            raise UserError(f"{name}={value!r} {_STRAY}: it should be a number; {_REMEDY}")
    local, rank, size = (int(given[name] or -1) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))
    if local != -1 or size > 1:
        if missing := [name for name in LAUNCH if given[name] is None]:
            name = "WORLD_SIZE" if local == -1 else "LOCAL_RANK"
            raise UserError(
                f"{name}={given[name]} {_STRAY}, but not {', '.join(missing)}: {_REMEDY}"
            )
        if not 0 <= rank < size:
            raise UserError(f"RANK={rank} {_STRAY}, but WORLD_SIZE={size}: {_REMEDY}")
    _initialize_after_restart(timeout)
    return PartialState(cpu=_on_cpu(), timeout=timedelta(seconds=timeout))


def _requests(feature: str) -> bool:
    return parse_flag_from_env(f"ACCELERATE_USE_{feature}")


def _on_cpu() -> bool:  # accelerate then needs cpu=True, or it would not connect the processes
    return _requests("CPU") or not torch.accelerator.is_available()


def _initialize_after_restart(timeout: float) -> None:
    """Initialize the process group after a restart by the launcher, under a prefix of its own.

    Without it the ranks would read the addresses of dead processes and wait for them.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or distributed.is_initialized():
        return
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rank, seconds = int(os.environ["RANK"]), timedelta(seconds=timeout)
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=not hosted and rank == 0,
        timeout=seconds,
        wait_for_workers=False,
    )
    distributed.init_process_group(
        "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo",
        store=PrefixStore(f"attempt-{attempt}", store),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=seconds,
    )


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
            "parallelism or FSDP2; configs/accelerate has settings for each"
        )
    has_shards = get_fsdp_plugin(accelerator) is not None
    if settings.checkpoint.sharded and not has_shards:
        raise UserError(
            "checkpoint.sharded=true needs weights sharded by FSDP2: set it to false, or launch "
            "with configs/accelerate/fsdp2.yaml (a run resumes from checkpoints of either kind)"
        )
    for name in ("cuda_graphs", "torch_compile"):
        if getattr(settings.rollout, name) and has_shards:
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
    if found := [problem for problem, is_wrong in wrong.items() if is_wrong]:
        raise UserError(f"accelerate's FSDP settings: {'; '.join(found)}")
    return plugin


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
