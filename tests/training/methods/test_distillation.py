"""On-policy distillation: the teacher's scores, its gradient, and what is refused."""

import json
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from groups import make_tokens
from small_runs import make_trainer, save_tiny_model
from tiny_models import noise_example

from vlm_grpo.config.objective import ObjectiveSettings
from vlm_grpo.config.recipes import load_settings
from vlm_grpo.data.boxes import crop_to_boxes, mask_beyond_boxes
from vlm_grpo.errors import UserError
from vlm_grpo.model.policy import load_policy
from vlm_grpo.planning.plan import plan
from vlm_grpo.training.methods import Passes, build_methods
from vlm_grpo.training.methods.distillation import load_teacher
from vlm_grpo.training.objective.losses import policy_loss
from vlm_grpo.training.objective.token_batch import StepTotals
from vlm_grpo.training.step_batch import Rollout


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    """Over all tokens of a vocabulary of five, each weighted with its probability."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    settings = ObjectiveSettings(distillation={"teacher": "any", "coef": 0.5, "only": True})
    methods = build_methods({"objective": settings})
    logprobs, other = logits.log_softmax(-1), teacher.log_softmax(-1)
    loss = torch.zeros((), dtype=torch.float64)
    for token, probability in enumerate(logprobs.detach().exp()):
        scores = {"teacher_logprobs": other[token, None]}
        batch = make_tokens(logprobs[token, None], [1], scores=scores)
        one = policy_loss(batch, StepTotals(1, 1, 1), settings, methods=methods)
        loss = loss + probability * one.loss
    logprobs = logits.log_softmax(-1)
    kl = 0.5 * (logprobs.exp() * (logprobs - other)).sum()
    (found,), (expected,) = torch.autograd.grad(loss, logits), torch.autograd.grad(kl, logits)
    assert loss.item() == pytest.approx(kl.item())
    assert torch.allclose(found, expected, atol=1e-12)


def test_a_teacher_that_reads_other_images_or_tokens_is_refused(tmp_path):
    student, other = (save_tiny_model(tmp_path / name) for name in ("student", "other"))
    path = other / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["image_mean"] = [0.0, 0.0, 0.0]
    path.write_text(json.dumps(config))
    settings = load_settings("counting", [f"model={student}"])
    policy = load_policy(settings)
    for teacher, problem in ((str(other), "preparation of images"), ("embedded", "vocabulary")):
        with pytest.raises(UserError, match=f"teacher=.*its {problem} is not that of"):
            load_teacher(settings, teacher, policy)
    with pytest.raises(UserError, match="there is no such folder"):
        load_teacher(settings, f"{tmp_path}/missing", policy)


def test_a_plan_counts_the_teacher():
    name = "objective.distillation"
    values = [f"{name}{value}" for value in ("=null", ".teacher=embedded", "={}")]
    runs = (load_settings("counting", ["data.train_limit=20", value]) for value in values)
    plain, taught, own = (plan(run, "24GB").step for run in runs)
    weights = taught.shape.num_weights * taught.shape.value_bytes
    assert taught.memory.teacher == weights
    assert taught.memory.peak == plain.memory.peak + weights
    assert own.memory.reference == own.memory.gradients  # a copy of the trained weights
    assert own.memory.peak == plain.memory.peak + own.memory.reference


def test_the_teacher_sees_the_part_around_all_boxes_or_only_what_is_inside():
    (image,) = noise_example("a", [(100, 80)], seed=1).images
    pixels = np.asarray(image.load())
    boxes = (20.0, 20.0, 40.0, 30.0), (30.0, 40.0, 50.0, 60.0)
    crop, mask = (change(image, boxes, 0.5) for change in (crop_to_boxes, mask_beyond_boxes))
    assert (np.asarray(crop.load()) == pixels[15:70, 10:60]).all()  # half of the sides beyond
    shown = np.zeros_like(pixels)
    for x1, y1, x2, y2 in ((10, 15, 50, 35), (20, 30, 60, 70)):
        shown[y1:y2, x1:x2] = pixels[y1:y2, x1:x2]
    assert (np.asarray(mask.load()) == shown).all()


def test_the_teacher_sees_what_is_inside_the_boxes_of_the_best_answer(settings, monkeypatch):
    changes: dict[str, Any] = {"task": "grounding", "task_options": {"instruction": None}}
    teaching = {"teacher_prompt": "mask", "boxes": "own", "margin": 0}
    changes |= {"data": {"train": "embedded:grounding"}, "objective": {"distillation": teaching}}
    run = settings(**changes)
    trainer, seen = make_trainer(run), list[Any]()
    first, *others = trainer.sampler.sample(0).groups
    best = [(5.0, 6.0, 20.0, 30.0)]
    boxes = [(0.0, 0.0, 9.0, 9.0)], best, None, [(1.0, 1.0, 2.0, 2.0)]
    pairs = zip(boxes, (0.2, 0.7, 0.9, None), strict=True)
    scores = tuple(replace(first.scores[0], answer=a, total=total) for a, total in pairs)
    none = tuple(replace(score, answer=None) for score in scores)
    silent = [replace(group, scores=none) for group in others]
    rollout = Rollout((replace(first, scores=scores), *silent))
    score = Passes.score
    monkeypatch.setattr(Passes, "score", lambda own, x, *y: seen.extend(x) or score(own, x, *y))
    found = trainer.updater.score(rollout)["teacher_logprobs"]
    (piece,) = seen  # the other groups have no answer, and no teacher
    image, shown = first.prompt.example.images[0], piece.prompt.example.images[0]
    expected = mask_beyond_boxes(image, best, 0)
    assert (np.asarray(shown.load()) == np.asarray(expected.load())).all()
    method = cast("Any", trainer.methods["distillation"])
    assert [method.covers(group) for group in rollout.groups] == [True, False, False]
    rest = slice(sum(len(c.token_ids) for c in first.completions), None)
    assert torch.equal(found[rest].cpu(), rollout.sampler_logprobs[rest])


def test_tokens_are_not_balanced_by_their_gain_if_all_have_a_high_one(settings):
    """The others are compared in ``tests/test_wiring.py``."""
    teaching = {"teacher_prompt": "crop", "high_share": 0.25}
    words = {"train": "embedded:tiny_words:cells=2"}
    trainer = make_trainer(settings(data=words, objective={"distillation": teaching}))
    rollout, method = trainer.sampler.sample(0), cast("Any", trainer.methods["distillation"])
    gains = torch.arange(float(rollout.layout.total))
    ties = (gains > 0.9 * len(gains)).float() - 1  # three quarters and more have the smallest
    assert torch.equal(method._balance(rollout, ties), torch.ones_like(gains))  # noqa: SLF001
