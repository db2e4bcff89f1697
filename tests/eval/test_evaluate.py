"""Evaluations of recipes: when they are due in training, the best of them, summaries, files."""

from pathlib import Path
from typing import Any

from commands import write_jsonl
from PIL import Image

from vlm_grpo import Settings, load_policy, load_settings, load_task, train
from vlm_grpo.data.loading import load_data
from vlm_grpo.dist.launch import build_accelerator
from vlm_grpo.dist.strategy import Strategy
from vlm_grpo.eval.evaluate import HeldOutEvaluator
from vlm_grpo.task.scorer import RewardScorer
from vlm_grpo.utils.jsonl import read_rows


def test_training_keeps_the_best_checkpoint_by_its_benchmark(tmp_path):
    definition = tmp_path / "errors.yaml"
    definition.write_text("title: E\ntask: counting\nmetric: absolute_error\nvariants: [rmse]\n")
    overrides = [
        *("data.eval_limit=40", "data.train_limit=40", f"evaluation.benchmark={definition}"),
        *("evaluation.every=1", "optim.max_steps=4", "optim.prompts_per_step=4", "optim.lr=3e-4"),
        *("optim.warmup_steps=0", "checkpoint.every=1", "checkpoint.keep_last=1"),
        *("checkpoint.keep_best=true", f"output_dir={tmp_path / 'runs'}", "name=benchmark"),
    ]
    result: Any = train(load_settings("counting", overrides))
    assert result.after.primary_metric == "absolute_error"
    metrics = read_rows(result.run_dir / "metrics.jsonl")
    errors = {row["step"] + 1: row["eval/absolute_error"] for row in metrics}
    assert len(set(errors.values())) > 1, "the learning rate is large enough to change answers"
    least = min(errors, key=lambda step: (errors[step], step))
    kept = {path.name for path in (result.run_dir / "checkpoints").iterdir()}
    # The initial model (step 0) may be the best; it has no checkpoint.
    expected = {"step-4"} if result.before.value <= errors[least] else {"step-4", f"step-{least}"}
    assert kept == expected
    assert "absolute error" in (result.run_dir / "report.html").read_text()


def small_settings(*overrides: str) -> Settings:
    return load_settings("counting", ["data.eval_limit=4", "data.train_limit=4", *overrides])


def make_evaluator(*overrides: str) -> HeldOutEvaluator:
    task, settings = load_task("counting"), small_settings(*overrides)
    _, examples = load_data(settings, task)
    strategy = Strategy(load_policy(settings), build_accelerator(settings))
    return HeldOutEvaluator(strategy, task, examples, settings, RewardScorer())


def test_evaluations_are_due_at_intervals_and_the_first_of_equal_results_is_the_best():
    evaluator = make_evaluator("evaluation.every=3", "optim.max_steps=7", "optim.warmup_steps=0")
    assert [step for step in range(1, 8) if evaluator.is_due(step)] == [3, 6, 7]
    results: Any = [evaluator.evaluate(step) for step in (0, 5)]
    first, second = results
    assert first.value == second.value  # the weights have not changed
    assert evaluator.best == (first.value, 0)
    evaluator = make_evaluator("data.eval=null", "data.eval_limit=null", "evaluation.every=0")
    assert not evaluator.is_due(load_settings("counting").optim.max_steps)
    assert (evaluator.evaluate(0), evaluator.best) == (None, None)


def test_held_out_data_that_is_trained_on_and_settings_of_no_video_are_reported(tmp_path, caplog):
    Image.new("RGB", (30, 30)).save(tmp_path / "a.png")
    row = {"question": "How many?", "answer": 3}
    image = row | {"images": ["a.png"]}
    video = row | {"videos": [{"frames": ["a.png", "a.png"]}]}
    contents = {"text": row, "image": image, "same": image, "video": video}
    path = {n: write_jsonl(tmp_path / f"{n}.jsonl", content) for n, content in contents.items()}

    def warn(*overrides: str, **sources: Path) -> str:
        caplog.clear()
        given = [*overrides, *(f"data.{split}={path}" for split, path in sources.items())]
        load_data(small_settings(*given), load_task("counting"))
        return caplog.text

    assert warn() == ""  # the embedded data, whose splits differ
    assert warn(eval=path["text"]) == ""
    warning = "data.eval is data.train: the evaluation is not on held-out examples"
    assert warning in warn(eval=path["text"], train=path["text"])
    found = warn(train=path["image"], eval=path["same"])
    assert "1 of 1 held-out examples show an image that is also trained on" in found
    warning = "data.video has no effect: no example has a video"
    assert warning not in found
    assert warning not in warn("data.video.fps=1", train=path["image"], eval=path["video"])
    assert warning in warn("data.video.fps=1", train=path["image"], eval=path["same"])
