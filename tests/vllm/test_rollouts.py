"""Completions of a real vLLM server, compared with those of the policy."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import small_environments
import torch
from small_runs import read_metrics
from tiny_models import make_prompt, noise_example, sampled_logprobs
from vllm_runs import LORA, find_difference, make_settings, sample

from vlm_grpo import UserError, train
from vlm_grpo.model.engine.sampling import SamplingSettings, build_sampling_settings
from vlm_grpo.model.policy import Policy
from vlm_grpo.serve import server as server_module
from vlm_grpo.serve.server import Server
from vlm_grpo.types import Prompt


def make_prompts(policy: Policy, count: int) -> list[Prompt]:
    """Build prompts with one or two images of odd sizes, up to 12 times as wide as high."""
    random = np.random.default_rng(0)
    prompts = []
    for index in range(count):
        short = int(random.integers(13, 120))
        long = int(short * random.uniform(1, 12 if index % 5 == 0 else 3))
        sizes = [(long, short) if index % 2 else (short, long)] * (1 + (index % 7 == 0))
        question = f"How many “objects” are in number {index}? {'é ' * (index % 4)}"
        prompts.append(make_prompt(policy, noise_example(str(index), sizes, question, seed=index)))
    return prompts


@pytest.mark.parametrize(
    ("count", "budget"),
    [
        (100, ()),
        # Another budget than the server's: smaller images are left alone.
        (10, ("policy.max_pixels=6272", "policy.max_pixels=25088")),
        (10, ("policy.min_pixels=12544", "policy.max_pixels=25088")),
    ],
)
def test_prompts_of_images_of_odd_sizes_have_our_tokens(make_sampler, count, budget):
    sampler, strategy, _ = make_sampler(*budget)
    prompts = make_prompts(strategy.policy, count)
    sampler.publish(0)
    sampling = SamplingSettings(strategy.policy.distribution, 2)
    groups = sample(sampler, prompts, sampling, 2)  # other tokens would be an error
    assert [len(group) for group in groups] == [2] * count
    assert find_difference(strategy.policy, prompts, groups) < 1e-4


def test_greedy_completions_of_fifty_prompts_are_equal(make_sampler):
    sampler, strategy, _ = make_sampler()
    policy = strategy.policy
    prompts = make_prompts(policy, 50)
    greedy = SamplingSettings(replace(policy.distribution, temperature=0.0), 12)
    expected = policy.sample(prompts, greedy, 1, [(0, i) for i in range(50)])
    sampler.publish(0)
    sampled = sample(sampler, prompts, greedy, 1)
    for prompt, (theirs,), (ours,) in zip(prompts, sampled, expected, strict=True):
        found = [(c.token_ids, c.text, c.stop) for c in (theirs, ours)]
        assert found[0] == found[1], prompt.example.id


def test_bans_ends_and_truncation_hold_there_too(make_sampler):
    sampler, strategy, _ = make_sampler()
    policy, prompts = strategy.policy, make_prompts(strategy.policy, 6)
    sampler.publish(0)
    own = policy.distribution
    vocabulary = policy.model.config.get_text_config().vocab_size
    kept = {*own.eos, *policy.tokenizer("0123456789")["input_ids"]}
    banned = tuple(token for token in range(vocabulary) if token not in kept)[:250] + own.banned
    policy.distribution = replace(own, temperature=1.7, banned=banned, min_new_tokens=4)
    sampling = SamplingSettings(policy.distribution, 10, stop=("77", "12"))
    groups = sample(sampler, prompts, sampling, 8)
    completions = [c for group in groups for c in group]
    assert find_difference(policy, prompts, groups) < 1e-4
    assert not {token for c in completions for token in c.token_ids} & set(banned)
    assert all(not set(c.token_ids[:4]) & set(own.eos) for c in completions)
    for completion in completions:
        ends = {
            "eos": completion.token_ids[-1] in own.eos,
            "length": len(completion.token_ids) == 10,
            "stop": any(stop in completion.text for stop in sampling.stop),
        }
        assert ends[completion.stop], completion
    again = sample(sampler, prompts, sampling, 8)
    others = sample(sampler, prompts, sampling, 8, seed=1)
    tokens = [[c.token_ids for group in g for c in group] for g in (groups, again, others)]
    assert tokens[0] == tokens[1] != tokens[2]
    policy.distribution = own
    single = replace(sampling, distribution=own, top_k=1, stop=())
    greedy = replace(single, distribution=replace(own, temperature=0.0), top_k=0)
    both = sample(sampler, prompts, single, 2), sample(sampler, prompts, greedy, 1)
    assert [g[0].token_ids for g in both[0]] == [g[0].token_ids for g in both[1]]
    assert all(value == 0 for group in both[0] for c in group for value in c.logprobs)


@pytest.mark.parametrize("adapters", [(), LORA], ids=["full weights", "adapters"])
def test_log_probs_are_the_trainers_after_each_of_ten_updates(tmp_path, server_processes, adapters):
    settings = make_settings(
        tmp_path,
        [server_processes[int(bool(adapters))][0]],
        "optim.prompts_per_step=8",  # rewards differ within a group of each step
        *("optim.max_steps=10", "rollout.num_generations=6", "optim.lr=1e-4", *adapters),
    )
    train(settings)
    rows = read_metrics(settings.run_dir)
    assert len(rows) == 10
    differences = [row["sampling/sampling_logp_difference/max"] for row in rows]
    assert max(differences) < 1e-4, differences
    assert all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("forks", [1, 3])
def test_log_probs_of_episodes_are_the_trainers(forks, tmp_path, server_processes):
    settings = make_settings(
        tmp_path,
        [server_processes[0][0]],
        *("optim.max_steps=3", "optim.prompts_per_step=8", "rollout.num_generations=6"),
        *("rollout.min_new_tokens=8", "rollout.max_completion_length=24"),  # enough for calls
        f"task_options.environment={small_environments.__file__}:PeekAtDigits",
        f"rollout.forks={forks}",
    )
    train(settings)
    for row in read_metrics(settings.run_dir):
        assert row["rewards/turns/mean"] > 1 / 3  # some have two turns or three
        assert row["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.parametrize("resets", [True, False])
def test_features_of_an_image_are_computed_with_the_new_vision_tower(
    make_sampler, monkeypatch, resets
):
    """A server whose encoder cache is not reset, by command or by a pause, answers from features
    of the old weights."""
    sampler, strategy, _ = make_sampler(*LORA)
    policy, prompts = strategy.policy, make_prompts(strategy.policy, 4)
    send, differences = server_module.post_command, []
    left_out = () if resets else ("/pause?mode=wait", "/resume", "/reset_encoder_cache")

    def send_most(url: str, *rest: Any, **named: Any) -> Any:
        return None if url.endswith(left_out) else send(url, *rest, **named)

    for version in range(2):
        sampler.publish(version)
        groups = sample(sampler, prompts, SamplingSettings(policy.distribution, 4), 4)
        differences.append(find_difference(policy, prompts, groups))
        monkeypatch.setattr(server_module, "post_command", send_most)
        torch.manual_seed(version)
        with torch.no_grad():
            for name, weight in policy.trainable_parameters():
                if "visual" in name:
                    weight.add_(0.3 * torch.randn_like(weight))
    assert differences[0] < 1e-4
    assert (differences[1] < 1e-4) == resets, differences


def test_a_server_with_other_base_weights_is_refused(make_sampler, server_processes):
    sampler, strategy, _ = make_sampler()
    sampler.publish(0)
    sampling = SamplingSettings(strategy.policy.distribution, 2)
    sample(sampler, make_prompts(strategy.policy, 1), sampling, 2)
    with pytest.raises(UserError, match=r"its base weights were replaced .*: start it again"):
        make_sampler(*LORA, urls=[server_processes[0][0]])[0].publish(0)


def test_two_servers_share_the_prompts_and_one_may_be_killed(
    make_sampler, server_processes, caplog
):
    """The last test of the file: one of its servers ends."""
    urls = [url for url, _ in server_processes]
    sampler, strategy, _ = make_sampler("rollout.vllm.max_restarts=0", urls=urls)
    policy, prompts = strategy.policy, make_prompts(strategy.policy, 60)
    asked: list[str] = []
    generate = Server.generate

    def note(self: Server, request: Any) -> Any:
        asked.append(self.url)
        if len(asked) == 40:
            server_processes[1][1].stop()
        return generate(self, request)

    sampling = build_sampling_settings(policy.distribution, sampler.settings.rollout)
    sampler.publish(0)
    first = sample(sampler, prompts[:20], sampling, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "generate", note)
        groups = sample(sampler, prompts, sampling, 4)
    assert set(asked) == set(urls)
    assert [server.url for server in sampler.servers] == urls[:1]
    assert "gets no more requests; 1 are left" in caplog.text
    assert find_difference(policy, prompts, groups) < 1e-4
    # Whichever server answered, and with whatever other requests in its batch, which round.
    for before, after in zip(first, groups, strict=False):
        assert [c.token_ids for c in before] == [c.token_ids for c in after]
        logprobs = [sampled_logprobs([group]) for group in (before, after)]
        torch.testing.assert_close(*logprobs, rtol=0, atol=1e-4)
    sampler.publish(1)
    assert {c.version for g in sample(sampler, prompts[:2], sampling, 2) for c in g} == {1}
