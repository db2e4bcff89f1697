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

from vlm_grpo.engine.attention import Prefill
from vlm_grpo.engine.sampling import Draws
from vlm_grpo.families import Family, ImageFeatures
from vlm_grpo.timing import Stopwatch
from vlm_grpo.types import Prompt


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


class Slots:
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
        self.prompt_lengths = [0] * slots

    def fill(self, slots: Sequence[int], lengths: Sequence[int], prefill: Prefill) -> None:
        """Put prefilled prompts into slots."""
        if not self.prefix:
            self._allocate(prefill.cache)
        where = torch.tensor(slots, device=prefill.cache[0][0].device)
        for held, new in zip(self.prefix, prefill.cache, strict=True):
            for mine, theirs in zip(held, new, strict=True):
                mine[where, :, : theirs.shape[2]] = theirs
        for slot, length in zip(slots, lengths, strict=True):
            self.prompt_lengths[slot] = length

    def keep(self, slots: Sequence[int]) -> None:
        """Drop all but these slots, and the room that no prompt among them needs."""
        where = torch.tensor(slots, device=self.prefix[0][0].device)
        self.prompt_lengths = [self.prompt_lengths[slot] for slot in slots]
        longest = max(self.prompt_lengths)
        self.prefix = [(k[where, :, :longest], v[where, :, :longest]) for k, v in self.prefix]
        self.own = [(k[where], v[where]) for k, v in self.own]
        self.shape = (len(slots), longest, self.shape[2])

    def _allocate(self, like: list[tuple[Tensor, Tensor]]) -> None:
        slots, prompt, completion = self.shape
        for key, _ in like:
            _, heads, _, width = key.shape
            shared = (slots, heads, prompt, width)
            own = (slots, self.group, heads, completion, width)
            self.prefix.append((key.new_zeros(shared), key.new_zeros(shared)))
            self.own.append((key.new_zeros(own), key.new_zeros(own)))


class Decode:
    """Attention of one new token for each active completion, over its prompt and its own past.

    The G queries of a slot are one matrix against the slot's single copy of the prompt.

    Args:
        slots: the keys and values.
        rows: (n,) active completions, as slot × G + index in the group.
        lengths: (n,) how many tokens each has fed before this one.
    """

    def __init__(self, slots: Slots, rows: Tensor, lengths: Tensor) -> None:
        self.slots, self.rows, self.lengths = slots, rows, lengths
        count, prompt, _ = slots.shape
        self.seen = int(lengths.max()) + 1
        every = torch.zeros(count * slots.group, dtype=torch.int64, device=rows.device)
        every[rows] = lengths
        own = torch.arange(self.seen, device=rows.device) > every[:, None]
        ends = torch.tensor(slots.prompt_lengths, device=rows.device)
        prefix = torch.arange(prompt, device=rows.device) >= ends[:, None]
        hidden = torch.cat([prefix.repeat_interleave(slots.group, 0), own], dim=1)
        self.hidden = hidden[:, None] if bool(hidden.any()) else None
        self.all_active = len(rows) == count * slots.group

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        slots, group, seen = self.slots.shape[0], self.slots.group, self.seen
        heads, width = query.shape[1], query.shape[3]
        shared, times = key.shape[1], query.shape[1] // key.shape[1]
        prefix_key, prefix_value = self.slots.prefix[layer]
        own_key, own_value = (x.flatten(0, 1) for x in self.slots.own[layer])
        own_key[self.rows, :, self.lengths] = key[:, :, 0]
        own_value[self.rows, :, self.lengths] = value[:, :, 0]

        if not self.all_active:
            every = query.new_zeros(slots * group, heads, 1, width)
            every[self.rows] = query
            query = every
        query = query.view(slots, group, shared, times, width) * scaling
        by_prompt = query.transpose(1, 2).reshape(slots, shared, group * times, width)
        to_prefix = (by_prompt @ prefix_key.transpose(2, 3)).view(slots, shared, group, times, -1)
        by_row = query.view(slots * group, shared, times, width)
        to_own = by_row @ own_key[:, :, :seen].transpose(2, 3)
        scores = torch.cat(
            [to_prefix.transpose(1, 2).reshape(slots * group, heads, -1), to_own.flatten(1, 2)], -1
        )
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights = weights.to(query.dtype)
        on_prefix, on_own = weights.split([weights.shape[-1] - seen, seen], -1)
        on_prefix = on_prefix.view(slots, group, shared, times, -1).transpose(1, 2)
        from_prefix = on_prefix.reshape(slots, shared, group * times, -1) @ prefix_value
        from_prefix = from_prefix.view(slots, shared, group, times, width).transpose(1, 2)
        from_own = on_own.reshape(slots * group, shared, times, seen) @ own_value[:, :, :seen]
        output = from_prefix.reshape(slots * group, heads, width) + from_own.flatten(1, 2)
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
    """

    def __init__(self, family: Family, model: Any, max_tokens: int, stopwatch: Stopwatch) -> None:
        self.family, self.model, self.max_tokens = family, model, max_tokens
        self.stopwatch = stopwatch
        self.language = family.language_model(model)
        self.head: Any = model.get_output_embeddings()

    def __call__(self, prefixes: Sequence[PrefixInputs], draws: Draws) -> None:
        """Draw all completions, the G of prompt p at rows p·G … p·G+G−1 of ``draws``."""
        group = len(draws.lengths) // len(prefixes)
        waiting = sorted(range(len(prefixes)), key=lambda p: len(prefixes[p].token_ids))
        longest = len(prefixes[waiting[-1]].token_ids)
        room = max(1, self.max_tokens // (longest + group * draws.tokens.shape[1]))
        slots = Slots(min(room, len(waiting)), group, longest, draws.tokens.shape[1])
        starts = torch.tensor([p.next_position for p in prefixes], device=draws.tokens.device)
        held = torch.full((slots.shape[0],), -1, device=draws.tokens.device)

        while True:
            if waiting and bool((held < 0).any()):
                with self.stopwatch("prefill"):
                    self._refill(held, waiting, prefixes, slots, draws)
            rows = _rows_of(held, group)
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
        slots: Slots,
        draws: Draws,
    ) -> None:
        """Prefill waiting prompts, longest first, into free slots; draw their first tokens."""
        free = (held < 0).nonzero()[:, 0].tolist()
        while free and waiting:
            fit = max(1, self.max_tokens // len(prefixes[waiting[-1]].token_ids))
            batch = [waiting.pop() for _ in range(min(fit, len(free), len(waiting)))]
            taken, free = free[: len(batch)], free[len(batch) :]
            prefill = Prefill()
            hidden = self._prefill([prefixes[p] for p in batch], prefill)
            slots.fill(taken, [len(prefixes[p].token_ids) for p in batch], prefill)
            held[taken] = prompts = torch.tensor(batch, device=held.device)
            logits = self.head(hidden).repeat_interleave(slots.group, 0)
            draws.take(logits, _rows_of(prompts, slots.group))

    def _prefill(self, prefixes: list[PrefixInputs], prefill: Prefill) -> Tensor:
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

    def _step(self, held: Tensor, live: Tensor, slots: Slots, draws: Draws, starts: Tensor) -> None:
        """One token more for every live completion: feed its newest, draw its next."""
        rows = _rows_of(held, slots.group)[live]
        fed = draws.lengths[rows] - 1
        newest = draws.tokens[rows, fed]
        positions = (starts[rows // slots.group] + fed)[None, :, None].expand(3, -1, 1)
        hidden = self.language(
            inputs_embeds=self.model.get_input_embeddings()(newest[:, None]),
            position_ids=positions,
            attend=Decode(slots, live.nonzero()[:, 0], fed),
            use_cache=False,
        ).last_hidden_state
        draws.take(self.head(hidden[:, 0]), rows)


def _rows_of(prompts: Tensor, group: int) -> Tensor:
    """The completions' rows of each prompt, one after the other; negative for prompt −1."""
    return (prompts[:, None] * group + torch.arange(group, device=prompts.device)).flatten()
