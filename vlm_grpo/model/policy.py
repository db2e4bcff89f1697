"""The policy: a vision-language model and its processor, which samples and scores completions."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from vlm_grpo.config.rollout import DEFAULT_ROLLOUT_TOKENS
from vlm_grpo.config.run import Settings, check_settings
from vlm_grpo.model.adapters import is_adapter_weight, save_weights
from vlm_grpo.model.chat import ChatTemplate
from vlm_grpo.model.engine import kernels
from vlm_grpo.model.engine.activations import eval_mode
from vlm_grpo.model.engine.attention import plain_attention
from vlm_grpo.model.engine.batch import GroupSlice, MicroBatch
from vlm_grpo.model.engine.decode import SharedDecoder
from vlm_grpo.model.engine.graphs import GraphCapture, describe_steps, get_capture
from vlm_grpo.model.engine.kv_cache import count_free_tokens
from vlm_grpo.model.engine.linear import use_fast_linears
from vlm_grpo.model.engine.logprobs import ScoringSettings, TokenScores
from vlm_grpo.model.engine.norms import use_fused_norms
from vlm_grpo.model.engine.repeated import Padding, sample_repeated, score_repeated
from vlm_grpo.model.engine.rollout_weights import rollout_weights
from vlm_grpo.model.engine.sampling import (
    SamplerState,
    SamplingDistribution,
    SamplingSettings,
    build_sampling_distribution,
    draw_uniforms,
)
from vlm_grpo.model.engine.shared import Layouts, PrefixInputs, build_prefix_inputs, score_shared
from vlm_grpo.model.engine.vision import ImageEncoder
from vlm_grpo.model.families import ImageFeatures, find_part
from vlm_grpo.model.families.shared_form import Unit
from vlm_grpo.model.form_check import FormCheck
from vlm_grpo.model.loading import LoadedModel, load_model
from vlm_grpo.model.prompts import PromptBuilder, get_context_length
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.task import Task
from vlm_grpo.task.coordinates import CoordinateFrame
from vlm_grpo.types import Completion, Example, Prompt, StopReason
from vlm_grpo.utils.timing import Stopwatch


@dataclass
class Counters:
    """Work of the model since the counters were reset; sharing prompts reduces it.

    Attributes:
        encoder_passes: number of images encoded by the vision tower.
        prefill_tokens: number of prompt tokens processed by the language model in rollouts.
        update_tokens: number of prompt and completion tokens that it processed in scoring.
        image_decodes: number of images read and resized for the prompts of rollouts.
        replaced_prompts: number of prompts that replaced one whose images could not be read.
    """

    encoder_passes: int = 0
    prefill_tokens: int = 0
    update_tokens: int = 0
    image_decodes: int = 0
    replaced_prompts: int = 0


class Policy:
    """A vision-language model that samples completions, scores them and is trained.

    Args:
        loaded: the model, its processor and its family.
        distribution: the distribution under which tokens are sampled and scored.
        chunk_tokens: number of tokens whose logits are computed at once in scoring; 0: all.
        capture: captures decode steps over shared prompts; None: steps run eagerly.

    Attributes:
        form_check: compares the shared form with the repeated one; None: they are not compared.
        prompts: builds the model's prompts.
        counters: work of the model; replace the object to reset it.
        stopwatch: seconds by phase of sampling and scoring.
        trains_vision: True if gradients flow into the vision tower.
        root: root module of all computation with the model, to which a strategy that shards the
            weights attaches its hooks.
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
        use_fused_norms(loaded.model)
        self.processor, self.family = loaded.processor, loaded.family
        self.decode = self.family.decoder(self.processor.tokenizer)
        self.budget, self.shared, self.adapters = loaded.budget, loaded.shared, loaded.adapters
        self.autocast, self.one_reader = loaded.autocast, loaded.one_reader
        self.distribution, self.chunk_tokens = distribution, chunk_tokens
        self.counters, self.stopwatch = Counters(), Stopwatch()
        self.root = CallRoot(loaded.model)
        limit = get_context_length(loaded.model.config)
        chat = loaded.chat or ChatTemplate(loaded.processor)
        self.prompts = PromptBuilder(chat, self.family, self.budget, limit)
        trained = {find_part(name) for name, _ in self.trainable_parameters()}
        self.trains_vision = not trained.isdisjoint(("vision", "projector"))
        self._encoder = ImageEncoder(self.family, self.model, self.trains_vision, self.stopwatch)
        self.form_check: FormCheck | None = None
        self._layouts: Layouts = {}
        self._decoder: SharedDecoder | None = None
        if self.shared:
            self._decoder = SharedDecoder(self.family, self.model, self.stopwatch, capture)

    @property
    def device(self) -> torch.device:
        return next(self.model.buffers(), next(self.model.parameters())).device

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.autocast else self.model.dtype

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @property
    def frame(self) -> CoordinateFrame:
        """The coordinate frame of the boxes that the model generates."""
        return self.prompts.frame

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the names and values of the parameters that are trained."""
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def with_resized_sizes(self, example: Example) -> Example:
        """Return the example with the ``resized_size`` that this model gives each image."""
        return self.prompts.with_resized_sizes(example)

    def build_prompt(self, example: Example, task: Task) -> Prompt:
        """Build the model's prompt; arguments and errors as in ``PromptBuilder.build``."""
        return self.prompts.build(example, task)

    # Sampling.

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSettings,
        num_generations: int | Sequence[range],
        seeds: Sequence[Sequence[int | str]],
        max_tokens: int | None = None,
    ) -> list[tuple[Completion, ...]]:
        """Sample completions of each prompt.

        The completions of a prompt depend only on its seed and the weights, not on the other
        prompts.

        Args:
            prompts: one prompt per group.
            sampling: the sampler's settings.
            num_generations: completions per prompt, G; or their numbers for each prompt.
            seeds: seed of each prompt's random streams, which a completion's number extends.
            max_tokens: maximum number of tokens cached at once; None: as many as fit into the
                GPU's free memory.

        Raises:
            UserError: ``form_check`` failed, and the prompt must be shared.
        """
        self.check_form(prompts)
        if isinstance(num_generations, int):
            num_generations = [range(num_generations)] * len(prompts)
        uniforms = [
            torch.from_numpy(draw_uniforms((*seed, index), sampling.max_completion_length))
            for seed, own in zip(seeds, num_generations, strict=True)
            for index in own
        ]
        uniform, sizes = copy_to(self.device, torch.stack(uniforms)), [*map(len, num_generations)]
        state = SamplerState(uniform, sampling, self.decode, sizes)
        with (
            eval_mode(self.model),
            self._autocast(),
            rollout_weights(self.model) as weights_are_copies,
        ):
            try:
                self.root(lambda: self._generate(prompts, state, max_tokens))
            except BaseException:
                self.release_rollout_memory()
                raise
        if weights_are_copies:
            self.release_rollout_memory()
        completions = self._build_completions(state)
        return [tuple(itertools.islice(completions, size)) for size in sizes]

    def check_form(self, prompts: Sequence[Prompt]) -> None:
        """Check the shared form on the first prompts; errors as in ``sample``."""
        if self.form_check is not None and self.shared and prompts:
            self.form_check.begin(self, prompts)

    def describe_engine(self) -> str:
        """Name the attention kernels and the form of decode steps; only with shared prompts."""
        assert self._decoder is not None
        steps = describe_steps(self._decoder.capture, self.model.config)
        return f"{kernels.describe(self.device, self.compute_dtype)}; decode steps {steps}"

    def use_capture(self, capture: GraphCapture | None) -> bool:
        """Capture decode steps from now on (None: run them eagerly); return whether they were."""
        return self._decoder is not None and self._decoder.use_capture(capture)

    def release_rollout_memory(self) -> None:
        """Free the memory that is kept for the next rollout's captured steps."""
        if self._decoder is not None:
            self._decoder.release()

    def _generate(
        self, prompts: Sequence[Prompt], state: SamplerState, max_tokens: int | None
    ) -> None:
        config, shape = self.model.config.get_text_config(), (state.count, state.tokens.shape[1])
        kept = 0 if self._decoder is None else self._decoder.count_kept_bytes()
        free = count_free_tokens(config, self.device, self.compute_dtype, shape, kept)
        if self._decoder is not None:
            prefixes = self._build_prefixes(prompts)
            self.counters.prefill_tokens += sum(len(p.token_ids) for p in prefixes)
            self._decoder(prefixes, state, max_tokens or free)
        else:
            for prompt, size in zip(prompts, state.sizes, strict=True):
                self.counters.prefill_tokens += size * len(prompt.token_ids)
                self.counters.encoder_passes += size * len(prompt.example.images)
            # A chunk's prompts are processed at once, and their activations take more than keys.
            most = max_tokens or min(free, DEFAULT_ROLLOUT_TOKENS)
            with plain_attention(self.family, self.model):
                sample_repeated(self.model, prompts, state, most, self._padding)

    def _build_completions(self, state: SamplerState) -> Iterator[Completion]:
        names = ("tokens", "logprobs", "entropies", "lengths")
        columns = (getattr(state, name)[:-1].tolist() for name in names)
        rows = zip(*columns, strict=True)
        for row, (tokens, logprobs, entropies, length) in enumerate(rows):
            token_ids = tuple(tokens[:length])
            stop: StopReason = "stop" if row in state.stopped else "length"
            if token_ids[-1] in state.settings.distribution.eos:
                stop = "eos"
            kept = tuple(entropies[:length]) if state.settings.with_entropies else ()
            text = self.decode(token_ids)
            yield Completion(token_ids, tuple(logprobs[:length]), text, stop, kept)

    @property
    def _padding(self) -> Padding:
        pad = self.tokenizer.pad_token_id
        token = self.distribution.eos[0] if pad is None else pad
        return Padding(token, self.family.completion_type)

    # Scoring.

    def score(
        self, batch: MicroBatch, with_entropy: bool = False, supervised: bool = False
    ) -> TokenScores:
        """Score the batch's completion tokens, with gradient if gradients are enabled.

        Args:
            batch: the batch.
            with_entropy: also compute entropies.
            supervised: score under the model's own distribution, at temperature 1 and over all
                tokens, and find out which tokens are the likeliest.
        """
        distribution = SamplingDistribution() if supervised else self.distribution
        settings = ScoringSettings(distribution, self.chunk_tokens, with_entropy, supervised)
        if not self.shared:
            return self.score_plain(batch, settings)
        return self._call_root(lambda: self._score_shared(batch, settings))

    def score_plain(
        self, batch: MicroBatch, settings: ScoringSettings | None = None
    ) -> TokenScores:
        """Score the batch by transformers' own forward, with repeated prompts."""
        scoring, padding = settings or ScoringSettings(self.distribution), self._padding
        prompts = [piece.prompt for piece in batch.slices for _ in piece.rows]
        self.counters.encoder_passes += sum(len(p.example.images) for p in prompts)
        self.counters.update_tokens += sum(len(p.token_ids) for p in prompts)
        self.counters.update_tokens += sum(len(tokens) - 1 for tokens in batch.completions)
        with plain_attention(self.family, self.model):
            return self._call_root(lambda: score_repeated(self.model, batch, scoring, padding))

    def repeat_prompts(self) -> None:
        """Repeat the prompt for each completion from now on."""
        self.release_rollout_memory()
        self.shared, self._decoder = False, None

    def _call_root(self, score: Callable[[], TokenScores]) -> TokenScores:
        with self._autocast():
            return TokenScores(*self.root(lambda: score().columns))

    def _score_shared(self, batch: MicroBatch, settings: ScoringSettings) -> TokenScores:
        prefixes = self._build_prefixes([piece.prompt for piece in batch.slices])
        self.counters.update_tokens += batch.num_tokens
        return score_shared(self.family, self.model, batch, prefixes, settings)

    def dummy_batch(self) -> MicroBatch:
        """Build the smallest batch that runs every layer: one prompt and one completion token."""
        prompt = Prompt(Example("dummy", (), "", None), "", self.distribution.eos[:1], {})
        return MicroBatch((GroupSlice(prompt, (self.distribution.eos[:1],), (0,)),))

    def _autocast(self) -> contextlib.AbstractContextManager:
        """Return a context that computes in bfloat16 if ``autocast`` is set."""
        if not self.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    # Checkpoints.

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of a checkpoint: all of the model, or only the adapter with LoRA."""
        state: dict[str, Tensor] = (self.adapters or self.model).state_dict()
        if self.adapters is None:
            return state
        return {name: weight for name, weight in state.items() if is_adapter_weight(name)}

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write ``weights`` and the processor, with its pixel budget, for transformers and PEFT."""
        if self.budget is not None:
            self.family.set_pixel_budget(self.processor, self.budget)
        save_weights(self.adapters or self.model, folder, weights)
        self.processor.save_pretrained(folder)

    def save_shard(self, folder: Path, weights: Mapping[str, Tensor], name: str = "model") -> None:
        """Write some of the full weights, under the names that ``save`` gives them, to a file.

        transformers' ``save_pretrained`` writes on the first process only.
        """
        untied: dict[Any, tuple[str, Tensor]] = {}  # a file has one name for tied weights
        for key, weight in weights.items():
            untied.setdefault((weight.data_ptr(), weight.shape), (key, weight))
        converted = revert_weight_conversion(self.model, dict(untied.values()))
        contiguous = {name: weight.contiguous() for name, weight in converted.items()}
        save_file(contiguous, folder / f"{name}.safetensors", {"format": "pt"})

    # Images.

    @torch.no_grad()
    def encode_images(self, prompts: Sequence[Prompt]) -> None:
        """Encode the prompts' images as ``sample`` does, if their features are cached."""
        if self.shared and not self.trains_vision:
            with eval_mode(self.model), self._autocast(), rollout_weights(self.model):
                self._encode_images(prompts)

    def clear_image_features(self) -> None:
        """Drop the cached vision features and layouts of this step's prompts."""
        self._encoder.clear_cache()
        self._layouts.clear()

    def share_image_passes(self) -> contextlib.AbstractContextManager:
        """Encode an image once for the micro-batches that share it; see ``ImageEncoder``."""
        return self._encoder.share_passes()

    def _encode_images(self, prompts: Sequence[Prompt]) -> dict[Unit, ImageFeatures]:
        features, encoded = self._encoder(prompts)
        self.counters.encoder_passes += encoded
        return features

    def _build_prefixes(self, prompts: Sequence[Prompt]) -> list[PrefixInputs]:
        features = self._encode_images(prompts)
        per_prompt = [[features[u] for u in self.family.units(p.example.images)] for p in prompts]
        return build_prefix_inputs(self.family, self.model, prompts, per_prompt, self._layouts)


class CallRoot(nn.Module):
    """A module that holds the model and whose forward pass calls a function.

    FSDP2 gathers and releases weights around the forward pass of its root module. Sampling and
    scoring call several parts of the model, so they run inside this module's forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


def load_policy(
    settings: Settings, checkpoint: str | Path | None = None, training: bool = True
) -> Policy:
    """Load the policy of a run; arguments and errors as in ``load_model`` and ``get_capture``."""
    folder = None if checkpoint is None else Path(checkpoint)
    loaded = load_model(check_settings(settings), folder, training)
    distribution = build_sampling_distribution(
        loaded.model, loaded.processor, loaded.family, settings.rollout
    )
    capture = get_capture(settings.rollout, loaded.shared, training, loaded.model.config)
    policy = Policy(loaded, distribution, settings.policy.head_chunk_tokens, capture)
    policy.form_check = FormCheck(must_share=settings.policy.engine == "shared")
    return policy
