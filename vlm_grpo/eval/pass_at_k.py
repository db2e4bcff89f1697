"""Several samples of an example: their mean, the best of them (pass@k), and the majority."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vlm_grpo.task import FAILURES, Task
from vlm_grpo.types import Example, Score


def list_sample_metrics(count: int) -> list[str]:
    """Return the names of the metrics of ``count`` samples of an example; none for one sample.

    >>> list_sample_metrics(6)
    ['mean_at_6', 'pass_at_2', 'pass_at_4', 'pass_at_6', 'majority_at_6']
    """
    if count == 1:
        return []
    sizes = [*(2**n for n in range(1, count.bit_length()) if 2**n < count), count]
    return [f"mean_at_{count}", *(f"pass_at_{size}" for size in sizes), f"majority_at_{count}"]


def merge_scores(task: Task, example: Example, scores: Sequence[Score]) -> Score:
    """Return one score for the samples of an example: means, and the metrics of the samples.

    ``mean_at_k``, ``pass_at_j`` and ``majority_at_k`` are those of the task's primary metric; they
    are undefined if it is for one of the samples. The answer is that of the first sample. A single
    score is returned as it is.
    """
    if len(scores) == 1:
        return scores[0]
    source, own = task.resolve(example)
    start = f"{source}/" if source else ""
    name = start + own.primary_metric
    values = [{**score.rewards, **score.metrics}.get(name) for score in scores]
    known = [value for value in values if value is not None]
    found: dict[str, float | None] = {}
    for metric in list_sample_metrics(len(scores)):
        kind, _, size = metric.partition("_at_")
        if len(known) < len(scores):
            found[start + metric] = None
        elif kind == "mean":
            found[start + metric] = math.fsum(known) / len(known)
        elif kind == "pass":
            found[start + metric] = estimate_best(known, int(size), own.lower_is_better)
        else:
            found[start + metric] = known[find_majority(task, example, scores)]
    rewards = _average([score.rewards for score in scores])
    metrics = _average([score.metrics for score in scores])
    total = _average([{"": score.total} for score in scores])[""]
    return replace(scores[0], rewards=rewards, total=total, metrics={**metrics, **found})


def find_majority(task: Task, example: Example, scores: Sequence[Score]) -> int:
    """Return the position of the first sample with the most frequent answer.

    Answers are equal if the task writes them equally; of several as frequent, the first counts. A
    sample without an answer has no vote; without any vote the first sample is returned.
    """
    votes = {}
    for position, score in enumerate(scores):
        if score.answer is not None:
            try:
                votes[position] = task.write(score.answer, example)
            except FAILURES:  # a user's method may raise anything: this sample has no vote
                continue
    if not votes:
        return 0
    ((most, _),) = Counter(votes.values()).most_common(1)  # the first of several
    return next(position for position, text in votes.items() if text == most)


def _average(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Return the mean of each column's values that are not None; None if all are."""
    means: dict[str, float | None] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [value for row in rows if (value := row.get(name)) is not None]
        means[name] = math.fsum(values) / len(values) if values else None
    return means


def estimate_best(values: Sequence[float], size: int, lower_is_better: bool = False) -> float:
    """Estimate the mean of the best of ``size`` samples from n of them, without bias.

    It is the mean over all subsets of this size, from 1 to n. Of values 0 and 1 it is pass@k, which
    is 1 − C(n − c, k) / C(n, k) for c values of 1 (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    >>> estimate_best([0, 1, 0, 0], 2)
    0.5
    """
    ordered = sorted(values, reverse=lower_is_better)
    subsets = math.comb(len(ordered), size)
    # The value at position i is the best of the subsets with size - 1 of the i worse ones.
    return math.fsum(
        value * (math.comb(worse, size - 1) / subsets) for worse, value in enumerate(ordered)
    )
