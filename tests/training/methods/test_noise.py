"""Groups of which a part is sampled behind images with noise (NoisyRollout)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from groups import make_tokens
from PIL import Image
from small_runs import assert_resumes, make_trainer, read_metrics
from steps import assert_sampled_behind

from vlm_grpo.config.methods import MAX_NOISE_STEPS, NoiseSettings
from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.prompt_order import ExampleStream
from vlm_grpo.errors import UserError
from vlm_grpo.training.methods import Run
from vlm_grpo.training.methods.curriculum import _observe
from vlm_grpo.training.methods.noise import DiffusionNoise, Noise
from vlm_grpo.training.objective import losses
from vlm_grpo.training.trainer import train
from vlm_grpo.types import Completion, Example, Group
from vlm_grpo.utils.jsonl import read_rows

CONSTANT = {"noise": {"midpoint": 9.0}}
"""Noise whose strength does not fall."""


def get_completions(groups: Sequence[Group]) -> dict[str, tuple[Completion, ...]]:
    return {group.id: group.completions for group in groups}


def read_marks(run: Settings) -> list[list[list[float | None]]]:
    """Return the strength of the noise of each completion, by step and group."""
    files = map(read_rows, sorted((run.run_dir / "samples").glob("*.jsonl")))
    return [[[c.get("noise") for c in row["completions"]] for row in rows] for rows in files]


@pytest.mark.parametrize(("share", "engine"), [(0.5, "repeated"), (0.25, "shared")])
def test_noise_that_changes_nothing_or_has_ended_leaves_the_tokens(
    settings, monkeypatch, share, engine
):
    """Each completion keeps its random stream; log-probs differ by rounding."""
    policy = {"policy": {"dtype": "float32", "engine": engine}}
    monkeypatch.setattr(DiffusionNoise, "__call__", lambda self, image: image)
    noisy = settings(rollout={"noise": {"share": share, "midpoint": 9.0}}, **policy)
    samplers = (make_trainer(run).sampler for run in (noisy, settings(**policy)))
    groups, plain = (get_completions(sampler.sample(0).groups) for sampler in samplers)
    for name, members in groups.items():
        expected = [0, 0, 500, 500] if share == 0.5 else [0, 0, 0, 500]
        assert [c.variant[1] if c.variant else 0 for c in members] == expected
        for completion, other in zip(members, plain[name], strict=True):
            assert completion.token_ids == other.token_ids
            assert completion.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    # Noise that has ended: bit for bit, with the whole group in one part again.
    ended = settings(rollout={"noise": {"midpoint": 1e-6, "steepness": 1e3}}, **policy)
    rollout = make_trainer(ended).sampler.sample(0)
    assert get_completions(rollout.groups) == plain
    assert rollout.metrics == {"noise/strength": 0}


def test_completions_are_sampled_behind_their_own_image_and_kept_with_the_clean_one(settings):
    trainer = make_trainer(settings(rollout=CONSTANT))
    sampler, rollout = trainer.sampler, trainer.sampler.sample(0)
    variant: Any = trainer.methods["noise"].variant(0)
    assert rollout.metrics == {"noise/strength": variant.label[1]}
    prompts = {p.example.id: p.variant for p in sampler.loader.load(range(3), variant)}
    for group in rollout.groups:
        assert all(image.change is None for image in group.prompt.example.images)
        noisy: Any = prompts[group.id]
        assert noisy.token_ids == group.prompt.token_ids
        assert_sampled_behind(sampler.policy, group, noisy)
        assert _observe(3, sampler.task, group)[2] == 2  # a curriculum counts clean ones alone


@pytest.mark.parametrize(("frozen", "passes"), [(["vision", "projector"], 2), ([], 3)])
def test_each_image_is_encoded_once_with_noise_and_once_without(settings, frozen, passes):
    """A trained tower encodes clean images once more in the update, whose micro-batches share them;
    noisy ones do not stay."""
    rollout, optim = {**CONSTANT, "num_generations": 8}, {"max_tokens_per_batch": 60}
    trainer = make_trainer(settings(rollout=rollout, policy={"freeze": frozen}, optim=optim))
    metrics = trainer.step()
    assert metrics["frac_reward_zero_std"] == 0
    assert metrics["work/image_decodes"] == 3
    assert metrics["work/encoder_passes"] == 3 * passes
    engine: Any = trainer.policy.engine
    assert not engine.encoder.cache  # else the features of all images of a run stay in memory
    counters = trainer.policy.counters
    trainer.sampler.sample(1)
    before = counters.encoder_passes
    prompts = trainer.sampler.loader.load(range(3, 6), trainer.methods["noise"].variant(1))
    trainer.policy.encode_images(prompts)
    assert counters.encoder_passes == before  # kept, or never kept with a trained tower
    trainer.policy.encode_images([p.variant for p in prompts if p.variant is not None])
    assert counters.encoder_passes == before + (3 if passes == 2 else 0)


def test_a_run_resumes_bit_for_bit_and_marks_its_samples(settings):
    """Stopped in the second step; the strength falls from step to step."""
    run, stopped = (settings(name=n, rollout={"noise": {"steepness": 4.0}}) for n in ("a", "b"))
    assert assert_resumes(run, stopped, (2, 3)) == ["step-1"]
    strengths = [row["noise/strength"] for row in read_metrics(run.run_dir)]
    assert run.rollout.noise is not None
    schedule = Noise(run.rollout.noise)
    assert strengths == [schedule.anneal(done) for done in (0.25, 0.5, 0.75, 1.0)]
    assert read_marks(run) == [[[None, None, own, own]] * 3 for own in strengths]


def test_steps_ahead_have_the_noise_of_their_own_step(vllm):
    run = vllm(2, rollout={"noise": {"steepness": 4.0}})
    assert run.objective.sampler_correction == "sequence_mask"
    train(run)
    rows = read_metrics(run.run_dir)
    strengths = [row["noise/strength"] for row in rows]
    assert read_marks(run) == [[[None, None, own, own]] * 3 for own in strengths]
    assert len(set(strengths)) == 4
    # The first step's clean completions are the policy's own; noise has no part in the difference.
    assert rows[0]["sampling/sampling_logp_difference/max"] < 1e-4


def test_what_was_sampled_behind_noise_has_no_difference_and_no_correction():
    logprobs = torch.full((4,), -1.0)
    behind = {"behind_variant": torch.tensor([False, True])}
    sampler = torch.tensor([-1.5, -1.5, -9.0, -9.0])
    given = {"old_logprobs": logprobs, "sampler_logprobs": sampler, **behind}
    batch = make_tokens(logprobs, [2, 2], **given)
    objective = ObjectiveSettings(sampler_correction="sequence")
    weights: Any = losses.sampler_weights(batch, objective)
    # e^(0.5 + 0.5) = 2.718, below the cap of 3.
    assert weights.tolist() == pytest.approx([2.71828, 2.71828, 1, 1], rel=1e-4)
    inputs = losses.LossInputs(batch, objective, losses.clipped_loss)
    found = losses.loss_metrics(inputs).values()
    assert found["sampling/sampling_logp_difference/mean"] == 0.5
    assert found["sampling/sampling_logp_difference/max"] == 0.5


def test_noise_needs_images_and_begins_with_the_first_step_after_a_warm_start(settings):
    trainer = make_trainer(settings(rollout=CONSTANT, warm_start={"steps": 2}))
    variants = map(trainer.methods["noise"].variant, range(4))
    labels = [variant and variant.label for variant in variants]
    assert labels == [None, None, ("noise", 500), ("noise", 500)]
    stream = ExampleStream([Example("a", (), "What?", "b")], 0)
    with pytest.raises(UserError, match="no training example has an image"):
        Noise(NoiseSettings()).start(Run(settings(), trainer.strategy, stream, trainer.task))


@pytest.mark.parametrize(
    ("strength", "midpoint", "steepness", "total"),
    [(500, 40, 30.0, 60), (450, 40, 60.0, 120), (999, 3, 2.0, 7)],
)
def test_the_noise_falls_as_in_the_authors_schedule(strength, midpoint, steepness, total):
    """The first two are their runs on Geometry3K and MMK12, whose midpoints are steps."""
    own = NoiseSettings(strength=strength, midpoint=midpoint / total, steepness=steepness)
    for step in range(1, total + 1):
        exponent = steepness * (step / total - midpoint / total)
        exact = strength * (1 - 1 / (1 + math.exp(-exponent)))
        assert Noise(own).anneal(step / total) in {int(exact - 1e-9), int(exact + 1e-9)}
    assert Noise(NoiseSettings(steepness=1e6)).anneal(0.0) == 500  # no overflow
    assert Noise(NoiseSettings(steepness=1e6)).anneal(1.0) == 0


@pytest.mark.parametrize(
    ("share", "size", "count"),
    [(0.5, 12, 6), (0.5, 5, 3), (0.25, 8, 2), (0.3, 8, 2), (0.01, 8, 1), (0.99, 8, 7)],
)
def test_a_share_is_rounded_to_whole_completions(share, size, count):
    assert Noise(NoiseSettings(share=share)).count_variants(size) == count


@pytest.mark.parametrize("steps", [1, 100, 500, MAX_NOISE_STEPS])
def test_noise_follows_the_diffusion_formula(steps):
    pixels = np.random.default_rng(5).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    found = DiffusionNoise(steps, (1, 2))(Image.fromarray(pixels))
    kept = 1.0  # the product of 1 − β over the steps
    for number in range(steps + 1):
        gate = 1 / (1 + math.exp(-(-6 + 12 * number / 999)))
        kept *= 1 - (gate * (0.5e-2 - 1e-5) + 1e-5)
    drawn = np.random.default_rng([1, 2]).standard_normal((40, 30, 3), np.float32).astype(float)
    exact = math.sqrt(kept) * pixels / 255 + math.sqrt(1 - kept) * drawn
    assert (found.mode, found.size) == ("RGB", (30, 40))
    # Half a level of rounding to 8 bits, and float32's own.
    assert np.abs(np.asarray(found) - 255 * exact.clip(0, 1)).max() < 0.5 + 1e-3
