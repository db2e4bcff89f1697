"""The two ways to sample and score completions: with one pass over their prompt, or with many."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.model.engine.attention import PackedAttention, plain_attention
from vlm_grpo.model.engine.batch import MicroBatch
from vlm_grpo.model.engine.decode import SharedDecoder
from vlm_grpo.model.engine.graphs import GraphCapture
from vlm_grpo.model.engine.logprobs import ScoringSettings, TokenScores, score_tokens
from vlm_grpo.model.engine.repeated import Padding, sample_repeated, score_repeated
from vlm_grpo.model.engine.sampling import SamplerState
from vlm_grpo.model.engine.shared import PrefixInputs, pack_row, run_row
from vlm_grpo.model.engine.vision import ImageEncoder
from vlm_grpo.model.families import ImageFeatures, PromptLayout, find_part
from vlm_grpo.model.families.family import Unit
from vlm_grpo.model.loading import LoadedModel
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.types import ImageRef, Prompt
from vlm_grpo.utils.timing import Stopwatch


@dataclass
class Counters:
    """Work of the model since the counters were reset; sharing prompts reduces it."""

    encoder_passes: int = 0  # images encoded by the vision tower
    prefill_tokens: int = 0  # tokens of prompts processed by the language model in rollouts
    update_tokens: int = 0  # tokens of prompts and completions that it processed in scoring
    image_decodes: int = 0  # images read and resized for the prompts of rollouts
    replaced_prompts: int = 0  # prompts in place of one whose images could not be read

    def reset(self, **work: int) -> None:
        """Start again, from these numbers or from 0."""
        vars(self).update(vars(Counters(**work)))


class Engine:
    """Samples and scores by transformers' own forward, with the prompt repeated.

    ``pad_token`` fills rows to the length of the longest.
    """

    shares_prompts = False
    # Most tokens to cache at once, however much memory is free: a chunk's prompts are processed at
    # once, and their activations take more than keys.
    most_tokens = DEFAULT_ROLLOUT_TOKENS
    capture: GraphCapture | None = None

    def __init__(self, loaded: LoadedModel, pad_token: int) -> None:
        self.model, self.family = loaded.model, loaded.family
        self._padding = Padding(pad_token, self.family.completion_type)

    def generate(
        self, prompts: Sequence[Prompt], state: SamplerState, max_tokens: int, counters: Counters
    ) -> None:
        """Sample all completions of ``state``, with at most ``max_tokens`` cached at once."""
        for prompt, size in zip(prompts, state.sizes, strict=True):
            counters.prefill_tokens += size * len(prompt.token_ids)
            counters.encoder_passes += size * len(prompt.example.images)
        with plain_attention(self.family, self.model):
            sample_repeated(self.model, prompts, state, max_tokens, self._padding)

    def score(
        self, batch: MicroBatch, settings: ScoringSettings, counters: Counters
    ) -> TokenScores:
        prompts = [piece.prompt for piece in batch.slices for _ in piece.rows]
        counters.encoder_passes += sum(len(p.example.images) for p in prompts)
        counters.update_tokens += sum(len(p.token_ids) for p in prompts)
        counters.update_tokens += sum(len(tokens) - 1 for tokens in batch.completions)
        with plain_attention(self.family, self.model):
            return score_repeated(self.model, batch, settings, self._padding)

    def encode_images(self, prompts: Sequence[Prompt], counters: Counters) -> None:
        """Encode the prompts' images and keep their features, if this engine keeps any."""

    def clear_image_features(self) -> None:
        """Drop the kept vision features, and layouts of this step's prompts."""

    def share_image_passes(self) -> AbstractContextManager[Callable[[Container[ImageRef]], None]]:
        """Encode an image once for the micro-batches that share it; see ``ImageEncoder``."""
        return contextlib.nullcontext(lambda needed: None)

    def use_capture(self, capture: GraphCapture | None) -> None:
        """Capture decode steps from now on, if this engine can; None: run them eagerly."""

    def count_kept_bytes(self) -> int:
        """Return the memory that the next rollout reuses or frees."""
        return 0

    def release(self) -> None:
        """Free the memory that is kept for the next rollout's captured steps."""


class SharedEngine(Engine):
    """Samples and scores all completions of a prompt behind one pass over it.

    ``capture`` captures decode steps; without it they run eagerly.
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
        trained = {find_part(n) for n, p in self.model.named_parameters() if p.requires_grad}
        trains_vision = not trained.isdisjoint(("vision", "projector"))
        self.encoder = ImageEncoder(self.family, self.model, trains_vision, stopwatch)
        self.decoder = SharedDecoder(self.family, self.model, stopwatch, capture)
        # By the prompt's tokens and images; they do not depend on the weights or on noise.
        self._layouts: dict[tuple[tuple[int, ...], Unit], PromptLayout] = {}

    @property
    def capture(self) -> GraphCapture | None:
        return self.decoder.capture

    def generate(
        self, prompts: Sequence[Prompt], state: SamplerState, max_tokens: int, counters: Counters
    ) -> None:
        prefixes = self.build_prefixes(prompts, counters)
        counters.prefill_tokens += sum(len(p.token_ids) for p in prefixes)
        self.decoder(prefixes, state, max_tokens)

    def score(
        self, batch: MicroBatch, settings: ScoringSettings, counters: Counters
    ) -> TokenScores:
        prefixes = self.build_prefixes([piece.prompt for piece in batch.slices], counters)
        counters.update_tokens += batch.num_tokens
        row = pack_row(prefixes, [piece.completions for piece in batch.slices])
        attend = PackedAttention(row.spans, [prefix.layout.masks for prefix in prefixes])
        head = self.family.head(self.model)
        hidden = run_row(self.family, self.model, row, prefixes, attend)
        arrays = (row.predictors, row.targets, row.target_positions)
        predictors, targets, positions = (copy_to(hidden.device, array) for array in arrays)
        return score_tokens(head, hidden[predictors], targets, positions, settings)

    def encode_images(self, prompts: Sequence[Prompt], counters: Counters) -> None:
        if not self.encoder.is_trained:
            self._encode(prompts, counters)

    def clear_image_features(self) -> None:
        self.encoder.clear_cache()
        self._layouts.clear()

    def share_image_passes(self) -> AbstractContextManager[Callable[[Container[ImageRef]], None]]:
        return self.encoder.share_passes()

    def use_capture(self, capture: GraphCapture | None) -> None:
        self.decoder.use_capture(capture)

    def count_kept_bytes(self) -> int:
        return self.decoder.count_kept_bytes()

    def release(self) -> None:
        self.decoder.release()

    def _encode(self, prompts: Sequence[Prompt], counters: Counters) -> dict[Unit, ImageFeatures]:
        features, encoded = self.encoder(prompts)
        counters.encoder_passes += encoded
        return features

    def build_prefixes(self, prompts: Sequence[Prompt], counters: Counters) -> list[PrefixInputs]:
        features, prefixes = self._encode(prompts, counters), []
        for prompt in prompts:
            images = prompt.example.images
            key = prompt.token_ids, tuple(image.clean for image in images)
            if key not in self._layouts:
                self._layouts[key] = self.family.lay_out(self.model, prompt)
            token_ids = np.array(prompt.token_ids, dtype=np.int64)
            units = tuple(features[unit] for unit in self.family.units(images))
            prefixes.append(PrefixInputs(token_ids, self._layouts[key], units))
        return prefixes
