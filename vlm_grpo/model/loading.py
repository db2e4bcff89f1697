"""Loading of a model: weights, whole or in 4 or 8 bits, processor, family, adapters, frozen parts.

Of several processes only the first reads the weights. The others build the model with uninitialized
ones, which occupy no memory until the strategy has placed the model on the devices and the values
are broadcast one at a time (``dist/weights.py``).
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from huggingface_hub.errors import StrictDataclassError
from peft import PeftModel
from torch import distributed, nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    BitsAndBytesConfig,
    GenerationMixin,
)
from transformers.utils.import_utils import is_bitsandbytes_available

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.config.run import RUNS, Settings
from vlm_grpo.errors import UserError, nearest
from vlm_grpo.model.adapters import (
    BROKEN,
    CONFIG,
    LOAD_ERRORS,
    apply_lora_or_freeze,
    check_start,
    check_weight_names,
    load_adapters,
)
from vlm_grpo.model.chat_template import ChatTemplate
from vlm_grpo.model.engine.activations import enable_gradient_checkpointing
from vlm_grpo.model.engine.attention import use_shared_attention
from vlm_grpo.model.families.family import Family, PixelBudget, find_part
from vlm_grpo.model.families.known import load_family
from vlm_grpo.model.hub import check_reachable, suggest_model
from vlm_grpo.model.prompts import PromptBuilder, get_context_length
from vlm_grpo.model.sharing_check import why_not_shared
from vlm_grpo.utils import trust

logger = logging.getLogger(__name__)

# ImportError: of a package that only this model needs.
_ERRORS = (OSError, ValueError, ImportError, RecursionError, StrictDataclassError, *BROKEN)


@dataclass(frozen=True)
class LoadedModel:
    """A model, ready to be trained or evaluated."""

    model: Any  # of transformers, with injected adapters if there are any
    prompts: PromptBuilder
    shared: bool  # completions share one pass over their prompt
    adapters: PeftModel | None  # the PEFT model around the model; None for full weights
    autocast: bool = False  # compute in bfloat16 from float32 weights
    one_reader: bool = False  # only the first process has the weights' values


def load_model(
    settings: Settings, checkpoint: Path | None = None, training: bool = True
) -> LoadedModel:
    """Load the model that the settings name, and add their adapters or freeze their parts.

    Trained full weights are in ``policy.master_weights``; base weights of adapters, and weights
    that are only evaluated (no ``training``), are in ``policy.dtype``. ``checkpoint`` is a folder
    with weights that replace the model's, or with an adapter that is added to them.
    """
    if training:
        check_quantization(settings.policy)
    has_adapter = checkpoint is not None and (checkpoint / CONFIG).is_file()
    adapter = checkpoint if has_adapter else None
    weights = get_model_source(settings.model) if adapter == checkpoint else str(checkpoint)
    full = training and settings.policy.lora is None
    dtype = getattr(torch, settings.policy.master_weights if full else settings.policy.dtype)
    remote_code = settings.policy.trust_remote_code
    if remote_code:
        logger.warning(
            "policy.trust_remote_code=true: running the Python code that comes with %s", weights
        )
    config = load_config(settings, weights)
    # A checkpoint's processor has the pixel budget of its training.
    prompts = load_prompt_builder(settings, str(checkpoint or weights), config)
    family = prompts.family
    whole = settings.policy.load_in == "none"  # quantized weights are not broadcast
    is_launched = distributed.is_initialized() and distributed.get_world_size() > 1
    one_reader = training and whole and is_launched
    read = functools.partial(_read_weights, weights, config, settings, dtype)
    model = read_once(read, config, dtype, remote_code) if one_reader else read()
    if adapter is not None:
        _check_vocabulary(model, prompts.processor.tokenizer, settings.model, adapter)
    why_not = why_not_shared(family, model.config)
    if settings.policy.engine == "shared" and why_not is not None:
        raise UserError(f"policy.engine=shared is not possible for {settings.model}: {why_not}")
    shared = settings.policy.engine != "repeated" and why_not is None
    if shared:
        use_shared_attention(family, model)
    if training:
        enable_gradient_checkpointing(model, settings.policy.gradient_checkpointing)
    adapters, lora = None, settings.policy.lora
    if training and (adapter is None or lora is not None):
        start = check_start(lora) if adapter is None and lora is not None else adapter
        adapters = apply_lora_or_freeze(model, settings.policy, start)
    elif adapter is not None:
        adapters = load_adapters(model, adapter)
    if training:
        _check_dropout(model, settings)
    autocast = dtype == torch.float32 and settings.policy.dtype == "bfloat16"
    return LoadedModel(model, prompts, shared, adapters, autocast, one_reader)


def _check_vocabulary(model: Any, tokenizer: Any, name: str, adapter: Path) -> None:
    last = max(tokenizer.get_vocab().values())
    rows = model.get_input_embeddings().num_embeddings
    if last >= rows:
        raise UserError(
            f"{adapter} was trained on another model than model={name} is now: its tokenizer has "
            f"ids of up to {last:,}, and the model has {rows:,} embeddings. Set model to the model "
            "that it was trained on"
        )


def find_largest_dropout(model: nn.Module) -> tuple[float, str]:
    largest = (0.0, "")
    for name, module in model.named_modules():  # attention layers store theirs as an attribute
        rates = [v for key, v in vars(module).items() if "dropout" in key and isinstance(v, float)]
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            rates.append(module.p)
        largest = max([largest, *((rate, name) for rate in rates)])
    return largest


def _check_dropout(model: nn.Module, settings: Settings) -> None:
    (rate, module), objective = find_largest_dropout(model), settings.objective
    corrects = objective.sampler_correction != "none" or objective.beta > 0
    if rate > 0 and (corrects or not settings.has_ratio_1):
        raise UserError(
            f"model {settings.model}, {module}: dropout of {rate:g} changes log-probabilities "
            "between two passes, so the importance ratios and the KL would measure the dropout "
            "mask: set every dropout in its config.json to 0, or make one update per rollout, with "
            "objective.beta=0 and no sampler_correction"
        )


def get_model_source(name: str) -> str:
    """Return the folder or Hub name of the setting ``model``; refuse a folder that is missing."""
    if name == "embedded":
        return str(resources.files("vlm_grpo") / "embedded" / "tiny-vlm")
    # A Hub name is NAME or OWNER/NAME: what is longer, starts like a path or has a folder of runs
    # as its OWNER can only be a folder.
    folder = Path(name).parent
    is_run = "/" in name and (folder == RUNS or any(folder.glob("*/config.yaml")))
    is_path = is_run or name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not Path(name).is_dir():
        siblings = [str(path) for path in folder.glob("*/")]
        raise UserError(f"model {name}: there is no such folder{nearest(name, siblings)}")
    return name


def read_once(read: Callable[[], Any], config: Any, dtype: torch.dtype, remote_code: bool) -> Any:
    """Read the model on the first process, and build it without values on the others.

    If it cannot be read, all raise; the first process has the actual error.
    """
    model, failure = None, None
    if distributed.get_rank() == 0:
        try:
            model = read()
        except Exception as error:  # raised below, after the others know of it
            failure = error
    news = [failure is not None, getattr(model, "generation_config", None)]
    failed, generation_config = broadcast_object_list(news)
    if failure is not None:
        raise failure
    if failed:
        raise UserError("the first process cannot read the model; its own message gives the reason")
    if model is not None:
        return model
    model = build_empty(config, remote_code, dtype=dtype).to_empty(device="cpu").eval()
    model.tie_weights()
    model.generation_config = generation_config
    return model


def build_empty(config: Any, remote_code: bool, **options: Any) -> Any:
    """Build a model without values, which takes no memory."""
    auto: Any = AutoModelForImageTextToText
    try:
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=remote_code, **options)
    except ImportError as error:
        raise UserError(f"{config.model_type} cannot be built: {_explain(error)}") from error


def _read_weights(source: str, config: Any, settings: Settings, dtype: torch.dtype) -> Any:
    auto: Any = AutoModelForImageTextToText
    try:
        model, loaded = auto.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            use_safetensors=True,  # never unpickle weights
            **build_quantization(source, config, settings.policy),
            **_hub_arguments(settings),
        )
    except (ImportError, *LOAD_ERRORS) as error:
        raise UserError(f"model {source} cannot be loaded: {_explain(error)}") from error
    check_weight_names(source, set(loaded["unexpected_keys"]), set(loaded["missing_keys"]))
    return model


def load_config(settings: Settings, source: str | None = None) -> Any:
    """Load the configuration of ``source``, by default of the model that the settings name."""
    source = source or get_model_source(settings.model)
    config = _load(AutoConfig, source, settings)
    config = getattr(config, "thinker_config", config)  # of Qwen-Omni, whose talker is left out
    remote = getattr(config, "auto_map", None) or {}
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), object)
    if not issubclass(kind, GenerationMixin) and "AutoModelForImageTextToText" not in remote:
        what = "takes no images" if kind is object else "does not write text token by token"
        raise UserError(
            f"model {source} is a {config.model_type} model, which {what}: "
            "choose an image-text model such as Qwen/Qwen2.5-VL-3B-Instruct"
        )
    return config


def load_processor(settings: Settings, config: Any, source: str | None = None) -> Any:
    """Load a processor as ``load_config`` does; refuse one without a chat template.

    That of the model's family, if it has one, is saved with the processor.
    """
    source = source or get_model_source(settings.model)
    processor = _load(AutoProcessor, source, settings)
    if not (processor.chat_template or processor.tokenizer.chat_template):
        processor.chat_template = load_family(config).chat_template
        if not processor.chat_template:
            raise UserError(
                f"model {source} has no chat template, so it is not tuned to follow instructions: "
                "choose its instruction-tuned version"
            )
    return processor


def load_prompt_builder(
    settings: Settings, source: str | None = None, config: Any = None
) -> PromptBuilder:
    """Load the builder of the prompts of ``source``, as ``load_config`` does, without its weights.

    ``config`` is the model's configuration; None: that of ``source``.
    """
    config = config or load_config(settings, source)
    processor, family = load_processor(settings, config, source), load_family(config)
    budget = get_pixel_budget(family, processor, settings.policy)
    chat = ChatTemplate(processor, settings.prompt)
    return PromptBuilder(chat, family, budget, get_context_length(config))


def _load(kind: Any, source: str, settings: Settings) -> Any:
    arguments = _hub_arguments(settings)
    try:
        check_reachable(source, arguments["revision"])
        return kind.from_pretrained(source, **arguments)
    except _ERRORS as error:
        hint = suggest_model(source)
        raise UserError(f"model {source} cannot be loaded{hint}: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    reason = str(error).strip() or type(error).__name__
    is_package = isinstance(error, ImportError)
    return f"{reason} (or pip install 'vlm-grpo[models]')" if is_package else reason


def _hub_arguments(settings: Settings) -> dict[str, Any]:
    revision = settings.model_revision or "main"
    if settings.policy.trust_remote_code:
        trust.check(f"{trust.REMOTE_CODE}{settings.model}")
    return {"trust_remote_code": settings.policy.trust_remote_code, "revision": revision}


def get_pixel_budget(family: Family, processor: Any, policy: PolicySettings) -> PixelBudget | None:
    """Return the processor's pixel budget, overridden by the settings of a run."""
    if (own := family.pixel_budget(processor)) is None:
        if policy.min_pixels is not None or policy.max_pixels is not None:
            raise UserError(
                "policy.min_pixels and policy.max_pixels have no effect on this model, whose image "
                "processor has no pixel budget: remove them, and change its "
                "preprocessor_config.json instead"
            )
        return None
    low, high = policy.min_pixels or own.min_pixels, policy.max_pixels or own.max_pixels
    if low > high:
        raise UserError(
            f"the pixel budget is empty: at least {low} and at most {high} pixels; set both "
            "policy.min_pixels and policy.max_pixels"
        )
    return PixelBudget(low, high, policy.max_video_pixels)


# Weights in 4 or 8 bits, by bitsandbytes.


def check_quantization(policy: PolicySettings) -> None:
    """Refuse settings by which quantized weights would be trained themselves, or sharded."""
    if policy.load_in == "none":
        return
    name = f"policy.load_in={policy.load_in}"
    if policy.lora is None:
        raise UserError(
            f"{name}: quantized weights cannot be trained themselves: add policy.lora.r=16, or "
            "remove it"
        )
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise UserError(
            f"{name} does not work with FSDP2, which cannot shard quantized weights: launch with "
            "plain data parallelism (configs/accelerate/ddp.yaml), where each device holds all of "
            "them"
        )


def find_quantized(model: Any, policy: PolicySettings) -> list[str]:
    """Return the names of the linear layers that the settings hold in 4 or 8 bits.

    In 4 bits, 64 consecutive weights share a scale (QLoRA: Dettmers et al., 2023,
    arXiv:2305.14314); in 8 bits, a row does (LLM.int8: Dettmers et al., 2022, arXiv:2208.07339).
    ``engine/linear.py`` computes with them.
    """
    if policy.load_in == "none":
        return []
    head = model.get_output_embeddings()
    modules = ((n, m) for n, m in model.named_modules() if type(m) is nn.Linear and m is not head)
    return [name for name, _ in modules if find_part(name) == "language"]


def build_quantization(source: str, config: Any, policy: PolicySettings) -> dict[str, Any]:
    """Build the arguments of ``from_pretrained`` that quantize the weights of model ``source``.

    There are none if the weights are whole, or quantized in their files already.
    """
    name, held = f"policy.load_in={policy.load_in}", _describe_files(config)
    if held not in ("whole", policy.load_in):
        remedy = f"set policy.load_in={held}" if held in ("4bit", "8bit") else "name another form"
        raise UserError(f"the weights of model {source} are quantized ({held}): {remedy} of it")
    if policy.load_in == "none":
        return {}
    if not is_bitsandbytes_available():
        raise UserError(
            f"{name} needs the package bitsandbytes: pip install 'vlm-grpo[quantization]'"
        )
    if held != "whole":
        if ignored := sorted(policy.model_fields_set & {"quant_type", "double_quant"}):
            raise UserError(
                f"policy.{ignored[0]} has no effect on model {source}, whose files have quantized "
                "weights: remove it"
            )
        return {}
    model = build_empty(config, policy.trust_remote_code)
    quantized = set(find_quantized(model, policy))
    if not quantized:
        raise UserError(f"{name}: the language model of {source} is not known: remove it")
    whole = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in quantized]
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=policy.load_in == "4bit",
            load_in_8bit=policy.load_in == "8bit",
            llm_int8_skip_modules=whole,
            bnb_4bit_compute_dtype=policy.dtype,
            bnb_4bit_quant_type=policy.quant_type,
            bnb_4bit_use_double_quant=policy.double_quant,
        )
    }


def _describe_files(config: Any) -> str:
    """Return how weights are held in a model's files: ``whole``, or the kind of quantization."""
    if not (settings := getattr(config, "quantization_config", None)):
        return "whole"
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    bits = [bits for bits in ("4bit", "8bit") if settings.get(f"load_in_{bits}")]
    return bits[0] if bits else str(settings.get("quant_method"))
