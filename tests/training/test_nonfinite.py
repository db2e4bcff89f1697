"""Updates with a gradient that is not finite are skipped; too many in a row end the run."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from groups import make_group
from small_runs import make_trainer

from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.logprobs import TokenScores
from vlm_grpo.training.nonfinite import MAX_NONFINITE_STEPS, NonfiniteGuard

GROUPS = [make_group({"exact": 1.0}, {"exact": 0.0}, lengths=[2, 3])]
ADVANTAGES = torch.tensor([0.5, -0.5])


def test_only_consecutive_steps_end_the_run(tmp_path):
    guard = NonfiniteGuard(tmp_path, rank=1)
    one_less = [True] * (MAX_NONFINITE_STEPS - 1)
    for step, is_skipped in enumerate([*one_less, False, *one_less]):
        guard.check(step, is_skipped, GROUPS, ADVANTAGES)
    assert guard.count == MAX_NONFINITE_STEPS - 1
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"in 5 consecutive steps.*step-000099-rank-1\.jsonl"):
        guard.check(99, True, GROUPS, ADVANTAGES)


def test_a_series_of_skipped_steps_is_reported_once(tmp_path, caplog):
    guard = NonfiniteGuard(tmp_path, rank=0)
    with caplog.at_level(logging.WARNING):
        for step, is_skipped in enumerate([True, True, False, True]):
            guard.check(step, is_skipped, GROUPS, ADVANTAGES)
    reported = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert reported == ["step 0", "step 3"]


def test_the_completions_of_the_last_step_are_written(tmp_path):
    guard = NonfiniteGuard(tmp_path, rank=0)
    guard.count = MAX_NONFINITE_STEPS - 1
    with pytest.raises(UserError, match="not finite"):
        guard.check(7, True, GROUPS, ADVANTAGES)
    path = tmp_path / "overflow" / "step-000007-rank-0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["token_ids"] for row in rows] == [[0, 1], [10, 11, 12]]
    assert [row["advantage"] for row in rows] == [0.5, -0.5]
    assert [row["rewards"] for row in rows] == [{"exact": 1.0}, {"exact": 0.0}]
    assert {tuple(row["prompt_token_ids"]) for row in rows} == {(7, 8)}


def test_every_rank_writes_its_completions(tmp_path):
    for rank in range(2):
        guard = NonfiniteGuard(tmp_path / "run", rank)
        guard.count = MAX_NONFINITE_STEPS - 1
        with pytest.raises(UserError, match=f"rank-{rank}"):
            guard.check(7, True, GROUPS, ADVANTAGES)
    assert len(list((tmp_path / "run" / "overflow").iterdir())) == 2


def test_a_run_skips_updates_that_are_not_finite_and_keeps_the_batch_that_ended_it(
    settings, monkeypatch
):
    run = settings(optim={"max_steps": 20})
    trainer = make_trainer(run)
    before = {n: w.detach().clone() for n, w in trainer.policy.trainable_parameters()}
    score = trainer.policy.score

    def score_infinite(*args: Any) -> TokenScores:
        return TokenScores(score(*args).logprobs * torch.inf)

    monkeypatch.setattr(trainer.policy, "score", score_infinite)
    with pytest.raises(UserError, match=r"5 consecutive steps.*optim\.lr") as ended:
        trainer.run()
    assert all(torch.equal(w, before[n]) for n, w in trainer.policy.trainable_parameters())

    path = run.run_dir / "overflow" / f"step-{MAX_NONFINITE_STEPS - 1:06d}-rank-0.jsonl"
    assert str(path) in str(ended.value)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 12  # 3 prompts with 4 completions each
    names = {"id", "images", "prompt_token_ids", "token_ids", "logprobs", "rewards", "advantage"}
    assert all(names <= set(row) for row in rows)
    assert all(len(row["token_ids"]) == len(row["logprobs"]) > 0 for row in rows)
    # The advantages of a group sum to 0.
    assert sum(row["advantage"] for row in rows[:4]) == pytest.approx(0, abs=1e-5)
