"""The choice of prompts by the pass rates of earlier steps."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from groups import EXAMPLES, build_mixture

from vlm_grpo.config.methods import CurriculumSettings
from vlm_grpo.data.prompt_order import ExampleStream, StreamCursor
from vlm_grpo.training.methods import Run
from vlm_grpo.training.methods.curriculum import Curriculum
from vlm_grpo.types import Example


def make_curriculum(stream: ExampleStream, **settings: Any) -> Curriculum:
    curriculum, run = Curriculum(CurriculumSettings(**settings)), SimpleNamespace(seed=0)
    curriculum.start(Run(run, None, stream, None))  # type: ignore[arg-type]
    return curriculum


def test_the_posterior_follows_the_formula():
    stream = ExampleStream(EXAMPLES, seed=0)
    curriculum = make_curriculum(stream, decay=0.5)
    first, second = stream.locate(0)[1], stream.locate(1)[1]
    names = [f"curriculum/{name}" for name in ("predicted_pass_rate", "pass_rate", "unseen")]
    metrics = curriculum.learn(0, [(0, 6.0, 8), (1, 0.0, 8)])
    assert metrics == dict(zip(names, (0.5, 6 / 16, 1.0), strict=True))  # 0.5: the prior's
    # λ·1 + (1 − λ)·1 + s and k − s
    assert curriculum.posterior[[first, second]].tolist() == [[7.0, 3.0], [1.0, 9.0]]
    metrics = curriculum.learn(0, [(0, 8.0, 8), (2, 4.0, 8)])
    expected = pytest.approx((0.7 + 0.5) / 2), 12 / 16, 0.5
    assert metrics == dict(zip(names, expected, strict=True))
    assert curriculum.posterior[first].tolist() == [0.5 * 7 + 0.5 + 8, 0.5 * 3 + 0.5]
    assert curriculum.learn(0, []) == {}


@pytest.mark.parametrize("target", [0.5, 0.9])
def test_examples_near_the_target_are_chosen(target):
    """Of examples whose pass rates are known well: row r has the rate r / 19."""
    stream = ExampleStream(EXAMPLES, seed=0)
    curriculum = make_curriculum(stream, target=target, pool=5, unseen=0.0)
    rates = np.arange(20) / 19
    curriculum.posterior = 1 + 1e4 * np.stack([rates, 1 - rates], axis=1)
    chosen = curriculum.choose(0, 4)
    assert sorted(chosen) == chosen
    found = sorted(rates[stream.locate(index)[1]] for index in chosen)
    best = sorted(rates, key=lambda rate: abs(rate - target))[:4]
    assert found == pytest.approx(sorted(best))


def test_a_share_below_one_prompt_is_reserved_as_often():
    stream = ExampleStream([Example(str(n), (), "?", n) for n in range(400)], seed=0)
    curriculum = make_curriculum(stream, pool=4, unseen=0.25)
    curriculum.posterior[::2] = 1e6
    chosen = [curriculum.choose(position, 1)[0] for position in range(0, 1600, 4)]
    share = sum(stream.locate(index)[1] % 2 for index in chosen) / len(chosen)
    assert 0.17 < share < 0.36  # 400 draws: a deviation of 0.022, and pools of one kind only
    # A small data set repeats an example only if it must.
    stream = ExampleStream(EXAMPLES[:4], seed=0)
    curriculum = make_curriculum(stream, pool=4)
    for position in range(0, 96, 16):
        assert len({stream.locate(i)[1] for i in curriculum.choose(position, 4)}) == 4
    assert len(curriculum.choose(0, 6)) == 6


def test_each_source_has_the_prompts_of_the_mixture():
    counts = {"a": 30, "b": 10, "c": 60}
    stream = build_mixture(counts)
    curriculum = make_curriculum(stream, pool=3)
    curriculum.posterior[40:] = 1e6  # source c alone is at the target
    total: Counter[str] = Counter()
    for position in range(0, 3000, 30):
        chosen = Counter(stream[index].source for index in curriculum.choose(position, 10))
        assert chosen == Counter(stream[position + place].source for place in range(10))
        total += chosen
    for name, count in counts.items():
        assert total[name] / 1000 == pytest.approx(count / 100, abs=0.01)


def test_a_cursor_passes_the_candidates_and_takes_returned_indices_first():
    curriculum = make_curriculum(ExampleStream(EXAMPLES, seed=0), pool=4)
    cursor = StreamCursor(8, [3, 5])
    expected = (3, 5, *curriculum.choose(8, 1))
    assert cursor.peek(3, curriculum) == expected
    assert cursor.take(3, curriculum) == expected
    assert (cursor.position, cursor.returned) == (12, [])
    assert cursor.take(2) == (12, 13)  # as supervised steps do
    assert cursor.position == 14
