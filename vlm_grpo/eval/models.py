"""Models that are evaluated: a policy in this process, or a server.

A policy generates in chunks, shared among the ranks; a server gets one request per output, several
at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.launch import initialize_distributed
from vlm_grpo.errors import UserError
from vlm_grpo.eval.remote import RemoteModel, Seed
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.episodes import Begun, sample_episodes
from vlm_grpo.model.policy import Policy, load_policy
from vlm_grpo.model.prompts import PromptWriter
from vlm_grpo.serve.chat_client import Endpoint
from vlm_grpo.task import Task
from vlm_grpo.task.episodes import EnvironmentRunner
from vlm_grpo.types import Completion, Example

# Pixels of resized images in memory at once: 0.4 GB in the Qwen families, which store each pixel of
# a still image as two frames of three 32-bit numbers.
CHUNK_PIXELS = 2**24
CHUNK_EXAMPLES = 64  # at most, so that a few hundred small examples make a chunk for every rank


class LocalModel:
    """A policy whose outputs are generated in this process."""

    served_name = None

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self.policy, self.settings = policy, settings
        self.runner = EnvironmentRunner(settings.rollout.reward_workers)
        self.prompts: PromptWriter = policy.prompts

    def split(self, examples: Sequence[Example]) -> list[range]:
        count = self.settings.evaluation.samples  # all samples of an example are in one chunk
        chunks = split_into_chunks(examples[::count])
        return [range(chunk.start * count, chunk.stop * count) for chunk in chunks]

    def generate(
        self, task: Task, begun: Sequence[Begun], seeds: Sequence[Seed], todo: Sequence[range]
    ) -> Iterator[tuple[range, list[Completion]]]:
        evaluation, rollout = self.settings.evaluation, self.settings.rollout
        distribution = replace(self.policy.distribution, temperature=evaluation.temperature)
        sampling = SamplingSettings(distribution, rollout.max_completion_length, rollout.stop)
        count, limit = evaluation.samples, evaluation.max_tokens_per_batch
        builder, policy = self.policy.prompts, self.policy
        for chunk in todo:
            pairs = [begun[index] for index in chunk[::count]]
            prompts = [replace(builder.build(e, task), start=start) for e, start in pairs]
            groups = sample_episodes(
                prompts,
                sampling,
                [range(count)] * len(prompts),
                [seeds[index] for index in chunk[::count]],
                lambda p, s, n, k, begun: policy.sample(p, s, n, k, limit, begun=begun),
                builder,
                self.runner,
            )
            self.policy.engine.clear_image_features()
            yield chunk, [completion for group in groups for completion in group]


EvaluatedModel = LocalModel | RemoteModel
"""A model that is evaluated.

``split`` divides the examples into chunks of indices; each example occurs ``evaluation.samples``
times in a row. ``generate`` yields the chunks of ``todo`` in any order, each with one completion
per index. ``runner`` calls tools. The examples have begun (``begin_episodes``); seeds of the same
example share a prefix. If examples have no output, it raises ``UserError`` after all the others.
``served_name`` is None for a policy.
"""


def load_evaluated_model(
    settings: Settings, weights: Path | None = None, server: Endpoint | str | None = None
) -> EvaluatedModel:
    """Load a policy for evaluation on this process's device, or connect to a server.

    Without ``weights``, the folder of a checkpoint, they are those of ``settings.model``.
    """
    disable_progress_bar()
    if server is not None:
        return RemoteModel(Endpoint(server) if isinstance(server, str) else server, settings)
    policy = load_policy(settings, weights, training=False)
    policy.model.to(initialize_distributed().device)
    return LocalModel(policy, settings)


def check_weights(checkpoint: Path | None, server: Endpoint | str | None) -> None:
    """Refuse a checkpoint beside a server, or one that is missing, before the data are read."""
    if checkpoint is not None and server is not None:
        raise UserError(
            "a server has its own weights: leave out the checkpoint, or the server; the settings "
            "of a run are those of its config.yaml, given as the recipe"
        )
    if checkpoint is not None and not checkpoint.is_dir():
        raise UserError(f"checkpoint {checkpoint} is not a folder")


def name_outputs(model: EvaluatedModel, weights: Path | None) -> str:
    """Return the name of the folder of a model's outputs in that of the run."""
    if model.served_name is not None:
        return "served-" + re.sub(r"[^\w.-]", "-", model.served_name)
    return weights.name if weights else "model"


def split_into_chunks(examples: Sequence[Example]) -> list[range]:
    """Split the examples' indices into chunks whose resized images fit into memory together.

    The split depends only on the examples, not on the ranks or on the progress so far, so that an
    example is batched with the same examples in every run and gets the same output.
    """
    chunks: list[range] = []
    start = pixels = 0
    for index, example in enumerate(examples):
        added = sum(math.prod(i.resized_size) * max(1, i.num_frames) for i in example.images)
        full = pixels + added > CHUNK_PIXELS or index - start == CHUNK_EXAMPLES
        if full and index > start:
            chunks.append(range(start, index))
            start, pixels = index, 0
        pixels += added
    if examples:
        chunks.append(range(start, len(examples)))
    return chunks
