"""Rollouts from shared prefixes: each prompt is prefilled once for its G completions.

All memory is allocated at the start. A finished completion frees its place at once for the next
one that waits, of any prompt; when none waits, empty places are given up. The device is read once
per ``CHECK_EVERY`` steps, to see which completions are finished; in between, those that finish stay
in the batch and nothing is stored for them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlm_grpo.model.engine.attention import PrefillAttention
from vlm_grpo.model.engine.graphs import DecodeStep, GraphCapture, find_cause
from vlm_grpo.model.engine.kv_cache import CachedKeys, CacheSize, DecodeAttention, KVCache
from vlm_grpo.model.engine.limits import PREFILL_TOKENS
from vlm_grpo.model.engine.sampling import SamplerState
from vlm_grpo.model.engine.shared import PrefixInputs, pack_row, run_row
from vlm_grpo.model.engine.slots import SlotIndex, SlotScheduler, build_index
from vlm_grpo.model.families import Family
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.utils.timing import Stopwatch

logger = logging.getLogger(__name__)

LENGTH_BUCKET = 64
"""Smallest number of tokens of each completion that a captured step attends to."""
CHECK_EVERY = 8
"""Steps between two reads of the finished completions; 1 on the CPU, where reading is free."""
KEPT_SHARE = 0.1
"""Largest share of the device's memory that a cache may take to be kept, with its captured steps,
between rollouts."""
KEPT_STEPS = 256
"""Largest number of captured steps that are kept between rollouts."""


class Visible(NamedTuple):
    """The greatest number of tokens of a prompt and of a completion, and whether all have it."""

    prompt: int
    prompts_are_equal: bool
    own: int
    own_are_equal: bool


class SharedDecoder:
    """Samples the completions of shared prompts, timed as the phases ``prefill`` and ``decode``.

    ``capture`` captures decode steps (``engine/graphs.py``), which are kept with their cache for
    the next rollouts that fit into it, up to ``KEPT_SHARE`` and ``KEPT_STEPS``. With None steps run
    eagerly, as they do after the first capture that fails.
    """

    def __init__(
        self, family: Family, model: Any, stopwatch: Stopwatch, capture: GraphCapture | None
    ) -> None:
        self.family, self.model = family, model
        self.stopwatch, self.capture = stopwatch, capture
        self.head: Any = family.head(model)
        self._cache: KVCache | None = None
        self._steps: dict[tuple[Any, ...], DecodeStep] = {}

    def __call__(
        self, prefixes: Sequence[PrefixInputs], state: SamplerState, max_tokens: int
    ) -> None:
        """Sample all completions into ``state``, with at most ``max_tokens`` prompt and completion
        tokens cached at once."""
        decoding = _Decoding(self, prefixes, state, max_tokens)
        try:
            while True:
                with self.stopwatch("prefill"):
                    decoding.admit()
                if decoding.scheduler.is_empty:
                    return
                with self.stopwatch("decode"):
                    decoding.advance()
        finally:
            self._release_large_cache()

    def release(self) -> None:
        self._cache = None
        self._steps.clear()

    def use_capture(self, capture: GraphCapture | None) -> None:
        self.release()
        self.capture = capture

    def open_cache(self, size: CacheSize, max_tokens: int) -> KVCache:
        """Return a cache: the one kept from the last rollout if it is large enough, but not larger
        than ``max_tokens`` or ``size``."""
        if self.capture is None:
            return KVCache(size)
        kept = self._cache
        if kept is None or not kept.size.holds(size, max_tokens):
            self.release()
            kept = self._cache = KVCache(size)
        kept.restore(size.slots, size.places)
        return kept

    def round_up(self, prompt_length: int) -> int:
        """Return the prompt length of a cache: for captured steps a multiple of the bucket."""
        if self.capture is None:
            return prompt_length
        return -(-prompt_length // LENGTH_BUCKET) * LENGTH_BUCKET

    def count_kept_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.count_bytes()

    def prefill(
        self, prefixes: Sequence[PrefixInputs], cache: KVCache, slots: Sequence[int]
    ) -> Float[Tensor, "prompts width"]:
        """Store the prompts' keys and values in slots; return each prompt's last hidden state."""
        row = pack_row(prefixes, [()] * len(prefixes))
        attend = PrefillAttention(row.spans, [prefix.layout.masks for prefix in prefixes])
        hidden = run_row(self.family, self.model, row, prefixes, attend)
        cache.store_prompts(slots, attend)
        last = np.array([start + length - 1 for start, length, _ in row.spans])
        return hidden[copy_to(hidden.device, last)]

    def step(
        self, cache: KVCache, visible: Visible, inputs: tuple[Tensor, ...]
    ) -> Float[Tensor, "R vocabulary"]:
        """Feed the newest token of each completion; return the logits of the next one."""
        if self.capture is None:
            return self.head(self._build_step(cache, visible)(*inputs))
        own = _round_up(visible.own, cache.completion_length)
        key = cache.slots, cache.places, own, *(tensor.shape for tensor in inputs)
        if key not in self._steps:
            step = self._build_step(cache, Visible(cache.prompt_length, False, own, False))
            try:
                with cache.keeping_states():  # a capture also runs the step
                    self._steps[key] = self.capture(step, inputs)
            except Exception as error:  # the eager step raises what is no fault of the capture
                cause = find_cause(error)
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
                hidden = self._build_step(cache, visible)(*inputs)
                self._stop_capturing(cause)
                return self.head(hidden)
        return self.head(self._steps[key](*inputs))

    def _stop_capturing(self, cause: BaseException) -> None:
        message = (str(cause).splitlines() or ["no message"])[0]
        logger.warning(
            "decode steps run eagerly from now on, which takes longer: they cannot be captured as "
            "CUDA graphs (%s: %s); rollout.cuda_graphs=false does not try",
            type(cause).__name__,
            message,
        )
        self.use_capture(None)

    def _build_step(self, cache: KVCache, visible: Visible) -> DecodeStep:
        def step(
            tokens: Tensor, positions: Tensor, fed: Tensor, prompt_lengths: Tensor, *seats: Tensor
        ) -> Tensor:
            like = cache.get_keys()
            # Completions that are finished, and their prompts, may be longer than all others.
            lengths = prompt_lengths.clamp(max=visible.prompt)
            over_prompt = CachedKeys.build(lengths, *visible[:2], like)
            lengths = (fed + 1).clamp(max=visible.own)
            over_own = CachedKeys.build(lengths, *visible[2:], like)
            keys = over_prompt, over_own
            attend = DecodeAttention(cache, seats, fed, prompt_lengths, keys)
            return self.family.run(self.model, tokens[:, None], positions, (), attend)[:, 0]

        return step

    def _release_large_cache(self) -> None:
        device = self.head.weight.device
        if self._cache is not None and device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            if self.count_kept_bytes() > KEPT_SHARE * total or len(self._steps) > KEPT_STEPS:
                self.release()


class _Decoding:
    def __init__(
        self,
        decoder: SharedDecoder,
        prefixes: Sequence[PrefixInputs],
        state: SamplerState,
        max_tokens: int,
    ) -> None:
        self.decoder, self.prefixes, self.state = decoder, prefixes, state
        self.device = state.tokens.device
        self.lengths = np.array([len(prefix.token_ids) for prefix in prefixes])
        sizes, longest = state.sizes, state.tokens.shape[1]
        prompt_length = decoder.round_up(int(self.lengths.max()))
        slots, places = _fit(len(prefixes), max(sizes), prompt_length, longest, max_tokens)
        places = min(places, state.count)
        self.scheduler = SlotScheduler(np.argsort(-self.lengths).tolist(), sizes, slots, places)
        size = CacheSize(slots, places, prompt_length, longest)
        self.cache = decoder.open_cache(size, max_tokens)
        self.axes = max(len(prefix.layout.positions) for prefix in prefixes)
        starts = np.repeat([prefix.next_position for prefix in prefixes], sizes)
        self.starts = copy_to(self.device, np.append(starts, 0))
        self.hidden = torch.empty(0)  # the last hidden state of the prompt in each slot
        self.index: SlotIndex | None = None

    def admit(self) -> None:
        while True:
            slots, places = self.scheduler.admit()
            if not len(places):
                return
            self._prefill(slots)
            origin = self.scheduler.find_slots(places)
            self.cache.fork(origin, places)
            held, order = np.unique(origin, return_inverse=True)
            hidden = self.hidden[copy_to(self.device, held)]
            logits = self.decoder.head(hidden)[copy_to(self.device, order)]
            self.state.sample(logits, copy_to(self.device, self.scheduler.rows[places]))
            self.scheduler.ages[places] = 1
            self.scheduler.release(self.state.update_active())
            self.index = None

    def _prefill(self, slots: Sequence[int]) -> None:
        prompts = self.scheduler.prompts
        while slots:
            longest = self.lengths[prompts[slots]].max()
            count = max(1, PREFILL_TOKENS // int(longest))
            part, slots = slots[:count], slots[count:]
            prefixes = [self.prefixes[p] for p in prompts[part]]
            hidden = self.decoder.prefill(prefixes, self.cache, part)
            if not len(self.hidden):
                self.hidden = hidden.new_zeros(len(prompts), hidden.shape[1])
            self.hidden[copy_to(self.device, np.array(part))] = hidden

    def advance(self) -> None:
        # Captured steps are of few sizes; on the CPU each row costs time.
        kept = self.scheduler.shrink(0.5 if self.decoder.capture else 0.875)
        if kept is not None:
            self.cache.keep(*kept)
            self.hidden = self.hidden[copy_to(self.device, kept[0])]
            self.index = None
        if self.index is None:
            heads = self.cache.heads
            self.index = build_index(self.scheduler, heads, self.lengths, self.device)
        longest = self.state.tokens.shape[1]
        has_completion = self.scheduler.rows >= 0
        left = longest - int(self.scheduler.ages[has_completion].min())
        for _ in range(1 if self.device.type == "cpu" else min(CHECK_EVERY, left)):
            self._step(self.index, self.scheduler.ages[has_completion].clip(max=longest))
            self.scheduler.ages += 1
        self.scheduler.release(self.state.update_active())

    def _step(self, index: SlotIndex, ages: Int[np.ndarray, " seated"]) -> None:
        state = self.state
        fed = (state.lengths[index.rows] - 1).clamp_(min=0)  # the spare row has length 0
        tokens = state.tokens[index.rows, fed]
        prompts = self.lengths[self.scheduler.prompts[self.scheduler.prompts >= 0]]
        visible = Visible(
            int(prompts.max()),
            bool((prompts == prompts[0]).all()),
            int(ages.max()),
            bool((ages == ages[0]).all()),
        )
        positions = (self.starts[index.rows] + fed)[None, :, None].expand(self.axes, -1, 1)
        inputs = tokens, positions, fed, index.prompt_lengths, *index.seats
        state.sample(self.decoder.step(self.cache, visible, inputs), index.rows)


def _fit(
    prompts: int, group_size: int, prompt_length: int, completion_length: int, max_tokens: int
) -> tuple[int, int]:
    """Return the numbers of slots and places that fit, at least one slot and one group's places."""
    own = group_size * completion_length
    if prompts * (prompt_length + own) <= max_tokens:
        return prompts, prompts * group_size
    # Twice as many slots as groups of places: the completions of a group do not finish together.
    groups = max(1, max_tokens // (2 * prompt_length + own))
    slots = min(2 * groups, prompts, max(1, (max_tokens - groups * own) // prompt_length))
    return slots, min(groups, prompts) * group_size


def _round_up(length: int, limit: int) -> int:
    """Return the next length of a captured step: 1, 1.5, 2, 3, 4, 6, … times the smallest."""
    bucket = LENGTH_BUCKET
    while bucket < length:
        half = bucket * 3 // 2
        bucket = half if half >= length else bucket * 2
    return min(bucket, limit)
