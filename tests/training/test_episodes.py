"""Training with an environment: episodes are sampled turn by turn, and again bit by bit."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_environments
from small_environments import EXAMPLE, write
from small_runs import assert_resumes, read_metrics

from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.episodes import begin_episodes, sample_episodes
from vlm_grpo.model.policy import load_policy
from vlm_grpo.task.episodes import EnvironmentRunner
from vlm_grpo.task.registry import load_task
from vlm_grpo.training.methods.warm_start import TargetWriter
from vlm_grpo.training.trainer import train
from vlm_grpo.types import Completion


def test_a_run_resumes_bit_for_bit_from_the_middle_of_an_episode(settings):
    peek = f"{small_environments.__file__}:Peek"
    changes = {
        "task_options": {"environment": {"name": peek, "max_turns": 3}},
        "rollout": {"num_generations": 4, "max_completion_length": 20, "forks": 2},
        "data": {"eval": "embedded:ocr", "eval_limit": 2},
        "optim": {"max_steps": 2},
        "methods": ["tool_gain"],
    }
    whole, stopped = (settings(name=name, **changes) for name in ("whole", "stopped"))
    assert_resumes(whole, stopped, (2, 12), last="step-2")
    for row in read_metrics(whole.run_dir):
        # Rounding of float32: what was sampled turn by turn has the log-probs of one pass.
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["rewards/turns/mean"] > 1 / 3  # some calls in every step
        assert row["completions/turns"] == pytest.approx(3 * row["rewards/turns/mean"])
        assert row["tools/calls"] == pytest.approx(row["completions/turns"] - 1 + row["tools/cut"])
        assert row["tokens/observed"] > 0
    assert {"eval/tools/gain", "eval/letters_without_tools"} <= row.keys()
    parts = row["tool_gain/with"], row["tool_gain/without"]
    assert row["tool_gain/difference"] == pytest.approx(parts[0] - parts[1])
    lines = (whole.run_dir / "samples" / "step-000000.jsonl").read_text().splitlines()
    turns = [turn for line in lines for c in json.loads(line)["completions"] for turn in c["turns"]]
    seen = [turn for turn in turns if turn.get("pictures")]
    assert seen
    assert all(len(turn["pictures"]) == len(turn["observed"]["images"]) for turn in seen)


def test_a_server_samples_the_turns_of_one_source_and_the_completions_of_another(vllm):
    peek = {"name": f"{small_environments.__file__}:Peek", "max_turns": 3}
    options = {"plain": {}, "tools": {"environment": peek}}
    own = {"source": "embedded:ocr", "task": "ocr", "limit": 6}
    sources = [{**own, "name": name, "task_options": given} for name, given in options.items()]
    data, length = {"train": sources, "train_limit": None}, {"max_completion_length": 20}
    run = vllm(task="mixed", data=data, rollout=length, optim={"max_steps": 1})
    train(run)
    (row,) = read_metrics(run.run_dir)
    assert row["tokens/observed"] > 0
    assert {"sources/plain/reward_std", "sources/tools/reward_std"} <= row.keys()


def build_settings(model: Path, length: int, **policy: Any) -> Settings:
    rollout, policy = {"max_completion_length": length}, {"dtype": "float32", **policy}
    own = {"data": {"train": "none"}, "policy": policy, "rollout": rollout}
    return Settings(task="ocr", model=str(model), **own)


def test_a_demonstration_is_written_as_it_would_be_sampled(model_folder):
    settings = build_settings(model_folder, 400)
    policy = load_policy(settings)
    task = policy.prompts.adapt(load_task("ocr", environment="zoom"))
    example = replace(EXAMPLE, answer="EXIT", meta={"evidence": [[20, 10, 90, 60], [0, 0, 50, 50]]})
    with EnvironmentRunner() as runner:
        example, start = begin_episodes(policy.prompts, runner, example, task)
    writer = TargetWriter(policy, settings)
    target = writer.write(example, task, start)
    writer.runner.close()
    first, second = target.observations
    assert [turn.call and turn.call.name for turn in target.turns] == ["zoom", "zoom", None]
    assert target.text == target.turns[-1].text == "EXIT"
    decode = policy.tokenizer.decode
    # The model's own tokens end with each call, where sampling stops; the end of the turn is read.
    texts = [target.turns[0].text, target.turns[1].text, "EXIT<|im_end|>"]
    places = [0, first.start, second.start, len(target.token_ids)]
    own = [target.token_ids[a:b] for a, b in pairwise(places)]
    assert list(map(decode, own)) == texts
    for observation in (first, second):
        assert decode(observation.prompt.token_ids).startswith("<|im_end|>\n<|im_start|>user\n")
    sizes = [o.prompt.example.images[0].size for o in target.observations]
    # 70 x 50 and 50 x 50 pixels, whose edges are rounded to pixels of the resized image.
    assert sizes == [pytest.approx((470, 336), abs=20), pytest.approx((336, 336), abs=20)]
    assert len(target.logprobs) == len(target.token_ids)
    writer = TargetWriter(policy, build_settings(model_folder, 100))
    with pytest.raises(UserError, match=r"its target 'EXIT' has 1\d\d tokens .* raise it"):
        writer.write(example, task, start)
    writer.runner.close()


def test_supervised_steps_train_on_demonstrations(settings):
    zoom, limits = {"name": "zoom", "min_side": 28}, {"max_completion_length": 200}
    words = {"task": "ocr", "data": {"train": "embedded:tiny_words"}, "rollout": limits}
    words |= {"task_options": {"environment": zoom}, "policy": {"max_pixels": 2352}}
    run = settings(**words, warm_start={"steps": "all"}, optim={"max_steps": 3})
    train(run)
    losses = [row["loss"] for row in read_metrics(run.run_dir)]
    assert losses == sorted(losses, reverse=True)


@pytest.fixture
def scripted(model_folder: Path) -> Any:
    """A policy, a prompt, the length of a call whose result is too thin to show, and functions that
    sample an episode of that call, so often, and an answer, or episodes of other texts."""
    policy = load_policy(build_settings(model_folder, 200, max_pixels=2352))
    task = policy.prompts.adapt(load_task("ocr", environment={"name": "zoom", "least": 4}))
    thin = write("zoom", bbox_2d=[0, 0, 10**5, 4])
    used = len(policy.tokenizer(thin)["input_ids"])

    def complete(text: str) -> Completion:
        tokens = tuple(policy.tokenizer(text)["input_ids"])
        return Completion(tokens, (0.0,) * len(tokens), text, "stop")

    with EnvironmentRunner() as runner:
        example, start = begin_episodes(policy.prompts, runner, EXAMPLE, task)
        prompt = replace(policy.prompts.build(example, task), start=start)

        def sample(answer: Any, count: int = 1, most: int = 200) -> tuple[Completion, ...]:
            sampling = SamplingSettings(policy.distribution, most)
            own = lambda *given: [tuple(map(complete, texts)) for texts in answer(*given)]  # noqa: E731
            arguments = [range(count)], [(0,)], own, policy.prompts, runner
            return sample_episodes([prompt], sampling, *arguments)[0]

        def run(calls: int, most: int = 200) -> Completion:
            def answer(prompts, sampling, numbers, seeds, begun):
                return [[thin if sum(begun) < calls * used else "EXIT"]] * len(prompts)

            return sample(answer, 1, most)[0]

        yield SimpleNamespace(policy=policy, prompt=prompt, used=used, sample=sample, run=run)


def test_each_episode_of_a_turn_reads_what_it_asked_for(scripted):
    """Two look at the same part, whose tokens and pixels are prepared once, and one at another."""
    boxes = [0, 0, 100, 100], [0, 0, 40, 60], [0, 0, 100, 100]

    def answer(prompts, sampling, numbers, seeds, begun):
        return [["EXIT"]] * 3 if begun else [[write("zoom", bbox_2d=box) for box in boxes]]

    episodes = scripted.sample(answer, 3)
    first, other, same = (episode.observations[0].prompt for episode in episodes)
    assert first is same
    sizes = [shown.example.images[0].size for shown in (first, other)]
    assert sizes[0] != sizes[1]
    seen = [small_environments.see(episode.turns[0].observed) for episode in episodes]
    assert [own.images[0].size for own in seen] == [sizes[0], sizes[1], sizes[0]]


def test_a_result_that_cannot_be_shown_is_answered_in_text_and_an_episode_cut_at_its_end(scripted):
    used, run = scripted.used, scripted.run
    episode, text = run(calls=1), "Error: the result cannot be shown to you"
    assert (episode.text, episode.stop) == ("EXIT", "stop")
    assert small_environments.see(episode.turns[0].observed).text == text
    assert text.removeprefix("Error: ") in episode.observations[0].prompt.text
    assert [len(run(2, most).observations) for most in (2 * used, 2 * used + 1)] == [1, 2]
    assert run(2, 2 * used).stop == "length"
    seen = run(1).observations[0].prompt
    whole = len(scripted.prompt.token_ids) + 2 * (used + len(seen.token_ids))
    for context, shown in ((whole, 1), (whole + 1, 2)):
        scripted.policy.prompts.max_tokens = context
        episode = run(2)
        assert len(episode.observations) == shown
        assert (episode.stop, len(episode.turns)) == (("length", 2) if shown == 1 else ("stop", 3))
