"""Conversion between full and sharded tensors: unsharded ones, and weights as ZeRO-3 keeps them.

The launches of ``test_strategy.py`` cover the tensors of FSDP2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from vlm_grpo.dist.sharding import (
    Deferred,
    full_shape,
    gather_full,
    is_sharded,
    local_shard,
    shard_like,
    unshard_like,
)

FULL = torch.arange(5.0)
SHARDS = (torch.tensor([0.0, 1.0, 2.0]), torch.tensor([3.0, 4.0, 0.0]))
"""The shards of two ranks, of equal lengths: the last one is padded."""


def make_zero3_weight() -> Tensor:
    """Build a weight with the attributes that DeepSpeed sets, empty while it is not gathered."""
    weight: Any = torch.nn.Parameter(torch.empty(0))
    weight.ds_tensor, weight.ds_shape = torch.zeros(3), torch.Size([5])
    return weight


def test_an_unsharded_tensor_is_its_own_shard():
    weight, value = torch.zeros(2, 3), torch.ones(2, 3)
    assert not is_sharded(weight)
    assert full_shape(weight) == (2, 3)
    assert local_shard(weight) is weight
    assert shard_like(value, weight) is value
    assert unshard_like(value, weight) is value


@pytest.mark.parametrize("rank", [0, 1])
def test_a_zero3_weight_is_sharded_with_padding(rank, monkeypatch):
    monkeypatch.setattr(distributed, "get_rank", lambda: rank)
    weight = make_zero3_weight()
    assert is_sharded(weight)
    assert full_shape(weight) == (5,)
    assert local_shard(weight) is weight.ds_tensor  # type: ignore[attr-defined]
    assert torch.equal(shard_like(FULL, weight), SHARDS[rank])


def test_the_shards_of_a_zero3_weight_are_joined_without_padding(monkeypatch):
    def gather(flat: Tensor, part: Tensor) -> None:
        assert torch.equal(part, SHARDS[0])
        flat.copy_(torch.cat(SHARDS))

    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_gather_into_tensor", gather)
    deferred = unshard_like(SHARDS[0], make_zero3_weight())
    assert isinstance(deferred, Deferred)
    assert (deferred.numel(), deferred.element_size()) == (FULL.numel(), 4)
    assert torch.equal(deferred.full_tensor(), FULL)


def test_gather_full_keeps_the_requested_names_and_ties():
    shared = torch.ones(2)
    tensors = {"head": shared, "embedding": shared, "norm": torch.zeros(1)}
    gathered = gather_full(tensors, {"head", "embedding"})
    assert set(gathered) == {"head", "embedding"}
    assert gathered["head"] is gathered["embedding"]
