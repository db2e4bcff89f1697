"""A net of two linear layers, with and without adapters."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

IN, OUT, RANK = 24, 40, 4
KINDS = ("full", "lora", "dora")


class Net(nn.Module):
    """Two layers, to a larger and to a smaller width, for products in both orders."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(IN, OUT, dtype=dtype)
        self.down = nn.Linear(OUT, IN, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def make_adapted(dtype: torch.dtype, **config: Any) -> Net:
    net = Net(dtype)
    get_peft_model(
        net,  # type: ignore[arg-type]
        LoraConfig(r=RANK, lora_alpha=6, target_modules=["up", "down"], **config),
        autocast_adapter_dtype=dtype != torch.float64,
    )
    for name, weight in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)  # initially 0, which would leave the output unchanged
        if "magnitude" in name:
            nn.init.uniform_(weight, 0.5, 2)
    return net
