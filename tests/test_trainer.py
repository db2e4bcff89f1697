"""The loop on a small random model: what it changes, what it keeps, and that it goes on exactly."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_runs
import torch
from safetensors.torch import load_file, save_file
from small_runs import (
    LORA,
    TASK,
    assert_same_run,
    load_weights,
    make_trainer,
    save_tiny_model,
    small_run,
    update_manifest,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Qwen2Config

from vlm_grpo.checkpoint.store import list_checkpoints
from vlm_grpo.config.run import Settings
from vlm_grpo.errors import UserError
from vlm_grpo.model.loading import load_model
from vlm_grpo.trainer import train


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> Any:
    return partial(small_run, tmp_path, model_folder)


def read_metrics(settings: Settings) -> list[dict[str, Any]]:
    return small_runs.read_metrics(settings.run_dir)


def test_the_same_settings_give_the_same_run(settings: Any) -> None:
    runs = [settings(name=name) for name in ("a", "b")]
    for run in runs:
        train(run)
    assert_same_run(runs[0].run_dir, runs[1].run_dir)


def test_frozen_parts_stay_bit_identical_and_others_move(settings: Any, model_folder: Path) -> None:
    before = load_file(model_folder / "model.safetensors")
    run = settings(policy={"freeze": ["vision", "projector"]})
    after = load_weights(train(run).checkpoint)
    for name, weight in before.items():
        if "visual" in name:
            assert torch.equal(weight, after[name]), name
    moved = [n for n in before if not torch.equal(before[n], after[n])]
    assert moved


@pytest.mark.parametrize(
    ("part", "inside"), [("projector", "visual.merger"), ("vision", "visual.blocks")]
)
def test_one_frozen_part_alone(settings: Any, model_folder: Path, part: str, inside: str) -> None:
    before = load_file(model_folder / "model.safetensors")
    after = load_weights(train(settings(policy={"freeze": [part]})).checkpoint)
    assert all(torch.equal(before[n], after[n]) for n in before if inside in n)
    other = "visual.blocks" if part == "projector" else "visual.merger"
    assert not all(torch.equal(before[n], after[n]) for n in before if other in n)


def test_lora_leaves_the_base_weights_alone(settings: Any) -> None:
    trainer = make_trainer(settings(policy=LORA))
    before = {n: w.clone() for n, w in trainer.policy.model.state_dict().items()}
    trainer.step()
    after = trainer.policy.model.state_dict()
    assert all(torch.equal(w, after[n]) for n, w in before.items() if "lora_" not in n)
    changed = [
        w
        for n, w in trainer.policy.trainable_parameters()
        if "lora_B" in n and bool((w != 0).any())
    ]
    assert changed


def test_a_resume_with_a_renamed_weight_fails_and_names_it(settings: Any) -> None:
    run = settings()
    checkpoint = train(run).checkpoint
    weights = load_weights(checkpoint)
    name = next(n for n in weights if n.endswith("q_proj.weight"))
    weights[name.replace("q_proj", "query_proj")] = weights.pop(name)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    update_manifest(checkpoint)
    with pytest.raises(UserError, match="q_proj"):
        train(run.model_copy(update={"resume": True}))


def test_a_second_run_does_not_overwrite_the_first(settings: Any) -> None:
    run = settings()
    train(run)
    with pytest.raises(UserError, match="resume=true"):
        train(run)


def test_work_per_unique_image_and_step(settings: Any) -> None:
    trained = settings(name="trained", rollout={"num_generations": 8})
    frozen = settings(
        name="frozen", rollout={"num_generations": 8}, policy={"freeze": ["vision", "projector"]}
    )
    for run, passes in ((trained, 2), (frozen, 1)):
        train(run)
        for row in read_metrics(run):
            # 3 prompts with one image each. One decode; one encoder pass in the rollout, and
            # one more in the update where the vision tower is trained.
            assert row["work/image_decodes"] == 3
            assert row["frac_reward_zero_std"] == 0
            assert row["work/encoder_passes"] == 3 * passes


def test_running_out_of_memory_changes_nothing_but_the_cut(
    settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gradient_norm(fail: bool) -> float:
        torch.manual_seed(0)
        trainer = make_trainer(settings())
        score, calls = trainer.policy.score, []

        def failing(batch: Any, with_entropy: bool = False) -> Any:
            calls.append(batch.num_tokens)
            if fail and batch.num_tokens > 130:
                raise torch.OutOfMemoryError("out of memory")
            return score(batch, with_entropy)

        monkeypatch.setattr(trainer.policy, "score", failing)
        norm = trainer.step()["grad_norm"]
        assert (len(calls) > 1) == fail
        return norm

    whole, cut = gradient_norm(False), gradient_norm(True)
    assert cut == pytest.approx(whole, rel=1e-5)
    assert "processing 100 tokens at a time" in caplog.text


@pytest.mark.parametrize("limit", [130, 1])
def test_a_rollout_that_runs_out_of_memory_samples_the_same_in_parts(
    settings: Any, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    trainer = make_trainer(settings())
    sample = trainer.policy.sample
    whole = trainer.sampler.sample(progress=0)

    def failing(*args: Any) -> Any:
        if args[-1] > limit:
            raise torch.OutOfMemoryError("out of memory")
        return sample(*args)

    monkeypatch.setattr(trainer.policy, "sample", failing)
    trainer.sampler.position = 0
    if limit == 1:
        with pytest.raises(UserError, match="num_generations"):
            trainer.sampler.sample(progress=0)
        return
    cut = trainer.sampler.sample(progress=0)
    texts = [[c.token_ids for group in r.groups for c in group.completions] for r in (whole, cut)]
    assert texts[0] == texts[1]
    assert trainer.sampler.budget.tokens <= limit


def test_zero_spread_groups_cost_no_update(settings: Any) -> None:
    # A reward of zero weight leaves every total at 0: no group has a spread.
    trainer = make_trainer(settings())
    object.__setattr__(trainer.task, "weights", {"letters": 0.0})
    metrics = trainer.step()
    assert metrics["frac_reward_zero_std"] == 1.0
    assert metrics["work/update_tokens"] == 0
    assert metrics["loss"] == 0.0


def test_dynamic_sampling_replaces_groups_up_to_its_limit(settings: Any) -> None:
    trainer = make_trainer(settings(rollout={"dynamic_sampling": True, "max_resample": 2}))
    metrics = trainer.step()
    assert metrics["resampled_groups"] == 0  # this reward spreads in every group
    object.__setattr__(trainer.sampler.task, "weights", {"letters": 0.0})
    position = trainer.sampler.position
    metrics = trainer.step()
    # Nothing has a spread now: two rounds of 3 fresh prompts, then the step goes on.
    assert metrics["resampled_groups"] == 6
    assert trainer.sampler.position == position + 9


def test_full_weights_train_in_float32_under_bfloat16(settings: Any) -> None:
    run = settings(policy={"dtype": "bfloat16"}, optim={"lr": 1e-6})
    loaded = load_model(run)
    assert loaded.autocast
    trainer = make_trainer(run)
    before = {n: w.detach().clone() for n, w in trainer.policy.trainable_parameters()}
    trainer.step()
    # In bfloat16 a weight of 0.1 has a spacing of 5e-4, and a step of 1e-6 would be lost.
    assert any(not torch.equal(w, before[n]) for n, w in trainer.policy.trainable_parameters())


class TestBadModels:
    def test_a_folder_that_is_no_model(self, settings: Any, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(UserError, match="empty cannot be loaded"):
            train(settings(model=str(tmp_path / "empty")))

    def test_a_text_model(self, settings: Any, tmp_path: Path) -> None:
        Qwen2Config().save_pretrained(tmp_path / "text")
        with pytest.raises(UserError, match="qwen2 model, which takes no images"):
            train(settings(model=str(tmp_path / "text")))

    def test_a_model_without_a_chat_template(
        self, settings: Any, model_folder: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "base"
        shutil.copytree(model_folder, folder)
        (folder / "chat_template.jinja").unlink()
        with pytest.raises(UserError, match="no chat template"):
            train(settings(model=str(folder)))

    def test_a_prompt_longer_than_the_context(
        self, settings: Any, model_folder: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "short"
        shutil.copytree(model_folder, folder)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["max_position_embeddings"] = 20
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=r"prompt has \d+ tokens.*holds 20.*max_pixels"):
            train(settings(model=str(folder)))

    def test_an_unknown_lora_target(self, settings: Any) -> None:
        policy = {"lora": {"target": ["q_prj"]}}
        with pytest.raises(UserError, match=r"q_prj; this model has .*q_proj"):
            train(settings(policy=policy))


def test_tensorboard_gets_metrics_by_their_trl_names_and_pictures(settings: Any) -> None:
    run = settings()
    train(run)
    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    names = {
        "reward", "reward_std", "frac_reward_zero_std", "rewards/letters/mean",
        "rewards/letters/std", "completions/mean_length", "completions/clipped_ratio", "entropy",
        "clip_ratio/region_mean", "sampling/sampling_logp_difference/mean", "loss", "grad_norm",
        "learning_rate", "memory/resident", "rewards/letters/failed",
    }  # fmt: skip
    assert names <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3, 4]
    # samples_every=1, and 3 groups a step, which are less than samples_per_step.
    assert set(events.Tags()["images"]) == {"samples/0", "samples/1", "samples/2"}
    assert [event.step for event in events.Images("samples/0")] == [1, 2, 3, 4]


def test_the_best_checkpoint_is_kept(settings: Any) -> None:
    run = settings(
        data={"eval": "embedded:ocr", "eval_limit": 8},
        evaluation={"every": 1},
        checkpoint={"every": 1, "keep_last": 1, "keep_best": True},
        optim={"max_steps": 6},
    )
    train(run)
    values = {
        row["step"] + 1: row["eval/letters"] for row in read_metrics(run) if "eval/letters" in row
    }
    best = max(values, key=lambda step: (values[step], -step))
    kept = {int(p.name.split("-")[1]) for p in (run.run_dir / "checkpoints").iterdir()}
    # The model as loaded (step 0) may be the best of all; it has no checkpoint.
    assert kept in ({best, 6}, {6})
    assert (run.run_dir / "report.html").is_file()


def test_interruption_while_a_checkpoint_is_written_leaves_the_last_one(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = settings(checkpoint={"every": 1, "keep_last": 0})
    trainer = make_trainer(run)
    save, calls = trainer.policy.save, []

    def dying(folder: Path, weights: dict[str, torch.Tensor]) -> None:
        calls.append(folder)
        save(folder, weights)
        if len(calls) == 3:
            raise OSError("No space left on device")

    monkeypatch.setattr(trainer.policy, "save", dying)
    with pytest.raises(OSError, match="No space left"):
        trainer.run()
    steps = [moment.steps for moment, _ in list_checkpoints(run.run_dir / "checkpoints")]
    assert steps == [1, 2]  # the third was never renamed into place
    assert train(run.model_copy(update={"resume": True})).checkpoint.name == "step-4"


FAILING = """
    @reward()
    def odd(self, answer, example):
        if len(answer) % 3 == 0:
            raise KeyError("no such column")
        while len(answer) % 3 == 1:
            pass
        return 1.0
"""


def test_rewards_that_raise_or_hang_are_counted_and_do_not_stop_the_run(
    settings: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "failing.py").write_text(TASK + FAILING)
    data = {"eval": "embedded:ocr", "eval_limit": 8}
    run = settings(
        task=str(tmp_path / "failing.py"),
        data=data,
        rollout={"reward_timeout": 0.02},
        optim={"max_steps": 2},
    )
    result = train(run)

    rows = read_metrics(run)
    assert len(rows) == 2
    failed = [row["rewards/odd/failed"] for row in rows]
    assert failed == [row["unscorable"] for row in rows]  # each of them cost its completion
    assert [row["rewards/letters/failed"] for row in rows] == [0, 0]
    assert 0 < sum(failed) < 2 * 12  # of 3 prompts with 4 completions in each step
    assert result.after is not None
    assert 0 < result.after.metrics["unscorable"] <= 8
    assert rows[-1]["eval/unscorable"] == result.after.metrics["unscorable"]
    told = [r.getMessage() for r in caplog.records if "odd failed" in r.getMessage()]
    assert len(told) == 1
    assert "Traceback" in told[0]
