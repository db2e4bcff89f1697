"""Metrics accumulate over the parts of a step to the metrics of the full step."""

from __future__ import annotations

import math

import pytest
import torch

from vlm_grpo.training.objective import MetricAccumulator

FIRST = MetricAccumulator(
    means={"kl": (torch.tensor(3.0), torch.tensor(2.0)), "reward": (1.0, 1)},
    minima={"min_length": 4},
    maxima={"max_length": 9, "ratio": torch.tensor(1.5)},
    sums={"failed": 1},
    samples={"exact": (1.0, 0.0)},
)
SECOND = MetricAccumulator(
    means={"kl": (torch.tensor(1.0), torch.tensor(2.0)), "entropy": (0.0, 0)},
    minima={"min_length": 2},
    maxima={"max_length": 5, "ratio": torch.tensor(1.25)},
    sums={"failed": 2, "decoded": 7},
    samples={"exact": (0.5,), "format": ()},
)


def test_two_parts_add_up_to_the_metrics_of_both():
    values = (FIRST + SECOND).values()
    assert values.pop("exact/std") == pytest.approx(0.5)  # of 1, 0 and 1/2
    assert math.isnan(values.pop("format/mean"))
    assert math.isnan(values.pop("format/std"))
    assert values == {
        "kl": 1.0,
        "reward": 1.0,
        "min_length": 2,
        "max_length": 9,
        "ratio": 1.5,
        "exact/mean": 0.5,
        "failed": 3,
        "decoded": 7,
    }


def test_a_mean_over_nothing_is_left_out_or_given_a_value():
    assert "entropy" not in SECOND.values()
    assert math.isnan(SECOND.values(empty=math.nan)["entropy"])


def test_the_sum_starts_from_an_empty_accumulator():
    assert sum([FIRST], MetricAccumulator()).values() == FIRST.values()
    assert MetricAccumulator().values() == {}


def test_a_maximum_with_nan_is_nan():
    broken = MetricAccumulator(maxima={"ratio": torch.tensor(math.nan)})
    assert math.isnan((FIRST + broken).values()["ratio"])
    assert math.isnan((broken + FIRST).values()["ratio"])


def test_a_copy_in_host_memory_has_the_same_values():
    assert FIRST.cpu().values() == FIRST.values()


def test_metrics_are_read_at_once_for_each_dtype(monkeypatch):
    reads, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: [cpu(x), reads.append(x.dtype)][0])
    right = MetricAccumulator({"accuracy": (torch.tensor(3), 4), "kl": (torch.tensor(0.5), 2)})
    found = (FIRST + right).cpu()
    assert sorted(map(str, reads)) == ["torch.float32", "torch.int64"]
    assert found.values() == (FIRST + right).values()
