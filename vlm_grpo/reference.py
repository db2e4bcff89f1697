"""The reference policy: a snapshot of what is trained, refreshed every k steps.

What is not trained is the same in policy and reference, so the snapshot holds the trainable
weights alone: a few megabytes for an adapter, one copy of the model for full weights. While the
reference is asked for log-probabilities, the snapshot takes the weights' place. It may be kept on
the host, so that the accelerator holds it only during that pass, when there are no gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

from vlm_grpo.errors import UserError
from vlm_grpo.objective_settings import ObjectiveSettings


class Reference:
    """The reference policy of a run.

    With ``beta = 0``, or refreshed at every step, there is no snapshot: the reference is not
    needed, or is the policy at the start of the step, whose log-probabilities the update has.

    Args:
        trainable: names and weights that training changes, as they are at the start.
        objective: says whether a reference is needed, how often it is refreshed and where it is
            kept.
    """

    def __init__(
        self,
        trainable: list[tuple[str, nn.Parameter]],
        objective: ObjectiveSettings,
    ) -> None:
        self.trainable = dict(trainable)
        self.every: int | Literal["never"] = objective.reference_refresh_every
        self.on_host = objective.reference_device == "cpu"
        self.snapshot: dict[str, torch.Tensor] | None = None
        if objective.needs_reference:
            policy = ((name, weight.detach()) for name, weight in self.trainable.items())
            self.snapshot = {name: self._keep(weight) for name, weight in policy}

    def refresh(self, step: int) -> bool:
        """Make the policy the reference if ``step`` (from 0) is one of every k; say whether."""
        if self.snapshot is None or self.every == "never":
            return False
        due = step % self.every == 0
        if due:
            for name, weight in self.trainable.items():
                self.snapshot[name].copy_(weight.detach())
        return due

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy's weights are the reference's inside."""
        if self.snapshot is None:
            raise RuntimeError("these settings keep no reference policy")
        policy = {name: weight.data for name, weight in self.trainable.items()}
        try:
            for name, weight in self.trainable.items():
                weight.data = self.snapshot[name].to(weight.device)
            yield
        finally:
            for name, weight in self.trainable.items():
                weight.data = policy[name]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The snapshot, empty where there is none."""
        return dict(self.snapshot or {})

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take a saved snapshot.

        Raises:
            UserError: it does not hold the weights that these settings train.
        """
        held = {name: weight.shape for name, weight in (self.snapshot or {}).items()}
        if {name: weight.shape for name, weight in state.items()} != held:
            raise UserError(
                "the checkpoint's reference policy does not fit: it holds other weights than "
                "these settings train"
            )
        if self.snapshot is not None:
            for name, weight in state.items():
                self.snapshot[name].copy_(weight)

    def _keep(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy of the weight where snapshots are kept."""
        return weight.to("cpu", copy=True) if self.on_host else weight.clone()
