"""Rollouts from shared prefixes: each prompt is prefilled once for its G completions.

The cache has slots. A slot holds the keys and values of one prompt, once, and of the tokens that
its G completions have generated. All memory is allocated at the start. Finished completions leave
the batch at once; a slot whose completions are all finished takes the next waiting prompt; when no
prompt waits and half of the slots are empty, the cache is compacted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vlm_grpo.engine.attention import PrefillAttention
from vlm_grpo.engine.graphs import CapturedStep, GraphCapture
from vlm_grpo.engine.sampling import SamplerState
from vlm_grpo.families import Family, ImageFeatures
from vlm_grpo.families.transfer import copy_to
from vlm_grpo.types import Prompt
from vlm_grpo.utils.timing import Stopwatch

LENGTH_BUCKET = 64
"""A captured step attends to a multiple of this many tokens of each completion."""


@dataclass(frozen=True)
class PrefixInputs:
    """A prompt, ready to be prefilled.

    Attributes:
        token_ids: the prompt's tokens.
        position_ids: their rotary positions.
        features: the features of the prompt's images, in order, on the model's device.
    """

    token_ids: Int[np.ndarray, " T"]
    position_ids: Int[np.ndarray, "3 T"]
    features: tuple[ImageFeatures, ...]

    @property
    def next_position(self) -> int:
        """First position of the completions: the prompt's largest position + 1."""
        return int(self.position_ids.max()) + 1


def build_prefix_inputs(
    family: Family,
    model: Any,
    prompts: Sequence[Prompt],
    features: Sequence[Sequence[ImageFeatures]],
) -> list[PrefixInputs]:
    """Build the language model's inputs for each prompt."""
    return [
        PrefixInputs(
            np.array(prompt.token_ids, dtype=np.int64),
            family.prompt_positions(model, prompt).numpy(),
            tuple(images),
        )
        for prompt, images in zip(prompts, features, strict=True)
    ]


class KVCache:
    """Keys and values of the prompts being decoded, and of their completions.

    Args:
        slots: number of prompts held at once.
        group_size: completions per prompt, G.
        prompt_length: maximum number of tokens per prompt.
        completion_length: maximum number of tokens per completion.

    Attributes:
        shape: number of slots, maximum prompt length, maximum completion length.
        prompts: for each layer, keys and values (slots, key heads, prompt length, head width).
        completions: as ``prompts``, (slots, key heads, G, completion length, head width).
        prompt_lengths: (slots,) number of tokens of each prompt.
    """

    def __init__(
        self, slots: int, group_size: int, prompt_length: int, completion_length: int
    ) -> None:
        self.group_size = group_size
        self.shape = (slots, prompt_length, completion_length)
        self.prompts: list[tuple[Tensor, Tensor]] = []
        self.completions: list[tuple[Tensor, Tensor]] = []
        self.prompt_lengths = torch.zeros(slots, dtype=torch.int64)

    def store_prompts(
        self, slots: Sequence[int], lengths: Sequence[int], prefill: PrefillAttention
    ) -> None:
        """Store prefilled prompts of the given lengths in the given slots."""
        if not self.prompts:
            self._allocate(prefill.cache)
        index = torch.tensor(slots, device=self.prompt_lengths.device)
        for layer, prefilled in zip(self.prompts, prefill.cache, strict=True):
            for cached, new in zip(layer, prefilled, strict=True):
                cached[index, :, : new.shape[2]] = new
        self.prompt_lengths[index] = torch.tensor(lengths, device=self.prompt_lengths.device)

    def keep_slots(self, slots: Sequence[int]) -> None:
        """Drop all slots but these, and the memory that no remaining prompt needs."""
        index = torch.tensor(slots, device=self.prompt_lengths.device)
        self.prompt_lengths = self.prompt_lengths[index]
        longest = int(self.prompt_lengths.max())
        self.prompts = [(k[index, :, :longest], v[index, :, :longest]) for k, v in self.prompts]
        self.completions = [(k[index], v[index]) for k, v in self.completions]
        self.shape = (len(slots), longest, self.shape[2])

    def _allocate(self, like: list[tuple[Tensor, Tensor]]) -> None:
        slots, prompt, completion = self.shape
        self.prompt_lengths = self.prompt_lengths.to(like[0][0].device)
        for key, _ in like:
            _, heads, _, width = key.shape
            shared = (slots, heads, prompt, width)
            own = (slots, heads, self.group_size, completion, width)
            self.prompts.append((key.new_zeros(shared), key.new_zeros(shared)))
            self.completions.append((key.new_zeros(own), key.new_zeros(own)))


class DecodeAttention:
    """Attention of the newest tokens of n active completions to their prompts and earlier tokens.

    The G queries of a slot form one matrix, multiplied by the slot's single copy of the prompt.

    Args:
        cache: the keys and values.
        rows: the active completions, as slot × G + index in the group.
        lengths: number of tokens of each completion that were fed before this one.
        visible: number of cached tokens of each completion to attend to, at least the greatest
            length + 1; None: exactly that number, which must be read from the device.
    """

    def __init__(
        self,
        cache: KVCache,
        rows: Int[Tensor, " n"],
        lengths: Int[Tensor, " n"],
        visible: int | None = None,
    ) -> None:
        slots, prompt, _ = cache.shape
        self.cache, self.rows, self.lengths = cache, rows, lengths
        self.slot_and_index = (rows // cache.group_size, rows % cache.group_size)
        self.all_active = len(rows) == slots * cache.group_size
        self.visible = int(lengths.max()) + 1 if visible is None else visible
        every = torch.zeros(slots * cache.group_size, dtype=torch.int64, device=rows.device)
        every[rows] = lengths
        own = torch.arange(self.visible, device=rows.device) > every.view(slots, -1, 1)
        prefix = torch.arange(prompt, device=rows.device) >= cache.prompt_lengths[:, None, None]
        masked = torch.cat([prefix.expand(-1, cache.group_size, -1), own], dim=2)
        self.masked: Tensor | None = masked[:, None, :, None]
        if visible is None and not bool(masked.any()):
            self.masked = None

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "n heads 1 width"],
        key: Float[Tensor, "n key_heads 1 width"],
        value: Float[Tensor, "n key_heads 1 width"],
        scaling: float,
    ) -> Float[Tensor, "n 1 heads width"]:
        slots, group, visible = self.cache.shape[0], self.cache.group_size, self.visible
        heads, width = query.shape[1], query.shape[3]
        key_heads, times = key.shape[1], query.shape[1] // key.shape[1]
        prefix_key, prefix_value = self.cache.prompts[layer]
        own_key, own_value = self.cache.completions[layer]
        slot, index = self.slot_and_index
        own_key[slot, :, index, self.lengths] = key[:, :, 0]
        own_value[slot, :, index, self.lengths] = value[:, :, 0]

        query = query[:, :, 0] * scaling
        if not self.all_active:
            every = query.new_zeros(slots * group, heads, width)
            every[self.rows] = query
            query = every
        # Rows and scores have the shape (slots, key heads, G, queries of a key head, …).
        query = query.view(slots, group, key_heads, times, width).transpose(1, 2).contiguous()
        stacked = query.view(slots, key_heads, group * times, width)
        to_prefix = (stacked @ prefix_key.mT).view(slots, key_heads, group, times, -1)
        to_own = query @ own_key[:, :, :, :visible].mT
        scores = torch.cat([to_prefix, to_own], -1)
        if self.masked is not None:
            scores = scores.masked_fill(self.masked, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        lengths = [weights.shape[-1] - visible, visible]
        on_prefix, on_own = weights.to(query.dtype).split(lengths, -1)
        output = on_own @ own_value[:, :, :, :visible]
        output += (on_prefix.flatten(2, 3) @ prefix_value).view_as(output)
        output = output.transpose(1, 2).reshape(slots * group, heads, width)
        if not self.all_active:
            output = output[self.rows]
        return output[:, None]


class SharedDecoder:
    """The rollout loop over shared prompts.

    Args:
        family: the model's family.
        model: the bare transformers model.
        max_tokens: maximum number of prompt and completion tokens cached or prefilled at once.
        stopwatch: times the phases ``prefill`` and ``decode``.
        capture: captures decode steps (see ``engine/graphs.py``); None: steps run eagerly.
    """

    def __init__(
        self,
        family: Family,
        model: Any,
        max_tokens: int,
        stopwatch: Stopwatch,
        capture: GraphCapture | None = None,
    ) -> None:
        self.family, self.model, self.max_tokens = family, model, max_tokens
        self.stopwatch, self.capture = stopwatch, capture
        self.captured: tuple[Any, CapturedStep] | None = None
        self.language_model = family.language_model(model)
        self.head: Any = model.get_output_embeddings()

    def __call__(self, prefixes: Sequence[PrefixInputs], state: SamplerState) -> None:
        """Sample all completions; rows p·G … p·G+G−1 of ``state`` belong to prompt p."""
        group_size = len(state.lengths) // len(prefixes)
        waiting = sorted(range(len(prefixes)), key=lambda p: len(prefixes[p].token_ids))
        longest = len(prefixes[waiting[-1]].token_ids)
        room = max(1, self.max_tokens // (longest + group_size * state.tokens.shape[1]))
        cache = KVCache(min(room, len(waiting)), group_size, longest, state.tokens.shape[1])
        starts = torch.tensor([p.next_position for p in prefixes], device=state.tokens.device)
        # The prompt in each slot; −1 in an empty one.
        prompts = torch.full((cache.shape[0],), -1, device=state.tokens.device)

        while True:
            if waiting and bool((prompts < 0).any()):
                with self.stopwatch("prefill"):
                    self._refill(prompts, waiting, prefixes, cache, state)
            rows = _expand_rows(prompts, group_size)
            is_active = state.active[rows.clamp(min=0)]
            is_active = (prompts >= 0).repeat_interleave(group_size) & is_active
            busy = is_active.view(-1, group_size).any(1)
            prompts = prompts.where(busy, -1)
            if waiting and not bool(busy.all()):
                continue
            if not bool(busy.any()):
                return
            if int(busy.sum()) <= len(prompts) // 2:
                cache.keep_slots(busy.nonzero()[:, 0].tolist())
                is_active = is_active[busy.repeat_interleave(group_size)]
                prompts = prompts[busy]
            with self.stopwatch("decode"):
                self._step(prompts, is_active, cache, state, starts)

    def _refill(
        self,
        prompts: Int[Tensor, " slots"],
        waiting: list[int],
        prefixes: Sequence[PrefixInputs],
        cache: KVCache,
        state: SamplerState,
    ) -> None:
        """Prefill waiting prompts into empty slots, longest first; sample their first tokens.

        There are no more slots than longest prompts fit into the token budget.
        """
        slots = (prompts < 0).nonzero()[: len(waiting), 0].tolist()
        batch = [waiting.pop() for _ in slots]
        prefill = PrefillAttention()
        hidden = self._prefill([prefixes[p] for p in batch], prefill)
        cache.store_prompts(slots, [len(prefixes[p].token_ids) for p in batch], prefill)
        prompts[slots] = new = torch.tensor(batch, device=prompts.device)
        logits = self.head(hidden).repeat_interleave(cache.group_size, 0)
        state.sample(logits, _expand_rows(new, cache.group_size))

    def _prefill(
        self, prefixes: list[PrefixInputs], prefill: PrefillAttention
    ) -> Float[Tensor, "prompts width"]:
        """Return each prompt's last hidden state; store keys and values in ``prefill``."""
        lengths = np.array([len(p.token_ids) for p in prefixes])
        tokens = np.zeros((len(prefixes), lengths.max()), dtype=np.int64)
        positions = np.zeros((3, *tokens.shape), dtype=np.int64)
        for row, prefix in enumerate(prefixes):
            tokens[row, : lengths[row]] = prefix.token_ids
            positions[:, row, : lengths[row]] = prefix.position_ids
        features = [image for p in prefixes for image in p.features]
        device = self.head.weight.device
        hidden = self.language_model(
            **self.family.language_inputs(self.model, tokens, features, device),
            position_ids=copy_to(device, positions),
            attend=prefill,
            use_cache=False,
        ).last_hidden_state
        last = copy_to(device, lengths - 1)
        return hidden[torch.arange(len(prefixes), device=device), last]

    def _step(
        self,
        prompts: Int[Tensor, " slots"],
        is_active: Bool[Tensor, " rows"],
        cache: KVCache,
        state: SamplerState,
        starts: Int[Tensor, " prompts"],
    ) -> None:
        """Feed the newest token of every active completion and sample its next one."""
        rows = _expand_rows(prompts, cache.group_size)
        if self.capture is None:
            rows = rows[is_active]
            fed = state.lengths[rows] - 1
            attend = DecodeAttention(cache, is_active.nonzero()[:, 0], fed)
            positions = starts[rows // cache.group_size] + fed
            state.sample(self._logits(state.tokens[rows, fed], positions, attend), rows)
            return
        # Run all rows, so that only values change between steps, not shapes, and discard the
        # logits of inactive rows.
        every = rows.clamp(min=0)
        fed = state.lengths[every] - 1
        longest = int(fed[is_active].max() + 1)
        visible = min(-(-longest // LENGTH_BUCKET) * LENGTH_BUCKET, cache.shape[2])
        fed = fed.clamp(0, visible - 1)
        inputs = (state.tokens[every, fed], starts[every // cache.group_size] + fed, fed)
        if self.captured is None or self.captured[0] != (cache.shape, visible):
            self.captured = None  # frees the previous graph's memory

            def step(tokens: Tensor, positions: Tensor, fed: Tensor) -> Tensor:
                order = torch.arange(len(fed), device=fed.device)
                return self._logits(tokens, positions, DecodeAttention(cache, order, fed, visible))

            self.captured = (cache.shape, visible), self.capture(step, inputs)
        state.sample(self.captured[1](*inputs)[is_active], rows[is_active])

    def _logits(
        self, tokens: Int[Tensor, " n"], positions: Int[Tensor, " n"], attend: DecodeAttention
    ) -> Float[Tensor, "n vocabulary"]:
        """Return the logits of the token that follows each of ``tokens``."""
        hidden = self.language_model(
            inputs_embeds=self.model.get_input_embeddings()(tokens[:, None]),
            position_ids=positions[None, :, None].expand(3, -1, 1),
            attend=attend,
            use_cache=False,
        ).last_hidden_state
        return self.head(hidden[:, 0])


def _expand_rows(prompts: Int[Tensor, " prompts"], group_size: int) -> Int[Tensor, " rows"]:
    """Return the rows of each prompt's completions in order; negative for prompt −1."""
    members = torch.arange(group_size, device=prompts.device)
    return (prompts[:, None] * group_size + members).flatten()
