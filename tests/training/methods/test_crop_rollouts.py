"""Groups of which a part is sampled behind the crop that the answer needs."""

from dataclasses import replace
from typing import Any

from small_runs import make_trainer
from steps import assert_sampled_behind
from tiny_models import noise_clip, noise_example

from vlm_grpo.training.methods.crop_rollouts import Cropped

EVIDENCE = {"evidence": [[60, 2, 80, 30], [90, 10, 95, 20]]}


def test_a_part_of_a_group_is_sampled_behind_the_crop_and_kept_with_the_image(settings):
    methods = [{"file": "crop_rollouts", "options": {"share": 0.25, "margin": 0.3}}]
    words = {"train": "embedded:tiny_words:cells=2"}
    trainer = make_trainer(settings(data=words, methods=methods))
    sampler, variant = trainer.sampler, trainer.methods["crop_rollouts"].variant(0)
    groups = sampler.sample(0).groups
    prompts = sampler.loader.load(range(3), variant)
    crops = {prompt.example.id: prompt.variant for prompt in prompts}
    for group in groups:
        crop: Any = crops[group.id]
        (image,) = crop.example.images
        assert any(side % 28 for side in image.size)  # before the resize
        assert not any(side % 28 for side in image.resized_size)
        assert len(crop.token_ids) < len(group.prompt.token_ids)
        assert [c.variant for c in group.completions] == [None, None, None, ("crop", 1)]
        assert_sampled_behind(sampler.policy, group, crop)


def test_the_crop_is_around_all_boxes_within_the_image_and_other_examples_have_none():
    whole = replace(noise_example("a", [(112, 56)]), meta=EVIDENCE)
    for margin, expected in ((0.0, (60, 2, 95, 30)), (1.0, (40, 0, 100, 56))):
        changed: Any = Cropped(margin).change(whole, 0)
        part = whole.images[0].load().crop(expected)
        assert changed.images[0].load().tobytes() == part.tobytes()
        assert changed.images[0].size == part.size
    for change in (
        {"meta": {}},
        {"meta": {"evidence": "page 3"}},
        {"images": noise_example("b", [(112, 56), (28, 28)]).images},
        {"images": (noise_clip("c", (112, 56), 2),)},
        {"images": ()},
        {"answer": {"boxes": [[1, 2, 3, 4]]}},  # of the image, not of the crop
    ):
        assert Cropped(0.1).change(replace(whole, **change), 0) is None
