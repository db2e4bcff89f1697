"""Clips in rollouts and predictions by a real vLLM server of a tiny Qwen3-VL."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from family_models import MROPE, build_qwen3
from tiny_models import clip_examples, make_prompt, noise_example, sampled_logprobs
from video_files import make_video
from vllm_runs import find_difference, make_settings, sample

from vlm_grpo.config.data import VideoSettings
from vlm_grpo.data.images import Clip, MediaReader
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.policy import load_policy
from vlm_grpo.serve.chat_client import ChatClient, Endpoint, build_messages, encode_clip
from vlm_grpo.serve.sampler import VllmSampler
from vlm_grpo.task import PlainQuestion
from vlm_grpo.training.update import build_updater
from vlm_grpo.types import Example, VideoRef

# vLLM's attention on a CPU takes heads of at least 32 dimensions.
TEXT = {
    "head_dim": 32,
    "rope_parameters": {**MROPE, "mrope_section": [8, 4, 4], "mrope_interleaved": True},
}
EXAMPLES = [*clip_examples(), noise_example("image", [(60, 90)], "Hello there")]


@pytest.fixture(scope="module")
def sampler(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    """The sampler of a run that starts a server of its own."""
    folder = tmp_path_factory.mktemp("qwen3")
    for part in build_qwen3("qwen3_vl", TEXT, deepstack_visual_indexes=[0, 1])():
        part.save_pretrained(folder / "model")
    own = "rollout.vllm.arguments=['--enforce-eager','--max-model-len=1024']"
    program = f"rollout.vllm.python={vllm_python}"
    settings = make_settings(folder, [], f"model={folder / 'model'}", program, own)
    strategy = build_updater(load_policy(settings), settings, Accelerator(cpu=True)).strategy
    sampler = VllmSampler(strategy, settings)
    yield sampler
    sampler.close()


def test_log_probs_of_answers_to_clips_are_the_trainers_before_and_after_an_update(sampler):
    policy = sampler.policy
    prompts = [make_prompt(policy, example) for example in EXAMPLES]
    sampling = SamplingSettings(policy.distribution, 6)
    torch.manual_seed(0)
    found: list[Any] = []
    for version in range(2):
        sampler.publish(version)
        groups = sample(sampler, prompts, sampling, 3)
        assert find_difference(policy, prompts, groups) < 1e-4
        found.append(sampled_logprobs(groups)[:4])
        with torch.no_grad():
            for _, weight in policy.trainable_parameters():
                weight.add_(0.1 * weight.abs().mean() * torch.randn_like(weight))
    assert not torch.equal(found[0], found[1])


def test_a_chat_on_a_file_has_our_prompt_but_for_two_tokens(sampler, tmp_path):
    """vLLM chooses the same frames and times, and keeps a start and an end around the clip."""
    (tmp_path / "a.mp4").write_bytes(make_video(count=90, size=(128, 64), fps=30))
    clip = MediaReader(tmp_path, 10**6, VideoSettings()).read(Clip("a.mp4"), "a")
    assert isinstance(clip, VideoRef)
    prompts = sampler.policy.prompts
    prompt = make_prompt(sampler.policy, Example("a", (clip,), "What?", 0))
    messages = build_messages(prompts.write(prompt.example, PlainQuestion()), [encode_clip(clip)])
    sampler.ready.result(300)
    client = ChatClient(Endpoint(sampler.servers[0].url))
    answer = client.ask(messages, {"max_tokens": 1})
    assert answer.prompt_tokens == len(prompt.token_ids) + 2
