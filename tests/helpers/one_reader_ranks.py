"""Two processes that load a model whose weight file only the first one has.

The results are the weights that each has after they are placed, with those that the first one read,
and the message of each process if the file is broken.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from small_runs import small_run
from torch.distributed.tensor import DTensor

from vlm_grpo.dist.launch import build_accelerator
from vlm_grpo.dist.strategy import FSDP, Strategy
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy, load_policy


def get_sums(policy: Policy) -> list[Any]:
    """Return the weights and buffers of the policy's model, unsharded, as sums of each tensor."""
    tensors = [*policy.model.named_parameters(), *policy.model.named_buffers()]
    return [
        (name, (t.full_tensor() if isinstance(t, DTensor) else t).double().sin().sum().item())
        for name, t in sorted(tensors)
    ]


def shard(policy: Policy, accelerator: Accelerator) -> FSDP:
    return FSDP(policy, accelerator, stream=True, replicas=1, offload=False)


def compare(folders: list[Path], rank: int, work: Path) -> dict[str, Any]:
    settings = small_run(work, folders[0 if rank == 0 else 1])
    accelerator = build_accelerator(settings)
    results: dict[str, Any] = {}
    for name, changes, build in (
        ("ddp", {}, Strategy),
        ("ddp lora", {"lora": {"r": 2, "alpha": 4}}, Strategy),
        ("fsdp", {}, shard),
        ("fsdp autocast", {"dtype": "bfloat16"}, shard),
    ):
        policy_settings = {"policy": {"dtype": "float32", **changes}}
        policy = load_policy(small_run(work, folders[0 if rank == 0 else 1], **policy_settings))
        before = get_sums(policy)
        build(policy, accelerator)
        after = get_sums(policy)
        first, second = gather_object([before])
        assert (first == second) is False, "the second process has read the weights"
        results[name] = gather_object([(after, first)])
    try:
        load_policy(small_run(work, folders[2]))
    except UserError as error:
        results["broken"] = gather_object([str(error)])
    return results


def run_rank(folders: list[Path], out: Path) -> None:
    """Write the results of all ranks to ``out``.

    The folders have a model, the same without the file of its weights, and one with a broken file.
    """
    rank = int(os.environ["RANK"])
    work = out.parent / str(rank)
    work.mkdir()
    results = compare(folders, rank, work)
    if rank == 0:
        out.write_text(json.dumps(results))
