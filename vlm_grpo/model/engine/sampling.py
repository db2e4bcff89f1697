"""The sampling distribution: one definition for the sampler and the scorer.

A log-probability is relative to a distribution. ``SamplingDistribution`` defines which tokens it
excludes, and its temperature; the rollout samples from it and the update scores under it, so the
importance ratio of a fresh completion is 1.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlm_grpo.config.rollout import RolloutSettings
from vlm_grpo.model.families.family import Family
from vlm_grpo.model.transfer import copy_to


@dataclass(frozen=True)
class SamplingDistribution:
    """The distribution over next tokens that both sampler and scorer derive from the logits."""

    temperature: float = 1.0  # divisor of the logits; 0 means greedy (scored as 1)
    banned: tuple[int, ...] = ()  # tokens of probability 0 (image, video and vision markers)
    eos: tuple[int, ...] = ()
    """End-of-sequence tokens, also banned in the first ``min_new_tokens`` positions."""
    min_new_tokens: int = 0

    def __call__(
        self, logits: Float[Tensor, "n vocabulary"], positions: Int[Tensor, " n"]
    ) -> Float[Tensor, "n vocabulary"]:
        """Return the distribution's logits as a new tensor of at least float32 precision, given the
        model's logits and the index of each token within its completion."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        adjusted = logits.to(wide, copy=True).div_(self.temperature or 1.0)
        if self.banned:
            adjusted.index_fill_(1, _to_index(self.banned, logits.device), -torch.inf)
        if self.min_new_tokens:
            early = (positions < self.min_new_tokens)[:, None]
            eos = _to_index(self.eos, logits.device)
            columns = adjusted.index_select(1, eos).masked_fill(early, -torch.inf)
            adjusted.index_copy_(1, eos, columns)
        return adjusted


@functools.cache  # captured steps read them
def _to_index(tokens: tuple[int, ...], device: torch.device) -> Int[Tensor, " n"]:
    return copy_to(device, np.array(tokens, dtype=np.int64))


@dataclass(frozen=True)
class SamplingSettings:
    distribution: SamplingDistribution
    max_completion_length: int  # maximum number of tokens per completion, end-of-sequence included
    stop: tuple[str, ...] = ()  # strings that end a completion once its text contains one of them
    top_k: int = 0  # keep only the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of tokens with at least this mass; 1.0 keeps all
    min_p: float = 0.0  # drop tokens below this fraction of the highest probability; 0.0 keeps all
    with_entropies: bool = False

    @property
    def truncates(self) -> bool:
        """True if the sampler excludes tokens that the scorer does not."""
        return bool(self.top_k or self.min_p or self.top_p < 1)


def build_sampling_distribution(
    model: Any, processor: Any, family: Family, rollout: RolloutSettings
) -> SamplingDistribution:
    eos = model.generation_config.eos_token_id
    eos = model.config.get_text_config().eos_token_id if eos is None else eos
    return SamplingDistribution(
        temperature=rollout.temperature,
        banned=family.banned_token_ids(model.config, processor),
        eos=tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
        min_new_tokens=rollout.min_new_tokens,
    )


def build_sampling_settings(
    distribution: SamplingDistribution, rollout: RolloutSettings
) -> SamplingSettings:
    return SamplingSettings(
        distribution,
        rollout.max_completion_length,
        rollout.stop,
        rollout.top_k,
        rollout.top_p,
        rollout.min_p or 0.0,
        with_entropies=True,
    )


def draw_uniforms(seed: Sequence[int | str], length: int) -> np.ndarray:
    """Draw the ``length`` uniform numbers in [0, 1) from which a completion's tokens are sampled.

    Each completion has a separate random stream, identified by its seed: in training the run's
    seed, the prompt's index in the stream of examples, and the completion's index in the group.
    Its tokens therefore do not depend on the batch it is sampled in, on the number of ranks, or on
    the state of any generator.
    """
    return np.random.Generator(np.random.Philox(key=derive_seed(seed, 16))).random(length)


def derive_seed(seed: Sequence[int | str], size: int = 7) -> int:
    digest = hashlib.blake2b(repr(tuple(seed)).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:size], "little")


class SamplerState:
    """The tokens sampled so far for N completions, with log-probabilities and entropies.

    Tensors have one more row than there are completions. It receives what is sampled for rows
    that are not active, so that a batch may contain finished completions, and the row itself in
    empty places. Nothing here but ``update_active`` reads from the device.

    Args:
        uniform: the numbers to sample with; see ``draw_uniforms``.
        decode: returns the text of tokens, which is searched for ``settings.stop``.
        sizes: number of completions of each prompt, in the order of rows; empty: each has one.
        check: called whenever the finished completions are read; may raise to end the sampling.
        begun: number of tokens that each completion has already, behind its prompt, which count
            against ``max_completion_length``; empty: none.
    """

    def __init__(
        self,
        uniform: Float[Tensor, "N longest"],
        settings: SamplingSettings,
        decode: Callable[[Sequence[int]], str] = lambda tokens: "",
        sizes: Sequence[int] = (),
        check: Callable[[], None] = lambda: None,
        begun: Sequence[int] = (),
    ) -> None:
        device, shape = uniform.device, (len(uniform) + 1, uniform.shape[1])
        self.settings, self.decode, self.count = settings, decode, len(uniform)
        self.sizes, self.check = sizes or (1,) * self.count, check
        self.uniform = torch.cat([uniform, torch.zeros_like(uniform[:1])])
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)  # up to ``lengths``
        self.logprobs = torch.zeros(shape, device=device)  # as sampled: after truncation
        self.entropies = torch.zeros(shape, device=device)  # before truncation; 0: not requested
        self.lengths = torch.zeros(shape[0], dtype=torch.int64, device=device)  # tokens sampled
        self.active = torch.ones(shape[0], dtype=torch.bool, device=device)  # False: finished
        self.active[-1:].fill_(False)
        before = np.array(begun or (0,) * self.count)
        # The tokens of each completion before those that are sampled.
        self.begun = copy_to(device, np.append(before, 0))
        # The numbers are as many as are left for the completion that has the fewest tokens.
        self._limits = copy_to(device, np.append(shape[1] + before.min() - before, 0))
        self.stopped: set[int] = set()  # completions that were ended by a stop string
        self._checked = np.zeros(self.count, dtype=np.int64)  # tokens searched for stop strings

    def sample(
        self, logits: Float[Tensor, "n vocabulary"], rows: Int[Tensor, " n"]
    ) -> Int[Tensor, " n"]:
        """Sample, store and return the next token of n completions; mark finished ones inactive."""
        positions = self.lengths[rows].clamp_(max=self.tokens.shape[1] - 1)
        numbers, uniform = positions + self.begun[rows], self.uniform[rows, positions]
        drawn = draw_tokens(logits, numbers, uniform, self.settings)
        self.store(drawn, rows)
        return drawn[0]

    def store(self, drawn: Sequence[Tensor], rows: Int[Tensor, " n"]) -> None:
        """Store what ``draw_tokens`` returned for n completions; mark finished ones inactive."""
        tokens, logprobs, is_last, *entropies = drawn
        is_active = self.active[rows]
        rows = rows.where(is_active, self.count)
        positions = self.lengths[rows]
        if entropies:
            self.entropies[rows, positions] = entropies[0]
        self.tokens[rows, positions] = tokens
        self.logprobs[rows, positions] = logprobs
        self.lengths[rows] = positions + is_active
        is_last = is_last | (positions + 1 >= self._limits[rows])
        self.active[rows] = is_active & ~is_last

    def update_active(self) -> Bool[np.ndarray, " N"]:
        """End completions at the tokens that complete a stop string, dropping later ones; return
        True for every completion that is not finished."""
        self.check()
        if self.settings.stop:
            lengths = np.array(self.lengths[:-1].tolist())
            tokens = self.tokens[:-1].cpu().numpy()
            ends = {}
            for row in np.flatnonzero(lengths > self._checked).tolist():
                sampled = tokens[row, : lengths[row]].tolist()
                if end := self._find_stop(sampled, int(self._checked[row])):
                    ends[row] = end
            self._checked = lengths
            if ends:
                rows = torch.tensor(list(ends), device=self.lengths.device)
                self.lengths[rows] = torch.tensor(list(ends.values()), device=rows.device)
                self.active[rows] = False
                self.stopped |= ends.keys()
        return np.array(self.active[:-1].tolist())

    def _find_stop(self, tokens: Sequence[int], checked: int) -> int:
        """Return the number of tokens after which the text contains a stop string; 0: it does not.
        That of the first ``checked`` tokens is known to contain none."""

        def contains_stop(tokens: Sequence[int]) -> bool:
            text = self.decode(tokens)
            return any(stop in text for stop in self.settings.stop)

        # A stop string may begin in checked tokens, up to this many characters before their end.
        # A token may hold a part of a character, which decodes to another character.
        reach = max(map(len, self.settings.stop)) + 4
        start = checked
        while start and len(self.decode(tokens[start:checked])) < reach:
            start = max(start - reach, 0)
        if not contains_stop(tokens[start:]):
            return 0
        ends = range(checked + 1, len(tokens) + 1)
        return next((end for end in ends if contains_stop(tokens[:end])), 0)


def draw_tokens(
    logits: Float[Tensor, "n vocabulary"],
    positions: Int[Tensor, " n"],
    uniform: Float[Tensor, " n"],
    settings: SamplingSettings,
) -> tuple[Tensor, ...]:
    """Draw a token from each row of logits.

    Returns (n,) tensors: tokens, their log-probabilities after truncation, whether they end a
    completion and, if the settings ask for them, entropies before truncation.
    """
    adjusted = settings.distribution(logits, positions)
    probs = adjusted.softmax(-1)
    entropies = [_compute_entropy(adjusted, probs).float()] if settings.with_entropies else []
    if settings.distribution.temperature == 0:
        tokens = adjusted.argmax(-1)
    else:
        if settings.truncates:
            probs = _truncate(probs, settings)
            probs /= probs.sum(-1, keepdim=True)
        tokens = _invert(probs, uniform)
    logprobs = probs.gather(1, tokens[:, None])[:, 0].log().float()
    is_last = torch.isin(tokens, _to_index(settings.distribution.eos, tokens.device))
    return tokens, logprobs, is_last, *entropies


def _compute_entropy(logits: Tensor, probs: Tensor) -> Float[Tensor, " n"]:
    """Return ``-Σ p log p``, as ``-log p* - Σ p (x - x*)`` for the likeliest token, with logits x:
    a logarithm for each token would take a CPU ten times as long."""
    differences = logits - logits.amax(-1, keepdim=True)
    differences.clamp_(min=torch.finfo(logits.dtype).min)  # 0 times -inf is NaN
    return -probs.amax(-1).log() - differences.mul_(probs).sum(-1)


def _invert(probs: Tensor, uniform: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Return the first token whose cumulative probability exceeds the uniform number."""
    # Sums over the vocabulary are in float32, over chunks; cumulative sums are in float64, over the
    # chunks' sums and within one chunk. A token of probability 0 adds nothing, so it is never
    # found.
    width = _find_chunk_width(probs.shape[1])
    if width == 1:
        return _search(probs, uniform)[0]
    chunks = probs.unflatten(1, (-1, width))
    chunk, fraction = _search(chunks.sum(-1), uniform)
    index = chunk[:, None, None].expand(-1, 1, width)
    return chunk * width + _search(chunks.gather(1, index)[:, 0], fraction)[0]


@functools.lru_cache
def _find_chunk_width(vocabulary: int) -> int:
    if vocabulary <= 2048:
        return 1
    return max(width for width in range(1, 513) if vocabulary % width == 0)


def _search(
    weights: Float[Tensor, "n m"], fraction: Float[Tensor, " n"]
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """Return where the cumulative sum of the weights exceeds a fraction of their total, and the
    fraction of the weight there that is below that point."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    point = fraction[:, None] * total
    found = torch.searchsorted(cumulative, point, right=True)
    # The product can round up to the total; then return the last weight above 0.
    found = found.minimum((cumulative < total).sum(-1, keepdim=True))
    weight = weights.gather(1, found)
    rest = (point - cumulative.gather(1, found) + weight) / weight
    return found[:, 0], rest[:, 0].clamp(0, 1)


def _truncate(probs: Tensor, settings: SamplingSettings) -> Float[Tensor, "n vocabulary"]:
    if settings.top_k:
        kth = probs.topk(min(settings.top_k, probs.shape[-1]), dim=-1).values[:, -1:]
        probs = probs.where(probs >= kth, 0)
    if settings.min_p:
        probs = probs.where(probs >= settings.min_p * probs.amax(-1, keepdim=True), 0)
    if settings.top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        kept = ordered.where(before < settings.top_p * ordered.sum(-1, keepdim=True), 0)
        probs = torch.zeros_like(probs).scatter(-1, order, kept)
    return probs
