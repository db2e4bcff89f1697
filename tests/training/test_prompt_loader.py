"""Prompts in training order: prefetched, counted and, if requested, replaced."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tiny_models import noise_example, tiny_policy

from vlm_grpo.data.prompt_order import ExampleStream
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import PlainQuestion
from vlm_grpo.training.methods.noise import DiffusionNoise, NoisyImages
from vlm_grpo.training.prompt_loader import MAX_REPLACEMENTS, PromptLoader
from vlm_grpo.types import Example


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy("qwen2_5_vl")


def make_examples(count: int) -> list[Example]:
    return [noise_example(str(number), [(56, 28)], seed=number) for number in range(count)]


def spoil(example: Example) -> Example:
    """Return the example with an image whose file ends after its header."""
    image = example.images[0]
    return replace(example, images=(replace(image, data=image.read_bytes()[:60]),))


class RecordingStream(ExampleStream):
    """A stream in the order of its examples, with the indices that were read."""

    def __init__(self, examples: Sequence[Example]) -> None:
        super().__init__(examples, seed=0)
        self.indices: list[int] = []

    def __getitem__(self, index: int) -> Example:
        self.indices.append(index)
        return self.examples[index % len(self.examples)]


def open_loader(policy: Policy, stream: Any, skip: bool = False, threads: int = 1) -> Any:
    return closing(PromptLoader(policy, PlainQuestion(), stream, skip, threads))


def test_prefetched_prompts_are_read_once_with_the_noise_of_their_step(policy):
    stream = RecordingStream(make_examples(4))
    with open_loader(policy, stream) as loader:
        loader.prefetch([1, 2])
        assert [prompt.example.id for prompt in loader.load([2, 1])] == ["2", "1"]
        assert stream.indices == [1, 2]
        loader.prefetch([3])
        loader.prefetch([0])  # drops the previous one
        loader.load([0, 3])
    assert stream.indices.count(0) == 1
    # They are prefetched for the noise of their step.
    weak, strong = (NoisyImages(DiffusionNoise(steps, (0,))) for steps in (5, 900))
    with open_loader(policy, RecordingStream(make_examples(3))) as loader:
        loader.prefetch([1], strong)
        (prompt,) = loader.load([1], weak)
        (again,) = loader.load([1], strong)
        assert loader.stream.indices == [1, 1]  # the second was prefetched
    assert prompt.variant.example.images[0].change == DiffusionNoise(5, (0, 1, 0))
    assert again.variant.example.images[0].change == DiffusionNoise(900, (0, 1, 0))


def test_the_images_of_a_prompt_for_a_gpu_are_pinned(policy, monkeypatch):
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: [x, pinned.append(x)][0])
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(Policy, "device", torch.device(kind))
        with open_loader(policy, RecordingStream(make_examples(1))) as loader:
            (prompt,) = loader.load([0])
        found = [*map(id, prompt.vision.values())] if kind == "cuda" else []
        assert [*map(id, pinned)] == found


def test_replacement_is_limited_and_other_errors_in_the_loading_thread_are_raised(policy):
    stream = RecordingStream([spoil(example) for example in make_examples(1)])
    loading = pytest.raises(UserError, match="cannot be read")
    with open_loader(policy, stream, skip=True) as loader, loading:
        loader.load([5])
    assert stream.indices == list(range(5, 5 + 1 + MAX_REPLACEMENTS))
    failing = MagicMock()
    failing.__getitem__.side_effect = ZeroDivisionError("at 3")
    with open_loader(policy, failing, skip=True) as loader:
        loader.prefetch([3])
        with pytest.raises(ZeroDivisionError, match="at 3"):
            loader.load([3])


def test_noisy_prompts_are_those_of_the_example_that_is_used(policy):
    """Also in place of an example that cannot be read; texts have none. With several threads."""
    good = make_examples(4)
    stream = RecordingStream([good[0], spoil(good[1]), good[2], noise_example("3", [])])
    variant = NoisyImages(DiffusionNoise(300, (5,)))
    with open_loader(policy, stream, True, threads=2) as loader:
        first, replaced, text = loader.load([0, 1, 3], variant)
    assert text.variant is None
    for index, prompt in ((0, first), (1, replaced)):
        own = prompt.example.with_changes(lambda n, i=index: DiffusionNoise(300, (5, i, n)))
        noisy = prompt.variant
        built = policy.prompts.build(own, PlainQuestion())
        assert (noisy.example, noisy.text) == (built.example, built.text)
        assert noisy.token_ids == built.token_ids
        torch.testing.assert_close(dict(noisy.vision), dict(built.vision), rtol=0, atol=0)
        assert not torch.equal(noisy.vision["pixel_values"], prompt.vision["pixel_values"])
    assert replaced.example.id == "2"
