"""What a run has learned of its examples: how difficult they are, and groups to replay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from accelerate import Accelerator

from vlm_grpo.config.methods import ReplaySettings
from vlm_grpo.config.run import Settings
from vlm_grpo.data.stream import ExampleStream
from vlm_grpo.dist.collectives import fail_together, gather_object
from vlm_grpo.task import Task
from vlm_grpo.task.scorer import measure_pass
from vlm_grpo.training.advantages import has_spread
from vlm_grpo.training.batch import Rollout
from vlm_grpo.training.curriculum import Curriculum, Observation
from vlm_grpo.types import Completion, Group, Prompt, Score


@dataclass(frozen=True)
class KeptGroup:
    """A group without its prompt, which is loaded from the data again.

    Attributes:
        index: its index in the stream.
        step: number of steps done before it was sampled.
        completions: its completions, whose log-probs are those of the policy of that step.
        scores: their scores.
    """

    index: int
    step: int
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]


class ReplayBuffer:
    """A buffer of groups with different rewards, each of which is replayed once at most.

    As RePO's recency-based strategy (Li et al., arXiv:2506.09340), it replays the newest first,
    whose ratios are nearest to 1. There, groups of the step's own prompts are replayed beside all
    prompts; here any group, and only beside groups without a gradient. All ranks hold the same.

    Args:
        settings: the settings.

    Attributes:
        groups: the groups, the oldest first.
    """

    def __init__(self, settings: ReplaySettings, groups: Iterable[KeptGroup] = ()) -> None:
        self.settings, self.groups = settings, [*groups]

    def choose(self, count: int, step: int) -> list[KeptGroup]:
        """Return up to ``count`` groups to replay in a step, the newest first; they stay here."""
        oldest = step - self.settings.max_age
        return [group for group in reversed(self.groups) if group.step >= oldest][:count]

    def update(self, replayed: Collection[KeptGroup], sampled: Sequence[KeptGroup]) -> None:
        """Remove the groups that a step has replayed, and add those that it has sampled."""
        used = {group.index for group in replayed}
        kept = [group for group in self.groups if group.index not in used]
        self.groups = [*kept, *sampled][-self.settings.size :]


class Experience:
    """The estimated difficulties of a run's examples, and its groups to replay.

    Both are equal on all ranks, which exchange what they sampled once per step.

    Args:
        stream: the training examples.
        rows: their number.
        settings: the run's settings.
        load: returns the prompts at indices of the stream.
        accelerator: the ranks.

    Attributes:
        curriculum: chooses the prompts; None: the stream's order does.
        replay: the groups to replay; None: none are replayed.
    """

    def __init__(
        self,
        stream: ExampleStream,
        rows: int,
        settings: Settings,
        load: Callable[[Sequence[int]], list[Prompt]],
        accelerator: Accelerator,
    ) -> None:
        self.settings, self.load, self.accelerator = settings, load, accelerator
        chosen, replay = settings.data.curriculum, settings.objective.replay
        self.curriculum = chosen and Curriculum(stream, rows, chosen, settings.seed)
        self.replay = replay and ReplayBuffer(replay)

    def finish(
        self, step: int, task: Task, groups: Mapping[int, Group], rollout: Rollout, count: int = 0
    ) -> Rollout:
        """Learn from a step's rollout, and return it with groups to replay and metrics.

        All ranks must call it.

        Args:
            step: number of steps done before it.
            task: the task with the reward weights of the step.
            groups: all groups that this rank sampled, by the stream's index.
            rollout: the rollout.
            count: maximum number of groups to replay, over all ranks.

        Raises:
            UserError: on all ranks, if a prompt cannot be loaded or a task's ``gold_reward`` fails;
                nothing is learned then.
        """
        if self.curriculum is None and self.replay is None:
            return rollout
        replayed = [] if self.replay is None else self.replay.choose(count, step)
        ranks, observed, prompts = self.accelerator, [], []
        own = replayed[ranks.process_index :: ranks.num_processes]
        with fail_together(ranks):
            prompts = self.load([group.index for group in own])
            if self.curriculum is not None:
                observed = [_observe(index, task, group) for index, group in groups.items()]
        metrics: dict[str, float] = {}
        if self.curriculum is not None:
            metrics |= self.curriculum.observe(sorted(gather_object(observed)))
        if self.replay is not None:
            self.replay.update(replayed, self._gather_useful(step, task, groups))
            metrics |= _describe(replayed, step)
        pairs = zip(prompts, own, strict=True)
        places = range(ranks.process_index, len(replayed), ranks.num_processes)
        return replace(
            rollout,
            replayed=tuple(Group(p, kept.completions, kept.scores) for p, kept in pairs),
            rounds=(*rollout.rounds, tuple(group.index for group in own)),
            mini_batches=(
                *rollout.mini_batches,
                *(place % self.settings.optim.mini_batches for place in places),
            ),
            metrics=metrics,
        )

    def _gather_useful(self, step: int, task: Task, groups: Mapping[int, Group]) -> list[KeptGroup]:
        """Return the groups of all ranks that have different rewards."""
        weights, objective = task.reward_weights(), self.settings.objective
        useful = []
        for index, group in groups.items():
            if has_spread(group, weights, objective):
                # Without what only the metrics of its own step need.
                stripped = (replace(c, entropies=(), version=None) for c in group.completions)
                scores = (replace(score, answer=None) for score in group.scores)
                useful.append(KeptGroup(index, step, tuple(stripped), tuple(scores)))
        return sorted(gather_object(useful), key=lambda group: group.index)


def _observe(index: int, task: Task, group: Group) -> Observation:
    pairs = zip(group.completions, group.scores, strict=True)
    # Noise makes a prompt harder than it is.
    clean = [score for completion, score in pairs if not completion.noise]
    passed = [measure_pass(task, group.prompt.example, score) for score in clean]
    return index, sum(passed), len(passed)


def _describe(replayed: Sequence[KeptGroup], step: int) -> dict[str, float]:
    """Return the metrics of a step's replay: the number of groups, and their mean age in steps."""
    ages = [step - group.step for group in replayed]
    metrics: dict[str, float] = {"replay/groups": len(ages)}
    return metrics | ({"replay/age": sum(ages) / len(ages)} if ages else {})
