"""Prompts in training order: prefetched, counted and, if requested, replaced."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from tiny_models import assert_same_prompt, noise_example, tiny_policy

from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.errors import UserError
from vlm_grpo.media.images import DiffusionNoise
from vlm_grpo.model.policy import Policy
from vlm_grpo.task import PlainQuestion
from vlm_grpo.training.methods.noise import NoisyImages
from vlm_grpo.training.prompt_loader import MAX_REPLACEMENTS, PromptLoader
from vlm_grpo.types import Example, ImageRef


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


@contextmanager
def open_loader(
    policy: Policy, stream: Any, skip_unreadable: bool = False, workers: int = 0
) -> Iterator[Any]:
    loader = PromptLoader(policy, PlainQuestion(), stream, skip_unreadable, workers)
    try:
        yield loader
    finally:
        loader.close()


def test_prompts_have_the_requested_order(policy):
    with open_loader(policy, RecordingStream(make_examples(3))) as loader:
        prompts = loader.load([2, 0, 4])
    assert [prompt.example.id for prompt in prompts] == ["2", "0", "1"]


def test_prefetched_prompts_are_read_once(policy):
    stream = RecordingStream(make_examples(4))
    with open_loader(policy, stream) as loader:
        loader.prefetch([1, 2])
        loader.load([1, 2])
        assert stream.indices == [1, 2]
        loader.prefetch([3])
        loader.prefetch([0])  # drops the previous one
        loader.load([0, 3])
    assert stream.indices.count(0) == 1


def test_image_decodes_are_counted_when_prompts_are_loaded(policy):
    examples = [noise_example("two", [(56, 28), (28, 56)]), noise_example("none", [])]
    before = policy.counters.image_decodes
    with open_loader(policy, RecordingStream(examples)) as loader:
        loader.prefetch([0, 1])
        assert policy.counters.image_decodes == before
        loader.load([0, 1])
    assert policy.counters.image_decodes == before + 2


def test_the_images_of_a_prompt_for_a_gpu_are_pinned(policy, monkeypatch):
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: [x, pinned.append(x)][0])
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(Policy, "device", torch.device(kind))
        with open_loader(policy, RecordingStream(make_examples(1))) as loader:
            (prompt,) = loader.load([0])
        found = [*map(id, prompt.vision.values())] if kind == "cuda" else []
        assert [*map(id, pinned)] == found


def test_an_unreadable_image_is_an_error(policy):
    examples = make_examples(2)
    stream = RecordingStream([spoil(examples[0]), examples[1]])
    with open_loader(policy, stream) as loader, pytest.raises(UserError, match="cannot be read"):
        loader.load([0])


def test_an_unreadable_image_is_replaced_by_the_next_example_if_requested(policy, caplog):
    good = make_examples(4)
    stream = RecordingStream([good[0], spoil(good[1]), spoil(good[2]), good[3]])
    before = policy.counters.replaced_prompts
    with caplog.at_level(logging.WARNING), open_loader(policy, stream, True) as loader:
        prompts = loader.load([0, 1])
    assert [prompt.example.id for prompt in prompts] == ["0", "3"]
    assert policy.counters.replaced_prompts == before + 1
    assert caplog.text.count("using the next example instead") == 2


def test_replacement_is_limited(policy):
    stream = RecordingStream([spoil(example) for example in make_examples(1)])
    with (
        open_loader(policy, stream, True) as loader,
        pytest.raises(UserError, match="cannot be read"),
    ):
        loader.load([5])
    assert stream.indices == list(range(5, 5 + 1 + MAX_REPLACEMENTS))


def test_an_error_in_the_loading_thread_is_raised(policy):
    class FailingStream:
        def __getitem__(self, index: int) -> Example:
            raise ZeroDivisionError(f"at {index}")

    with open_loader(policy, FailingStream(), skip_unreadable=True) as loader:
        loader.prefetch([3])
        with pytest.raises(ZeroDivisionError, match="at 3"):
            loader.load([3])


# Worker processes.


@pytest.fixture(scope="module")
def fifo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipe in place of an image, on which a worker waits for as long as a test wants."""
    path = tmp_path_factory.mktemp("pipes") / "image.png"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def with_workers(policy: Policy, fifo: Path) -> Iterator[PromptLoader]:
    """A loader with two workers; examples 1 and 2 cannot be read, and 4 is the pipe."""
    forked.start_server()
    good = [
        noise_example("0", [(112, 84), (56, 28)]),
        *(spoil(example) for example in make_examples(2)),
        replace(noise_example("3", [(28, 56)]), answer=7, meta={"unpicklable": lambda: None}),
        replace(noise_example("4", []), images=(ImageRef("pipe", (56, 28), (56, 28), fifo),)),
        noise_example("5", []),
    ]
    with open_loader(policy, RecordingStream(good), True, workers=2) as loader:
        yield loader


def test_workers_prepare_the_same_prompts(policy, with_workers):
    indices, before = [5, 0, 3, 6], policy.counters.image_decodes
    with_workers.prefetch(indices)
    prompts = with_workers.load(indices)
    counted = policy.counters.image_decodes - before
    with open_loader(policy, with_workers.stream) as loader:
        expected = loader.load(indices)
    for prompt, other in zip(prompts, expected, strict=True):
        assert_same_prompt(prompt, other)
    assert counted in (3, 5)  # index 6 is example 0 again: its images may be in the worker's cache


def test_noisy_prompts_are_those_of_the_example_that_is_used(policy, with_workers):
    """Also from a worker, and in place of an example that cannot be read; texts have none."""
    variant = NoisyImages(DiffusionNoise(300, (5,)))
    text, _, _, replaced = prompts = with_workers.load([5, 0, 3, 1], variant)
    assert text.variant is None
    for index, prompt in zip([0, 3, 1], prompts[1:], strict=True):
        own = prompt.example.with_noise(DiffusionNoise(300, (5, index)))
        noisy = prompt.variant
        assert noisy is not None
        assert_same_prompt(noisy, policy.prompts.build(own, PlainQuestion()))
        assert not torch.equal(noisy.vision["pixel_values"], prompt.vision["pixel_values"])
    assert replaced.example.id == "3"


def test_prompts_are_prefetched_for_the_noise_of_their_step(policy):
    weak, strong = (NoisyImages(DiffusionNoise(steps, (0,))) for steps in (5, 900))
    with open_loader(policy, RecordingStream(make_examples(3))) as loader:
        loader.prefetch([1], strong)
        (prompt,) = loader.load([1], weak)
        (again,) = loader.load([1], strong)
        assert loader.stream.indices == [1, 1]  # the second was prefetched
    assert prompt.variant.example.images[0].noise == DiffusionNoise(5, (0, 1, 0))
    assert again.variant.example.images[0].noise == DiffusionNoise(900, (0, 1, 0))


def test_errors_in_workers_are_raised_or_replaced(policy, with_workers, caplog):
    before = policy.counters.replaced_prompts
    with caplog.at_level(logging.WARNING):
        (prompt,) = with_workers.load([1])
    assert prompt.example.id == "3"
    assert policy.counters.replaced_prompts == before + 1
    assert caplog.text.count("cannot be read") == 2
    with_workers.skip_unreadable = False
    with pytest.raises(UserError, match=r"example 1: image 1-0 cannot be read"):
        with_workers.load([2])
    with_workers.skip_unreadable = True


def kill_reader(fifo: Path) -> None:
    """Kill the worker that waits for the pipe's content."""
    pid = find_reader(fifo)
    os.kill(pid, signal.SIGKILL)
    while find_reader(fifo, 0.0) == pid:
        time.sleep(0.01)


def find_reader(fifo: Path, seconds: float = 60.0) -> int:
    """Return the id of the worker that waits for the pipe's content; 0: none does."""
    deadline = time.monotonic() + seconds
    while True:
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):  # the process has ended
                if os.readlink(link) == str(fifo) and link.parts[2] != str(os.getpid()):
                    return int(link.parts[2])
        if time.monotonic() > deadline:
            return 0
        time.sleep(0.02)


def test_a_killed_worker_is_replaced_and_two_end_the_run_with_one_message(
    with_workers, fifo, caplog
):
    with caplog.at_level(logging.WARNING), os.fdopen(os.open(fifo, os.O_RDWR), "wb") as pipe:
        with_workers.prefetch([4])
        kill_reader(fifo)
        kill_reader(fifo)
        with pytest.raises(UserError, match="example 4: two workers ended") as caught:
            with_workers.load([4])
        assert "(exit code -9)" in str(caught.value)
        assert "lower data.dataloader_num_workers" in str(caught.value)

        with_workers.prefetch([4])
        kill_reader(fifo)
        assert find_reader(fifo)
        pipe.write(noise_example("4", [(56, 28)]).images[0].read_bytes())
    (prompt,) = with_workers.load([4])
    assert prompt.example.id == "4"
    assert caplog.text.count("the worker of its prompt ended (exit code -9)") == 3
