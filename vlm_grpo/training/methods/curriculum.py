"""The choice of training prompts by their difficulty, which is estimated during the run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlm_grpo.config.methods import CurriculumSettings
from vlm_grpo.task import Task
from vlm_grpo.task.scorer import measure_pass
from vlm_grpo.training.methods import Groups, Method, Metrics, Run
from vlm_grpo.training.step_batch import KeptGroup
from vlm_grpo.types import Group

Observation = tuple[int, float, int]
"""An index of the stream, the sum of its completions' pass values (0 to 1), and their number."""


class Curriculum(Method):
    """A chooser of prompts whose pass rate is probably near a target.

    MoPPS (Qu et al., arXiv:2507.04632): the pass rate of an example has the posterior Beta(α, β),
    and the prior Beta(1, 1). Of the next candidates in the stream's order, those are chosen whose
    draw from their posterior (Thompson sampling) is nearest to the target. After k completions
    with s passes, α becomes λα + (1 − λ) + s, and β becomes λβ + (1 − λ) + k − s; λ is ``decay``.

    Each source of a mixture has as many prompts as in the stream's own order. The choice depends
    only on the posterior, the seed and the place in the stream, so ranks agree on it.
    """

    name, block = "curriculum", "data.curriculum"
    own: CurriculumSettings
    posterior: np.ndarray  # (rows, 2) α and β of each example

    def __init__(self, own: CurriculumSettings) -> None:
        super().__init__(own)
        self.pool = own.pool

    def start(self, run: Run) -> None:
        super().start(run)
        self.posterior = np.ones((len(run.stream.examples), 2))

    def choose(self, position: int, count: int, /) -> list[int]:
        """Return ``count`` of the ``count * pool`` indices from ``position`` on, in their order."""
        places = [self.run.stream.locate(position + i) for i in range(count * self.pool)]
        sources, rows = np.array(places, dtype=int).reshape(-1, 2).T
        random = np.random.default_rng([self.run.settings.seed, position, 1])
        draws = random.beta(*self.posterior[rows].T)
        distances = np.abs(draws - self.own.target)
        # In a small data set, an example that comes twice is taken twice only if it must be.
        distances[np.setdiff1d(range(len(rows)), np.unique(rows, return_index=True)[1])] += 1
        unseen = self._is_unseen(rows)
        chosen: list[int] = []
        for source, wanted in Counter(sources[:count].tolist()).items():
            own = np.flatnonzero(sources == source)
            own = own[np.argsort(distances[own], kind="stable")]
            reserved = int(wanted * self.own.unseen + random.random())  # right on average
            first = own[unseen[own]][:reserved]
            others = own[~np.isin(own, first)]
            chosen += [*first, *others[: wanted - len(first)]]
        return [position + int(place) for place in sorted(chosen)]

    def observe(self, step: int, task: Task, groups: Groups) -> list[Observation]:
        return [_observe(index, task, group) for index, group in groups.items()]

    def learn(
        self, step: int, observed: list[Observation], recalled: Sequence[KeptGroup] = ()
    ) -> Metrics:
        """Update the posterior after a step; return the mean pass rate that was predicted and the
        one that was found, and the share of prompts whose examples had not been sampled yet.
        """
        if not observed:
            return {}
        observations = sorted(observed)
        rows = np.array([self.run.stream.locate(index)[1] for index, _, _ in observations])
        passed = np.array([passed for _, passed, _ in observations])
        counts = np.array([count for _, _, count in observations])
        known = self.posterior[rows]
        metrics = {
            "curriculum/predicted_pass_rate": float((known[:, 0] / known.sum(1)).mean()),
            "curriculum/pass_rate": float(passed.sum() / counts.sum()),
            "curriculum/unseen": float(self._is_unseen(rows).mean()),
        }
        decay = self.own.decay
        for row, update in zip(rows, np.stack([passed, counts - passed], axis=1), strict=True):
            self.posterior[row] = decay * self.posterior[row] + (1 - decay) + update
        return metrics

    def _is_unseen(self, rows: np.ndarray) -> np.ndarray:
        return self.posterior[rows].sum(axis=1) == 2  # the prior

    def state_dict(self) -> tuple[None, dict[str, Tensor]]:
        return None, {"posterior": torch.from_numpy(self.posterior).clone()}

    def load_state_dict(self, values: Any, tensors: Mapping[str, Tensor]) -> None:
        if "posterior" in tensors:
            self.posterior = tensors["posterior"].numpy().copy()


def _observe(index: int, task: Task, group: Group) -> Observation:
    pairs = zip(group.completions, group.scores, strict=True)
    # Another form of a prompt, as with noise, may be harder than it is.
    own = [score for completion, score in pairs if completion.variant is None]
    passed = [measure_pass(task, group.prompt.example, score) for score in own]
    return index, sum(passed), len(passed)
