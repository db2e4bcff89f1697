"""The settings of the vLLM servers that sample completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from vlm_grpo.config.section import Frozen

WeightTransfer = Literal["files", "ipc", "nccl"]
_OWN = ("gpu_memory_utilization", "max_model_length", "arguments", "sleep_level")
"""Settings of servers that the run starts."""
RESIDENT_SHARE = 0.25
"""Share of a GPU's memory up to which base weights stay there while their adapter is updated."""
CHOOSE_SERVERS = (
    "set either rollout.vllm.python, the Python of an environment with vLLM, or rollout.vllm.urls, "
    "the addresses of running servers"
)
"""The remedy for settings without servers, or with both kinds."""


class VllmSettings(Frozen):
    """The vLLM servers of ``rollout.sampler=vllm``: either ``python`` or ``urls``."""

    python: Path | None = None
    """Python of the environment in which vLLM is installed: each process of the run starts a server
    of its own on its own device. None: the servers of ``urls``."""
    urls: tuple[str, ...] = ()
    """Addresses of running servers (``vlm-grpo serve``), such as ``http://127.0.0.1:8000``, which
    share the prompts; empty: the run starts its own."""
    gpu_memory_utilization: float = Field(default=0.3, gt=0, le=1)
    """Fraction of the GPU's memory that a server started by the run uses for weights and keys."""
    max_model_length: int | None = Field(default=None, ge=1)
    """Maximum number of prompt and completion tokens; None: what the model's context allows."""
    arguments: tuple[str, ...] = ()
    """Further arguments of ``vllm serve``, such as ``--max-num-seqs=512``."""
    weight_transfer: WeightTransfer | None = None
    """Way in which full weights reach the servers: ``ipc`` (same GPU), ``nccl`` (other GPUs) or
    ``files``. None: ipc for servers started on a GPU with ``steps_ahead`` of 0 or 1, otherwise
    files. Adapters are always files."""
    sleep_level: Literal[0, 1, 2] | None = None
    """What a server started by the run frees of a GPU's memory while the policy is updated: 0 its
    keys, 1 also its weights, which the host keeps, 2 also its weights, which are sent again. None:
    2 for full weights; with adapters 0 or 1, by what fits. With ``steps_ahead`` it frees nothing.
    """
    startup_timeout: float = Field(default=900.0, gt=0)
    """Seconds in which a server must be ready."""
    request_timeout: float = Field(default=900.0, gt=0)
    """Seconds in which the completions of one prompt must be sampled; a server that takes longer
    hangs and is replaced."""
    max_restarts: int = Field(default=3, ge=0)
    """Number of failures of a server, without a finished rollout in between, after which it is not
    started or asked again."""

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} must start with http:// or https://")
        if len(set(urls)) < len(urls):
            raise ValueError("an address is listed twice")
        return tuple(url.rstrip("/").removesuffix("/v1") for url in urls)

    @model_validator(mode="after")
    def _check_combinations(self) -> VllmSettings:
        if (self.python is None) == (not self.urls):
            raise ValueError(CHOOSE_SERVERS)
        if self.urls:
            for name in _OWN:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"rollout.vllm.{name} has no effect on running servers (urls): remove it"
                    )
            if self.weight_transfer == "ipc":
                raise ValueError(
                    "rollout.vllm.weight_transfer=ipc needs servers on the GPUs of the run "
                    "(rollout.vllm.python): use nccl or files"
                )
        elif self.weight_transfer == "nccl":
            raise ValueError(
                "rollout.vllm.weight_transfer=nccl needs servers on other GPUs than the run's "
                "(rollout.vllm.urls): use ipc or files"
            )
        return self

    def check_steps_ahead(self, steps: int) -> None:
        """Check the settings that conflict with ``rollout.steps_ahead``."""
        if steps and self.sleep_level is not None:
            raise ValueError(
                f"rollout.vllm.sleep_level has no effect with rollout.steps_ahead={steps}, where "
                "servers sample during the update: remove one of them"
            )
        if steps > 1 and self.weight_transfer in ("ipc", "nccl"):
            raise ValueError(
                f"rollout.vllm.weight_transfer={self.weight_transfer} replaces weights at once, "
                "and with rollout.steps_ahead=2 older ones are still in use: use files, or one step"
            )

    def check_adapters(self, use_dora: bool, modules_to_save: Sequence[str]) -> None:
        """Check the settings that conflict with ``policy.lora``."""
        for name, is_used in (("use_dora", use_dora), ("modules_to_save", modules_to_save)):
            if is_used:
                raise ValueError(
                    f"policy.lora.{name}: vLLM does not load such adapters: remove it, or remove "
                    "rollout.sampler=vllm, so that the policy samples"
                )
        if self.weight_transfer is not None:
            raise ValueError(
                "rollout.vllm.weight_transfer has no effect on adapters, which are sent as files: "
                "remove it"
            )
        if self.sleep_level == 2:
            raise ValueError(
                "rollout.vllm.sleep_level=2 drops the base weights, which are not sent with an "
                "adapter: use 0 or 1"
            )


def choose_adapter_level(weights: int, memory: int) -> int:
    """Return the sleep level for base weights and a GPU's memory of these sizes in bytes.

    >>> choose_adapter_level(7_500_000_000, 80 << 30), choose_adapter_level(7_500_000_000, 24 << 30)
    (0, 1)
    """
    return 0 if weights <= RESIDENT_SHARE * memory else 1
