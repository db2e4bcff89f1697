"""Every family: the forms of sampling and scoring compute what plain transformers computes."""

import functools
from typing import Any

import pytest
import torch
from family_models import ALIKE, BUILDERS
from family_policies import (
    backpropagate,
    build_family_policy,
    build_prompts,
    make_batch,
    read_gradient,
    score_each_alone,
)
from gradients import relative_distance, use_float64_recurrence
from small_runs import make_trainer, small_run
from tiny_models import (
    FAMILIES,
    fill_adapters,
    make_prompt,
    noise_example,
    pack_groups,
    pack_tokens,
    read_tokens,
    sample_groups,
    sampled_logprobs,
)
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlm_grpo.model.families.family import place
from vlm_grpo.model.policy import load_policy
from vlm_grpo.model.sharing_check import BOUND
from vlm_grpo.types import Prompt

GATED_DELTA = [name for name in BUILDERS if name.startswith(("qwen3_5", "minicpm"))]
# Of layers that cannot share a prompt: cross-attention, indexed attention.
SHARED = [name for name in BUILDERS if name not in ("mllama", "qwen4_exp")]
FORMS = [(n, "repeated") for n in BUILDERS] + [(n, "shared") for n in SHARED]
SAMPLED = [pair for pair in FORMS if pair[1] == "shared" or pair[0] not in ALIKE]
# Images side by side in one tensor, and rows that are read one at a time.
SAMPLED += [("minicpmv4_6", "repeated"), ("hunyuan_vl", "repeated")]
LONGER = [name for name in BUILDERS if name not in ALIKE]
# Features and experts chosen by layers and by the types of tokens.
GRADIENTS = [n for n in SHARED if n in (*LONGER, "molmo2", "granite4_vision", "ernie4_5_vl_moe")]


def test_an_image_can_have_as_many_patches_as_its_prompt_has_tokens():
    policy = build_family_policy("gemma4", torch.float64, banned=())
    [prompt] = build_prompts(policy, "gemma4", 1)
    missing = prompt.vision["pixel_values"].shape[1] - len(prompt.token_ids)
    example = noise_example("0", [(60, 40)], "What is it?" + "?" * missing)
    prompt = make_prompt(policy, example)
    assert prompt.vision["pixel_values"].shape[:2] == (1, len(prompt.token_ids))
    batch = pack_tokens([prompt], [[(70, 71, 72)]])
    expected = score_each_alone(policy.model, batch)
    torch.testing.assert_close(policy.score(batch).logprobs, expected, rtol=0, atol=1e-9)


@functools.cache
def score_plainly(name: str) -> Tensor:
    """Score each completion of four prompts alone, by plain transformers."""
    policy = build_family_policy(name, torch.float64, banned=())
    return score_each_alone(policy.model, make_batch(build_prompts(policy, name, 4)))


@functools.cache
def generate_greedily(name: str) -> tuple[list[Prompt], list[tuple[int, ...]]]:
    """Build four different prompts, and generate four tokens for each by plain transformers."""
    policy = build_family_policy(name, torch.float64, temperature=0.0)
    policy.model.eval()  # in training, Molmo 2 asks for more of each pass
    prompts, generated = build_prompts(policy, name, 4), []
    for prompt in prompts:
        tokens = torch.tensor([prompt.token_ids])
        output = policy.model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            **place(policy.model, prompt.vision),
            max_new_tokens=4,
            do_sample=False,
            suppress_tokens=list(policy.distribution.banned) or None,
        )
        generated.append(tuple(output[0, tokens.shape[1] :].tolist()))
    return prompts, generated


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_scores_equal_plain_forward_passes(name, form, monkeypatch):
    policy = build_family_policy(name, torch.float64, shared=form == "shared", banned=())
    use_float64_recurrence(monkeypatch, policy.model)
    scores = policy.score(make_batch(build_prompts(policy, name, 4)), with_entropy=True)
    # Where scores are capped, transformers computes the softmax in float32.
    bound = 1e-6 if name.startswith("paligemma") and form == "shared" else 1e-9
    torch.testing.assert_close(scores.logprobs, score_plainly(name), rtol=0, atol=bound)


@pytest.mark.no_shapes
@pytest.mark.parametrize(("name", "form"), [*SAMPLED, *((name, "shared") for name in FAMILIES)])
def test_greedy_samples_equal_generate(name, form, monkeypatch):
    policy = build_family_policy(name, torch.float64, shared=form == "shared", temperature=0.0)
    use_float64_recurrence(monkeypatch, policy.model)
    prompts, generated = generate_greedily(name)
    # Room for 2 prompts: places are given to other completions, and given up.
    budget = 2 * (max(len(prompt.token_ids) for prompt in prompts) + 2 * 4)
    groups = sample_groups(policy, prompts, group_size=2, max_tokens=budget, length=4)
    assert read_tokens(groups) == [[tokens] * 2 for tokens in generated]
    with torch.no_grad():
        scores = policy.score(pack_groups(prompts, groups)).logprobs
    # Padding on the left shifts the rotary positions, which are float32: at most 2e-5 here.
    torch.testing.assert_close(scores.float(), sampled_logprobs(groups), rtol=0, atol=5e-5)


@pytest.mark.no_shapes
# Gemma 3n's tower is another one here, which its configuration does not name.
@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "gemma3n"])
def test_a_changed_model_is_loaded_and_saved_as_transformers_does(name, tmp_path):
    torch.manual_seed(0)
    model, processor = BUILDERS[name]()
    for part in (model, processor):
        part.save_pretrained(tmp_path / "model")
    policy = load_policy(small_run(tmp_path, tmp_path / "model"))
    assert policy.shared == (name in SHARED)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for key, weight in policy.trainable_parameters():
            assert torch.equal(weight, own[key])
            weight.mul_(0.9)
    policy.save(tmp_path / "saved", policy.weights())
    kind: Any = AutoModelForImageTextToText
    loaded, report = kind.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    changed = dict(policy.model.named_parameters())
    assert all(torch.equal(value, changed[key]) for key, value in loaded.named_parameters())
    assert type(AutoProcessor.from_pretrained(tmp_path / "saved")) is type(processor)


MODES: dict[str, dict[str, Any]] = {
    "full": {"dtype": "float32", "gradient_checkpointing": "none"},
    "checkpointed": {"dtype": "float32", "gradient_checkpointing": "full"},
    "frozen": {"dtype": "float32", "freeze": ["vision"]},
    "lora": {"dtype": "float32", "lora": {"r": 4, "alpha": 8}},
}

PARTS = {"qwen3_vl_moe": "frozen", "gemma4": "lora", "qwen3_5": "lora", "internvl": "frozen"}
"""Families that also train a part: those with experts, windows, recurrent layers, and neither."""


def compute_gradient(
    name: str, shared: bool, settings: dict[str, Any], patch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """Compute the gradient of a weighted sum of log-probs of four prompts, in float64."""
    policy = build_family_policy(name, torch.float64, shared=shared, policy=settings, banned=())
    use_float64_recurrence(patch, policy.model)
    torch.manual_seed(1)
    fill_adapters(policy.model)
    return backpropagate(policy, policy.score(make_batch(build_prompts(policy, name, 4))).logprobs)


@pytest.mark.no_shapes
@pytest.mark.parametrize("name", GRADIENTS)
def test_both_forms_have_the_same_gradient(name, monkeypatch):
    """Every family trains in full, by turns with recomputed layers; a few also a part."""
    for mode in ([*MODES][GRADIENTS.index(name) % 2], *([PARTS[name]] if name in PARTS else [])):
        settings = MODES[mode]
        plain = settings | {"gradient_checkpointing": "none"}  # which computes the same
        found = compute_gradient(name, True, settings, monkeypatch)
        expected = compute_gradient(name, False, plain, monkeypatch)
        # Norms compute in float32 in most families, and their gradients are rounded to it.
        assert relative_distance(found, expected) < 1e-6, mode


@pytest.mark.no_shapes
@pytest.mark.parametrize("name", [*PARTS, "paligemma", "mllama"])
def test_a_run_trains_it(name, tmp_path):
    torch.manual_seed(0)
    for part in BUILDERS[name]():
        part.save_pretrained(tmp_path / "model")
    trainer = make_trainer(small_run(tmp_path, tmp_path / "model"))
    assert 0 < trainer.step()["grad_norm"] < 1e3
    trainer.sampler.close()


@pytest.mark.parametrize("name", GATED_DELTA)
def test_recurrent_layers_in_float32_differ_by_rounding(name):
    """A new chunk of tokens begins at the end of a shared prompt."""
    scores = []
    for shared in (False, True):
        policy = build_family_policy(name, shared=shared, banned=())
        with torch.no_grad():
            scores.append(policy.score(make_batch(build_prompts(policy, name, 4))).logprobs)
    difference = (scores[0] - scores[1]).abs()
    assert 0 < difference.max() < 1e-3
    assert difference.mean() < BOUND / 5


@pytest.mark.parametrize("shared", [False, True])
def test_the_auxiliary_loss_of_routers_is_not_part_of_the_gradient(shared):
    gradients: list[dict[str, Tensor]] = []
    for has_loss in (False, True):
        policy = build_family_policy("qwen3_vl_moe", shared=shared, policy=MODES["full"])
        policy.model.config.text_config.output_router_logits = has_loss
        policy.score(make_batch(build_prompts(policy, "qwen3_vl_moe", 1))).logprobs.sum().backward()
        gradients.append(read_gradient(policy))
    assert any("gate.weight" in name for name in gradients[0])  # of routers
    assert relative_distance(*gradients) == 0
