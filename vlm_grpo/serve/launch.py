"""The commands that start vLLM servers: for a run's rollouts, and for a trained model's users."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from vlm_grpo.config.data import VideoSettings
from vlm_grpo.config.rollout import WeightTransfer, choose_adapter_level
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.adapters import CONFIG, LOAD_ERRORS, WEIGHTS, apply_lora_or_freeze
from vlm_grpo.model.families.family import find_part
from vlm_grpo.model.loading import build_empty, get_model_source, load_config, load_prompt_builder
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.prompts import PromptBuilder
from vlm_grpo.serve.server import SERVED_NAME
from vlm_grpo.serve.weights import choose_transfer
from vlm_grpo.utils import trust
from vlm_grpo.utils.jsonl import read_object

ENVIRONMENT = {  # of a server for rollouts
    "VLLM_SERVER_DEV_MODE": "1",  # versions of weights, pauses and caches
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def describe_adapter(
    settings: Settings, adapter: Path | None = None
) -> tuple[frozenset[str | None], int]:
    """Return the parts that an adapter changes, and its largest rank.

    None: the adapter of the settings, which is still to be trained.
    """
    if adapter is not None:
        try:
            described = read_object(adapter / CONFIG)
            with safe_open(adapter / WEIGHTS, "pt") as weights:
                parts = frozenset(map(find_part, weights.keys()))
            rank = max(described["r"], *(described.get("rank_pattern") or {}).values(), 1)
        except LOAD_ERRORS as error:
            raise UserError(f"adapter {adapter} cannot be loaded: {error}") from error
        if described.get("use_dora") or described.get("modules_to_save"):
            raise UserError(
                f"the adapter {adapter} has norms of rows (use_dora) or modules trained in full "
                "(modules_to_save), which vLLM does not load: export the merged model first "
                "(vlm-grpo export), and serve that folder"
            )
        return parts, rank
    if settings.policy.lora is None:
        return frozenset(), 0
    with torch.device("meta"):
        empty = build_empty(load_config(settings), settings.policy.trust_remote_code)
        adapters: Any = apply_lora_or_freeze(empty, settings.policy)
    trained = (name for name, weight in adapters.named_parameters() if weight.requires_grad)
    return frozenset(map(find_part, trained)), settings.policy.lora.r


def build_command(
    settings: Settings, address: tuple[str, int], on_gpu: bool | None = None
) -> list[str]:
    """Build the command of a server that can sample for a run, without the program's name.

    ``on_gpu``: whether the server has a GPU; None: if this machine has one.
    """
    on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
    prompts, adapter = load_prompt_builder(settings), describe_adapter(settings)
    options = _build_options(settings, address, prompts, adapter, on_gpu) | {
        "served-model-name": SERVED_NAME,
        "logprobs-mode": "processed_logprobs",  # of the distribution that is sampled from
        "seed": settings.seed,
        "enable-scale-out": True,
    }
    if prompts.family.has_texts_between_frames:
        # vLLM 0.32 keeps this cache in two processes, and clips skip the first. The two then evict
        # different images, and a request for an image that only the first has would fail.
        options["mm-processor-cache-gb"] = 0
    if not on_gpu:
        options["worker-extension-cls"] = "vlm_grpo_worker.WorkerExtension"
    vllm = settings.rollout.vllm
    arguments: Sequence[str] = ()
    transfer: WeightTransfer = "nccl"  # what a server for other GPUs may be asked for
    if vllm is not None and vllm.python is not None:
        options["gpu-memory-utilization"] = vllm.gpu_memory_utilization
        if vllm.max_model_length is not None:
            options["max-model-len"] = vllm.max_model_length
        for argument in vllm.arguments:  # which may name Python modules
            trust.check(argument)
        arguments, transfer = vllm.arguments, choose_transfer(settings, on_gpu)
        if on_gpu and not settings.rollout.steps_ahead:
            options["enable-sleep-mode"] = True
    if on_gpu and settings.policy.lora is None and transfer != "files":
        options["weight-transfer-config"] = json.dumps({"backend": transfer})
    return [*_format_command(get_model_source(settings.model), options), *arguments]


def build_public_command(
    settings: Settings, checkpoint: Path | None, name: str, address: tuple[str, int]
) -> list[str]:
    """Build the command of a server for users, who find the model or its checkpoint by ``name``."""
    source, adapter = get_model_source(settings.model), None
    if checkpoint is not None and (checkpoint / CONFIG).is_file():
        adapter = checkpoint.absolute()
    elif checkpoint is not None:
        source = str(checkpoint)
    prompts = load_prompt_builder(settings, source)
    described = (frozenset(), 0) if adapter is None else describe_adapter(settings, adapter)
    options = _build_options(settings, address, prompts, described, torch.cuda.is_available())
    options["served-model-name"] = name
    if adapter is not None:
        options["served-model-name"] = f"{name}-base"
        options["lora-modules"] = f"{name}={adapter}"
    if prompts.takes_videos:  # the default would be 32 frames, one per second
        video = settings.data.video or VideoSettings()
        options["media-io-kwargs"] = json.dumps({"video": {"num_frames": -1, "fps": video.fps}})
    if arguments := prompts.chat.arguments:
        options["default-chat-template-kwargs"] = json.dumps(arguments)
    return _format_command(source, options)


def _build_options(
    settings: Settings,
    address: tuple[str, int],
    prompts: PromptBuilder,
    adapter: tuple[frozenset[str | None], int],
    on_gpu: bool,
) -> dict[str, Any]:
    """Return the options that every server needs; the value of one without a value is True."""
    options: dict[str, Any] = {
        "host": address[0],
        "port": address[1],
        "dtype": settings.policy.dtype,
        # Otherwise the model's generation_config.json would change what a request does not set.
        "generation-config": "vllm",
    }
    if settings.model_revision is not None:
        options["revision"] = settings.model_revision
    if settings.policy.trust_remote_code:
        options["trust-remote-code"] = True
    parts, rank = adapter
    if parts:
        options |= {"enable-lora": True, "max-lora-rank": round_up_rank(rank), "max-loras": 1}
        if not parts.isdisjoint(("vision", "projector")):
            options["enable-tower-connector-lora"] = True
    if image_options := _get_image_options(prompts):
        options["mm-processor-kwargs"] = json.dumps(image_options)
    if not on_gpu:
        # In vLLM 0.32 a request with a seed fails on a CPU if its prompt is read in chunks.
        options["no-enable-chunked-prefill"] = True
    return options


def _format_command(source: str, options: dict[str, Any]) -> list[str]:
    words = (f"--{k}" if value is True else f"--{k}={value}" for k, value in options.items())
    return ["serve", source, *words]


def build_program(python: Path) -> list[str]:
    trust.check(python)
    return [str(python), "-m", "vllm.entrypoints.cli.main"]


def build_environment(settings: Settings, device: torch.device | None = None) -> dict[str, str]:
    """Return the variables of a server for rollouts, on a process's device or on any (None)."""
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    if not on_gpu:
        paths = [str(Path(__file__).parent / "worker"), os.environ.get("PYTHONPATH", "")]
        return ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if device is None:
        return ENVIRONMENT
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    index = device.index or 0
    own = {"CUDA_VISIBLE_DEVICES": visible.split(",")[index] if visible else str(index)}
    if choose_transfer(settings, on_gpu) == "ipc":
        # Of handles, which only we send: see weights.py.
        own["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return ENVIRONMENT | own


def choose_sleep_level(policy: Policy, settings: Settings) -> int | None:
    """Return what a run's own server frees during the update; None: it does not rest."""
    vllm = settings.rollout.vllm
    assert vllm is not None
    if policy.device.type != "cuda" or vllm.python is None or settings.rollout.steps_ahead:
        return None
    if policy.adapters is None:  # full weights are sent again after each update
        return 2
    # Base weights that take little of the GPU stay there, and others wait in the host's memory.
    weights = sum(weight.nbytes for weight in policy.model.parameters())
    memory = torch.cuda.get_device_properties(policy.device).total_memory
    return choose_adapter_level(weights, memory)


def round_up_rank(rank: int, ranks: Sequence[int] = (1, 8, 16, 32, 64, 128, 256, 320, 512)) -> int:
    """Return the smallest rank of adapters that vLLM allows and that is at least ``rank``."""
    return next((allowed for allowed in ranks if allowed >= rank), rank)


def _get_image_options(prompts: PromptBuilder) -> dict[str, Any]:
    """Return the options that give the server's processor a pixel budget."""
    family, budget = prompts.family, prompts.budget
    if budget is None:
        return {}
    family.set_pixel_budget(prompts.processor, budget)
    size = dict(prompts.processor.image_processor.size)
    if not family.has_texts_between_frames or budget.video_pixels is None:
        return {"size": size}
    # The size of a clip is that of all its frames, which an image's would make far too small.
    clips = {"shortest_edge": budget.min_pixels, "longest_edge": budget.video_pixels}
    return {"images_kwargs": {"size": size}, "videos_kwargs": {"size": clips}}
