"""Rollout from shared prefixes: each prompt passed once, its G completions decoded from it.

Prompts live in slots. A slot holds the keys and values of one prompt, once, and those of the
tokens its G completions have produced so far. All memory is allocated when the loop starts;
finished completions leave the batch at once; a slot whose completions are all finished takes the
next waiting prompt; and when nothing waits and half of the slots are empty, the rest move
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vlm_grpo.engine.attention import PrefillAttention
from vlm_grpo.engine.graphs import Record, Recorded
from vlm_grpo.engine.sampling import SamplerState
from vlm_grpo.families import Family, ImageFeatures
from vlm_grpo.types import Prompt
from vlm_grpo.utils.timing import Stopwatch

ROOM = 64
"""A recorded step looks at a multiple of so many places of each completion."""


@dataclass(frozen=True)
class PrefixInputs:
    """A prompt ready for its one pass: its tokens, positions and image features.

    Attributes:
        token_ids: (T_prompt,).
        positions: (3, T_prompt) rotary positions.
        features: the features of its images, in order.
    """

    token_ids: Tensor
    positions: Tensor
    features: tuple[ImageFeatures, ...]

    @property
    def next_position(self) -> int:
        """Where its completions start: after the largest position, not after the length."""
        return int(self.positions.max()) + 1


def prefix_inputs(
    family: Family,
    model: Any,
    prompts: Sequence[Prompt],
    features: Sequence[Sequence[ImageFeatures]],
    device: torch.device,
) -> list[PrefixInputs]:
    """What the language model is fed for each prompt, on ``device``."""
    return [
        PrefixInputs(
            torch.tensor(prompt.token_ids, device=device),
            family.prompt_positions(model, prompt).to(device),
            tuple(images),
        )
        for prompt, images in zip(prompts, features, strict=True)
    ]


class KVCache:
    """Keys and values of the prompts being decoded, and of their completions.

    Args:
        slots: how many prompts are held at once.
        group: completions of each prompt, G.
        prompt_length: room for a prompt's tokens.
        completion_length: room for a completion's tokens.
    """

    def __init__(self, slots: int, group: int, prompt_length: int, completion_length: int) -> None:
        self.group = group
        self.shape = (slots, prompt_length, completion_length)
        self.prefix: list[tuple[Tensor, Tensor]] = []
        self.own: list[tuple[Tensor, Tensor]] = []
        self.ends = torch.zeros(slots, dtype=torch.int64)

    def fill(self, slots: Sequence[int], lengths: Sequence[int], prefill: PrefillAttention) -> None:
        """Put prefilled prompts into slots."""
        if not self.prefix:
            self._allocate(prefill.cache)
        where = torch.tensor(slots, device=self.ends.device)
        for held, new in zip(self.prefix, prefill.cache, strict=True):
            for mine, theirs in zip(held, new, strict=True):
                mine[where, :, : theirs.shape[2]] = theirs
        self.ends[where] = torch.tensor(lengths, device=self.ends.device)

    def keep(self, slots: Sequence[int]) -> None:
        """Drop all but these slots, and the room that no prompt among them needs."""
        where = torch.tensor(slots, device=self.ends.device)
        self.ends = self.ends[where]
        longest = int(self.ends.max())
        self.prefix = [(k[where, :, :longest], v[where, :, :longest]) for k, v in self.prefix]
        self.own = [(k[where], v[where]) for k, v in self.own]
        self.shape = (len(slots), longest, self.shape[2])

    def _allocate(self, like: list[tuple[Tensor, Tensor]]) -> None:
        slots, prompt, completion = self.shape
        self.ends = self.ends.to(like[0][0].device)
        for key, _ in like:
            _, heads, _, width = key.shape
            shared = (slots, heads, prompt, width)
            own = (slots, heads, self.group, completion, width)
            self.prefix.append((key.new_zeros(shared), key.new_zeros(shared)))
            self.own.append((key.new_zeros(own), key.new_zeros(own)))


class DecodeAttention:
    """Attention of one new token for each active completion, over its prompt and its own past.

    The G queries of a slot are one matrix against the slot's single copy of the prompt.

    Args:
        slots: the keys and values.
        rows: (n,) active completions, as slot × G + index in the group.
        lengths: (n,) how many tokens each has fed before this one.
        room: how far a completion's past is looked at, at least the greatest length + 1; None: no
            further than that, which is read from the device first.
    """

    def __init__(
        self, slots: KVCache, rows: Tensor, lengths: Tensor, room: int | None = None
    ) -> None:
        count, prompt, _ = slots.shape
        self.slots, self.rows, self.lengths = slots, rows, lengths
        self.where = (rows // slots.group, rows % slots.group)
        self.all_active = len(rows) == count * slots.group
        self.seen = int(lengths.max()) + 1 if room is None else room
        every = torch.zeros(count * slots.group, dtype=torch.int64, device=rows.device)
        every[rows] = lengths
        own = torch.arange(self.seen, device=rows.device) > every.view(count, -1, 1)
        prefix = torch.arange(prompt, device=rows.device) >= slots.ends[:, None, None]
        hidden = torch.cat([prefix.expand(-1, slots.group, -1), own], dim=2)
        self.hidden: Tensor | None = hidden[:, None, :, None]
        if room is None and not bool(hidden.any()):
            self.hidden = None

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        slots, group, seen = self.slots.shape[0], self.slots.group, self.seen
        heads, width = query.shape[1], query.shape[3]
        shared, times = key.shape[1], query.shape[1] // key.shape[1]
        prefix_key, prefix_value = self.slots.prefix[layer]
        own_key, own_value = self.slots.own[layer]
        slot, index = self.where
        own_key[slot, :, index, self.lengths] = key[:, :, 0]
        own_value[slot, :, index, self.lengths] = value[:, :, 0]

        query = query[:, :, 0] * scaling
        if not self.all_active:
            every = query.new_zeros(slots * group, heads, width)
            every[self.rows] = query
            query = every
        # Rows and scores lie as (slots, key heads, G, queries of a key head, …).
        query = query.view(slots, group, shared, times, width).transpose(1, 2).contiguous()
        stacked = query.view(slots, shared, group * times, width)
        to_prefix = (stacked @ prefix_key.mT).view(slots, shared, group, times, -1)
        to_own = query @ own_key[:, :, :, :seen].mT
        scores = torch.cat([to_prefix, to_own], -1)
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        on_prefix, on_own = weights.to(query.dtype).split([weights.shape[-1] - seen, seen], -1)
        output = on_own @ own_value[:, :, :, :seen]
        output += (on_prefix.flatten(2, 3) @ prefix_value).view_as(output)
        output = output.transpose(1, 2).reshape(slots * group, heads, width)
        if not self.all_active:
            output = output[self.rows]
        return output[:, None]


class SharedDecoder:
    """Decodes the completions of many prompts.

    Args:
        family: the model's family.
        model: the bare transformers model.
        max_tokens: the most tokens, of prompts and completions, held or prefilled at once.
        stopwatch: times the phases ``prefill`` and ``decode``.
        record: makes a call that can be repeated of one that computes a step's logits, see
            ``engine/graphs.py``; None: every step is computed as it comes.
    """

    def __init__(
        self,
        family: Family,
        model: Any,
        max_tokens: int,
        stopwatch: Stopwatch,
        record: Record | None = None,
    ) -> None:
        self.family, self.model, self.max_tokens = family, model, max_tokens
        self.stopwatch, self.record = stopwatch, record
        self.recorded: tuple[Any, Recorded] | None = None
        self.language = family.language_model(model)
        self.head: Any = model.get_output_embeddings()

    def __call__(self, prefixes: Sequence[PrefixInputs], draws: SamplerState) -> None:
        """Draw all completions, the G of prompt p at rows p·G … p·G+G−1 of ``draws``."""
        group = len(draws.lengths) // len(prefixes)
        waiting = sorted(range(len(prefixes)), key=lambda p: len(prefixes[p].token_ids))
        longest = len(prefixes[waiting[-1]].token_ids)
        room = max(1, self.max_tokens // (longest + group * draws.tokens.shape[1]))
        slots = KVCache(min(room, len(waiting)), group, longest, draws.tokens.shape[1])
        starts = torch.tensor([p.next_position for p in prefixes], device=draws.tokens.device)
        held = torch.full((slots.shape[0],), -1, device=draws.tokens.device)

        while True:
            if waiting and bool((held < 0).any()):
                with self.stopwatch("prefill"):
                    self._refill(held, waiting, prefixes, slots, draws)
            rows = _expand_rows(held, group)
            live = (held >= 0).repeat_interleave(group) & draws.active[rows.clamp(min=0)]
            busy = live.view(-1, group).any(1)
            held = held.where(busy, -1)
            if waiting and not bool(busy.all()):
                continue
            if not bool(busy.any()):
                return
            if int(busy.sum()) <= len(held) // 2:
                slots.keep(busy.nonzero()[:, 0].tolist())
                live, held = live[busy.repeat_interleave(group)], held[busy]
            with self.stopwatch("decode"):
                self._step(held, live, slots, draws, starts)

    def _refill(
        self,
        held: Tensor,
        waiting: list[int],
        prefixes: Sequence[PrefixInputs],
        slots: KVCache,
        draws: SamplerState,
    ) -> None:
        """Prefill waiting prompts, longest first, into free slots; draw their first tokens."""
        free = (held < 0).nonzero()[:, 0].tolist()
        while free and waiting:
            fit = max(1, self.max_tokens // len(prefixes[waiting[-1]].token_ids))
            batch = [waiting.pop() for _ in range(min(fit, len(free), len(waiting)))]
            taken, free = free[: len(batch)], free[len(batch) :]
            prefill = PrefillAttention()
            hidden = self._prefill([prefixes[p] for p in batch], prefill)
            slots.fill(taken, [len(prefixes[p].token_ids) for p in batch], prefill)
            held[taken] = prompts = torch.tensor(batch, device=held.device)
            logits = self.head(hidden).repeat_interleave(slots.group, 0)
            draws.take(logits, _expand_rows(prompts, slots.group))

    def _prefill(self, prefixes: list[PrefixInputs], prefill: PrefillAttention) -> Tensor:
        """The last hidden state of each prompt, (prompts, width); keys and values into prefill."""
        tokens = pad_sequence([p.token_ids for p in prefixes], batch_first=True)
        positions = pad_sequence([p.positions.T for p in prefixes], batch_first=True)
        features = [image for p in prefixes for image in p.features]
        hidden = self.language(
            **self.family.language_inputs(self.model, tokens, features),
            position_ids=positions.permute(2, 0, 1),
            attend=prefill,
            use_cache=False,
        ).last_hidden_state
        last = torch.tensor([len(p.token_ids) - 1 for p in prefixes], device=hidden.device)
        return hidden[torch.arange(len(prefixes), device=hidden.device), last]

    def _step(
        self, held: Tensor, live: Tensor, slots: KVCache, draws: SamplerState, starts: Tensor
    ) -> None:
        """One token more for every live completion: feed its newest, draw its next."""
        rows = _expand_rows(held, slots.group)
        if self.record is None:
            rows = rows[live]
            fed = draws.lengths[rows] - 1
            attend = DecodeAttention(slots, live.nonzero()[:, 0], fed)
            draws.take(self._logits(*_newest(rows, fed, slots, draws, starts), attend), rows)
            return
        # All rows, so that nothing but their contents changes from step to step; what is computed
        # for a row without a live completion is not looked at.
        every = rows.clamp(min=0)
        fed = draws.lengths[every] - 1
        room = min(-(-int(fed[live].max() + 1) // ROOM) * ROOM, slots.shape[2])
        fed = fed.clamp(0, room - 1)
        inputs = (*_newest(every, fed, slots, draws, starts), fed)
        if self.recorded is None or self.recorded[0] != (slots.shape, room):
            self.recorded = None  # frees the memory of the one before

            def step(tokens: Tensor, positions: Tensor, fed: Tensor) -> Tensor:
                order = torch.arange(len(fed), device=fed.device)
                return self._logits(tokens, positions, DecodeAttention(slots, order, fed, room))

            self.recorded = (slots.shape, room), self.record(step, inputs)
        draws.take(self.recorded[1](*inputs)[live], rows[live])

    def _logits(self, tokens: Tensor, positions: Tensor, attend: DecodeAttention) -> Tensor:
        """What follows each of the tokens, (n,) to (n, vocabulary)."""
        hidden = self.language(
            inputs_embeds=self.model.get_input_embeddings()(tokens[:, None]),
            position_ids=positions[None, :, None].expand(3, -1, 1),
            attend=attend,
            use_cache=False,
        ).last_hidden_state
        return self.head(hidden[:, 0])


def _newest(
    rows: Tensor, fed: Tensor, slots: KVCache, draws: SamplerState, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """The newest token of each completion and its position, both (n,)."""
    return draws.tokens[rows, fed], starts[rows // slots.group] + fed


def _expand_rows(prompts: Tensor, group: int) -> Tensor:
    """The completions' rows of each prompt, one after the other; negative for prompt −1."""
    return (prompts[:, None] * group + torch.arange(group, device=prompts.device)).flatten()
