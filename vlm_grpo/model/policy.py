"""The policy: a vision-language model and its processor, which samples and scores completions."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from vlm_grpo.config.run import Settings, check_settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.adapters import is_adapter_weight
from vlm_grpo.model.engine import kernels
from vlm_grpo.model.engine.activations import eval_mode
from vlm_grpo.model.engine.forwards import computed, use_fused_layers
from vlm_grpo.model.engine.graphs import GraphCapture, get_capture
from vlm_grpo.model.engine.kv_cache import count_free_tokens
from vlm_grpo.model.engine.linear import cast_together, use_fast_linears
from vlm_grpo.model.engine.logprobs import ScoringSettings, TokenScores
from vlm_grpo.model.engine.packing import GroupSlice, MicroBatch
from vlm_grpo.model.engine.repeated import Counters, Engine
from vlm_grpo.model.engine.rollout_weights import rollout_weights
from vlm_grpo.model.engine.sampling import (
    SamplerState,
    SamplingDistribution,
    SamplingSettings,
    build_sampling_distribution,
    draw_uniforms,
)
from vlm_grpo.model.engine.shared import SharedEngine
from vlm_grpo.model.loading import LoadedModel, load_model
from vlm_grpo.model.sharing_check import (
    BOUND,
    HALF_BOUND,
    ROLLOUT_LENGTH,
    SharingCheck,
    explain_failure,
)
from vlm_grpo.model.transfer import copy_to
from vlm_grpo.types import Completion, Example, Group, Prompt, StopReason
from vlm_grpo.utils.stopwatch import Stopwatch

logger = logging.getLogger(__name__)


class Policy:
    """A vision-language model that samples completions, scores them and is trained.

    Tokens are sampled and scored under ``distribution``, with the logits of ``chunk_tokens`` tokens
    (0: of all) at once in scoring. ``capture`` captures decode steps over shared prompts.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        distribution: SamplingDistribution,
        chunk_tokens: int = 0,
        capture: GraphCapture | None = None,
    ) -> None:
        self.model: Any = loaded.model
        self.adapted_layers = use_fast_linears(loaded.model)
        use_fused_layers(loaded.model)
        self.prompts = prompts = loaded.prompts
        self.processor, self.family, self.budget = prompts.processor, prompts.family, prompts.budget
        self.tokenizer: Any = self.processor.tokenizer
        self.decode = self.family.decoder(self.tokenizer)
        self.adapters = loaded.adapters
        self.autocast, self.one_reader = loaded.autocast, loaded.one_reader
        self.distribution, self.chunk_tokens = distribution, chunk_tokens
        self.counters, self.stopwatch = Counters(), Stopwatch()
        self.root = CallRoot(loaded.model)  # to which a strategy that shards attaches its hooks
        self.sharing_check: SharingCheck | None = None  # None: nothing is checked
        pad = self.tokenizer.pad_token_id
        pad = distribution.eos[0] if pad is None else pad
        self._repeated = Engine(loaded, pad)
        self.engine = self._repeated
        if loaded.shared:
            self.engine = SharedEngine(loaded, pad, self.stopwatch, capture)

    @property
    def device(self) -> torch.device:
        return next(self.model.buffers(), next(self.model.parameters())).device

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.autocast else self.model.dtype

    @property
    def shared(self) -> bool:
        return self.engine.shares_prompts

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def view(self, repeated: bool = False) -> Policy:
        """Return a policy of the same model that counts its own work, and checks no form.

        With ``repeated`` it repeats prompts, whatever this one does.
        """
        view = copy.copy(self)
        view.counters, view.sharing_check = Counters(), None
        if repeated:
            view.engine = self._repeated
        return view

    # Sampling.

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSettings,
        num_generations: int | Sequence[range],
        seeds: Sequence[Sequence[int | str]],
        max_tokens: int | None = None,
        check: Callable[[], None] = lambda: None,
        begun: Sequence[int] = (),
    ) -> list[tuple[Completion, ...]]:
        """Sample completions of each prompt, which depend only on its seed and the weights.

        Args:
            num_generations: completions per prompt, G; or their numbers for each prompt.
            seeds: seed of each prompt's random streams, which a completion's number extends.
            max_tokens: most tokens cached at once; None: as many as fit into the GPU's free memory.
            check: called every few tokens; may raise to end the sampling.
            begun: number of tokens that each prompt's completions have already, at its end: they
                continue their random streams, up to the same length; empty: none.
        """
        self.check_sharing(prompts)
        if isinstance(num_generations, int):
            num_generations = [range(num_generations)] * len(prompts)
        pairs = zip(seeds, num_generations, strict=True)
        streams = [(*seed, index) for seed, own in pairs for index in own]
        begun = [n for n, own in zip(begun, num_generations, strict=False) for _ in own]
        uniforms = np.zeros((len(streams), sampling.max_completion_length - min(begun, default=0)))
        for row, count, stream in zip(uniforms, begun or (0,) * len(streams), streams, strict=True):
            row[: sampling.max_completion_length - count] = draw_uniforms(
                stream, sampling.max_completion_length
            )[count:]
        uniform, sizes = copy_to(self.device, uniforms), [*map(len, num_generations)]
        state = SamplerState(uniform, sampling, self.decode, sizes, check, begun)
        with (
            eval_mode(self.model),
            self._autocast(),
            rollout_weights(self.model, self.engine.capture is not None) as weights_are_copies,
        ):
            try:
                self.root(lambda: self._generate(prompts, state, max_tokens))
            except BaseException:
                self.engine.release()
                raise
        if weights_are_copies:
            self.engine.release()
        completions = self._build_completions(state)
        return [tuple(itertools.islice(completions, size)) for size in sizes]

    def _generate(
        self, prompts: Sequence[Prompt], state: SamplerState, max_tokens: int | None
    ) -> None:
        config, shape = self.model.config.get_text_config(), (state.count, state.tokens.shape[1])
        kept = self.engine.count_kept_bytes()
        free = count_free_tokens(config, self.device, self.compute_dtype, shape, kept)
        most = max_tokens or min(free, self.engine.most_tokens)
        self.engine.generate(prompts, state, most, self.counters)

    def _build_completions(self, state: SamplerState) -> Iterator[Completion]:
        columns = (state.tokens, state.logprobs, state.entropies, state.lengths)
        rows = zip(*(column[:-1].tolist() for column in columns), strict=True)
        for row, (tokens, logprobs, entropies, length) in enumerate(rows):
            token_ids = tuple(tokens[:length])
            stop: StopReason = "stop" if row in state.stopped else "length"
            if token_ids[-1] in state.settings.distribution.eos:
                stop = "eos"
            kept = tuple(entropies[:length]) if state.settings.with_entropies else ()
            text = self.decode(token_ids)
            yield Completion(token_ids, tuple(logprobs[:length]), text, stop, kept)

    @torch.no_grad()
    def encode_images(self, prompts: Sequence[Prompt]) -> None:
        """Encode the prompts' images as ``sample`` does, if their features are kept."""
        with eval_mode(self.model), self._autocast(), rollout_weights(self.model, False):
            self.engine.encode_images(prompts, self.counters)

    # Scoring.

    def score(
        self,
        batch: MicroBatch,
        with_entropy: bool = False,
        supervised: bool = False,
        others: Tensor | None = None,
        top_k: int = 0,
    ) -> TokenScores:
        """Score the batch's completion tokens, with gradient if gradients are enabled.

        If ``supervised``, score under the model's own distribution, at temperature 1 and over all
        tokens, and find out which tokens are the likeliest. ``others`` (M, k) are further tokens to
        score at each place; the likeliest ``top_k`` are scored instead.
        """
        distribution = SamplingDistribution() if supervised else self.distribution
        given = with_entropy, supervised, top_k, others
        settings = ScoringSettings(distribution, self.chunk_tokens, *given)
        with self._autocast(), cast_together(self.adapted_layers):
            return TokenScores(
                *self.root(lambda: self.engine.score(batch, settings, self.counters).columns)
            )

    def dummy_batch(self) -> MicroBatch:
        """Build the smallest batch that runs every layer: one prompt and one completion token."""
        prompt = Prompt(Example("dummy", (), "", None), "", self.distribution.eos[:1], {})
        return MicroBatch((GroupSlice(prompt, (self.distribution.eos[:1],), (0,)),))

    def _autocast(self) -> contextlib.AbstractContextManager:
        if not self.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    # The check of shared prompts.

    def check_sharing(self, prompts: Sequence[Prompt]) -> None:
        """Check shared prompts on the first ones; ``UserError``: the model fails with it, or
        differs although it must be used."""
        check = self.sharing_check
        if check is None or not (self.shared and prompts):
            return
        if (prompt := check.choose(prompts)) is not None:
            try:
                self._follow(self.try_sharing(prompt))
            finally:
                self.engine.clear_image_features()

    def check_groups(self, groups: Sequence[Group]) -> None:
        """Check a shared prompt on the group that exceeds what was checked the most.

        Without a group the model still runs as often as on other ranks. A completion that does not
        fit into the memory in one of the forms is not checked.
        """
        batch = self.sharing_check.choose_batch(groups) if self.sharing_check is not None else None
        with contextlib.suppress(torch.OutOfMemoryError):
            self._follow(self._check(lambda: self.compare(batch or self.dummy_batch())))

    def try_sharing(self, prompt: Prompt) -> str | None:
        """Sample short completions of a prompt, and compare the two forms on them.

        Returns how they differ; None: by rounding. ``UserError``: the model fails.
        """
        settings = SamplingSettings(self.distribution, ROLLOUT_LENGTH)

        def sample_and_compare() -> str | None:
            (group,) = self.view().sample([prompt], settings, 2, [(0,)])
            tokens = tuple(completion.token_ids for completion in group)
            sampled = [logprob for completion in group for logprob in completion.logprobs]
            return self.compare(MicroBatch((GroupSlice(prompt, tokens, (0, 1)),)), sampled)

        return self._check(sample_and_compare)

    def _check(self, check: Callable[[], str | None]) -> str | None:
        """Return the problem that a check finds; captured steps that alone differ are given up."""
        problem = eager = None
        if self.engine.capture is not None:
            try:
                with explain_failure():
                    problem = check()
            except UserError as error:
                problem = str(error)
            if problem is None:
                return None
            self.engine.use_capture(None)
        try:
            with explain_failure():
                eager = check()
        finally:  # also if the repetition does not fit into the memory
            if problem is not None and eager is None:
                logger.warning(
                    "decode steps run eagerly from now on, which takes longer: as CUDA graphs, %s",
                    problem,
                )
        return eager

    @torch.no_grad()
    def compare(self, batch: MicroBatch, sampled: Sequence[float] = ()) -> str | None:
        """Score a batch in both forms, and return how they differ; None: within rounding.

        ``sampled`` are the log-probabilities of its tokens when they were sampled, if known.
        """
        with eval_mode(self.model):  # two passes with dropout would differ
            shared = self.view().score(batch).logprobs.double()
            with computed("plain"):
                plain = self.view(repeated=True).score(batch).logprobs.double()
        found = {"scored": shared}
        if sampled:
            found["sampled"] = torch.tensor(sampled).to(shared)
        bound = HALF_BOUND if self.compute_dtype.itemsize == 2 else BOUND
        for verb, logprobs in found.items():
            difference = float((logprobs - plain).abs().mean())
            if not difference <= bound:  # also if it is NaN
                return (
                    f"the log-probs of {verb} tokens differ by {difference:.1e} nats on average "
                    f"from those of transformers (rounding: at most {bound:g})"
                )
        return None

    def _follow(self, problem: str | None) -> None:
        """Repeat prompts from now on if a check of the shared form has found a problem."""
        if problem is None:
            return
        if self.sharing_check is not None and self.sharing_check.must_share:
            raise UserError(
                f"policy.engine=shared does not work with this model: {problem}; remove it, "
                "or set policy.engine=repeated"
            )
        logger.warning(
            "from now on the prompt is repeated for each completion (policy.engine=repeated), "
            "which takes longer: with a shared prompt, %s",
            problem,
        )
        self.repeat_prompts()

    def repeat_prompts(self) -> None:
        self.engine.release()
        self.engine = self._repeated

    def describe_engine(self) -> str:
        """Name the attention kernels and the form of decode steps of a shared prompt."""
        steps = "run eagerly" if self.engine.capture is None else "as CUDA graphs"
        return f"{kernels.describe(self.device, self.compute_dtype)}; decode steps {steps}"

    # Checkpoints.

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of a checkpoint: all of the model, or only the adapter with LoRA."""
        state: dict[str, Tensor] = (self.adapters or self.model).state_dict()
        if self.adapters is None:
            return state
        return {name: weight for name, weight in state.items() if is_adapter_weight(name)}

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write ``weights`` and the processor, with its pixel budget, for transformers and PEFT."""
        (self.adapters or self.model).save_pretrained(str(folder), state_dict=weights)
        self.prompts.save_processor(folder)

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


class CallRoot(nn.Module):
    """A module whose forward pass runs sampling and scoring, which call parts of the model.

    FSDP2 gathers and releases weights around the forward pass of its root module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


def load_policy(
    settings: Settings, checkpoint: str | Path | None = None, training: bool = True
) -> Policy:
    """Load the policy of a run; arguments as in ``load_model``."""
    folder = None if checkpoint is None else Path(checkpoint)
    loaded = load_model(check_settings(settings), folder, training)
    distribution = build_sampling_distribution(
        loaded.model, loaded.prompts.processor, loaded.prompts.family, settings.rollout
    )
    capture = get_capture(settings.rollout, loaded.shared, training)
    policy = Policy(loaded, distribution, settings.policy.head_chunk_tokens, capture)
    policy.sharing_check = SharingCheck(must_share=settings.policy.engine == "shared")
    return policy
