"""Sampling and scoring with the prompt and its images repeated for every completion.

This form uses only the model's ``forward`` and ``generate``, so it works with every image-text
model, and tests compare the shared form with it.
"""

import contextlib
import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.model.engine.attention import plain_attention
from vlm_grpo.model.engine.graphs import GraphCapture
from vlm_grpo.model.engine.logprobs import ScoringSettings, TokenScores, add_tokens, score_logits
from vlm_grpo.model.engine.packing import GroupSlice, MicroBatch, Path
from vlm_grpo.model.engine.sampling import SamplerState
from vlm_grpo.model.families.family import ImageFeatures, Unit, place
from vlm_grpo.model.loading import LoadedModel
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.types import Example, ImageRef, Prompt


@dataclass
class Counters:
    """Work of the model since the counters were reset; sharing prompts reduces it."""

    encoder_passes: int = 0  # images encoded by the vision tower
    prefill_tokens: int = 0  # tokens of prompts processed by the language model in rollouts
    update_tokens: int = 0  # tokens of prompts and completions that it processed in scoring
    image_decodes: int = 0  # images read and resized for the prompts of rollouts
    replaced_prompts: int = 0  # prompts in place of one whose images could not be read

    def reset(self) -> None:
        vars(self).update(vars(Counters()))


class Engine:
    """Samples and scores by transformers' own forward, with the prompt repeated.

    ``pad_token`` fills rows to the length of the longest.
    """

    shares_prompts = False
    # Most tokens to cache at once, however much memory is free: a chunk's prompts are processed at
    # once, and their activations take more than keys.
    most_tokens = DEFAULT_ROLLOUT_TOKENS
    capture: GraphCapture | None = None  # of decode steps; None: they run eagerly

    def __init__(self, loaded: LoadedModel, pad_token: int) -> None:
        self.model, self.family, self.pad_token = loaded.model, loaded.prompts.family, pad_token

    def generate(
        self, prompts: Sequence[Prompt], state: SamplerState, max_tokens: int, counters: Counters
    ) -> None:
        """Sample all completions of ``state``, with at most ``max_tokens`` prompt and completion
        tokens processed or cached at once."""
        pairs = zip(map(join_parts, prompts), state.sizes, strict=True)
        repeated = [prompt for prompt, size in pairs for _ in range(size)]
        counters.prefill_tokens += sum(len(prompt.token_ids) for prompt in repeated)
        counters.encoder_passes += sum(len(prompt.example.images) for prompt in repeated)
        longest = state.tokens.shape[1]
        # The model's generation config may add a repetition penalty or suppress tokens, which are
        # not part of the scored distribution.
        own, self.model.generation_config = self.model.generation_config, GenerationConfig()
        try:
            with plain_attention(self.model):
                for order in _group_alike(repeated):
                    order.sort(key=lambda row: -len(repeated[row].token_ids))
                    while order:
                        length = len(repeated[order[0]].token_ids) + longest
                        count = max(1, max_tokens // length if self.family.can_batch else 1)
                        rows, order = order[:count], order[count:]
                        self._sample([repeated[row] for row in rows], state, rows)
        finally:
            self.model.generation_config = own

    def _sample(self, prompts: Sequence[Prompt], state: SamplerState, rows: list[int]) -> None:
        config = GenerationConfig(
            max_new_tokens=state.tokens.shape[1],
            do_sample=False,
            pad_token_id=self.pad_token,
            eos_token_id=list(state.settings.distribution.eos) or None,
        )
        index = torch.tensor(rows, device=state.tokens.device)

        def choose(input_ids: Tensor, scores: Tensor) -> Tensor:
            """Sample each row's token, and make ``generate`` choose it."""
            is_active = state.active[index]
            chosen = state.sample(scores, index).where(is_active, self.pad_token)
            return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)

        def is_finished(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            state.update_active()
            return ~state.active[index]

        self.model.generate(
            **self._build_inputs(prompts, [()] * len(prompts)),
            generation_config=config,
            logits_processor=LogitsProcessorList([choose]),
            stopping_criteria=StoppingCriteriaList([is_finished]),
        )

    def score(
        self, batch: MicroBatch, settings: ScoringSettings, counters: Counters
    ) -> TokenScores:
        prompts = [piece.prompt for piece in batch.slices for _ in piece.rows]
        paths = [path for piece in batch.slices for path in piece.paths]
        observed = [o.prompt for path in paths for o in path.observations]
        counters.encoder_passes += sum(len(p.example.images) for p in (*prompts, *observed))
        counters.update_tokens += sum(len(p.token_ids) for p in prompts)
        counters.update_tokens += sum(len(path.token_ids) - 1 for path in paths)
        # Prompts together would need padded images, for which not every model has a mask, and
        # padding on the left, which shifts the positions of many.
        parts, start, others = list[TokenScores](), 0, settings.others
        with plain_attention(self.model):
            for logits, targets, steps in itertools.chain(*map(self._run, batch.slices)):
                own = None if others is None else others[start : start + len(targets)]
                parts.append(score_logits(logits, add_tokens(targets, own), steps, settings))
                start += len(targets)
        return TokenScores.join(parts)

    def _run(self, piece: GroupSlice) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield logits, the tokens that they predict, and the numbers of these."""
        if any(piece.observations) or not self.family.can_batch:
            yield from (self._run_path(piece.prompt, path) for path in piece.paths)
            return
        completions = piece.completions
        prompts = [piece.prompt] * len(completions)
        inputs = self._build_inputs(prompts, [tokens[:-1] for tokens in completions])
        device = inputs["input_ids"].device
        longest = max(len(tokens) for tokens in completions)
        # Not every model reads ``logits_to_keep``.
        logits = self.model(**inputs, use_cache=False, logits_to_keep=longest).logits[:, -longest:]
        lengths = torch.tensor([len(tokens) for tokens in completions], device=device)
        steps = torch.arange(longest, device=device)
        real = steps < lengths[:, None]
        targets = torch.tensor([token for tokens in completions for token in tokens], device=device)
        yield logits[real], targets, steps.expand_as(real)[real]

    def _run_path(self, prompt: Prompt, path: Path) -> tuple[Tensor, Tensor, Tensor]:
        whole = join_parts(extend_prompt(prompt, path))
        inputs = self._build_inputs([whole], [()])
        predictors = len(prompt.token_ids) - 1 + path.sampled
        logits = self.model(**inputs, use_cache=False).logits[0]
        device = logits.device
        targets = copy_to(device, np.array(path.tokens))
        steps = torch.arange(len(targets), device=device)
        return logits[copy_to(device, predictors)], targets, steps

    def _build_inputs(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        """Build one row per completion: prompt padded left, completion padded right."""
        longest_prompt = max(len(prompt.token_ids) for prompt in prompts)
        longest = max(len(tokens) for tokens in completions)
        pad, kind = self.pad_token, self.family.completion_type
        tokens, mask = [], []
        columns: dict[str, list[Tensor]] = {}
        for prompt, completion in zip(prompts, completions, strict=True):
            left, right = longest_prompt - len(prompt.token_ids), longest - len(completion)
            tokens.append([pad] * left + [*prompt.token_ids, *completion] + [pad] * right)
            mask.append([0] * left + [1] * (len(prompt.token_ids) + len(completion)) + [0] * right)
            for name, values in prompt.vision.items():
                if _is_per_token(name, values, prompt):
                    last = values[:, -1:]
                    before = torch.zeros_like(last).repeat_interleave(left, 1)
                    after = last if kind is None else torch.full_like(last, kind)
                    values = torch.cat((before, values, after.repeat_interleave(longest, 1)), dim=1)
                columns.setdefault(name, []).append(values)
        inputs = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask)}
        inputs |= {n: torch.cat(values, _find_axis(n, columns)) for n, values in columns.items()}
        return place(self.model, inputs)

    # What only shared prompts keep between passes.

    def encode_images(self, prompts: Sequence[Prompt], counters: Counters) -> None:
        """Encode the prompts' images and keep their features, if this engine keeps any."""

    def clear_image_features(self) -> None:
        """Drop the kept vision features, and layouts of this step's prompts."""

    def share_image_passes(
        self, watched: dict[Unit, ImageFeatures] | None = None
    ) -> AbstractContextManager[Callable[[Container[ImageRef]], None]]:
        """Encode an image once for the micro-batches that share it; see ``ImageEncoder``."""
        return contextlib.nullcontext(lambda needed: None)

    def use_capture(self, capture: GraphCapture | None) -> None:
        """Capture decode steps from now on, if this engine can; None: run them eagerly."""

    def count_kept_bytes(self) -> int:
        """Return the memory that the next rollout reuses or frees."""
        return 0

    def release(self) -> None:
        """Free the memory that is kept for the next rollout's captured steps."""


def extend_prompt(prompt: Prompt, path: Path) -> Prompt:
    """Return the prompt of a path behind a prompt, with the images of both.

    Its vision tensors are those of its ``parts``, which ``join_parts`` joins.
    """
    parts = (prompt, *(observation.prompt for observation in path.observations))
    starts = [0, *(observation.start for observation in path.observations), len(path.tokens)]
    own = [path.tokens[start:stop] for start, stop in itertools.pairwise(starts)]
    sampled = [Prompt(Example("sampled", (), "", None), "", tokens, {}) for tokens in own]
    return replace(
        prompt,
        example=replace(
            prompt.example, images=tuple(i for part in parts for i in part.example.images)
        ),
        token_ids=(*prompt.token_ids, *path.token_ids.tolist()),
        vision={},
        parts=tuple(part for pair in zip(parts, sampled, strict=True) for part in pair),
    )


def join_parts(prompt: Prompt, with_pixels: bool = True) -> Prompt:
    """Return a prompt with the vision tensors of its parts, if it continues another."""
    if not prompt.parts:
        return prompt
    vision: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in prompt.parts for name in part.vision):
        known = next(part for part in prompt.parts if name in part.vision)
        if _is_per_token(name, known.vision[name], known):
            first, pieces = known.vision[name][:, :1], []
            for part, sampled in zip(prompt.parts[::2], prompt.parts[1::2], strict=True):
                no_image = torch.zeros_like(first).repeat_interleave(len(part.token_ids), 1)
                values = part.vision.get(name, no_image)
                pieces += [values, values[:, -1:].repeat_interleave(len(sampled.token_ids), 1)]
            vision[name] = torch.cat(pieces, dim=1)
        elif with_pixels or not name.startswith("pixel_values"):
            parts = [p.vision[name] for p in prompt.parts if name in p.vision]
            vision[name] = _join(parts, _find_axis(name, known.vision))
    return replace(prompt, vision=vision)


def _join(values: Sequence[Tensor], axis: int) -> Tensor:
    """Join tensors of images along an axis, the others of which processors fill by zeros."""
    values = [value.movedim(axis, 0) for value in values]
    largest = np.array([value.shape[:0:-1] for value in values]).max(0)
    missing = [largest - value.shape[:0:-1] for value in values]
    pairs = [[side for count in counts.tolist() for side in (0, count)] for counts in missing]
    padded = [functional.pad(v, p) for v, p in zip(values, pairs, strict=True)]
    return torch.cat(padded).movedim(0, axis)


def _find_axis(name: str, vision: Mapping[str, Any]) -> int:
    """Return the axis of a tensor along which images follow each other."""
    # MiniCPM-V's processor lays the patches of all images side by side.
    return -1 if name == "pixel_values" and "target_sizes" in vision else 0


def _is_per_token(name: str, values: Tensor, prompt: Prompt) -> bool:
    # An image can have as many patches as its prompt has tokens.
    is_image = name.startswith(("pixel", "image"))
    return values.shape[:2] == (1, len(prompt.token_ids)) and not is_image


def _group_alike(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Group the indices of prompts whose images fit into one batch without padding."""
    # Not every model has a mask for padded pixels, and some refuse a prompt of text alone beside
    # prompts with images.
    groups: dict[object, list[int]] = {}
    for index, prompt in enumerate(prompts):
        shapes = {
            name: () if _is_per_token(name, values, prompt) else values.shape[1:]
            for name, values in prompt.vision.items()
        }
        groups.setdefault(tuple(shapes.items()), []).append(index)
    return list(groups.values())
