"""Settings of the rollout: how completions are sampled, by the policy or by vLLM servers."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from vlm_grpo.config.methods import NoiseSettings
from vlm_grpo.config.section import Frozen
from vlm_grpo.utils.http_json import split_address

WeightTransfer = Literal["files", "ipc", "nccl"]
RESIDENT_SHARE = 0.25
"""Share of a GPU's memory up to which base weights stay there while their adapter is updated."""
DEFAULT_ROLLOUT_TOKENS = 65_536
"""Number of tokens cached at once where free memory is not known."""


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
            split_address(url)
        if len(set(urls)) < len(urls):
            raise ValueError("an address is listed twice")
        return tuple(url.rstrip("/").removesuffix("/v1") for url in urls)


class RolloutSettings(Frozen):
    """The sampling of completions. Names and meanings follow TRL's GRPOConfig."""

    sampler: Literal["policy", "vllm"] = "policy"
    """``policy``: this process samples, with the weights that are trained; ``vllm``: vLLM servers
    do, which get the weights after each step."""
    steps_ahead: Literal[0, 1, 2] = 0
    """Number of steps whose completions are generated while an earlier step's update runs, with
    weights that are as many steps old; 0: generation and update take turns (vllm only)."""
    num_generations: int = Field(default=8, ge=2)
    """Completions per prompt, G; a group of one has no advantage."""
    forks: int = Field(default=1, ge=1)
    """Episodes that share one first turn: with F, a group samples G/F first turns, each of which is
    passed once and followed by F episodes of their own; 1: each has its own (environments only)."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the distribution that is sampled from and trained."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens whose probabilities sum to this value; 1: all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k likeliest tokens; 0: all tokens."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from tokens with at least this fraction of the likeliest token's probability; None:
    all tokens."""
    max_completion_length: int = Field(default=256, ge=1)
    """Maximum number of tokens per completion; longer ones are truncated."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Minimum number of tokens per completion; 0: no minimum."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; empty: only the end-of-sequence token ends it."""
    max_tokens_per_batch: int | None = Field(default=None, ge=1)
    """Maximum number of prompt and completion tokens in one generation batch; None: as many as fit
    into the GPU's free memory, 65,536 on a CPU."""
    cuda_graphs: bool | None = None
    """Replay decode steps as CUDA graphs; None: on a GPU, if prompts are shared and weights are not
    sharded; False: launch each kernel from Python. Each rollout
    captures them again if it copies weights: all those trained in bfloat16 from float32 without an
    adapter, and float32 or quantized ones under an adapter."""
    torch_compile: bool = False
    """Fuse the kernels of captured decode steps with ``torch.compile``, which the first rollout
    waits for."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal with groups of new prompts."""
    max_resample: int | None = Field(default=None, ge=1)
    """Maximum rounds of replacement per step; None: 3 (dynamic_sampling only)."""
    noise: NoiseSettings | None = None
    """Sample a part of each group for images with noise; None: all of it for clean images."""
    vllm: VllmSettings | None = None
    """The vLLM servers (``rollout.sampler=vllm`` only); None: there are none."""
    reward_timeout: float | None = Field(default=10.0, gt=0)
    """Time limit in seconds of one reward for one completion, which is unscorable after a timeout
    or an error. None: no limit."""
    reward_workers: int = Field(default=0, ge=0)
    """Number of processes that score completions, for rewards that are slow, hang in compiled code,
    or end their process; 0: the training process, which can only interrupt Python code."""

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are never sampled, so that the distribution is not the policy's."""
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p)


def choose_adapter_level(weights: int, memory: int) -> int:
    """Return the sleep level for base weights and a GPU's memory of these sizes in bytes.

    >>> choose_adapter_level(7_500_000_000, 80 << 30), choose_adapter_level(7_500_000_000, 24 << 30)
    (0, 1)
    """
    return 0 if weights <= RESIDENT_SHARE * memory else 1
