"""A run that trains on gold answers first: its phases, the switch between them, and resuming."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from recorded import record_calls
from small_runs import LORA, assert_resumes, make_trainer, read_metrics, read_samples
from tiny_models import make_prompt, noise_example, tiny_policy

from vlm_grpo.config.recipes import load_settings
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.resolve import list_checkpoints
from vlm_grpo.task import Task, reward
from vlm_grpo.training.methods.warm_start import TargetWriter, find_end_token
from vlm_grpo.training.trainer import Trainer, train
from vlm_grpo.training.update import Updater
from vlm_grpo.types import Example

WARM = {"steps": 2, "lr": 3e-3, "schedule": "constant"}
LIMIT = {"num_generations": 4, "max_completion_length": 12}


@pytest.fixture
def warm(settings: Any) -> Any:
    """Return a function that builds runs of two supervised and two sampled steps."""
    return partial(settings, rollout=LIMIT, warm_start=WARM)


def copy_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: w.detach().clone() for n, w in trainer.policy.trainable_parameters()}


def is_equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_only_the_metrics_of_its_kind_describe_a_step_and_the_switch_is_evaluated_and_saved(warm):
    run = warm(data={"eval": "embedded:ocr", "eval_limit": 4})
    train(run)
    rows = read_metrics(run.run_dir)
    assert [("eval/letters" in row) for row in rows] == [False, True, False, True]
    saved = [step for step, _ in list_checkpoints(run.run_dir / "checkpoints")]
    assert saved == [2, 4]
    assert [("mean_token_accuracy" in row) for row in rows] == [True, True, False, False]
    for row in rows[:2]:
        assert row["loss"] > 1  # nats per token of a random model
        sampled = ("reward", "completions/", "entropy", "ratio/", "sampling/", "frac_")
        assert not [name for name in row if name.startswith(sampled)]
        assert row["work/prefill_tokens"] == 0
    assert {"reward", "entropy", "completions/mean_length"} <= rows[2].keys()
    # The samples of a supervised step are its targets.
    samples = read_samples(run.run_dir)
    assert b'"rewards": {}, "reward": null' in samples["samples/step-000001.jsonl"]
    assert b'"rewards": {"letters"' in samples["samples/step-000002.jsonl"]


def test_a_resumed_run_equals_an_uninterrupted_one(warm):
    """A run is not stopped within supervised steps, which sample nothing. The reference is the
    policy of the switch, from which the first rollout is sampled."""
    objective = {"num_iterations": 2, "beta": 0.1, "reference_refresh_every": "never"}
    runs = (warm(name=name, policy=LORA, objective=objective) for name in ("whole", "resumed"))
    assert assert_resumes(*runs, (3,), (2, 2)) == ["step-2", "step-3"]


def begin_at_switch(settings: Settings) -> Trainer:
    """Return a trainer after its supervised steps."""
    trainer = make_trainer(settings)
    for _ in range(settings.supervised_steps):
        trainer.step()
    return trainer


def test_grpo_begins_as_a_new_run_with_the_warm_model(warm):
    """The optimizer has no momentum of the supervised steps, and the schedule begins."""
    optim = {"schedule": "linear", "warmup_steps": 1, "max_steps": 6}
    trainer = begin_at_switch(warm(optim=optim))
    weights, cursor = copy_weights(trainer), trainer.sampler.cursor
    metrics = [trainer.step() for _ in range(2)]
    fresh = make_trainer(warm(name="fresh", warm_start=None, optim={**optim, "max_steps": 4}))
    with torch.no_grad():
        for name, weight in fresh.policy.trainable_parameters():
            weight.copy_(weights[name])
    fresh.sampler.restore(2 * 3, [])  # the prompts of the two supervised steps
    assert cursor.position == 4 * 3
    expected = [fresh.step() for _ in range(2)]
    for name in ("loss", "reward", "grad_norm", "learning_rate"):
        assert [row[name] for row in metrics] == [row[name] for row in expected]
    assert is_equal(copy_weights(trainer), copy_weights(fresh))


def test_the_reference_is_the_warm_model(warm):
    objective = {"beta": 0.1, "reference_refresh_every": "never"}
    trainer = begin_at_switch(warm(objective=objective))
    kl, warmed = trainer.methods["kl"], copy_weights(trainer)
    assert not is_equal(kl.state_dict()[1], warmed)
    first, second = trainer.step(), trainer.step()
    assert is_equal(kl.state_dict()[1], warmed)
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert second["kl"] > 1e-6


def test_each_phase_has_its_learning_rates_and_the_rewards_progress(warm, monkeypatch):
    """Also after a supervised step whose update was skipped, which does not advance them."""
    used: list[float] = []
    accumulate = Updater._accumulate  # noqa: SLF001

    def record(self: Updater, *arguments: Any) -> Any:
        used.append(self.strategy.optimizer.param_groups[0]["lr"])
        return accumulate(self, *arguments)

    monkeypatch.setattr(Updater, "_accumulate", record)
    start = {"steps": 3, "lr": 3e-3, "schedule": "linear", "warmup_steps": 1}
    optim = {"lr": 8e-3, "schedule": "linear", "warmup_steps": 1, "max_steps": 6}
    trainer = make_trainer(warm(warm_start=start, optim=optim))
    changes = record_calls(monkeypatch, Task, "with_progress")
    for step in range(6):
        with monkeypatch.context() as patch:
            if step == 1:
                patch.setattr(trainer.strategy, "step", lambda: torch.inf)
            trainer.step()
    # Warmup from 0, then the peak and its linear fall to 0 within the phase; the second step is
    # repeated at its rate because it was skipped.
    assert used == pytest.approx([0, 3e-3, 3e-3, 0, 8e-3, 4e-3])
    # The progress of rewards counts from the first rollout, of three.
    assert [call.arguments[1] for call in changes] == pytest.approx([0, 1 / 3, 2 / 3])


def test_servers_start_after_the_supervised_steps(vllm):
    trainer = begin_at_switch(vllm(1, rollout=LIMIT, warm_start=WARM))
    assert not vllm.samplers
    for _ in range(2):
        trainer.step()
    (outside,) = vllm.samplers
    # The weights of the switch, also for the step after it, which was started ahead.
    assert [version for version, _ in outside.sampled] == [2, 2]


class Copy(Task):
    """Repeat the answer of the row."""

    primary_metric = "same"

    def parse(self, text: str, example: Example) -> str:
        if text == "raise":
            raise KeyError(text)
        return text

    def write(self, answer: str, example: Example) -> str:
        if answer == "error":
            raise ZeroDivisionError("no text")
        return answer

    @reward()
    def same(self, answer: str, example: Example) -> float:
        return float(answer == example.answer)


def make_settings(*overrides: str) -> Settings:
    limit = "rollout.max_completion_length=8"
    return load_settings("quickstart", ["warm_start.steps=2", limit, *overrides])


def make_example(answer: Any, meta: Mapping[str, Any] | None = None) -> Example:
    return Example("a", (), "Which?", answer, meta or {}, "rows.jsonl:3")


@pytest.fixture(scope="module")
def policy() -> Any:
    return tiny_policy("qwen2_5_vl")


def test_a_target_is_the_text_of_the_gold_answer_or_of_the_row_and_the_end_token(policy):
    writer = TargetWriter(policy, make_settings())
    target = writer.write(make_example("red"), Copy(tags=False))
    end = policy.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert policy.tokenizer.decode(target.token_ids[:-1]) == "red"
    assert target.token_ids[-1] == end
    assert (target.text, target.stop) == ("red", "eos")
    assert target.logprobs == (0.0,) * len(target.token_ids)  # no other text can be written
    writer = TargetWriter(policy, make_settings("rollout.max_completion_length=20"))
    tagged = writer.write(make_example("7"), Copy(tags=True)).text
    assert tagged == "<answer>7</answer>"
    assert writer.write(make_example("red", {"completion": "blue"}), Copy()).text == "blue"
    assert writer.write(make_example("red", {"completion": None}), Copy()).text == "red"


@pytest.mark.parametrize(
    ("answer", "meta", "overrides", "problem"),
    [
        ("longer than it", {}, (), r"than it' has 15 tokens .* rollout.max_completion_length=8"),
        ("a", {}, ["rollout.min_new_tokens=2"], "ends after 1 tokens, before .*min_new_tokens=2"),
        ("<|im_end|>", {}, (), "has the text of a control token"),
        ("error", {}, (), "the task cannot write its gold answer: ZeroDivisionError"),
        ("", {}, (), "the task's gold answer must be text, not ''"),
        (5, {}, (), "the task's gold answer must be text, not 5"),
        ("a", {"completion": ["a"]}, (), r"its column completion must be text, not \['a'\]"),
        ("a", {"completion": ""}, (), "its column completion must be text, not ''"),
    ],
)
def test_targets_that_cannot_be_trained_on_name_their_row(policy, answer, meta, overrides, problem):
    writer = TargetWriter(policy, make_settings(*overrides))
    with pytest.raises(UserError, match=f"^rows.jsonl:3: example a: .*{problem}"):
        writer.write(make_example(answer, meta), Copy())


TURN = "{% for m in messages %}{% set c = m['content'] %}{{ c if c is string else c[0]['text'] }}"


@pytest.mark.parametrize(
    ("after", "expected"),
    [("<|im_end|>\n", "<|im_end|>"), ("<|endoftext|>", "<|endoftext|>"), ("", "<|endoftext|>")],
)
def test_the_end_token_is_that_of_the_chat_template(after, expected):
    """A model can have several; Gemma's first one, for example, is not that of a turn."""
    policy = tiny_policy("qwen2_5_vl")
    tokens = policy.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    policy.distribution = type(policy.distribution)(eos=tuple(tokens))
    policy.processor.chat_template = TURN + after + "{% endfor %}"
    assert find_end_token(policy) == policy.tokenizer.convert_tokens_to_ids(expected)


def test_targets_are_read_as_answers_without_a_reward(settings):
    warm_start = make_trainer(settings(rollout=LIMIT, warm_start=WARM)).methods["warm_start"]
    examples = (replace(noise_example(text, []), answer=text) for text in ("a", "raise"))
    groups = warm_start.write([make_prompt(warm_start.run.policy, e) for e in examples], Copy())
    assert [[c.text for c in group.completions] for group in groups] == [["a"], ["raise"]]
    (first,), (failed,) = (group.scores for group in groups)
    assert (first.answer, failed.answer) == ("a", None)
    assert "KeyError" in failed.failures["parse"]
    assert not first.rewards
    assert first.total is None
