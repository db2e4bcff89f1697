"""Runs with several sources: what is logged, learned and resumed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from groups import make_group
from small_runs import read_metrics, save_tiny_model, small_run

from vlm_grpo import Settings, UserError, load_settings, load_task, train
from vlm_grpo.data.mixed_task import Mixed
from vlm_grpo.report.run import read_run
from vlm_grpo.training.checkpoint.resume import check_same_settings, flatten_settings
from vlm_grpo.training.step_batch import Rollout, compute_advantages

MEMBERS = {"count": load_task("counting"), "read": load_task("ocr")}


def compute(task: Any, groups: Any, *overrides: str) -> torch.Tensor:
    """Return the advantages of groups under the settings of a recipe with changes."""
    accelerator: Any = SimpleNamespace(process_index=0)
    objective = load_settings("counting", overrides).objective
    rollout = Rollout(tuple(groups), task.reward_weights())
    return compute_advantages(rollout, {}, objective, None, accelerator).own


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("each", ["false", "true"])
def test_advantages_of_a_source_do_not_depend_on_the_others(estimator, each):
    """Of the batch's scale only: with normalize_each_reward, a deviation of all completions."""
    rewards = (0.0, 0.25), (1.0, 1.0)
    groups = {
        "count": make_group({"exact": 1.0}, {"exact": 0.0}, {"exact": 0.0}, name="a"),
        "read": make_group(*({"exact": a, "character_accuracy": b} for a, b in rewards), name="b"),
    }
    objective = f"advantage_estimator={estimator}", f"normalize_each_reward={each}"
    changes = [f"objective.{change}" for change in objective]
    alone = [compute(MEMBERS[name], [group], *changes) for name, group in groups.items()]
    named = [name_rewards(group, name) for name, group in groups.items()]
    mixed = compute(Mixed(members=MEMBERS), named, *changes)
    for part, own in zip(mixed.split([3, 2]), alone, strict=True):
        scale = (own / part).mean() if each == "true" else 1.0
        torch.testing.assert_close(part * scale, own)


def test_the_scale_of_the_batch_is_that_of_the_rewards_that_each_source_has():
    """A reward of another source adds nothing to a total; a group's own mean would hide it."""
    rewards = {"a": (1.0, 0.0), "b": (0.0, 1.0), "c": (0.0, 0.0)}
    plain = [make_group(*({"exact": r} for r in own), name=n) for n, own in rewards.items()]
    names = ("count", "read", "read")
    groups = [name_rewards(group, name) for group, name in zip(plain, names, strict=True)]
    members = {**MEMBERS, "count": load_task("counting", weights={"exact": 3.0})}
    found = compute(Mixed(members=members), groups, "objective.scale_rewards=batch")
    weights = [members[name].reward_weights()["exact"] for name in ("count", "read")]
    totals = torch.tensor([weights[0], 0.0, 0.0, weights[1], 0.0, 0.0])
    centered = totals - totals.view(3, 2).mean(1).repeat_interleave(2)
    torch.testing.assert_close(found, centered / (totals.std() + 1e-4))


def name_rewards(group: Any, source: str) -> Any:
    scores = tuple(score.with_prefix(source) for score in group.scores)
    return type(group)(group.prompt, group.completions, scores)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Train on two sources, one of them with tags, evaluate twice, and return the settings."""
    folder = tmp_path_factory.mktemp("mixture")
    words = {"source": "embedded:ocr", "task": str(folder / "letters.py")}
    sources = [
        {**words, "name": "plain", "weight": 2.0, "limit": 12},
        {**words, "name": "tagged", "task_options": {"tags": True}, "limit": 5},
    ]
    held_out = [{**words, "name": "held", "limit": 3}, {"source": "embedded:ocr", "name": "tagged"}]
    data = {"train": sources, "eval": held_out, "eval_limit": 2, "train_limit": None}
    settings = small_run(folder, save_tiny_model(folder / "model"), data=data, task="mixed")
    train(settings)
    return settings


def test_metrics_prompts_and_samples_are_those_of_each_source(finished):
    rows, found = read_metrics(finished.run_dir), set()
    for row in rows:
        parts = [(*n.split("/", 2), v) for n, v in row.items() if n.startswith("sources/")]
        own = {name: value for _, name, metric, value in parts if metric == "reward"}
        found |= {name for _, name, *_ in parts}
        assert min(own.values()) <= row["reward"] <= max(own.values())
        for name, value in own.items():
            assert row[f"rewards/{name}/letters/mean"] == pytest.approx(value)
            assert 0 <= row[f"sources/{name}/frac_reward_zero_std"] <= 1
    assert found == {"plain", "tagged"}
    held_out = rows[-1]["eval/held/letters"], rows[-1]["eval/tagged/letters"]
    assert rows[-1]["eval/score"] == pytest.approx(sum(held_out) / 2)
    run = read_run(finished.run_dir)
    for row in run.samples:
        is_tagged = row["id"].startswith("tagged/")
        prompt = row.get("prompt")
        assert prompt is None or ("<answer>" in prompt) == is_tagged
        assert row["headline"] == f"{row['id'].split('/')[0]}/letters"
    assert run.primary_metric == "score"
    assert {name.split("/")[0] for name in run.evaluations[-1].values} == {"held", "tagged"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weight": 3.0}, "weight of the source plain was 2.0 and is now 3.0"),
        ({"task_options": {"tags": True}}, "task_options of the source plain was {}"),
        ({"task": "ocr"}, "task of the source plain was"),
    ],
)
def test_what_a_source_learns_may_not_change_on_a_resume(finished, change, named):
    def resume(change: Any) -> None:
        values = finished.model_dump(mode="json")
        values["data"]["train"][0] |= change
        changed = Settings.model_validate(values)
        check_same_settings(flatten_settings(finished), changed, "step-4", MEMBERS["count"])

    with pytest.raises(UserError) as caught:
        resume(change)
    assert named in str(caught.value)
    resume({"source": "elsewhere.jsonl"})  # the rows decide
