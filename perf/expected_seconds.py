"""Compute from counted kernels and bytes how long a step should take on an H100; no GPU is used.

    python perf/expected_seconds.py                   print the tables of the recorded counts
    python perf/expected_seconds.py --count LABEL     count this code before that, and record it

Qwen2.5-VL-3B in bfloat16 with LoRA on the language model, 8 prompts with an image each, beside TRL
with transformers' ``generate`` and with vLLM. What depends on the code is counted on the meta
device, which has sizes but no values, in models of two and of three layers of the real widths: the
kernels of a decode step, the operations that Python dispatches in an update and the bytes that its
kernels read and write, except products and attention. All else is assumed (``ASSUMED``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import checkout
import torch
from random_models import SIZES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(checkout.ROOT / "tests/helpers"))

import meta_device
import pytest
from peft import LoraConfig, get_peft_model
from tiny_models import add_lora, make_prompt, noise_example, pack_groups
from transformers import DynamicCache, Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as Model

from vlm_grpo.config.policy import LoraSettings, PolicySettings
from vlm_grpo.model.engine.kernels import count_parts
from vlm_grpo.model.engine.shared import SharedEngine
from vlm_grpo.model.policy import Policy
from vlm_grpo.planning.model_shape import read_model_shape
from vlm_grpo.planning.sizes import ModelShape
from vlm_grpo.planning.step_time import count_token_flops, count_vision_flops
from vlm_grpo.types import Completion

RECORDED = checkout.ROOT / "perf/results/expected_seconds.json"
LAYERS = 36  # of the 3B model
ADAPTED = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
LISTED = ("mm", "addmm", "bmm", "baddbmm", "linear")  # products, by the name of their operation
CASES = [
    (448, 8, 64),
    (448, 8, 512),
    (448, 16, 512),
    (1008, 8, 64),
    (1008, 8, 512),
    (1008, 16, 512),
]
"""Edge of the image, completions per prompt, tokens of each."""
PROMPTS, TEXT = 8, 40


@dataclass(frozen=True)
class Assumed:
    """What is not counted. Rates of an H100 SXM from its data sheet; the others are guesses that
    fit what is published of such kernels."""

    peak: float = 989e12  # FLOP/s of dense products in bfloat16
    bandwidth: float = 0.8 * 3.35e12  # bytes/s that kernels bound by memory reach
    product: float = 0.65  # share of the peak in products of full passes
    vision: float = 0.45  # the same in the vision tower, whose widths are small
    captured: float = 2e-6  # seconds of a small kernel in a CUDA graph, with the gap after it
    dispatched: float = 5e-6  # seconds in which Python dispatches an operation that computes
    block: float = 25e9  # bytes/s of keys and values that one block of threads reads
    capture: float = 0.12  # seconds of a capture, of which ``captures`` are made in a step
    generate: float = 2.5  # times ``dispatched``, of a kernel in transformers' generate
    sync: float = 0.7  # seconds in which TRL merges adapters and copies the weights to vLLM
    server_kernels: float = 14.0  # per layer in a decode step of vLLM
    server_host: float = 1e-3  # seconds per decode step in which vLLM schedules


ASSUMED = Assumed()
H100 = SimpleNamespace(multi_processor_count=132)


class Counts(NamedTuple):
    """What is counted of an engine.

    Attributes:
        layer: kernels of a decode step in a layer.
        rest: the others inside of the step that is captured, and ``outside`` of it.
        logits: bytes that kernels read and write for a row's logits in a decode step.
        operations: dispatched in a layer for a micro-batch, forward and backward, views included.
        others: dispatched for a micro-batch outside of the layers.
        token: bytes that kernels other than products and attention read and write in a layer for
            a token of the update, forward and backward.
    """

    layer: float
    rest: float
    outside: float
    logits: float
    operations: float
    others: float
    token: float


class Work(TorchDispatchMode):
    """Kernels, dispatched operations, and bytes of kernels but products and attention."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.kernels = self.operations = self.bytes = self.logits = 0
        self.vocabulary = vocabulary

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.operations += 1
        if func.is_view or name.startswith(("_unsafe_view", "empty", "new_empty", "detach")):
            return result
        self.kernels += 1
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        size = sum(x.numel() * x.element_size() for x in {id(x): x for x in tensors}.values())
        if name in LISTED or "attention" in name or "embedding" in name:  # it reads single rows
            return result
        if any(self.vocabulary in x.shape for x in tensors):
            self.logits += size
        else:
            self.bytes += size
        return result


def build_policy(layers: int) -> Policy:
    """Build a policy of so many layers of the 3B model on the meta device, with its adapters."""
    host = meta_device.tiny_policy("qwen2_5_vl")
    found, config = SIZES["qwen2.5-vl-3b"], host.model.config
    text = found["text"] | {"num_hidden_layers": layers}
    config.text_config.update(text | {"layer_types": ["full_attention"] * layers})
    config.vision_config.out_hidden_size = text["hidden_size"]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with meta_device.DEVICE:
            model = type(host.model)(config)
            meta_device.use_shared_attention(host.family, model)
            loaded = meta_device.LoadedModel(model, host.prompts, True, None)
            policy = Policy(loaded, host.distribution, chunk_tokens=1024)
    finally:
        torch.set_default_dtype(torch.float32)
    with meta_device.DEVICE:
        add_lora(policy, ADAPTED)
    return policy


class Decoding(NamedTuple):
    """Kernels inside and outside of a decode step, and bytes of a row's logits."""

    inside: int
    outside: int
    logits: float


def count_decoding(layers: int) -> Decoding:
    with pytest.MonkeyPatch.context() as patch:
        meta_device.use_gpu_kernels(patch)
        policy = build_policy(layers)
        policy.engine.capture = lambda step, inputs: step
        vocabulary, marks, step = (
            SIZES["qwen2.5-vl-3b"]["text"]["vocab_size"],
            [],
            SharedEngine.step,
        )
        rows = 0

        def run(*arguments: Any) -> Any:
            nonlocal rows
            before = work.kernels, work.logits
            result = step(*arguments)
            rows = max(rows, arguments[-1][0].shape[0])
            marks.append((*before, work.kernels, work.logits))
            return result

        patch.setattr(SharedEngine, "step", run)
        with Work(vocabulary) as work:
            meta_device.sample(policy, patch)
    # Two steps with no read of the finished completions, and no admission, between them.
    pairs = itertools.pairwise(marks)
    outside, pair = min((later[0] - first[2], (first, later)) for first, later in pairs)
    inside = min(mark[2] - mark[0] for mark in marks)
    return Decoding(inside, outside, (pair[1][1] - pair[0][1]) / rows)


def count_update(policy: Policy, tokens: int) -> Work:
    """Count a micro-batch of one prompt without images and four completions."""
    prompt = make_prompt(policy, noise_example("0", []))
    group = tuple(Completion((5,) * tokens, (0.0,) * tokens, "", "eos", ()) for _ in range(4))
    batch = pack_groups([prompt], [group])
    policy.model.train()
    with pytest.MonkeyPatch.context() as patch:
        meta_device.use_gpu_kernels(patch)
        with Work(SIZES["qwen2.5-vl-3b"]["text"]["vocab_size"]) as work:
            policy.score(batch).logprobs.sum().backward()
    return work


def count_ours() -> Counts:
    two, three = count_decoding(2), count_decoding(3)
    short, long = 64, 128
    policies = {layers: build_policy(layers) for layers in (2, 3)}
    works = {
        (n, tokens): count_update(policy, tokens)
        for n, policy in policies.items()
        for tokens in (short, long)
    }
    per_layer = {t: works[3, t].bytes - works[2, t].bytes for t in (short, long)}
    operations = works[3, long].operations - works[2, long].operations
    return Counts(
        layer=three.inside - two.inside,
        rest=two.inside - 2 * (three.inside - two.inside),
        outside=three.outside,
        logits=three.logits,
        operations=operations,
        others=works[2, long].operations - 2 * operations,
        token=(per_layer[long] - per_layer[short]) / (4 * (long - short)),
    )


class _Attention(torch.autograd.Function):
    """In place of a fused kernel, which is not counted."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return torch.empty_like(query).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def count_theirs() -> Counts:
    """Count transformers' model with PEFT's adapters, as TRL runs it."""
    found = {}
    for layers in (2, 3):
        text = SIZES["qwen2.5-vl-3b"]["text"] | {"num_hidden_layers": layers}
        vision = {"depth": 1, "out_hidden_size": text["hidden_size"]}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with meta_device.DEVICE:
                model: Any = Model(config)
        finally:
            torch.set_default_dtype(torch.float32)
        with meta_device.DEVICE:
            get_peft_model(model, LoraConfig(r=16, target_modules=ADAPTED))
        language_model = model.get_decoder()
        language_model.config._attn_implementation = "counted"  # noqa: SLF001
        found[layers] = [count_pass(language_model, *size) for size in ((64, 1), (1, 64), (1, 128))]
    decoding, short, long = ([found[layers][number] for layers in (2, 3)] for number in range(3))
    operations = long[1].operations - long[0].operations
    per_layer = [one[1].bytes - one[0].bytes for one in (short, long)]
    layer = decoding[1].kernels - decoding[0].kernels
    return Counts(
        layer, decoding[0].kernels - 2 * layer, 0, 60.0 * text["vocab_size"], operations,
        long[0].operations - 2 * operations, (per_layer[1] - per_layer[0]) / 64,
    )  # fmt: skip


def count_pass(language_model: Any, rows: int, tokens: int) -> Work:
    """Count a decode step, or a pass over a row with its gradient."""
    attend = lambda module, q, k, v, *_, **__: (_Attention.apply(q, k, v), None)  # noqa: E731
    width = language_model.config.hidden_size
    with pytest.MonkeyPatch.context() as patch, meta_device.DEVICE:
        functions = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
        patch.setitem(functions._global_mapping, "counted", attend)  # noqa: SLF001
        hidden = torch.empty(rows, tokens, width, dtype=torch.bfloat16)
        positions = torch.arange(tokens).expand(3, rows, tokens)
        options = {"position_ids": positions, "attention_mask": {"full_attention": None}}
        if tokens == 1:
            cache = DynamicCache(config=language_model.config)
            language_model(inputs_embeds=hidden, use_cache=True, past_key_values=cache, **options)
            with torch.no_grad(), Work(0) as work:
                language_model(
                    inputs_embeds=hidden, use_cache=True, past_key_values=cache, **options
                )
            return work
        with Work(0) as work:
            output = language_model(
                inputs_embeds=hidden.requires_grad_(), use_cache=False, **options
            ).last_hidden_state
            output.sum().backward()
        return work


# The seconds of a step.


@dataclass(frozen=True)
class Case:
    """A step of 8 prompts; ``budget``: tokens of a micro-batch, ``recomputes``: all layers."""

    edge: int
    group: int
    tokens: int
    budget: int
    recomputes: bool

    @property
    def prompt(self) -> int:
        return self.edge**2 // 28**2 + TEXT


def decode(
    counts: Counts, shape: ModelShape, case: Case, captures: float = 0.0, parts: int | None = None
) -> float:
    """Return the seconds of decode steps over ``parts`` of each prompt; None: as many as ours."""
    text, rows = shape.text, PROMPTS * case.group
    weights = 2 * (LAYERS * text.layer_weights + text.hidden * text.vocabulary)
    adapters = 2 * 16 * LAYERS * text.adapter_widths
    reading = (weights + adapters) / ASSUMED.bandwidth
    token = 2 * 2 * text.key  # bytes of keys and values in a layer
    average = case.prompt * PROMPTS + rows * case.tokens / 2
    attention = LAYERS * token * average / ASSUMED.bandwidth
    if parts is None:
        with patch.object(torch.cuda, "get_device_properties", lambda device: H100):
            device, sequences = torch.device("cuda"), PROMPTS * text.key_heads
            parts = count_parts(device, sequences, case.prompt, case.prompt)
        counts = counts._replace(layer=counts.layer + (parts > 1))  # one more kernel merges
    # A block of threads for each part and key head.
    alone = LAYERS * token / text.key_heads * case.prompt / parts / ASSUMED.block
    attention = max(attention, alone)
    small = (LAYERS * counts.layer + counts.rest) * ASSUMED.captured
    logits = counts.logits * rows / ASSUMED.bandwidth
    outside = counts.outside * ASSUMED.dispatched
    return (
        case.tokens * (reading + attention + small + logits + outside) + captures * ASSUMED.capture
    )


def update(
    counts: Counts, shape: ModelShape, case: Case, rows: Sequence[int], factor: float = 1.0
) -> float:
    """Return the seconds of passes with gradient over rows of so many tokens; the longest of
    dispatching and computing in each."""
    text, passes = shape.text, 3 if case.recomputes else 2
    head = 2 * text.hidden * text.vocabulary
    total = 0.0
    for tokens in rows:
        linear = 2 * LAYERS * text.weights_per_token * tokens
        answers = tokens * factor
        flops = linear * passes + 4 * head / 2 * answers * 2
        memory = LAYERS * counts.token * tokens * (passes / 2)
        computing = flops / (ASSUMED.peak * ASSUMED.product) + memory / ASSUMED.bandwidth
        host = (LAYERS * counts.operations + counts.others) * ASSUMED.dispatched / 2
        total += max(computing, host * (passes / 2))
    return total


def estimate_ours(
    counts: Counts, shape: ModelShape, case: Case, captures: float
) -> dict[str, float]:
    patches = case.edge**2 // 14**2
    vision = PROMPTS * count_vision_flops(shape, patches) / (ASSUMED.peak * ASSUMED.vision)
    prefill = PROMPTS * count_token_flops(shape, 0, case.prompt)
    prefill /= ASSUMED.peak * ASSUMED.product
    group = case.prompt + case.group * case.tokens
    per_batch = max(1, case.budget // group)
    rows = [group * min(per_batch, PROMPTS - n) for n in range(0, PROMPTS, per_batch)]
    share = case.group * case.tokens / group
    rollout = vision + prefill + decode(counts, shape, case, captures)
    updating = update(counts, shape, case, rows, share)
    attention = 4 * shape.text.query * LAYERS * PROMPTS * case.group * case.tokens
    attention *= (case.prompt + case.tokens / 2) * 3.5 / (ASSUMED.peak * 0.4)
    return {
        "rollout": rollout,
        "update": updating + attention,
        "step": rollout + updating + attention,
    }


def estimate_trl(
    theirs: Counts, ours: Counts, shape: ModelShape, case: Case, with_server: bool
) -> float:
    """Return the seconds of TRL's step: prompts repeated for each completion, one group at a time,
    recomputed layers."""
    rows = PROMPTS * case.group
    patches = case.edge**2 // 14**2
    vision = count_vision_flops(shape, patches) / (ASSUMED.peak * ASSUMED.vision)
    sequence = case.prompt + case.tokens
    passes = [sequence * case.group] * PROMPTS
    updating = update(theirs, shape, replace(case, recomputes=True), passes, case.tokens / sequence)
    updating += 2 * rows * vision  # rollout's features are not kept: old log-probs and the update
    prefill = count_token_flops(shape, 0, case.prompt) / (ASSUMED.peak * ASSUMED.product)
    if not with_server:
        step = (LAYERS * theirs.layer + theirs.rest) * ASSUMED.generate * ASSUMED.dispatched
        return rows * (vision + prefill) + case.tokens * step + updating
    counts = ours._replace(layer=ASSUMED.server_kernels, rest=60.0, outside=0.0)
    decoding = decode(counts, shape, case, parts=64) + case.tokens * ASSUMED.server_host
    return PROMPTS * (vision + prefill) + decoding + ASSUMED.sync + updating


def format_table(
    ours: Counts, theirs: Counts, captures: float, budget: int, recomputes: bool
) -> Iterator[str]:
    found = SIZES["qwen2.5-vl-3b"]
    config = Qwen2_5_VLConfig(
        text_config=found["text"], vision_config=found["vision"], tie_word_embeddings=True
    )
    lora = LoraSettings(r=16, alpha=32, target="language")
    shape = read_model_shape(config, PolicySettings(dtype="bfloat16", lora=lora))
    yield "| case | rollout | update | step | TRL | TRL + vLLM | ≥ 5 × TRL | ≥ 1.5 × TRL + vLLM |"
    yield "| --- " * 8 + "|"
    for edge, group, tokens in CASES:
        case = Case(edge, group, tokens, budget, recomputes)
        mine = estimate_ours(ours, shape, case, captures)
        trl, server = (estimate_trl(theirs, ours, shape, case, s) for s in (False, True))
        cells = [f"{edge}², G {group}, {tokens} tokens"]
        cells += [f"{value:.2f}" for value in (*mine.values(), trl, server)]
        for other, goal in ((trl, 5), (server, 1.5)):
            ratio = other / mine["step"]
            cells.append(f"{'yes' if ratio >= goal else 'no'}, {ratio:.1f}")
        yield f"| {' | '.join(cells)} |"


def format_all(recorded: dict[str, Any]) -> str:
    """Format what is counted of each version of the code, and its table."""
    parts = []
    for label, given in recorded.items():
        ours, theirs = Counts(**given["ours"]), Counts(**given["trl"])
        options = ", ".join(f"{name} {value}" for name, value in given["options"].items())
        shown = ", ".join(f"{name} {value:,.0f}" for name, value in ours._asdict().items())
        parts.append(f"{label} (counted: {shown}; {options}):\n")
        parts.append("\n".join([*format_table(ours, theirs, **given["options"]), ""]))
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", metavar="LABEL", help="count this code, and record it")
    parser.add_argument("--captures", type=float, default=0.0, help="of decode steps in a step")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--recomputes", action="store_true", help="all layers, in the update")
    parser.add_argument("--out", type=Path, default=RECORDED, help=f"default: {RECORDED.name}")
    options = vars(parser.parse_args())
    label, path = options.pop("count"), options.pop("out")
    recorded = json.loads(path.read_text()) if path.exists() else {}
    if label is not None:
        counts = {"ours": count_ours()._asdict(), "trl": count_theirs()._asdict()}
        recorded[label] = counts | {"options": options}
        path.write_text(json.dumps(recorded, indent=1) + "\n")
    print("Computed, not measured. Assumed:", json.dumps(asdict(ASSUMED)))
    print()
    print(format_all(recorded))


if __name__ == "__main__":
    main()
