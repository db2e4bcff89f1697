"""Measurement of the bytes that one layer saves for its backward pass; it needs no weights.

Two decoder layers and two blocks of a vision tower run the engine's code on fake tensors, which
have sizes, a precision and a device, but no values. The bytes of a layer are those that autograd
saves in the second, in addition to those of the first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, AutoConfig, AutoModelForImageTextToText
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionBlock
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionBlock

from vlm_grpo.config.policy import PolicySettings
from vlm_grpo.model.adapters import apply_lora_or_freeze
from vlm_grpo.model.engine.activations import enable_gradient_checkpointing
from vlm_grpo.model.engine.attention import ATTENTION_NAME, SEGMENTS_NAME, PackedAttention
from vlm_grpo.model.engine.forwards import computed, use_fused_layers
from vlm_grpo.model.engine.kernels import GroupSpan
from vlm_grpo.model.engine.linear import use_fast_linears
from vlm_grpo.planning.sizes import LayerBytes, ModelShape, Precision

_ADAPTED = {f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")}
_SEGMENTS = "flash_measured"  # transformers looks for "flash" in the name
Rows = tuple[int, int, int]  # tokens of a prompt, its number of completions and the tokens of each


def measure_layers(shape: ModelShape, policy: PolicySettings, on_cpu: bool) -> ModelShape:
    """Return the shape with the bytes that its layers save under the policy's settings."""
    trained: Any = PolicySettings(lora=policy.lora, freeze=policy.freeze)  # hashable, as frozen
    return _measure_layers(shape, trained, on_cpu)


@lru_cache(maxsize=64)  # a measurement takes a second
def _measure_layers(shape: ModelShape, policy: PolicySettings, on_cpu: bool) -> ModelShape:
    device = torch.device("cpu" if on_cpu else "cuda")
    block = _measure_block(shape, device) if shape.trains_vision else None
    return replace(shape, layer=_measure_layer(shape, policy, device), block=block)


def _measure_layer(shape: ModelShape, policy: PolicySettings, device: torch.device) -> LayerBytes:
    model = _build_layers(shape, policy)
    language_model: Any = model.get_decoder()

    def run(rows: Rows) -> None:
        prompt, generations, tokens = rows
        row = torch.empty(1, prompt + generations * tokens, shape.text.hidden, dtype=model.dtype)
        language_model(
            inputs_embeds=row.requires_grad_(),
            position_ids=torch.arange(row.shape[1])[None],
            attention_mask=torch.zeros(1, 1, 1, 1),  # passed on as it is
            attend=PackedAttention([GroupSpan(0, prompt, (tokens,) * generations)]),
            use_cache=False,
        )

    width = shape.text.hidden * model.dtype.itemsize
    return _measure(run, model, language_model.layers, width, (shape.precision, device))


def _measure_block(shape: ModelShape, device: torch.device) -> LayerBytes:
    tower, vision = _build_blocks(shape), shape.vision
    dtype = torch.float32 if shape.precision == "float32" else torch.bfloat16

    def run(rows: Rows) -> None:
        prompt, generations, tokens = rows
        patches = prompt + generations * tokens
        hidden = torch.empty(patches, vision.hidden, dtype=dtype).requires_grad_()
        angles = torch.empty(patches, vision.hidden // vision.heads)
        for block in tower:
            hidden = block(
                hidden,
                cu_seqlens=torch.arange(0, patches + 1, patches, dtype=torch.int32),
                position_embeddings=(angles, angles),
                max_seqlen=(patches,),
            )

    width = vision.hidden * dtype.itemsize
    return _measure(run, tower, tower, width, (shape.precision, device))


def _measure(
    run: Callable[[Rows], None],
    model: nn.Module,
    layers: Any,
    width: int,
    place: tuple[Precision, torch.device],
) -> LayerBytes:
    """Fit lines to the bytes that the second of a model's layers saves; its input has ``width``."""

    def count(rows: Rows) -> int:
        with _use_fakes(model, *place):
            return _count_saved(lambda: run(rows), model, layers)

    n = 32  # kernels round lengths up to it
    least, longer = count((n, 1, n)), count((n, 1, 2 * n))
    token = (longer - least) // n
    repeat = (count((n, 2, n)) - least) // n - token
    prompt = (count((2 * n, 1, n)) - least) // n - token - repeat
    enable_gradient_checkpointing(model, "mlp")
    kept = count((n, 1, n))
    mlp_token = token - (count((n, 1, 2 * n)) - kept) // n
    mlp_fixed = least - kept - 2 * n * mlp_token
    fixed = least - 2 * n * token - n * (prompt + repeat)
    return LayerBytes(token, fixed, mlp_token, mlp_fixed, width, prompt, repeat)


def _build_layers(shape: ModelShape, policy: PolicySettings) -> Any:
    """Build a model with two decoder layers as ``load_policy`` does, on the meta device."""
    text = shape.text
    head = text.query // text.heads // 2 * 2  # rotated in pairs; a mean may be odd
    config = AutoConfig.for_model(
        "llava",
        text_config={
            "model_type": "qwen3" if text.qk_norm else "llama",
            "num_hidden_layers": 2,
            "hidden_size": text.hidden,
            "intermediate_size": text.intermediate,
            "num_attention_heads": text.heads,
            "num_key_value_heads": text.key_heads,
            "head_dim": head,
        },
        vision_config={"model_type": "clip_vision_model", "num_hidden_layers": 1},
    )
    if (lora := policy.lora) is not None:
        is_known = lora.target in ("language", "all") or _ADAPTED.issuperset(lora.target)
        target = lora.target if is_known else "language"
        changes = {"r": shape.lora_rank, "target": target, "modules_to_save": ()}
        policy = policy.model_copy(update={"lora": lora.model_copy(update=changes)})
    dtype = torch.bfloat16 if shape.precision == "bfloat16" else torch.float32
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=dtype)
        apply_lora_or_freeze(model, policy)
    model.get_decoder().config._attn_implementation = ATTENTION_NAME  # noqa: SLF001
    use_fast_linears(model)
    if text.fuses_norms:
        use_fused_layers(model)
    return model.train()


def _attend_segments(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    # Without a GPU, PyTorch would choose products that keep the scores for float32 on one.
    if query.is_cuda and query.dtype == torch.float32:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001
        output = kernel(query, key, value, None, True, scale=kwargs["scaling"])[0]
        return output.transpose(1, 2), None
    attend: Any = ALL_ATTENTION_FUNCTIONS[SEGMENTS_NAME]
    return attend(module, query, key, value, **kwargs)


AttentionInterface.register(_SEGMENTS, _attend_segments)


def _build_blocks(shape: ModelShape) -> nn.ModuleList:
    vision = shape.vision
    config = SimpleNamespace(
        hidden_size=vision.hidden,
        embed_dim=vision.hidden,
        num_heads=vision.heads,
        intermediate_size=vision.intermediate,
        mlp_ratio=(vision.intermediate + 0.5) / vision.hidden,  # rounded down to the width
        hidden_act=vision.activation,
        _attn_implementation=_SEGMENTS,
    )
    kind: Any = Qwen2_5_VLVisionBlock if vision.gated else Qwen2VLVisionBlock
    with torch.device("meta"):
        tower = nn.ModuleList(kind(config) for _ in range(2))
    use_fast_linears(tower)
    use_fused_layers(tower)
    return tower.to(torch.bfloat16 if shape.precision == "bfloat16" else torch.float32).train()


@contextmanager
def _use_fakes(model: nn.Module, precision: Precision, device: torch.device) -> Iterator[None]:
    """Give the model fake weights on a device, on which new tensors are fake inside, and compute as
    autocast does if the precision asks for it, also for a GPU that is not there."""
    with FakeTensorMode(), device, computed("planned"):
        for module in model.modules():
            own = {**module._parameters, **module._buffers}  # noqa: SLF001
            for name, tensor in own.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, tensor.requires_grad)
                    setattr(module, name, fake)
        before = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        torch.set_autocast_enabled(device.type, precision == "autocast")
        torch.set_autocast_dtype(device.type, torch.bfloat16)
        try:
            yield
        finally:
            torch.set_autocast_enabled(device.type, before[0])
            torch.set_autocast_dtype(device.type, before[1])
            torch.clear_autocast_cache()


def _count_saved(run: Callable[[], Any], model: nn.Module, layers: Any) -> int:
    storages: dict[int, Any] = {}  # kept, so that their addresses stay theirs
    totals: list[int] = []

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages.setdefault(storage._cdata, storage)  # noqa: SLF001
        return tensor

    for weight in (*model.parameters(), *model.buffers()):
        record(weight)

    def mark(*_: Any) -> None:
        totals.append(sum(storage.nbytes() for storage in storages.values()))

    starts = layers[1].register_forward_pre_hook(mark)
    ends = layers[1].register_forward_hook(mark)
    with starts, ends, saved_tensors_hooks(record, lambda tensor: tensor):
        run()
    return totals[1] - totals[0]
