"""Weights that are gathered from several ranks."""

import weakref

import torch

from vlm_grpo.dist import weights
from vlm_grpo.dist.weights import gather_full


def test_a_shared_tensor_is_gathered_once_and_only_the_requested_names_are_kept_and_copied(
    monkeypatch,
):
    gathered: list[torch.Tensor] = []
    copied: list[torch.Tensor] = []

    class Whole(torch.Tensor):
        def cpu(self) -> torch.Tensor:
            copied.append(self)
            return self.as_subclass(torch.Tensor)

    class Sharded(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            gathered.append(self)
            return self.as_subclass(Whole)

    monkeypatch.setattr(weights, "DTensor", Sharded)
    shared, norm = torch.ones(2).as_subclass(Sharded), torch.zeros(1).as_subclass(Sharded)
    found = gather_full({"head": shared, "embedding": shared, "norm": norm}, {"head", "embedding"})
    assert set(found) == {"head", "embedding"}
    assert len(gathered) == 2, "every rank takes part also for what it does not keep"
    assert len(copied) == 1
    assert found["head"] is found["embedding"]
    assert found["head"].tolist() == [1, 1]


def test_the_device_holds_one_full_tensor_at_a_time(monkeypatch):
    made: list[weakref.ref[torch.Tensor]] = []

    class Sharded(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            assert all(other() is None for other in made)
            full = torch.zeros(2)
            made.append(weakref.ref(full))
            return full

    monkeypatch.setattr(weights, "DTensor", Sharded)
    shards = {str(number): torch.zeros(1).as_subclass(Sharded) for number in range(3)}
    assert gather_full(shards, keep=()) == {}
    assert len(made) == 3
