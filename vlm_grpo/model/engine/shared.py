"""Sampling and scoring with one pass over each prompt, whose completions share it.

All memory of a rollout is allocated at its start. A finished completion frees its place at once for
the next one that waits, of any prompt; when none waits, empty places are given up. The device is
read once per ``CHECK_EVERY`` steps, to see which completions are finished; in between, those that
finish stay in the batch and nothing is stored for them.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vlm_grpo.model.engine import kernels
from vlm_grpo.model.engine.attention import PackedAttention, PrefillAttention
from vlm_grpo.model.engine.decode_attention import CachedKeys, DecodeAttention
from vlm_grpo.model.engine.graphs import (
    KEPT_SHARE,
    KEPT_STEPS,
    CudaGraph,
    DecodeStep,
    GraphCapture,
    capture_compiled,
    find_cause,
)
from vlm_grpo.model.engine.kernels import GroupSpan
from vlm_grpo.model.engine.kv_cache import CacheSize, KVCache
from vlm_grpo.model.engine.logprobs import ScoringSettings, TokenScores, add_tokens, score_tokens
from vlm_grpo.model.engine.packing import PREFILL_TOKENS, MicroBatch, Path, Segment, split_paths
from vlm_grpo.model.engine.repeated import Counters, Engine, extend_prompt, join_parts
from vlm_grpo.model.engine.sampling import SamplerState, SamplingSettings, draw_tokens
from vlm_grpo.model.engine.slot_scheduler import SlotScheduler
from vlm_grpo.model.engine.vision import ImageEncoder
from vlm_grpo.model.families.family import ImageFeatures, Masks, PromptLayout, Unit, find_part
from vlm_grpo.model.loading import LoadedModel
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.types import ImageRef, Prompt
from vlm_grpo.utils.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

LENGTH_BUCKET = 64  # smallest number of tokens that a captured step attends to
CHECK_EVERY = 8
"""Steps between two reads of the finished completions; 1 on the CPU, where reading is free."""


@dataclass(frozen=True)
class PrefixInputs:
    """A prompt, ready to be run: tokens, their positions and masks, features of its images."""

    token_ids: Int[np.ndarray, " T"]
    layout: PromptLayout
    features: tuple[ImageFeatures, ...]
    #: of a prompt that continues another: that one, behind which others continue, too
    base: PrefixInputs | None = None

    @property
    def path(self) -> PathInputs:
        """What stands behind the base, whose last token is fed, too."""
        base = self.base or self
        rest = *self.token_ids[len(base.token_ids) :].tolist(), 0
        return PathInputs(Path(rest), self.layout, (self.features[len(base.features) :],))

    @property
    def next_position(self) -> int:
        """First position of the completions: that of the prompt's last token + 1."""
        # The times of a clip before it can be larger positions.
        return int(self.layout.positions[:, -1].max()) + 1


@dataclass(frozen=True)
class PackedRow:
    """A row of T tokens, ``[prompt | c1 | … | cG]`` for each slice, that predicts M targets."""

    token_ids: Int[np.ndarray, " T"]
    """Prompts, and each completion, with what it observed, without its last token, which is never
    fed."""
    position_ids: Int[np.ndarray, "axes T"]
    """Rotary positions; each completion starts at its prompt's last + 1."""
    spans: tuple[GroupSpan, ...]
    features: tuple[ImageFeatures, ...]
    """Of the images of prompts and paths, in the order of their placeholders."""
    predictors: Int[np.ndarray, " M"]
    """Index in the row of the hidden state that predicts each target: the prompt's last one for the
    first token of each completion."""
    targets: Int[np.ndarray, " M"]
    target_positions: Int[np.ndarray, " M"]  # index of each target within its completion
    segments: tuple[tuple[Segment, ...], ...]  # of each slice
    # index of the target of each of the completions' tokens; None: they are the targets
    order: Int[np.ndarray, " tokens"] | None = None


@dataclass(frozen=True)
class PathInputs:
    """A completion, ready to be run: its path, and what the observations on it need."""

    path: Path
    layout: PromptLayout | None = None  # of the prompt and the path; None: nothing was observed
    features: tuple[tuple[ImageFeatures, ...], ...] = ()  # of the images of each observation

    def find_masks(self, prompt_length: int, segment: Segment) -> Masks:
        """Return (n, T) which tokens of the prompt and the path a segment's tokens see."""
        if self.layout is None:
            return {}
        start, stop = prompt_length + segment.start, prompt_length + segment.stop
        return {kind: mask[start:stop, :stop] for kind, mask in self.layout.masks.items()}

    def list_features(self, segment: Segment) -> Iterator[ImageFeatures]:
        """Return those in a segment: a trunk ends with the first observation."""
        is_trunk = len(segment.members) > 1
        shown = self.features[1:] if segment.start else self.features[: 1 if is_trunk else None]
        return itertools.chain(*shown)


def pack_row(
    prefixes: Sequence[PrefixInputs],
    completions: Sequence[Sequence[PathInputs]],
    segments: Sequence[Sequence[Segment]] = (),
) -> PackedRow:
    """Pack the completions of each prompt; without ``segments``, they share the prompt alone."""
    segments = segments or [split_paths([inputs.path for inputs in own]) for own in completions]
    layouts = [i.layout for group in completions for i in group if i.layout is not None]
    axes = max(len(layout.positions) for layout in (*(p.layout for p in prefixes), *layouts))
    token_ids: list[Any] = []
    position_ids: list[np.ndarray] = []
    spans: list[GroupSpan] = []
    features: list[ImageFeatures] = []
    predictors, target_positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    start = 0
    for prefix, group, parts in zip(prefixes, completions, segments, strict=True):
        length = len(prefix.token_ids)
        fed = tuple(segment.stop - segment.start for segment in parts)
        parents = tuple(segment.parent for segment in parts)
        spans.append(
            GroupSpan(start, length, fed, parents if max(parents, default=-1) >= 0 else ())
        )
        token_ids.append(prefix.token_ids)
        position_ids.append(np.broadcast_to(prefix.layout.positions, (axes, length)))
        features += prefix.features
        next_position, last = prefix.next_position, start + length - 1
        start += length
        places = [[np.array([last])] for _ in group]  # of the prompt's end and each path's tokens
        for segment, count in zip(parts, fed, strict=True):
            inputs, own = group[segment.members[0]], slice(segment.start, segment.stop)
            positions = next_position + np.arange(own.start, own.stop)
            if inputs.layout is not None:
                positions = inputs.layout.positions[:, length + own.start : length + own.stop]
            token_ids.append(inputs.path.token_ids[own])
            position_ids.append(np.broadcast_to(positions, (axes, count)))
            features += inputs.list_features(segment)
            for member in segment.members:
                places[member].append(np.arange(start, start + count))
            start += count
        for inputs, found in zip(group, places, strict=True):
            predictors.append(np.concatenate(found)[inputs.path.sampled])
            target_positions.append(np.arange(len(inputs.path.tokens)))
    paths = [inputs.path for group in completions for inputs in group]
    targets = np.array([token for path in paths for token in path.tokens], dtype=np.int64)
    row = PackedRow(
        np.concatenate(token_ids).astype(np.int64),
        np.concatenate(position_ids, axis=1),
        tuple(spans),
        tuple(features),
        np.concatenate(predictors),
        targets,
        np.concatenate(target_positions),
        tuple(map(tuple, segments)),
    )
    if all(len(segment.members) == 1 for parts in segments for segment in parts):
        return row
    # A trunk's tokens are predicted once, too: equal predictors have one place in the completion.
    pairs = row.predictors * (targets.max() + 1) + targets
    _, kept, order = np.unique(pairs, return_index=True, return_inverse=True)
    names = "predictors", "targets", "target_positions"
    return replace(row, order=order, **{name: getattr(row, name)[kept] for name in names})


def find_path_masks(row: PackedRow, paths: Sequence[Sequence[PathInputs]]) -> list[list[Masks]]:
    triples = zip(row.spans, paths, row.segments, strict=True)
    return [
        [own[part.members[0]].find_masks(span.prompt_length, part) for part in parts]
        for span, own, parts in triples
    ]


class Visible(NamedTuple):
    """How many tokens of each prompt, or of each completion, a decode step sees."""

    longest: int
    are_equal: bool

    @classmethod
    def read(cls, lengths: Int[np.ndarray, " n"]) -> Visible:
        return cls(int(lengths.max()), bool((lengths == lengths[0]).all()))


class SharedEngine(Engine):
    """Samples and scores all completions of a prompt behind one pass over it.

    The phases ``vision``, ``prefill`` and ``decode`` are timed. ``capture`` captures decode steps
    (``engine/graphs.py``), which are kept with their cache for the next rollouts that fit into it,
    up to ``KEPT_SHARE`` and ``KEPT_STEPS``. With None steps run eagerly, as they do after the first
    capture that fails.
    """

    shares_prompts = True
    most_tokens = sys.maxsize

    def __init__(
        self,
        loaded: LoadedModel,
        pad_token: int,
        stopwatch: Stopwatch,
        capture: GraphCapture | None = None,
    ) -> None:
        super().__init__(loaded, pad_token)
        self.stopwatch, self.capture = stopwatch, capture
        self.head: Any = self.family.head(self.model)
        text = self.model.config.get_text_config()
        self.has_windows = "sliding_attention" in (getattr(text, "layer_types", None) or ())
        # of decode steps, in some layers (``Layer.needs_mask``)
        self.has_masks = self.has_windows or bool(getattr(text, "attn_logit_softcapping", None))
        trained = {find_part(n) for n, p in self.model.named_parameters() if p.requires_grad}
        trains_vision = not trained.isdisjoint(("vision", "projector"))
        self.encoder = ImageEncoder(self.family, self.model, trains_vision, stopwatch)
        # By the prompt's tokens and images; they do not depend on the weights or on noise.
        self._layouts: dict[tuple[tuple[int, ...], Unit], PromptLayout] = {}
        self._cache: KVCache | None = None
        self._steps: dict[tuple[Any, ...], DecodeStep] = {}

    def score(
        self, batch: MicroBatch, settings: ScoringSettings, counters: Counters
    ) -> TokenScores:
        observed = (o.prompt for s in batch.slices for own in s.observations for o in own)
        prompts = [piece.prompt for piece in batch.slices]
        features = self.encoder([*prompts, *observed], counters)
        prefixes = [self._build_prefix(prompt, features) for prompt in prompts]
        paths = [[self._build_path(s.prompt, p, features) for p in s.paths] for s in batch.slices]
        counters.update_tokens += batch.num_tokens
        row = pack_row(prefixes, paths, [piece.segments for piece in batch.slices])
        masks = [prefix.layout.masks for prefix in prefixes]
        attend = PackedAttention(row.spans, masks, find_path_masks(row, paths))
        hidden = self.run_row(row, attend)
        order, arrays = row.order, (row.predictors, row.targets, row.target_positions)
        # Others may differ at the places of what is predicted once.
        if settings.others is not None and order is not None:
            order, arrays = None, tuple(array[order] for array in arrays)
        predictors, targets, positions = (copy_to(hidden.device, array) for array in arrays)
        targets = add_tokens(targets, settings.others)
        scores = score_tokens(self.head, hidden[predictors], targets, positions, settings)
        return scores if order is None else scores.take(copy_to(hidden.device, order))

    def run_row(self, row: PackedRow, attend: PackedAttention) -> Float[Tensor, "T width"]:
        device = self.model.get_output_embeddings().weight.device
        positions = copy_to(device, row.position_ids[:, None])
        tokens = row.token_ids[None]
        return self.family.run(self.model, tokens, positions, row.features, attend)[0]

    def build_prefixes(self, prompts: Sequence[Prompt], counters: Counters) -> list[PrefixInputs]:
        features = self.encoder(prompts, counters)
        bases = {
            id(p.parts[0]): self._build_prefix(p.parts[0], features) for p in prompts if p.parts
        }
        prefixes = (self._build_prefix(prompt, features) for prompt in prompts)
        return [
            replace(prefix, base=bases[id(prompt.parts[0])]) if prompt.parts else prefix
            for prefix, prompt in zip(prefixes, prompts, strict=True)
        ]

    def _build_prefix(self, prompt: Prompt, features: Mapping[Unit, ImageFeatures]) -> PrefixInputs:
        token_ids = np.array(prompt.token_ids, dtype=np.int64)
        return PrefixInputs(token_ids, self._lay_out(prompt), self._find(prompt, features))

    def _build_path(
        self, prompt: Prompt, path: Path, features: Mapping[Unit, ImageFeatures]
    ) -> PathInputs:
        if not path.observations:
            return PathInputs(path)
        whole = extend_prompt(prompt, path)
        observed = tuple(self._find(o.prompt, features) for o in path.observations)
        return PathInputs(path, self._lay_out(whole), observed)

    def _find(
        self, prompt: Prompt, features: Mapping[Unit, ImageFeatures]
    ) -> tuple[ImageFeatures, ...]:
        parts = prompt.parts or (prompt,)
        units = (unit for part in parts for unit in self.family.units(part.example.images))
        return tuple(features[unit] for unit in units)

    def _lay_out(self, prompt: Prompt) -> PromptLayout:
        key = prompt.token_ids, tuple(image.clean for image in prompt.example.images)
        if key not in self._layouts:
            # Pixels are encoded part by part, and a layout needs the sizes only.
            whole = join_parts(prompt, with_pixels=False)
            self._layouts[key] = self.family.lay_out(self.model, whole)
        return self._layouts[key]

    def encode_images(self, prompts: Sequence[Prompt], counters: Counters) -> None:
        if not self.encoder.is_trained:
            self.encoder(prompts, counters)

    def clear_image_features(self) -> None:
        self.encoder.cache.clear()
        self._layouts.clear()

    def share_image_passes(
        self, watched: dict[Unit, ImageFeatures] | None = None
    ) -> AbstractContextManager[Callable[[Container[ImageRef]], None]]:
        return self.encoder.share_passes(watched)

    # Sampling.

    def generate(
        self, prompts: Sequence[Prompt], state: SamplerState, max_tokens: int, counters: Counters
    ) -> None:
        prefixes = self.build_prefixes(prompts, counters)
        rollout = _Rollout(self, prefixes, state, max_tokens)
        try:
            while True:
                with self.stopwatch("prefill"):
                    rollout.admit()
                if rollout.scheduler.is_empty:
                    return
                with self.stopwatch("decode"):
                    rollout.advance()
        finally:
            counters.prefill_tokens += rollout.prefilled
            self._release_large_cache()

    def use_capture(self, capture: GraphCapture | None) -> None:
        self.release()
        self.capture = capture

    def count_kept_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.count_bytes()

    def release(self) -> None:
        self._cache = None
        self._steps.clear()

    def _release_large_cache(self) -> None:
        device = self.head.weight.device
        if self._cache is not None and device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            if self.count_kept_bytes() > KEPT_SHARE * total:
                self.release()

    def open_cache(self, size: CacheSize, max_tokens: int) -> KVCache:
        """Return a cache: for captured steps the one kept from the last rollout, if it is large
        enough but not larger than ``max_tokens`` or ``size``."""
        if self.capture is None:
            return KVCache(size)
        kept = self._cache
        if kept is None or not kept.size.holds(size, max_tokens):
            self.release()
            kept = self._cache = KVCache(size)
        kept.restore(size.slots, size.places)
        return kept

    def step(
        self,
        cache: KVCache,
        prompts: Visible,
        own: Visible,
        sampling: SamplingSettings,
        inputs: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """Feed the newest token of each completion; return what is drawn next (``draw_tokens``)."""
        if self.capture is None:
            return self._build_step(cache, prompts, own, sampling)(*inputs)
        longest = cache.size.completion_length
        if self.has_windows or not kernels.has_varlen(cache.get_keys()):
            longest = round_up(own.longest, longest)  # else the kernel reads no keys beyond it
        shapes = (tensor.shape for tensor in inputs)
        key = cache.slots, cache.places, longest, sampling, *shapes
        if key not in self._steps:
            most = Visible(cache.size.prompt_length, False), Visible(longest, False)
            step = self._build_step(cache, *most, sampling)
            if len(self._steps) >= KEPT_STEPS:
                self._steps.clear()
            try:
                with cache.keeping_states():  # a capture also runs the step
                    self._steps[key] = self.capture(step, inputs)
            except Exception as error:  # the eager step raises what is no fault of the capture
                cause = find_cause(error)
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
                del error  # and what the failed step holds
                is_compiled = self.capture is capture_compiled
                self.use_capture(CudaGraph if is_compiled else None)
                drawn = self.step(cache, prompts, own, sampling, inputs)
                logger.warning(
                    "decode steps run %s from now on, which takes longer: they cannot be %s "
                    "(%s: %s); rollout.%s=false does not try",
                    "without torch.compile" if is_compiled else "eagerly",
                    "compiled" if is_compiled else "captured as CUDA graphs",
                    type(cause).__name__,
                    (str(cause).splitlines() or ["no message"])[0],
                    "torch_compile" if is_compiled else "cuda_graphs",
                )
                return drawn
        return self._steps[key](*inputs)

    def _build_step(
        self, cache: KVCache, prompts: Visible, own: Visible, sampling: SamplingSettings
    ) -> DecodeStep:
        def step(
            tokens: Tensor,
            positions: Tensor,
            fed: Tensor,
            numbers: Tensor,
            uniform: Tensor,
            prompt_lengths: Tensor,
            *seats: Tensor,
        ) -> tuple[Tensor, ...]:
            # Completions that are finished, and their prompts, may be longer than all others.
            like, lengths = cache.get_keys(), prompt_lengths.clamp(max=prompts.longest)
            over_prompt = CachedKeys.build(lengths, *prompts, like)
            over_own = CachedKeys.build((fed + 1).clamp(max=own.longest), *own, like)
            attend = DecodeAttention(cache, seats, fed, prompt_lengths, (over_prompt, over_own))
            hidden = self.family.run(self.model, tokens[:, None], positions, (), attend)[:, 0]
            return draw_tokens(self.head(hidden), numbers, uniform, sampling)

        return step


class _Rollout:
    def __init__(
        self,
        engine: SharedEngine,
        prefixes: Sequence[PrefixInputs],
        state: SamplerState,
        max_tokens: int,
    ) -> None:
        self.engine, self.prefixes, self.state = engine, prefixes, state
        self.device = state.tokens.device
        # Without what a captured step does not depend on.
        self.sampling = replace(state.settings, max_completion_length=0, stop=())
        lengths = np.array([len(prefix.token_ids) for prefix in prefixes])
        sizes, longest, prompt_length = state.sizes, state.tokens.shape[1], int(lengths.max())
        if engine.capture is not None:  # captured steps are of few sizes
            prompt_length = round_up(prompt_length)
        slots, places = _fit(len(prefixes), max(sizes), prompt_length, longest, max_tokens)
        size = CacheSize(slots, min(places, state.count), prompt_length, longest)
        self.scheduler = SlotScheduler(lengths, sizes, size.slots, size.places)
        self.cache = engine.open_cache(size, max_tokens)
        self.axes = max(len(prefix.layout.positions) for prefix in prefixes)
        starts = np.repeat([prefix.next_position for prefix in prefixes], sizes)
        self.starts = copy_to(self.device, np.append(starts, 0))
        self.hidden = torch.empty(0)  # the last hidden state of the prompt in each slot
        self.index: tuple[Tensor, ...] | None = None
        self.prefilled = 0  # number of tokens

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
            logits = self.engine.head(hidden)[copy_to(self.device, order)]
            self.state.sample(logits, copy_to(self.device, self.scheduler.rows[places]))
            self.scheduler.ages[places] = 1
            self.scheduler.release(self.state.update_active())
            self.index = None

    def _prefill(self, slots: Sequence[int]) -> None:
        prompts = self.scheduler.prompts
        while slots:
            longest = self.scheduler.lengths[prompts[slots]].max()
            count = max(1, PREFILL_TOKENS // int(longest))
            part, slots = slots[:count], slots[count:]
            # One pass over a prompt that several continue: each gets a slot with all of it.
            bases: dict[int, tuple[PrefixInputs, list[int]]] = {}
            owners: list[int] = prompts.tolist()
            for slot in part:
                prefix = self.prefixes[owners[slot]]
                base = prefix.base or prefix
                bases.setdefault(id(base), (base, []))[1].append(slot)
            prefixes, slots_of = zip(*bases.values(), strict=True)
            own = [[self.prefixes[owners[slot]] for slot in members] for members in slots_of]
            paths = [[p.path for p in members if p.base is not None] for members in own]
            row = pack_row(prefixes, paths)
            masks = [prefix.layout.masks for prefix in prefixes]
            attend = PrefillAttention(row.spans, masks, find_path_masks(row, paths))
            hidden = self.engine.run_row(row, attend)
            self.prefilled += len(row.token_ids)
            part = [slot for members in slots_of for slot in members]
            every = (span.list_paths() for span in row.spans)
            tokens = [places for paths in every for places in paths[1:] or paths]
            self.cache.store_prompts(part, attend, tokens)
            last = np.array([places[-1] for places in tokens])
            hidden = hidden[copy_to(hidden.device, last)]
            if not len(self.hidden):
                self.hidden = hidden.new_zeros(len(prompts), hidden.shape[1])
            self.hidden[copy_to(self.device, np.array(part))] = hidden

    def advance(self) -> None:
        scheduler, state = self.scheduler, self.state
        # Captured steps are of few sizes; on the CPU each row costs time.
        kept = scheduler.shrink(0.25 if self.engine.capture else 0.875)
        if kept is not None:
            self.cache.keep(*kept)
            self.hidden = self.hidden[copy_to(self.device, kept[0])]
            self.index = None
        if self.index is None:
            parts = self._count_parts()
            self.index = scheduler.build_index(self.cache.heads, self.device, parts)
        rows, prompt_lengths, *seats = self.index
        prompts = Visible.read(scheduler.lengths[scheduler.prompts[scheduler.prompts >= 0]])
        has_completion, longest = scheduler.rows >= 0, state.tokens.shape[1]
        left = longest - int(scheduler.ages[has_completion].min())
        for _ in range(1 if self.device.type == "cpu" else min(CHECK_EVERY, left)):
            fed = (state.lengths[rows] - 1).clamp_(min=0)  # the spare row has length 0
            positions = (self.starts[rows] + fed)[None, :, None].expand(self.axes, -1, 1)
            uniform = state.uniform[rows, (fed + 1).clamp_(max=longest - 1)]
            numbers = fed + 1 + state.begun[rows]  # of the tokens within their completions
            drawing = numbers, uniform, prompt_lengths
            inputs = state.tokens[rows, fed], positions, fed, *drawing, *seats
            own = Visible.read(scheduler.ages[has_completion].clip(max=longest))
            drawn = self.engine.step(self.cache, prompts, own, self.sampling, inputs)
            state.store(drawn, rows)
            scheduler.ages += 1
        scheduler.release(state.update_active())

    def _count_parts(self) -> int:
        """Return into how many parts a decode step splits prompts."""
        cache, lengths = self.cache, self.scheduler.lengths
        if self.engine.has_masks or not kernels.has_varlen(cache.get_keys()):
            return 1
        sequences = cache.slots * min(key_heads for _, key_heads in cache.heads)
        longest = cache.size.prompt_length
        return kernels.count_parts(self.device, sequences, int(lengths.min()), longest)


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


def round_up(length: int, limit: int = sys.maxsize) -> int:
    """Return the next length of a captured step: 1, 1.5, 2, 3, 4, 6, … times the smallest."""
    bucket = LENGTH_BUCKET
    while bucket < length:
        half = bucket * 3 // 2
        bucket = half if half >= length else bucket * 2
    return min(bucket, limit)
