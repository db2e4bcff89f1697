"""Groups of revisions of one answer in place of those that fail."""

from statistics import fmean
from typing import Any

import pytest
from small_runs import make_trainer, save_tiny_model, small_run

from vlm_grpo.training.methods.revision import is_revised

TEXT = "No. Again."


@pytest.fixture
def settings(tmp_path, tmp_path_factory):
    """Return a function that builds settings of a run whose completions often end early."""
    source = save_tiny_model(tmp_path_factory.mktemp("model"), seed=0, ends=range(0, 256, 3))

    def build(below=0.05, **changes: Any):
        own = {"file": "revision", "options": {"below": below, "text": TEXT}}
        return small_run(tmp_path, source, **{"methods": [own]} | changes)

    return build


def test_failed_groups_are_revisions_of_their_best_answer(settings, monkeypatch):
    trainer, scored = make_trainer(settings()), []
    score = trainer.sampler._score  # noqa: SLF001

    def record(*given):
        scored.append(score(*given))
        return [*scored[-1]]

    monkeypatch.setattr(trainer.sampler, "_score", record)
    rollout = trainer.sampler.sample(0)
    trainer.sampler.close()
    sampled, revised = scored
    failed = [g for g in sampled if max(s.total for s in g.scores) < 0.05]
    assert [g.id for g in revised] == [g.id for g in failed]
    assert 0 < len(failed) < len(sampled)
    assert {g.id for g in rollout.groups if is_revised(g)} == {g.id for g in failed}
    gains = []
    for before, group in zip(failed, revised, strict=True):
        pairs = zip(before.completions, before.scores, strict=True)
        ended = [(s.total, c) for c, s in pairs if c.stop == "eos"]
        best, first = max(ended, key=lambda pair: pair[0])
        gains.append(fmean(s.total for s in group.scores) - best)
        for number, own in enumerate(group.completions):
            (observation,), (turn, last) = own.observations, own.turns
            assert own.trunk == 0
            assert own.token_ids[: observation.start] == first.token_ids[:-1]  # without its end
            assert own.logprobs[: observation.start] == first.logprobs[:-1]
            assert (turn.text, last.text, turn.observed.text) == (first.text, own.text, TEXT)
            assert TEXT in observation.prompt.text
            assert len(own.token_ids) <= 6
            # A text of white space alone is no answer.
            assert group.scores[number].answer == (own.text if own.text.strip() else None)
        assert len({own.token_ids for own in group.completions}) > 1
    own = [c.token_ids[c.trunk_length :] for group in revised for c in group.completions]
    first = [c.token_ids for group in sampled for c in group.completions]
    assert rollout.num_tokens == sum(map(len, (*first, *own)))
    assert rollout.metrics["revision/share"] == pytest.approx(len(failed) / len(sampled))
    assert rollout.metrics["revision/improvement"] == pytest.approx(fmean(gains))


def test_no_group_above_the_bound_is_revised(settings):
    plain, none = (make_trainer(settings(below=0.0, **more)) for more in ({"methods": []}, {}))
    first, second = plain.sampler.sample(0), none.sampler.sample(0)
    assert [g.completions for g in first.groups] == [g.completions for g in second.groups]
    assert second.metrics == {"revision/share": 0.0}
    for trainer in (plain, none):
        trainer.sampler.close()
