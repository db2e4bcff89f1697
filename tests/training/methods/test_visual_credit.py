"""The map of credit over an image, its share inside boxes, and its place on the page."""

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import make_trainer, read_metrics

from vlm_grpo.media.images import encode_png
from vlm_grpo.model.engine.packing import GroupSlice, MicroBatch
from vlm_grpo.model.families.family import ImageFeatures
from vlm_grpo.report.page import build_report
from vlm_grpo.training.methods.visual_credit import cover_cells, measure_credit
from vlm_grpo.training.step_batch import Rollout
from vlm_grpo.training.trainer import Trainer, train
from vlm_grpo.training.update import Updater
from vlm_grpo.types import Example, ImageRef
from vlm_grpo.utils.jsonl import read_rows

BOXED = {"train": "embedded:grounding"}


def find_grid(trainer: Trainer, example: Example) -> tuple[ImageRef, tuple[int, int]]:
    """Return the resized image of an example, and its rows and columns of tokens."""
    (image,) = trainer.policy.prompts.with_resized_sizes(example).images
    grid = trainer.policy.family.token_grid(image, trainer.policy.prompts.processor)
    assert grid is not None
    return image, grid


def test_credit_is_the_norm_over_all_layers_and_boxes_cover_shares_of_cells():
    embeds, level, unused = (torch.zeros(2, 2, requires_grad=True) for _ in range(3))
    (embeds * torch.tensor([[1.0, 2.0], [0.0, 0.0]]) + 2 * level).sum().backward()
    found = measure_credit(ImageFeatures(embeds, (level, unused)))
    assert found == pytest.approx([13**0.5, 8**0.5])  # 1 + 4 + 4 + 4, and 4 + 4
    # Two rows of three cells of 20 x 10 pixels; the boxes overlap in the middle cell.
    boxes = [(10.0, 0.0, 30.0, 10.0), (20.0, 5.0, 40.0, 20.0)]
    covered = cover_cells(boxes, (60, 20), (2, 3))
    assert covered.tolist() == [[0.5, 0.75, 0.0], [0.0, 1.0, 0.0]]
    assert not cover_cells([(60.0, 0.0, 90.0, 20.0)], (60, 20), (2, 3)).any()  # outside


def test_a_run_measures_and_draws_the_credit_of_examples_with_boxes(settings):
    changes = {"task": "grounding", "task_options": {"instruction": None}, "data": BOXED}
    run = settings(methods=["visual_credit"], optim={"max_steps": 2}, **changes)
    trainer = make_trainer(run)
    method: Any = trainer.methods["visual_credit"]
    examples = trainer.train_examples[:2]
    # All credit in the first token, and in every one alike.
    grids = [find_grid(trainer, example)[1] for example in examples]
    one = np.zeros(grids[0])
    one[0, 0] = 1.0
    method.maps = {examples[0].images[0]: one, examples[1].images[0]: np.ones(grids[1])}
    for example, grid in zip(examples, grids, strict=True):
        covered = cover_cells(example.answer["boxes"], example.images[0].size, grid)
        inside = covered[0, 0] if example is examples[0] else covered.mean()
        assert method._find_shares(example) == pytest.approx((inside, covered.mean()))  # noqa: SLF001
    drawn = method.draw(examples[0])
    assert drawn.size == examples[0].images[0].size
    width, height = (side // n for side, n in zip(drawn.size, grids[0][::-1], strict=True))
    assert drawn.getchannel("A").getbbox() == (0, 0, width, height)
    # The maps of several updates add up.
    image, (rows, columns) = find_grid(trainer, trainer.train_examples[2])
    updates = []
    for size in (1.0, 2.0):
        embeds = torch.zeros(rows * columns, 4, requires_grad=True)
        embeds.grad = torch.full_like(embeds, size)
        updates.append({(image,): ImageFeatures(embeds)})
    method.read_features(updates)
    assert method.maps[image].tolist() == [[6.0] * columns] * rows  # the norms are 2 and 4


def test_an_update_that_runs_out_of_memory_counts_once(settings, monkeypatch):
    def measure(fails: int) -> dict[Any, np.ndarray]:
        torch.manual_seed(0)
        trainer = make_trainer(settings(methods=["visual_credit"]))
        trainer.policy.sharing_check = None  # also calls ``_backward``
        backward, left = Updater._backward, iter(range(fails))  # noqa: SLF001

        def fail_behind(*given: Any) -> Any:
            found = backward(*given)
            for _ in left:
                raise torch.OutOfMemoryError("out of memory")
            return found

        monkeypatch.setattr(Updater, "_backward", fail_behind)
        trainer.step()
        monkeypatch.setattr(Updater, "_backward", backward)
        return dict(trainer.methods["visual_credit"].maps)  # type: ignore[attr-defined]

    expected, found = measure(0), measure(1)
    assert any(own.any() for own in expected.values())
    for image, own in expected.items():
        assert found[image] == pytest.approx(own, rel=1e-4)


def test_the_page_has_the_map_of_a_group_with_a_gradient(settings):
    run = settings(methods=["visual_credit"], optim={"max_steps": 1}, data=BOXED)
    train(run)
    rows = read_rows(run.run_dir / "samples/step-000000.jsonl")
    names = [row["layers"]["visual_credit"] for row in rows if "layers" in row]
    assert names
    assert all((run.run_dir / "samples/images" / name).is_file() for name in names)
    page = build_report(run.run_dir).read_text()
    assert names[0] in page
    row, *_ = read_metrics(run.run_dir)
    assert 0 < row["visual_credit/in_boxes"] < 1
    assert 0.05 < row["visual_credit/box_area"] < 0.5  # shapes of a quarter of the sides or more


def test_gains_without_the_object_are_compared_with_rewards(settings, monkeypatch):
    hiding = {"file": "visual_credit", "options": {"hide_object": True}}
    run = settings(methods=[hiding], data=BOXED)
    trainer, rollouts = make_trainer(run), list[Any]()
    policy, score = trainer.policy, trainer.updater.score

    def keep(rollout: Rollout) -> Any:
        group, *others = rollout.groups
        scores = (replace(group.scores[0], answer=None), *group.scores[1:])
        rollouts.append(replace(rollout, groups=(replace(group, scores=scores), *others)))
        return score(rollouts[-1])

    monkeypatch.setattr(trainer.updater, "score", keep)
    first, name = copy.deepcopy(policy.model.state_dict()), "visual_credit/gain_without_object"
    assert trainer.step()[name] == 0.0  # the weights are those at the start
    now = copy.deepcopy(policy.model.state_dict())
    found = trainer.step()[name]
    gains, rewards = [], []
    for group in rollouts[1].groups:
        example, prompt = group.prompt.example, group.prompt
        (image,) = example.images
        pixels = np.array(image.load())
        mean = pixels.mean((0, 1)).round()
        for x1, y1, x2, y2 in example.answer["boxes"]:
            pixels[int(y1) : math.ceil(y2), int(x1) : math.ceil(x2)] = mean
        shown = ImageRef("hidden", image.size, image.size, data=encode_png(Image.fromarray(pixels)))
        hidden = policy.prompts.with_resized_sizes(replace(example, images=(shown,)))
        for completion, own in zip(group.completions, group.scores, strict=True):
            behind = policy.prompts.encode_text(hidden, prompt.text)
            piece = GroupSlice(behind, (completion.token_ids,), (0,))
            means = []
            for weights in (now, first):
                policy.model.load_state_dict(weights)
                policy.engine.clear_image_features()
                means.append(policy.score(MicroBatch((piece,))).logprobs.mean().exp().item())
            if own.answer is not None:
                gains.append(means[0] - means[1])
                rewards.append(own.total)
    slope = np.polyfit(rewards, gains, 1)[0]
    assert abs(slope) > 1e-5
    assert found == pytest.approx(slope, rel=1e-3)
