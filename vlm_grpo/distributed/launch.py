"""The processes of a run: how they are launched, and what they agree on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
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
from torch import Tensor, distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import CPUOffloadPolicy, StateDictType

from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError

SUPPORTED = (
    DistributedType.NO,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_CPU,
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
)

BUCKET_BYTES = 256 * 2**20
"""Gradients that are added up by one collective: enough to fill a link, little beside a model."""


def join() -> PartialState:
    """This process among those of its launch, which meet here the first time it is asked.

    Raises:
        UserError: the launch asks for DeepSpeed, which is not installed.
    """
    refuse_missing_deepspeed()
    if _on_cpu():  # else DeepSpeed, which libraries import where it is installed, says so on stdout
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _join_after_restart()
    return PartialState(cpu=_on_cpu())


def _on_cpu() -> bool:
    """Whether the launch is one on CPUs.

    Without an accelerator accelerate would leave several processes to themselves, unless told.
    """
    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def _join_after_restart() -> None:
    """Meet the other ranks under a prefix of this attempt, where a launcher has started them anew.

    Launchers keep one key-value store for all attempts. There the ranks would find the addresses
    of processes that are dead, and wait for them.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not attempt or distributed.is_initialized():
        return
    world = int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rank = int(os.environ["RANK"])
    store = TCPStore(address, port, world, is_master=not hosted and rank == 0)
    distributed.init_process_group(
        "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo",
        store=PrefixStore(f"attempt-{attempt}", store),
        rank=rank,
        world_size=world,
    )


def build_accelerator(settings: Settings) -> Accelerator:
    """Devices and processes.

    Raises:
        UserError: the launch is of a kind that is not supported, or has too many processes.
    """
    join()
    # The policy sets its own precision, for rollout and update alike.
    dp_replicate_size()
    on_cpu, parallelism = _on_cpu(), None
    if on_cpu and _asks_for_parallelism():  # which accelerate knows on accelerators alone
        parallelism = ParallelismConfig(1, 1, tp_size=1, cp_size=1, sp_size=1)
    accelerator = Accelerator(mixed_precision="no", cpu=on_cpu, parallelism_config=parallelism)
    if accelerator.distributed_type not in SUPPORTED:
        raise UserError(
            f"{accelerator.distributed_type.value} is not supported: launch with plain data "
            "parallelism, FSDP2 or DeepSpeed, whose settings lie in configs/accelerate"
        )
    is_sharded = get_fsdp_plugin(accelerator) is not None
    if settings.checkpoint.sharded and not is_sharded:
        raise UserError(
            "checkpoint.sharded=true is for weights that FSDP2 cuts: set it to false, or launch "
            "with configs/accelerate/fsdp2.yaml (a run resumes from checkpoints of either kind)"
        )
    get_deepspeed_config(accelerator)
    if settings.optim.prompts_per_step < accelerator.num_processes:
        raise UserError(
            f"optim.prompts_per_step={settings.optim.prompts_per_step} is less than the number of "
            f"processes, {accelerator.num_processes}: each needs a prompt"
        )
    return accelerator


def get_fsdp_plugin(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    """The launch's FSDP settings; None where it asks for none.

    Raises:
        UserError: they ask for what is not supported.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    # accelerate knows FSDP on accelerators alone; on a CPU the same launch is to be tried out.
    on_cpu = accelerator.distributed_type == DistributedType.MULTI_CPU
    if on_cpu and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        plugin = FullyShardedDataParallelPlugin()
    if plugin is None:
        return None
    wrong = {
        "fsdp_version must be 2": plugin.fsdp_version != 2,
        "fsdp_offload_params must be false": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "fsdp_activation_checkpointing must be false (policy.gradient_checkpointing does it)": (
            plugin.activation_checkpointing
        ),
        "fsdp_cpu_ram_efficient_loading must be false: each process reads the model": (
            plugin.cpu_ram_efficient_loading
        ),
        "fsdp_state_dict_type must be FULL_STATE_DICT (checkpoint.sharded says who writes)": (
            plugin.state_dict_type != StateDictType.FULL_STATE_DICT
        ),
    }
    if found := [problem for problem, is_there in wrong.items() if is_there]:
        raise UserError(f"accelerate's FSDP settings: {'; '.join(found)}")
    return plugin


def dp_replicate_size() -> int:
    """How many times the weights that FSDP2 cuts are there, as the launch's parallelism says.

    1: they are cut over all ranks. More: over as many ranks as hold one copy, such as those of
    one machine (hybrid sharding).

    Raises:
        UserError: the launch asks for another parallelism, or for another number of ranks.
    """
    if not _asks_for_parallelism():
        return 1
    asked, world = ParallelismConfig(), int(os.environ.get("WORLD_SIZE", "1"))
    if asked.non_data_parallel_size != 1:
        raise UserError(
            "accelerate's parallelism_config: tp_size, cp_size and sp_size must be 1; of its "
            "parallelisms dp_replicate_size and dp_shard_size are supported"
        )
    if asked.data_parallel_size != world or not asked.dp_shard_enabled:
        raise UserError(
            f"accelerate's parallelism_config: dp_replicate_size={asked.dp_replicate_size} times "
            f"dp_shard_size={asked.dp_shard_size} must be the number of processes, {world}, and "
            "dp_shard_size more than 1"
        )
    return asked.dp_replicate_size or 1


def _asks_for_parallelism() -> bool:
    return os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true"


def asks_for_deepspeed() -> bool:
    """Whether the launcher said so."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"


def refuse_missing_deepspeed() -> None:
    """Find a launch with DeepSpeed where it is not installed.

    Raises:
        UserError: it is.
    """
    if asks_for_deepspeed() and not is_deepspeed_available():
        raise UserError(
            "this launch asks for DeepSpeed, which is not installed: pip install "
            "'vlm-grpo[deepspeed]', or launch with configs/accelerate/fsdp2.yaml"
        )


def get_deepspeed_config(accelerator: Accelerator) -> dict[str, Any] | None:
    """The launch's settings for DeepSpeed, in its own words; None where it asks for none.

    Raises:
        UserError: they ask for what is not supported.
    """
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    # As with FSDP: accelerate knows DeepSpeed on accelerators alone.
    if accelerator.distributed_type == DistributedType.MULTI_CPU and asks_for_deepspeed():
        plugin = DeepSpeedPlugin()
    if plugin is None:
        return None
    config: dict[str, Any] = plugin.deepspeed_config
    zero = config["zero_optimization"]
    offloads = ("offload_optimizer", "offload_param")
    wrong = {
        "zero_stage must be 2 or 3": zero["stage"] not in (2, 3),
        "offload_optimizer_device and offload_param_device must be none": any(
            (zero.get(part) or {}).get("device", "none") != "none" for part in offloads
        ),
        "stage3_… must be left out: all weights are gathered together": any(
            key.startswith("stage3_") and not key.endswith("on_model_save") for key in zero
        ),
        "zero3_init_flag must be false: each process reads the model": plugin.zero3_init_flag,
        "fp16 and bf16 must be off: policy.dtype says how the model computes": any(
            config.get(dtype, {}).get("enabled") for dtype in ("fp16", "bf16")
        ),
        "optimizer and scheduler must be left out: the recipe's optim has them": (
            "optimizer" in config or "scheduler" in config
        ),
        "gradient_clipping must be left out: the recipe's optim.max_grad_norm says it": (
            config.get("gradient_clipping", "auto") != "auto"
        ),
        "gradient_accumulation_steps must be 1: the recipe's optim cuts the step": (
            config.get("gradient_accumulation_steps", "auto") not in ("auto", 1)
        ),
    }
    if found := [problem for problem, is_there in wrong.items() if is_there]:
        raise UserError(f"accelerate's DeepSpeed settings: {'; '.join(found)}")
    return config


@contextlib.contextmanager
def explain_lost_rank() -> Iterator[None]:
    """Say plainly that another process has died, where a collective finds it gone.

    Raises:
        UserError: in place of the connection's error.
    """
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)
        if not lost:
            raise
        raise UserError(
            "another process of this run has died: the launcher's report tells which and how. "
            "Finished checkpoints are whole: resume=true goes on from the newest"
        ) from error


@contextlib.contextmanager
def together(accelerator: Accelerator) -> Iterator[None]:
    """What each rank does by itself inside succeeds on all of them, or all raise.

    Raises:
        UserError: it failed on another rank, which raises what went wrong.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = any_rank(accelerator, failure is not None)
    if failure is not None:
        raise failure
    if failed:
        raise UserError("another process of this run has failed, and says above or below why")


def any_rank(accelerator: Accelerator, flag: bool) -> bool:
    """Whether the flag is up on any rank, so that all of them do the same."""
    if accelerator.num_processes == 1:
        return flag
    flags = torch.tensor(float(flag), device=accelerator.device)
    return bool(accelerator.reduce(flags, "sum") > 0)  # type: ignore[operator]


def balance_by_cost(costs: Sequence[int], world: int) -> list[list[int]]:
    """The items of each of ``world`` ranks, so that their costs are about equal.

    The dearest item left goes to the rank with the least so far (Graham's longest-processing-time
    rule: at most 4/3 of the best cut). All ranks come to the same shares without speaking.

    Args:
        costs: of each item, at least 0.
        world: how many ranks.

    Returns:
        For each rank its items' places in ``costs``, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(world)]
    loads = [(0, 0, rank) for rank in range(world)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        cost, count, rank = min(loads)
        shares[rank].append(place)
        loads[rank] = (cost + costs[place], count + 1, rank)
    return [sorted(share) for share in shares]


def sum_over_ranks(accelerator: Accelerator, tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all ranks, many tensors in one collective.

    One collective for each tensor would spend its time on latency: an adapter has hundreds of
    small ones. Every rank calls it with tensors of the same shapes in the same order.
    """
    if accelerator.num_processes == 1:
        return
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        torch.distributed.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in order, in runs of one type and at most ``BUCKET_BYTES`` or one tensor."""
    buckets: list[list[Tensor]] = []
    room, dtype = 0, None
    for tensor in tensors:
        if tensor.nbytes > room or tensor.dtype != dtype:
            buckets.append([])
            room, dtype = BUCKET_BYTES, tensor.dtype
        buckets[-1].append(tensor)
        room -= tensor.nbytes
    return buckets
