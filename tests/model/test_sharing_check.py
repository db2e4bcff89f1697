"""A shared form that does not compute what transformers does is noticed, and given up."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from recorded import record_calls
from small_runs import make_embedded_trainer
from tiny_models import make_prompt, noise_example, read_tokens, sample_groups, tiny_policy
from torch import Tensor

from vlm_grpo.errors import UserError
from vlm_grpo.model.engine import attention, kernels
from vlm_grpo.model.engine.repeated import Counters
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.engine.shared import PrefixInputs
from vlm_grpo.model.policy import Policy
from vlm_grpo.model.sharing_check import SharingCheck
from vlm_grpo.types import Completion, Group, Prompt


def checked_policy(must_share: bool = False) -> tuple[Policy, Prompt]:
    policy = tiny_policy("qwen2_5_vl")
    policy.sharing_check = SharingCheck(must_share)
    return policy, make_prompt(policy, noise_example("a", [(56, 84)]))


def sample(policy: Policy, prompt: Prompt) -> list[tuple[int, ...]]:
    return read_tokens(sample_groups(policy, [prompt], length=6))[0]


def test_a_correct_form_is_kept_and_changes_nothing():
    unchecked = tiny_policy("qwen2_5_vl")
    policy, prompt = checked_policy()
    assert sample(policy, prompt) == sample(unchecked, prompt)
    assert policy.shared
    assert policy.counters == unchecked.counters != Counters()


def test_a_wrong_form_is_given_up_with_one_warning_or_ends_the_run(monkeypatch, caplog):
    policy, prompt = checked_policy()
    must_share, _ = checked_policy(must_share=True)
    length = property(lambda self: len(self.token_ids))
    monkeypatch.setattr(PrefixInputs, "next_position", length)
    with pytest.raises(UserError, match=r"policy\.engine=shared does not work with this"):
        sample(must_share, prompt)
    tokens = sample(policy, prompt)
    assert not policy.shared
    assert tokens == sample(tiny_policy("qwen2_5_vl", False), prompt)
    (record,) = caplog.records
    message = record.getMessage()
    assert "from now on the prompt is repeated" in message
    assert "the log-probs of scored tokens differ by" in message
    assert "rounding: at most 0.001" in message


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (torch.OutOfMemoryError("out"), "^out$"),
        # What is wrong in a call is a defect, which slower training would hide.
        (TypeError("forward() got 'attend'"), r"^forward\(\) got 'attend'$"),
        (AttributeError("no layers"), "^no layers$"),
        (ValueError("a shape\nin detail"), r"\(ValueError: a shape\): set policy\.engine=rep"),
    ],
)
def test_a_model_that_fails_ends_the_run(error, shown, monkeypatch):
    policy, prompt = checked_policy()
    monkeypatch.setattr(attention.PackedAttention, "__call__", Mock(side_effect=error))
    with pytest.raises((type(error), UserError), match=shown):
        sample(policy, prompt)
    assert policy.shared


def lower_logprobs(tokens: Tensor, logprobs: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return tokens, logprobs - 1, *others


NO_CAPTURE = RuntimeError("CUDA error: operation not permitted when stream is capturing")


@pytest.mark.parametrize("must_share", [False, True])
@pytest.mark.parametrize(
    ("capture", "problem"),
    [
        (Mock(side_effect=NO_CAPTURE), "(RuntimeError: CUDA error: operation not permitted"),
        (
            lambda step, _: lambda *inputs: lower_logprobs(*step(*inputs)),
            ": as CUDA graphs, the log-probs of sampled tokens differ by",
        ),
    ],
)
def test_wrong_or_failing_captures_are_no_fault_of_the_form(capture, problem, must_share, caplog):
    policy, prompt = checked_policy(must_share)
    policy.engine.use_capture(capture)
    assert sample(policy, prompt) == sample(tiny_policy("qwen2_5_vl"), prompt)
    assert policy.shared
    assert policy.engine.capture is None
    [record] = caplog.records
    assert "decode steps run eagerly from now on, which takes longer" in record.getMessage()
    assert problem in record.getMessage()


def test_steps_that_are_no_longer_captured_are_told_if_eager_ones_do_not_fit(monkeypatch, caplog):
    policy, _ = checked_policy()
    policy.engine.use_capture(Mock(side_effect=NO_CAPTURE))
    errors = [RuntimeError("wrong"), torch.OutOfMemoryError("out")]
    monkeypatch.setattr(policy, "compare", Mock(side_effect=errors))
    policy.check_groups([])
    assert policy.engine.capture is None
    assert "decode steps run eagerly from now on" in caplog.text


def make_group(prompt: Prompt, *lengths: int) -> Group:
    members = tuple(Completion(tuple(range(70, 70 + n)), (), "", "eos") for n in lengths)
    return Group(prompt, members, ())


def test_only_much_larger_shapes_are_checked_again_and_a_lack_of_memory_ends_no_run(monkeypatch):
    policy, prompt = checked_policy()
    check: Any = policy.sharing_check
    assert check.is_larger([make_group(prompt, 3)])  # as an outside sampler's first group
    sample(policy, prompt)
    assert not check.is_larger([make_group(prompt, 3, 16)])
    assert check.is_larger([make_group(prompt, 3, 17)])
    calls = record_calls(monkeypatch, policy, "compare")
    policy.check_groups([make_group(prompt, 3, 17)])
    assert max(map(len, calls[0].arguments[0].slices[0].completions)) == 17
    assert policy.shared
    assert not check.is_larger([make_group(prompt, 34)])
    long = make_prompt(policy, noise_example("b", [(280, 280), (280, 280)]))
    assert check.is_larger([make_group(prompt, 3), make_group(long, 3)])
    assert check.is_larger([make_group(prompt, 35), make_group(prompt, 3)])
    batch = check.choose_batch([make_group(prompt, length) for length in (3, 40, 5)])
    assert len(batch.slices[0].completions[0]) == 40
    fail = Mock(side_effect=torch.OutOfMemoryError("out"))
    monkeypatch.setattr(attention.PackedAttention, "__call__", fail)
    policy.check_groups([make_group(prompt, 40)])
    fail.assert_called()
    assert policy.shared


def test_images_are_checked_as_soon_as_a_prompt_has_some(monkeypatch, caplog):
    policy, with_image = checked_policy()
    text = make_prompt(policy, noise_example("t", [], "What? " * 20))
    settings = SamplingSettings(policy.distribution, 6)
    calls = record_calls(monkeypatch, Policy, "compare")
    for prompts in ([text], [text, text], [text, with_image], [with_image], [text]):
        policy.sample(prompts, settings, 2, [(1,)] * len(prompts))
    checked = [call.arguments[1].slices[0].prompt for call in calls]
    assert checked == [text, with_image]
    assert policy.sharing_check is not None
    assert policy.sharing_check.checked == (max(len(p.token_ids) for p in checked), 8)
    other, with_image = checked_policy()
    text = make_prompt(other, noise_example("t", []))
    other.sample([text, with_image], settings, 2, [(1,), (2,)])
    assert [call.arguments[1].slices[0].prompt for call in calls[2:]] == [with_image]


def test_dropout_is_no_fault_of_the_form():
    policy, prompt = checked_policy()
    layer, dropout = policy.model.get_decoder().layers[0], torch.nn.functional.dropout
    layer.register_forward_hook(lambda own, _, output: dropout(output, 0.5, own.training))
    policy.model.train()
    sample(policy, prompt)
    assert policy.shared
    assert policy.model.training


def test_a_form_that_is_wrong_for_larger_shapes_is_given_up_in_a_run(tmp_path, monkeypatch, caplog):
    lengths = ("rollout.max_completion_length=24", "rollout.min_new_tokens=24")
    trainer = make_embedded_trainer(tmp_path, *lengths)
    cascade = kernels.cascade

    def wrong_when_long(q: Any, pk: Any, pv: Any, k: Any, v: Any, lengths: Any, s: float) -> Any:
        return cascade(q, pk, pv, k, v, lengths, s * (2 if max(lengths) > 20 else 1))

    monkeypatch.setattr(kernels, "cascade", wrong_when_long)
    trainer.policy.sharing_check = SharingCheck(must_share=False)
    trainer.step()
    assert not trainer.policy.shared
    assert "from now on the prompt is repeated" in caplog.text
