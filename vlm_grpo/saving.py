"""Writing a run's state into a checkpoint, and putting it back."""

from __future__ import annotations

from pathlib import Path

from vlm_grpo.checkpoint import (
    TrainerState,
    prune,
    random_states,
    restore_random_states,
    save_checkpoint,
)
from vlm_grpo.config import Settings
from vlm_grpo.optimizer import set_rates
from vlm_grpo.policy import Policy
from vlm_grpo.update import Updater


class Saver:
    """Collects a run's state from its parts, and gives it back to them.

    Args:
        settings: the run's.
        policy: its weights and processor.
        update: its optimizer, schedule and reference policy.

    Attributes:
        saved: the step of the last checkpoint that this process wrote; None before any.
    """

    def __init__(self, settings: Settings, policy: Policy, update: Updater) -> None:
        self.settings, self.policy, self.update = settings, policy, update
        self.saved: int | None = None

    def save(self, step: int, position: int, best: tuple[float, int] | None) -> None:
        """Write ``checkpoints/step-N`` and remove those that are not to be kept."""
        state = TrainerState(
            step=step,
            position=position,
            optimizer=self.update.optimizer.state_dict(),
            scheduler=self.update.scheduler.state_dict(),
            reference=self.update.reference.state_dict(),
            best=best,
            random=random_states(),
        )
        folder = self.settings.run_dir / "checkpoints"

        def save_weights(aside: Path) -> None:
            self.policy.save(aside)
            self.settings.save(aside / "config.yaml")

        if self.update.accelerator.is_main_process:
            save_checkpoint(folder, state, save_weights)
            keep = {best[1]} if best is not None and self.settings.checkpoint.keep_best else set()
            prune(folder, self.settings.checkpoint.keep_last, keep)
        self.saved = step

    def restore(self, state: TrainerState) -> None:
        """Put the state back into the parts; the policy was loaded with its weights."""
        update = self.update
        update.optimizer.load_state_dict(state.optimizer)
        update.scheduler.load_state_dict(state.scheduler)
        set_rates(update.optimizer, update.scheduler, self.settings.optim)
        update.reference.load_state_dict(state.reference)
        restore_random_states(state.random)
