"""The VLM policy: a model and its processor, asked for completions and for log-probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from vlm_grpo.config.run import Settings
from vlm_grpo.coordinates import FRAMES, CoordinateFrame
from vlm_grpo.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.engine.decode import PrefixInputs, SharedDecoder, build_prefix_inputs
from vlm_grpo.engine.graphs import GraphCapture, get_capture
from vlm_grpo.engine.linear import rollout_weights, use_fast_linears
from vlm_grpo.engine.logprobs import ScoringSettings, TokenScores
from vlm_grpo.engine.repeated import sample_repeated, score_repeated
from vlm_grpo.engine.sampling import (
    SamplerState,
    SamplingDistribution,
    SamplingSettings,
    build_sampling_distribution,
    draw_uniforms,
)
from vlm_grpo.engine.shared import score_shared
from vlm_grpo.engine.vision import ImageEncoder
from vlm_grpo.errors import UserError
from vlm_grpo.families import ImageFeatures
from vlm_grpo.model.loading import LoadedModel, load_model
from vlm_grpo.task import Task
from vlm_grpo.types import Completion, Example, ImageRef, Prompt, StopReason
from vlm_grpo.utils.timing import Stopwatch

RECENT_IMAGES = 64
"""Decoded images that are kept for further questions about them."""


@dataclass
class Counters:
    """Work done since the counters were last reset: what sharing a prompt is meant to save.

    Attributes:
        encoder_passes: images that went through the vision tower.
        prefill_tokens: prompt tokens that went through the language model in rollouts.
        update_tokens: prompt and completion tokens that went through it in scoring.
    """

    encoder_passes: int = 0
    prefill_tokens: int = 0
    update_tokens: int = 0


class Policy:
    """A vision-language model that is sampled from, scored and trained.

    Args:
        loaded: the model and what belongs to it.
        restriction: what is never sampled, and the temperature at which tokens are scored.
        chunk_tokens: tokens whose logits are held at once in scoring; 0: all.
        capture: how decode steps over shared prompts are captured; None: not at all.

    Attributes:
        counters: work done since they were last replaced.
        stopwatch: seconds by phase of sampling and scoring.
        image_decodes: images read and resized since the policy was made.
        run: calls what passes through the model; a placement that cuts the weights over ranks
            puts in its place what gathers them first.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        distribution: SamplingDistribution,
        chunk_tokens: int = 0,
        capture: GraphCapture | None = None,
    ) -> None:
        self.model: Any = loaded.model
        use_fast_linears(loaded.model)
        self.processor, self.family = loaded.processor, loaded.family
        self.decode = self.family.decoder(self.processor.tokenizer)
        self.budget, self.shared, self.adapters = loaded.budget, loaded.shared, loaded.adapters
        self.autocast = loaded.autocast
        self.distribution, self.chunk_tokens, self.capture = distribution, chunk_tokens, capture
        self.counters, self.stopwatch = Counters(), Stopwatch()
        self.run: Callable[[Callable[[], Any]], Any] = _directly
        self.image_decodes = 0
        # Several questions about one image in one step decode it once.
        self._image = lru_cache(maxsize=RECENT_IMAGES)(self._decode)
        vision = self.family.parts.get("vision", ())
        self.trains_vision = any(name.startswith(vision) for name, _ in self.trainable_parameters())
        self._encoder = ImageEncoder(self.family, self.model, self.trains_vision, self.stopwatch)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @property
    def frame(self) -> CoordinateFrame:
        """The coordinate frame that the model writes boxes in."""
        return FRAMES[self.family.frame]

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and weights that training changes."""
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    # Examples to prompts.

    def with_resized_sizes(self, example: Example) -> Example:
        """The example with its images' ``seen`` sizes set to what this model will see."""
        if self.budget is None:
            return example
        images = tuple(
            replace(
                image,
                resized_size=self.family.resized_size(image.size, self.budget, self.processor),
            )
            for image in example.images
        )
        return replace(example, images=images)

    def estimate_prompt_tokens(self, example: Example, task: Task) -> int:
        """About how many tokens the example's prompt has, without reading its images.

        Image tokens are counted exactly where the family's resize is known; a token of text is
        taken to have three characters.
        """
        seen = self.with_resized_sizes(example).images
        images = sum(self.family.image_tokens(image.resized_size, self.processor) for image in seen)
        return images + len(task.prompt(example)) // 3

    def build_prompt(self, example: Example, task: Task) -> Prompt:
        """The example as this model reads it: its images are decoded and preprocessed here.

        Raises:
            UserError: an image cannot be read, or the prompt exceeds the model's context.
        """
        content = [{"type": "image"} for _ in example.images]
        content.append({"type": "text", "text": task.prompt(example)})
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        arguments: dict[str, Any] = {"text": [text], "return_tensors": "pt"}
        if example.images:
            arguments |= {"images": self._images(example), **self.family.processor_kwargs()}
        inputs = dict(self.processor(**arguments))
        token_ids = tuple(inputs.pop("input_ids")[0].tolist())
        inputs.pop("attention_mask", None)
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and len(token_ids) >= limit:
            raise UserError(
                f"example {example.id}: its prompt has {len(token_ids)} tokens, the model's "
                f"context holds {limit}: lower policy.max_pixels or shorten the question"
            )
        return Prompt(example, text, token_ids, inputs)

    def _images(self, example: Example) -> list[Any]:
        try:
            return [self._image(reference) for reference in example.images]
        except ValueError as error:
            raise UserError(f"example {example.id}: {error}") from error

    def _decode(self, reference: ImageRef) -> Any:
        self.image_decodes += 1
        image = reference.load()
        return self.family.resize(image, self.budget, self.processor) if self.budget else image

    # Completions.

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Prompt],
        rollout: SamplingSettings,
        group: int,
        seeds: Sequence[Sequence[int | str]],
        max_tokens: int,
    ) -> list[tuple[Completion, ...]]:
        """``group`` completions of each prompt.

        What is sampled for a prompt depends on its seed and the weights alone, not on the
        prompts beside it.

        Args:
            prompts: one for each group.
            rollout: how completions are drawn.
            group: completions of each prompt, G.
            seeds: for each prompt, what names its streams of random numbers.
            max_tokens: the most tokens generated at once.
        """
        length = rollout.max_completion_length
        streams = [
            torch.from_numpy(draw_uniforms((*seed, index), length))
            for seed in seeds
            for index in range(group)
        ]
        draws = SamplerState(torch.stack(streams).to(self.device), rollout, self._has_stop(rollout))
        with _evaluating(self.model), self._precision(), rollout_weights(self.model):
            self.run(lambda: self._draw(prompts, draws, group, max_tokens))
        completions = [self._completion(draws, row) for row in range(len(draws.lengths))]
        return [
            tuple(completions[start : start + group]) for start in range(0, len(completions), group)
        ]

    def _draw(
        self, prompts: Sequence[Prompt], draws: SamplerState, group: int, max_tokens: int
    ) -> None:
        if self.shared:
            prefixes = self._prefix_inputs(prompts, self._encode(prompts))
            self.counters.prefill_tokens += sum(len(p.token_ids) for p in prefixes)
            rest = (max_tokens, self.stopwatch, self.capture)
            SharedDecoder(self.family, self.model, *rest)(prefixes, draws)
        else:
            repeated = [p for p in prompts for _ in range(group)]
            self.counters.prefill_tokens += sum(len(p.token_ids) for p in repeated)
            self.counters.encoder_passes += sum(len(p.example.images) for p in repeated)
            sample_repeated(self.model, prompts, draws, max_tokens, self._pad)

    def _completion(self, draws: SamplerState, row: int) -> Completion:
        length = int(draws.lengths[row])
        tokens = tuple(draws.tokens[row, :length].tolist())
        stop: StopReason = "length"
        if tokens[-1] in draws.settings.distribution.eos:
            stop = "eos"
        elif draws.has_stop_string is not None and draws.has_stop_string(tokens):
            stop = "stop"
        return Completion(
            token_ids=tokens,
            logprobs=tuple(draws.logprobs[row, :length].tolist()),
            text=self.decode(tokens),
            stop=stop,
            entropies=tuple(draws.entropies[row, :length].tolist()),
        )

    def _has_stop(self, rollout: SamplingSettings):
        if not rollout.stop:
            return None

        def has_stop_string(tokens: Sequence[int]) -> bool:
            text = self.decode(tokens)
            return any(stop in text for stop in rollout.stop)

        return has_stop_string

    @property
    def _pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return self.distribution.eos[0] if pad is None else pad

    # Log-probabilities.

    def score(self, batch: MicroBatch, with_entropy: bool = False) -> TokenScores:
        """Log-probabilities of the batch's completion tokens, with gradient where it is enabled."""
        with self._precision():
            logprobs, entropies = self.run(lambda: self._score(batch, with_entropy))
        return TokenScores(logprobs, entropies)

    def _score(self, batch: MicroBatch, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies; a plain tuple, in which ``run`` finds the tensors."""
        scores = self._scores(batch, with_entropy)
        return scores.logprobs, scores.entropies

    def _scores(self, batch: MicroBatch, with_entropy: bool) -> TokenScores:
        if not self.shared:
            rows = [piece.prompt for piece in batch.slices for _ in piece.rows]
            self.counters.encoder_passes += sum(len(p.example.images) for p in rows)
            self.counters.update_tokens += sum(len(p.token_ids) for p in rows)
            self.counters.update_tokens += sum(len(tokens) - 1 for tokens in batch.completions)
            return score_repeated(self.model, batch, self.distribution, self._pad, with_entropy)
        prompts = [piece.prompt for piece in batch.slices]
        prefixes = self._prefix_inputs(prompts, self._encode(prompts))
        self.counters.update_tokens += batch.num_tokens
        settings = ScoringSettings(self.distribution, self.chunk_tokens, with_entropy)
        return score_shared(self.family, self.model, batch, prefixes, settings)

    def dummy_batch(self) -> MicroBatch:
        """The least that goes through every layer: one token of prompt and one of completion."""
        prompt = Prompt(Example("idle", (), "", None), "", self.distribution.eos[:1], {})
        return MicroBatch((GroupSlice(prompt, (self.distribution.eos[:1],), (0,)),))

    def _precision(self) -> contextlib.AbstractContextManager:
        """Computation in bfloat16 on float32 weights, each cast once inside, where asked for."""
        if not self.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def weights(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of the model: all weights, or with LoRA the adapter's alone."""
        state: dict[str, torch.Tensor] = (self.adapters or self.model).state_dict()
        if self.adapters is None:
            return state
        return {name: weight for name, weight in state.items() if "lora_" in name}

    def save(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """Write ``weights`` and the processor, to be loaded by transformers and PEFT; the pixel
        budget goes into the processor."""
        if self.budget is not None:
            self.family.set_pixel_budget(self.processor, self.budget)
        (self.adapters or self.model).save_pretrained(str(folder), state_dict=weights)
        self.processor.save_pretrained(folder)

    def save_shard(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """Write some of the full weights under the names that ``save`` gives them.

        transformers writes on the first process alone, and the others have weights too.
        """
        once: dict[int, tuple[str, Tensor]] = {}  # a file holds a tied weight under one name
        for name, weight in weights.items():
            once.setdefault(id(weight), (name, weight))
        named = revert_weight_conversion(self.model, dict(once.values()))
        plain = {name: weight.contiguous() for name, weight in named.items()}
        save_file(plain, folder / "model.safetensors", {"format": "pt"})

    @torch.no_grad()
    def encode_images(self, prompts: Sequence[Prompt]) -> None:
        """Encode the prompts' images as ``sample`` does, where a frozen tower's features stay."""
        if self.shared and not self.trains_vision:
            with _evaluating(self.model), self._precision(), rollout_weights(self.model):
                self._encode(prompts)

    def forget_images(self) -> None:
        """Drop the vision features kept for this step."""
        self._encoder.clear_cache()

    def encoding_once(self) -> contextlib.AbstractContextManager:
        """Micro-batches that share an image share its pass: see ``ImageEncoder.share_passes``."""
        return self._encoder.share_passes()

    def _encode(self, prompts: Sequence[Prompt]) -> dict[ImageRef, ImageFeatures]:
        features, fresh = self._encoder(prompts)
        self.counters.encoder_passes += fresh
        return features

    def _prefix_inputs(
        self, prompts: Sequence[Prompt], features: dict[ImageRef, ImageFeatures]
    ) -> list[PrefixInputs]:
        per_prompt = [[features[image] for image in p.example.images] for p in prompts]
        return build_prefix_inputs(self.family, self.model, prompts, per_prompt, self.device)


def _directly(call: Callable[[], Any]) -> Any:
    return call()


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode inside: no dropout, and no checkpointing that would switch the cache off."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def load_policy(
    settings: Settings, checkpoint: Path | None = None, training: bool = True
) -> Policy:
    """The policy of a run; arguments and errors as in ``load_model`` and ``get_capture``."""
    loaded = load_model(settings, checkpoint, training)
    distribution = build_sampling_distribution(loaded.model, loaded.family, settings.rollout)
    capture = get_capture(settings.rollout, loaded.shared, training)
    return Policy(loaded, distribution, settings.policy.head_chunk_tokens, capture)
