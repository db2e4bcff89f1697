"""Attention, sampling and a training step on this device, compared with plain float64.

    python perf/gpu_checks.py --out checks.json        on a GPU in bfloat16; elsewhere on the CPU

Each check has two errors relative to float64: that of our form, and that of the same formula as
PyTorch or transformers computes it in the same precision, which is rounding. Ours may be twice as
large. A check that cannot run here is listed with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import checkout
import numpy as np
import torch
from PIL import Image
from random_models import build_random_model
from step_time_vlm_grpo import build_trainer, use_dense_attention
from torch import Tensor

from vlm_grpo.model.engine import kernels
from vlm_grpo.model.engine.attention import PackedAttention
from vlm_grpo.model.engine.graphs import CudaGraph
from vlm_grpo.model.engine.kernels import GroupSpan, Layer
from vlm_grpo.model.engine.packing import GroupSlice, MicroBatch
from vlm_grpo.model.engine.sampling import SamplerState, SamplingDistribution, SamplingSettings
from vlm_grpo.model.policy import Policy
from vlm_grpo.types import Group

sys.path.insert(0, str(checkout.ROOT / "tests/helpers"))  # the small models of other families

FACTOR, FLOOR = 2.0, 1e-5  # ours may be so many times the error of rounding, and at least this
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = ((300, (40, 0, 17)), (129, (64, 64, 64)), (5, ()))
"""Tokens of each prompt and of its completions in the checked row."""


class Heads(NamedTuple):
    """An attention layer: query heads, key heads, their width, window and cap of the scores."""

    query: int
    key: int
    width: int
    window: int | None = None
    cap: float | None = None


HEADS = {
    "as many key heads": Heads(4, 4, 128),
    "Qwen2.5-VL-3B": Heads(16, 2, 128),
    "Qwen2.5-VL-7B": Heads(28, 4, 128),
    "Qwen3-VL-4B": Heads(32, 8, 128),
    "width 64": Heads(8, 2, 64),
    "window, width 256 (Gemma 3)": Heads(8, 4, 256, window=100),
    "cap (Gemma 2)": Heads(8, 4, 128, cap=50.0),
}


class Check(NamedTuple):
    """The largest errors of a check, relative to float64: ours, and that of rounding."""

    ours: float
    rounding: float

    @property
    def passed(self) -> bool:
        return self.ours <= max(FACTOR * self.rounding, FLOOR)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def compare(ours: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor]) -> Check:
    """Return the errors of the tensor in which ours exceeds rounding the most."""
    checks = [
        Check(relative_error(one, third), relative_error(other, third))
        for one, other, third in zip(ours, plain, exact, strict=True)
    ]
    return max(checks, key=lambda check: check.ours / max(FACTOR * check.rounding, FLOOR))


# Attention of packed rows and of images.


def build_visibility(spans: Sequence[GroupSpan], window: int | None) -> Tensor:
    """Return which tokens each token of a row sees (T, T): earlier ones of its prompt and of its
    own completion, in the window that ends with it."""
    group, part, place = [], [], []  # of each token; part 0 is the prompt
    for number, (_, prompt, lengths, _) in enumerate(spans):
        for index, length in enumerate((prompt, *lengths)):
            group += [number] * length
            part += [index] * length
            place += range(prompt * bool(index), prompt * bool(index) + length)
    groups, parts, places = (torch.tensor(values) for values in (group, part, place))
    distance = places[:, None] - places
    seen = (parts == 0) | (parts[:, None] == parts)
    seen &= (groups[:, None] == groups) & (distance >= 0)
    return seen if window is None else seen & (distance < window)


def attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float, cap: float | None
) -> Tensor:
    """Compute attention (1, T, heads, width) with a mask over all pairs of tokens."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = (query @ key.mT * scaling).to(torch.promote_types(query.dtype, torch.float32))
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype)
    return (weights @ value).transpose(1, 2)


def differentiate(
    attend: Callable[..., Tensor], tensors: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Return the output of attention and its gradients, for a fixed gradient of the output."""
    query, key, value, grad = (x.detach().to(dtype) for x in tensors)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    output = attend(*inputs)
    output.backward(grad)
    return [output.detach(), *(x.grad for x in inputs if x.grad is not None)]


def check_rows(heads: Heads, dtype: torch.dtype) -> Check:
    """Check attention of a packed row: prompts to themselves, completions to prompts and selves."""
    spans, total = [], 0
    for prompt, lengths in LENGTHS:
        spans.append(GroupSpan(total, prompt, lengths))
        total += prompt + sum(lengths)
    scaling = heads.width**-0.5
    layer = Layer(0, "full_attention", scaling, heads.window, heads.cap)
    seen = build_visibility(spans, heads.window).to(DEVICE)
    tensors = build_tensors(heads, total, dtype)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_plainly(query, key, value, seen, scaling, heads.cap)

    ours = differentiate(lambda *x: PackedAttention(spans)(layer, *x), tensors, dtype)
    exact = differentiate(plain, tensors, torch.float64)
    return compare(ours, differentiate(plain, tensors, dtype), exact)


def build_tensors(heads: Heads, total: int, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys, values (1, heads, T, width) and a gradient of the output."""
    random = torch.Generator(DEVICE).manual_seed(0)
    counts = (heads.query, heads.key, heads.key)
    shapes = [*((1, count, total, heads.width) for count in counts)]
    shapes.append((1, total, heads.query, heads.width))
    drawn = (torch.randn(shape, generator=random, device=DEVICE) for shape in shapes)
    return [x.to(dtype) for x in drawn]  # all forms start from equal values


def check_images(width: int, dtype: torch.dtype) -> Check:
    """Check attention within images and windows of a vision tower."""
    lengths = (64, 64, 64, 16, 300, 1)
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE)
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    seen = (owner[:, None] == owner).to(DEVICE)
    tensors = build_tensors(Heads(16, 16, width), sum(lengths), dtype)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernels.attend_in_segments(query, key, value, starts, lengths, width**-0.5)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_plainly(query, key, value, seen, width**-0.5, None)

    exact = differentiate(plain, tensors, torch.float64)
    return compare(differentiate(ours, tensors, dtype), differentiate(plain, tensors, dtype), exact)


@contextlib.contextmanager
def dense_attention() -> Iterator[None]:
    """Compute attention in half precision without PyTorch's varlen kernel inside."""
    names = ("has_varlen", "is_cpu")
    before = {name: getattr(kernels, name) for name in names}
    use_dense_attention()
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(kernels, name, function)


# Sampling.


def check_sampling(vocabulary: int, dtype: torch.dtype, **truncation: Any) -> Check:
    """Check tokens, log-probabilities and entropies of random logits.

    The error of the tokens is the distance of the uniform number from the interval of the sampled
    token in the cumulative probabilities; all errors are absolute, and rounding that of float32.
    """
    rows, temperature = 64, 0.7
    random = torch.Generator(DEVICE).manual_seed(0)
    logits = 4 * torch.randn(rows, vocabulary, generator=random, device=DEVICE)
    logits = logits.to(dtype)
    uniform = torch.rand(rows, 1, generator=random, device=DEVICE, dtype=torch.float64)
    banned, eos = (3, 5), (7,)
    settings = SamplingSettings(
        SamplingDistribution(temperature, banned, eos), 1, with_entropies=True, **truncation
    )
    state = SamplerState(uniform, settings)
    tokens = state.sample(logits.clone(), torch.arange(rows, device=DEVICE))
    exact = logits.double() / temperature
    exact[:, list(banned)] = -torch.inf
    probs = exact.softmax(-1)
    entropy = torch.special.entr(probs).sum(-1)
    if truncation:
        probs = truncate_plainly(probs, **truncation)
    ends = probs.cumsum(-1)
    ends = ends / ends[:, -1:]
    found = ends.gather(1, tokens[:, None])[:, 0]
    first = found - probs.gather(1, tokens[:, None])[:, 0]
    outside = torch.maximum(first - uniform[:, 0], uniform[:, 0] - found).clamp(min=0)
    chosen = probs.gather(1, tokens[:, None])[:, 0].log()
    errors = [
        outside.max(),
        (state.logprobs[:rows, 0] - chosen).abs().max(),
        (state.entropies[:rows, 0] - entropy).abs().max(),
    ]
    # Sums of float32 numbers over a vocabulary, and a logarithm.
    return Check(float(torch.stack([x.double() for x in errors]).max()), 5e-5)


def truncate_plainly(
    probs: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    ordered, order = torch.sort(probs, stable=True, dim=-1, descending=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if top_k:
        kept &= ordered >= ordered[:, top_k - 1 : top_k]
    if min_p:
        kept &= ordered >= min_p * ordered[:, :1]
    shown = ordered * kept
    if top_p < 1:
        shown = shown * (shown.cumsum(-1) - shown < top_p * shown.sum(-1, keepdim=True))
    shown = shown / shown.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, order, shown)


# Passes of whole models, and a training step.


def copy_in_float64(policy: Policy) -> Policy:
    """Return a policy with equal weights in float64, which repeats prompts as transformers does."""
    other = copy.copy(policy).view(repeated=True)
    model = copy.deepcopy(policy.model).double()
    other.model, other.autocast = model, False
    other.engine = copy.copy(other.engine)
    other.engine.model = model
    return other


def read_logprobs(policy: Policy, groups: Sequence[Group]) -> Tensor:
    """Score each completion alone."""
    found = []
    for group in groups:
        for index, completion in enumerate(group.completions):
            piece = GroupSlice(group.prompt, (completion.token_ids,), (index,))
            found.append(policy.score(MicroBatch((piece,))).logprobs)
    return torch.cat(found)


def pack_all(groups: Sequence[Group]) -> MicroBatch:
    slices, first = [], 0
    for group in groups:
        completions = tuple(c.token_ids for c in group.completions)
        slices.append(
            GroupSlice(group.prompt, completions, tuple(range(first, first + len(completions))))
        )
        first += len(completions)
    return MicroBatch(tuple(slices))


def check_passes(policy: Policy, groups: Sequence[Group]) -> dict[str, Check]:
    """Check the log-probabilities of sampled tokens, as sampled and as scored in one packed row."""
    exact_policy = copy_in_float64(policy)
    sampled = torch.tensor(
        [value for group in groups for c in group.completions for value in c.logprobs],
        device=policy.device,
    )
    policy.model.eval()
    with torch.no_grad():
        exact = read_logprobs(exact_policy, groups).double()
        plain = read_logprobs(policy.view(repeated=True), groups)
        scored = policy.score(pack_all(groups)).logprobs
    return {
        "sampled": compare([sampled], [plain], [exact]),
        "scored": compare([scored], [plain], [exact]),
    }


def build_options(size: str, dtype: str, smoke: bool) -> argparse.Namespace:
    return argparse.Namespace(
        size=size, dtype=dtype, checkpointing="none", full=False, prompts=2, generations=4,
        tokens=4 if smoke else 48, max_tokens=16384, steps=1, image=56 if smoke else 448,
        cuda_graphs=None, torch_compile=None, workers=0, objective={},
    )  # fmt: skip


def check_step(size: str, smoke: bool) -> dict[str, Check]:
    """Check a rollout, eager and captured, and the gradient and the weights of a training step."""
    dtype = "float32" if DEVICE == "cpu" else "bfloat16"
    options = build_options(size, dtype, smoke)
    model, processor = build_random_model(
        size, getattr(torch, dtype), DEVICE, max_pixels=options.image**2
    )
    random = np.random.default_rng(0)
    shape = (options.image, options.image, 3)
    images = [
        Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8))
        for _ in range(options.prompts * 3)
    ]
    trainer = build_trainer(options, model, processor, images)
    policy, strategy = trainer.policy, trainer.strategy
    with torch.no_grad():  # adapters of a trained model: not zero
        for name, weight in policy.trainable_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02, generator=torch.Generator(DEVICE).manual_seed(1))
    before = {name: weight.detach().double() for name, weight in policy.trainable_parameters()}
    exact_policy, rollouts, gradients = copy_in_float64(policy), [], {}
    sample, step = trainer.sampler.sample, strategy.step

    def keep_rollout(*arguments: Any, **named: Any) -> Any:
        rollouts.append(sample(*arguments, **named))
        return rollouts[-1]

    def keep_gradients() -> float:
        gradients.update({name: weight.grad.clone() for name, weight in strategy.trainable})
        return step()

    trainer.sampler.sample, strategy.step = keep_rollout, keep_gradients
    metrics = trainer.step()
    (rollout,) = rollouts
    trainer.sampler.close()
    after = {name: weight.detach().double() for name, weight in policy.trainable_parameters()}
    with torch.no_grad():  # the weights with which the step began
        for name, weight in policy.trainable_parameters():
            weight.copy_(before[name])
    exact = compute_gradients(exact_policy, rollout.groups)
    plain = compute_gradients(policy.view(repeated=True), rollout.groups)
    names = sorted(exact)
    flat = [
        torch.cat([grads[name].double().flatten() for name in names])
        for grads in (gradients, plain, exact)
    ]
    found = {"gradient of a step": compare(*([x] for x in flat))}
    rate = metrics.get("lr", metrics.get("learning_rate", trainer.settings.optim.lr))
    expected = apply_adamw(before, gradients, rate, trainer.settings.optim.max_grad_norm)
    changes = [
        torch.cat([(weights[name] - before[name]).flatten() for name in names])
        for weights in (after, expected)
    ]
    # The adapters are in float32: a change of 1e-6 of a weight of 0.02 has six bits.
    found["AdamW's change of the weights"] = Check(relative_error(*changes), 1e-2)
    passes = check_passes(policy, rollout.groups)
    return {f"{name} log-probs": check for name, check in passes.items()} | found


def compute_gradients(policy: Policy, groups: Sequence[Group]) -> dict[str, Tensor]:
    """Return the gradients of the loss of GRPO by its formula, one completion at a time.

    The first update has a ratio of 1, so the loss is the negative mean over completions of the mean
    over tokens of A ratio, with A = (r − mean) / (std + 1e-4) within a group (arXiv:2402.03300).
    """
    weights = [weight for _, weight in policy.trainable_parameters()]
    for weight in weights:
        weight.grad = None
    count = sum(len(group.completions) for group in groups)
    for group in groups:
        rewards = torch.tensor([score.total for score in group.scores], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=1) + 1e-4)
        for index, completion in enumerate(group.completions):
            piece = GroupSlice(group.prompt, (completion.token_ids,), (index,))
            logprobs = policy.score(MicroBatch((piece,))).logprobs
            ratio = (logprobs - logprobs.detach()).exp()
            (-float(advantages[index]) * ratio.mean() / count).backward()
    found = {n: w.grad.clone() for n, w in policy.trainable_parameters() if w.grad is not None}
    for weight in weights:
        weight.grad = None
    return found


def apply_adamw(
    weights: dict[str, Tensor], gradients: dict[str, Tensor], rate: float, most: float
) -> dict[str, Tensor]:
    """Return the weights after the first step of AdamW, whose moments cancel to g / (|g| + eps)."""
    grads = {name: grad.double() for name, grad in gradients.items()}
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    factor = (most / (norm + 1e-6)).clamp(max=1.0) if most else 1.0
    scaled = {name: grad * factor for name, grad in grads.items()}
    return {
        name: weights[name] - rate * grad / (grad.abs() + 1e-8) for name, grad in scaled.items()
    }


def check_family(name: str, captured: bool, parts: int | None = None) -> dict[str, Check]:
    """Check sampled and scored log-probabilities of a small model of another architecture.

    ``parts``: into which decode steps split prompts; None: none, since they are short.
    """
    from family_policies import build_family_policy  # noqa: PLC0415
    from tiny_models import make_prompt, noise_example  # noqa: PLC0415

    policy = build_family_policy(name)
    policy.model.to(DEVICE, torch.float32 if DEVICE == "cpu" else torch.bfloat16)
    if captured:
        policy.engine.use_capture(CudaGraph)
    sizes = ([(112, 84)], [(28, 56), (56, 28)], [])
    prompts = [make_prompt(policy, noise_example(str(n), s)) for n, s in enumerate(sizes)]
    settings = SamplingSettings(policy.distribution, 40)
    count = kernels.count_parts if parts is None else lambda *_: parts
    with patch.object(kernels, "count_parts", count):
        completions = policy.sample(prompts, settings, 3, [(0, n) for n in range(len(prompts))])
    groups = [Group(p, c, ()) for p, c in zip(prompts, completions, strict=True)]
    return check_passes(policy, groups)


FAMILIES = ("qwen2_vl", "qwen3_vl", "internvl", "gemma3", "gemma4", "qwen3_5")
"""Grouped heads, deepstack, windows, heads of two widths, recurrent layers."""


def list_checks(smoke: bool) -> dict[str, Callable[[], Check | dict[str, Check]]]:
    half = torch.bfloat16
    heads = dict(list(HEADS.items())[::3]) if smoke else HEADS
    checks: dict[str, Callable[[], Check | dict[str, Check]]] = {}
    for name, layer in heads.items():
        checks[f"packed row, {name}"] = lambda layer=layer: check_rows(layer, half)
        checks[f"packed row, {name}, float32"] = lambda layer=layer: check_rows(
            layer, torch.float32
        )
        if DEVICE == "cuda":
            checks[f"packed row, {name}, without varlen_attn"] = lambda layer=layer: run_dense(
                layer
            )
    for width in (80, 64):
        checks[f"images, width {width}"] = lambda width=width: check_images(width, half)
    vocabulary = 1000 if smoke else 151_936
    for dtype in (half, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        checks[f"sampling, {kind}"] = lambda dtype=dtype: check_sampling(vocabulary, dtype)
    checks["sampling, truncated"] = lambda: check_sampling(
        vocabulary, torch.float32, top_k=50, top_p=0.9, min_p=0.01
    )
    size = "tiny" if smoke else "35m"
    checks[f"step of {size}"] = lambda: check_step(size, smoke)
    for name in FAMILIES[-1:] if smoke else FAMILIES:
        checks[f"{name}, eager"] = lambda name=name: check_family(name, False)
        if DEVICE == "cuda":
            checks[f"{name}, captured"] = lambda name=name: check_family(name, True)
            if name in FAMILIES[:2]:
                checks[f"{name}, prompts in parts"] = lambda name=name: check_family(name, True, 3)
    return checks


def run_dense(heads: Heads) -> Check:
    with dense_attention():
        return check_rows(heads, torch.bfloat16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file for the errors")
    parser.add_argument("--smoke", action="store_true", help="few checks of a tiny model")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    print("| check | our error | of rounding | |\n| --- | --- | --- | --- |")
    results, failed = {}, []
    for title, check in list_checks(options.smoke).items():
        try:
            found = check()
        except Exception as error:  # the other checks say more
            text = str(error).splitlines() or [""]
            results[title] = {"failed": f"{type(error).__name__}: {text[0]}"}
            failed.append(title)
            traceback.print_exc()
            print(f"| {title} | {results[title]['failed'][:200]} | – | failed |", flush=True)
            continue
        named = {title: found} if isinstance(found, Check) else {
            f"{title}: {name}": one for name, one in found.items()
        }  # fmt: skip
        for name, one in named.items():
            results[name] = {"ours": one.ours, "rounding": one.rounding, "passed": one.passed}
            failed += [] if one.passed else [name]
            mark = "" if one.passed else "failed"
            print(f"| {name} | {one.ours:.1e} | {one.rounding:.1e} | {mark} |", flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(results)} checks, {len(failed)} failed: {', '.join(failed)}".rstrip(": "))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
