"""The room that a run's checkpoints need on its disk."""

import logging
import shutil

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import fail_together
from vlm_grpo.dist.optimizer import count_state
from vlm_grpo.errors import UserError
from vlm_grpo.model.resolve import list_checkpoints
from vlm_grpo.training.update import Updater

logger = logging.getLogger(__name__)


def check_disk(settings: Settings, updater: Updater) -> None:
    """Raise ``UserError`` if no checkpoint fits on the run's disk; warn if those do not fit that
    the settings keep, with the next one. All ranks must call it."""
    size, keep_last = estimate_bytes(settings, updater), settings.checkpoint.keep_last
    with fail_together(updater.strategy.accelerator):
        if not updater.strategy.accelerator.is_main_process:
            return
        free, run_dir = shutil.disk_usage(settings.run_dir).free, settings.run_dir
        needs = f"a checkpoint of this run takes about {size / 1e9:.3g} GB"
        room = f"the disk of {run_dir} has {free / 1e9:.3g} GB free"
        if free < size:
            raise UserError(
                f"{needs}, and {room}: make room, or set output_dir to a folder on another disk"
            )
        # A checkpoint is complete before an older one is deleted.
        wanted = (keep_last or 2) + settings.checkpoint.keep_best + 1
        if free < (wanted - len(list_checkpoints(run_dir / "checkpoints"))) * size:
            logger.warning(
                "%s, and %s, which is less than the %d that checkpoint.keep_last=%d needs: "
                "make room, or keep fewer", needs, room, wanted, keep_last,
            )  # fmt: skip


def estimate_bytes(settings: Settings, updater: Updater) -> int:
    """Estimate the bytes of weights, optimizer state and methods' state in a checkpoint."""
    policy, optimizer = updater.policy, settings.optim.name
    trained = dict(policy.trainable_parameters())
    weights = policy.model.parameters() if policy.adapters is None else trained.values()
    size = sum(weight.numel() * weight.dtype.itemsize for weight in weights)
    for name, weight in trained.items():
        size += count_state(name, weight.shape, optimizer, weight.dtype)
    for method in updater.methods.values():
        held = method.state_dict()[1].values()
        size += sum(tensor.numel() * tensor.dtype.itemsize for tensor in held)
    return size
