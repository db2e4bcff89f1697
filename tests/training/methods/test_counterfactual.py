"""CFPO: its log-probs and its term against a computation in float64, and a run that resumes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from groups import make_tokens
from small_runs import make_trainer
from steps import capture_step
from torch import Tensor
from transformers.masking_utils import sdpa_mask

THRESHOLD = 0.8
METHOD = {"file": "counterfactual", "options": {"threshold": THRESHOLD, "kl_coef": 0.5}}
IMAGES: list[range] = []


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
    """Attend as in the counterfactual, one head and one token at a time."""
    (query,), (key,), (value,) = query, key, value
    heads, length, width = query.shape
    shared = heads // len(key)
    weights = torch.zeros(heads, length, length, dtype=torch.float64)
    for h in range(heads):
        for q in range(length):
            scores = key[h // shared, : q + 1] @ query[h, q] / width**0.5
            weights[h, q, : q + 1] = scores.exp() / scores.exp().sum()
    output = torch.zeros(1, length, heads, width, dtype=torch.float64)
    tokens = [k for image in IMAGES for k in image]
    for h in range(heads):
        means = value[h // shared, tokens].mean(0)
        for q in range(length):
            for k in range(q + 1):
                read = value[h // shared, k]
                for image in IMAGES:
                    if k in image and q >= image.stop:
                        found = weights[:, image.stop :, image.start : image.stop].flatten()
                        if weights[h, q, k] > found.mean() + THRESHOLD * found.std():
                            read = means
                output[0, q, h] += weights[h, q, k] * read
    return output, None


hf.AttentionInterface.register("counterfactual", attend)
hf.AttentionMaskInterface.register("counterfactual", sdpa_mask)


def score_in_float64(folder: Path, prompt: Any, tokens: tuple[int, ...], policy: Any) -> Tensor:
    model: Any = hf.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float64)
    model.model.language_model.config._attn_implementation = "counterfactual"  # noqa: SLF001
    ids = torch.tensor([[*prompt.token_ids, *tokens[:-1]]])
    is_image = (ids[0] == model.config.image_token_id).tolist()
    IMAGES[:] = [range(is_image.index(True), is_image.index(True) + sum(is_image))]
    vision = {name: value for name, value in prompt.vision.items() if name != "mm_token_type_ids"}
    vision["pixel_values"] = vision["pixel_values"].double()
    kinds = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(ids, mm_token_type_ids=kinds, **vision).logits
    logits = logits[0, len(prompt.token_ids) - 1 :]
    logprobs = policy.distribution(logits, torch.arange(len(tokens))).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_a_step_is_that_of_an_attention_with_replaced_values(settings, model_folder):
    trainer = make_trainer(settings(methods=[METHOD]))
    metrics, rollout, batch = capture_step(trainer)
    found = batch.layout.split(batch.values["counterfactual"])
    sampled = batch.layout.split(rollout.sampler_logprobs)
    group = rollout.groups[0]
    for row in range(2):  # of one group
        tokens = group.completions[row].token_ids
        expected = score_in_float64(model_folder, group.prompt, tokens, trainer.policy)
        torch.testing.assert_close(found[row].double(), expected, atol=2e-5, rtol=0)
        assert (found[row] - sampled[row]).abs().max() > 1e-4  # more than rounding
    divergences = [(b - a).exp() - 1 - (b - a) for a, b in zip(sampled, found, strict=True)]
    mean = torch.cat(divergences).mean().item()
    assert metrics["counterfactual/kl"] == pytest.approx(mean, rel=1e-3)
    policy, own = (batch.weights[name] for name in ("policy", "counterfactual"))
    torch.testing.assert_close(own, -0.5 * policy)  # kl_coef
    scores = {"counterfactual": torch.tensor([-1.0, -3.0])}
    inputs: Any = SimpleNamespace(batch=make_tokens(torch.tensor([-1.0, -2.0]), [2], scores=scores))
    term = trainer.methods["counterfactual"].term(inputs)
    assert term.tolist() == pytest.approx([0.0, 0.36788], abs=1e-5)  # 1 / e + 1 - 1
