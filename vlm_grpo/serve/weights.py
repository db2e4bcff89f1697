"""The transfer of a policy's weights to servers, and the one by files."""

from __future__ import annotations

import shutil
from pathlib import Path

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import fail_together, get_local_names
from vlm_grpo.dist.sharding import gather_full
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.model.adapters import save_weights
from vlm_grpo.serve.client import VllmClient
from vlm_grpo.serve.direct import DirectTransfer, IpcChannel, NcclChannel
from vlm_grpo.serve.launch import choose_transfer
from vlm_grpo.utils.atomic_io import share_weights

KEPT = 3
"""Number of versions whose files are kept: one for each rollout that may not have begun."""


class FileTransfer:
    """Weights in files, which all processes and servers can read.

    With full weights every rank writes a share of them, and holds only that share in full.

    Args:
        strategy: the policy and the ranks.
        folder: folder for the files.
    """

    def __init__(self, strategy: Strategy, folder: Path) -> None:
        self.strategy, self.policy, self.folder = strategy, strategy.policy, folder

    def stage(self, version: int) -> None:
        """Write the current weights. All ranks must call it."""
        ranks, target = self.strategy.accelerator, self._find(version)
        with fail_together(ranks):
            if ranks.is_main_process:
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir(parents=True)
        weights = self.strategy.weights()
        names = get_local_names(ranks, weights)
        if (adapters := self.policy.adapters) is not None:  # small: one file
            names = weights.keys() if ranks.is_main_process else ()
        share = gather_full(weights, names)
        with fail_together(ranks):  # also lets nobody read before all have written
            if adapters is None and share:
                self.policy.save_shard(target, share, f"model-{ranks.process_index:05d}")
            elif adapters is not None and share:
                save_weights(adapters, target, share)
        if ranks.is_main_process:
            share_weights(target)

    def load(self, client: VllmClient, version: int) -> None:
        """Load a version that was staged into a server that is paused.

        Raises:
            ServiceError: the server failed.
        """
        folder = self._find(version).absolute()
        if self.policy.adapters is None:
            client.load_files(folder)
        else:
            client.load_adapter(folder)

    def forget(self, client: VllmClient) -> None:
        """Do nothing: files serve any server."""

    def close(self) -> None:
        """Delete the files, on the main process."""
        if self.strategy.accelerator.is_main_process:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _find(self, version: int) -> Path:
        return self.folder / f"weights-{version % KEPT}"


def build_transfer(strategy: Strategy, settings: Settings) -> FileTransfer | DirectTransfer:
    """Build the transfer of a run (``rollout.vllm.weight_transfer``).

    Raises:
        UserError: the way that is set needs a GPU.
    """
    device = strategy.policy.device
    way = choose_transfer(settings, device.type == "cuda")
    if way == "files":
        return FileTransfer(strategy, settings.run_dir / "vllm")
    channel = IpcChannel(device) if way == "ipc" else NcclChannel(device)
    return DirectTransfer(strategy, channel, may_load=settings.rollout.steps_ahead == 0)
