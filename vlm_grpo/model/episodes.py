"""Episodes: completions behind prompts with an environment, sampled turn by turn.

Tokens go in as they came out: a turn is sampled behind the tokens of the prompt, of the turns
before it and of what was observed in between, and nothing is decoded and tokenized again. The
numbers from which the tokens are sampled are one stream per episode.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlm_grpo.errors import UserError
from vlm_grpo.model.engine.packing import Path
from vlm_grpo.model.engine.repeated import extend_prompt
from vlm_grpo.model.engine.sampling import SamplingSettings
from vlm_grpo.model.prompts import PromptBuilder, PromptWriter
from vlm_grpo.task import Task
from vlm_grpo.task.episodes import EnvironmentRunner
from vlm_grpo.types import (
    Completion,
    EpisodeStart,
    EpisodeTurn,
    Example,
    Observation,
    Observed,
    Prompt,
)

logger = logging.getLogger(__name__)

Seeds = Sequence[Sequence[int | str]]
Sample = Callable[
    [Sequence[Prompt], SamplingSettings, Sequence[range], Seeds, Sequence[int]],
    Sequence[tuple[Completion, ...]],
]
"""Samples behind prompts, given the settings, the numbers of the completions, the seeds, and the
numbers of tokens that each prompt's completions have already."""
Begun = tuple[Example, EpisodeStart | None]
"""An example of which ``begin_episodes`` has begun the episodes, if it has an environment."""


def begin_episodes(
    builder: PromptWriter, runner: EnvironmentRunner | None, example: Example, task: Task
) -> Begun:
    """Return an example with the resized sizes of its images and what its environment shows at the
    start, and the start of its episodes; None: it has no environment."""
    example, environment = builder.with_resized_sizes(example), task.resolve(example)[1].environment
    if environment is None or runner is None:
        return example, None
    example, start = runner.begin(environment, example)
    return builder.with_resized_sizes(example), start


REFUSAL = Observed("No tool is available now. Answer without one.")
"""What is read after a call that is refused; it is no error of the model's."""

NO_START = EpisodeStart(None, 2, False, "")
"""The start of an episode without an environment."""


@dataclass
class _Episode:
    prompt: Prompt
    start: EpisodeStart
    seed: Sequence[int | str]
    number: int  # in its group
    parts: list[Completion]  # what was sampled in each turn
    state: Any  # of the environment
    is_refused: bool = False  # whether it reads ``REFUSAL`` in place of each result
    turns: list[EpisodeTurn] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    stop: str | None = None  # why it ended, if not as its last part did
    trunk: int | None = None  # number of the episode that it is a branch of

    def fork(self, count: int) -> list[_Episode]:
        """Return it and its branches, whose first turn and environment's state are its own."""
        if count == 1:
            return [self]
        self.trunk = self.number
        episodes: list[_Episode] = [self]
        for number in range(self.number + 1, self.number + count):
            own = {name: [*getattr(self, name)] for name in ("parts", "turns", "observations")}
            episodes.append(replace(self, number=number, **own))
        return episodes

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for part in self.parts for token in part.token_ids)

    def finish(self) -> Completion:
        last, parts = self.parts[-1], self.parts
        answer = [EpisodeTurn(part.text) for part in parts[len(self.turns) :]]  # without a result
        return Completion(
            self.tokens,
            tuple(value for part in parts for value in part.logprobs),
            last.text,
            self.stop or last.stop,  # type: ignore[arg-type]
            tuple(value for part in parts for value in part.entropies),
            min((p.version for p in parts if p.version is not None), default=None),
            last.variant,
            tuple(self.observations),
            (*self.turns, *answer),
            self.trunk,
        )


def sample_episodes(
    prompts: Sequence[Prompt],
    sampling: SamplingSettings,
    numbers: Sequence[range],
    seeds: Seeds,
    sample: Sample,
    builder: PromptBuilder,
    runner: EnvironmentRunner,
    refused: int = 0,
) -> list[tuple[Completion, ...]]:
    """Sample the completions of prompts, some or none of which have an environment.

    An episode ends with a text that calls no tool. It is cut where the next turn would exceed the
    maximum number of tokens that an episode may sample, the model's context, or the environment's
    turns; what it observed last is then dropped whole.

    Args:
        numbers: the numbers of each prompt's completions in their group. Those between two
            numbers are branches of the episode with the first one: they begin after what it
            observes first, or are equal to it if it ends before.
        sample: samples the next part of some completions.
        builder: writes what is observed in the model's chat template.
        refused: number of the last completions of each group whose calls are refused.
    """
    ends = {prompt.start.end_of_call: None for prompt in prompts if prompt.start is not None}
    sampling = replace(sampling, stop=(*sampling.stop, *ends))
    longest = sampling.max_completion_length
    first = sample(prompts, sampling, numbers, seeds, ())
    groups: list[list[Completion | _Episode]] = []
    for prompt, own, seed, members in zip(prompts, numbers, seeds, first, strict=True):
        if (start := prompt.start) is None:
            groups.append([*members])
            continue
        given, pairs = own.stop - refused, zip(own, members, strict=True)
        groups.append(
            [_Episode(prompt, start, seed, n, [c], start.state, n >= given) for n, c in pairs]
        )
    active = [e for group in groups for e in group if isinstance(e, _Episode)]
    active = _step(active, builder, runner, longest)
    for group, own in zip(groups, numbers, strict=True):
        forks = {id(e): e.fork(own.step) for e in group if isinstance(e, _Episode)}
        group[:] = [branch for e in group for branch in forks.get(id(e), [e])]
        active = [branch for e in active for branch in forks.get(id(e), [e])]
    while active:
        _sample_turn(active, sampling, sample)
        active = _step(active, builder, runner, longest)
    return [tuple(e.finish() if isinstance(e, _Episode) else e for e in group) for group in groups]


def _sample_turn(active: Sequence[_Episode], sampling: SamplingSettings, sample: Sample) -> None:
    """Sample the next part of each episode behind what it observed last."""
    # Branches with the same tokens so far are sampled behind one prompt.
    ids = zip(map(id, (e.observations[-1] for e in active)), active, strict=True)
    runs = itertools.groupby(ids, key=operator.itemgetter(0))
    alike = [[e for _, e in run] for _, run in runs]
    firsts = [own[0] for own in alike]
    behind = [extend_prompt(e.prompt, Path(e.tokens, tuple(e.observations))) for e in firsts]
    ranges = [range(own[0].number, own[-1].number + 1) for own in alike]
    own_seeds, begun = [e.seed for e in firsts], [len(e.tokens) for e in firsts]
    found = sample(behind, sampling, ranges, own_seeds, begun)
    for episode, part in zip(active, itertools.chain(*found), strict=True):
        episode.parts.append(part)


def sample_next_turns(
    prompts: Sequence[Prompt],
    sampling: SamplingSettings,
    numbers: Sequence[range],
    seeds: Seeds,
    firsts: Sequence[tuple[Completion, Observed]],
    sample: Sample,
    builder: PromptBuilder,
) -> list[tuple[Completion, ...]]:
    """Sample further turns of one completion of each prompt, behind what is read after it.

    The completions of a prompt are branches of the first one, without its end-of-sequence token.
    There are none where no token is left for them. ``firsts`` are the completion of each prompt and
    what is read after it; other arguments are as in ``sample_episodes``.
    """
    groups: list[list[_Episode]] = []
    for prompt, own, seed, (first, observed) in zip(prompts, numbers, seeds, firsts, strict=True):
        shown = builder.observe(observed, "user")
        used = len(first.token_ids) - (first.stop == "eos")
        length = len(prompt.token_ids) + used + len(shown.token_ids)
        is_long = builder.max_tokens and length >= builder.max_tokens
        if not 0 < used < sampling.max_completion_length or is_long:
            groups.append([])
            continue
        kept = {
            name: getattr(first, name)[:used] for name in ("token_ids", "logprobs", "entropies")
        }
        episode = _Episode(prompt, NO_START, seed, own.start, [replace(first, **kept)], None)
        episode.observations.append(Observation(used, shown))
        episode.turns.append(EpisodeTurn(first.text, None, observed))
        groups.append(episode.fork(len(own)))
    if active := [episode for group in groups for episode in group]:
        _sample_turn(active, sampling, sample)
    return [tuple(episode.finish() for episode in group) for group in groups]


def _step(
    episodes: list[_Episode], builder: PromptBuilder, runner: EnvironmentRunner, max_tokens: int
) -> list[_Episode]:
    """Call the tools that the last turns ask for; return the episodes that go on."""
    calling = [e for e in episodes if e.start.end_of_call in e.parts[-1].text]
    given = [episode for episode in calling if not episode.is_refused]
    steps = iter(runner.step([e.state for e in given], [e.parts[-1].text for e in given]))
    following, known = [], dict[Observed, tuple[Observed, Prompt]]()  # many look at the same part
    for episode in calling:
        refusal = episode.state, None, REFUSAL
        state, call, observed = refusal if episode.is_refused else next(steps)
        episode.state, text = state, episode.parts[-1].text
        if observed is None:  # an environment with its own ``step`` ends the episode
            continue
        used = len(episode.tokens)
        if len(episode.parts) >= episode.start.max_turns:
            episode.stop = "turns" if episode.start.masks_long else None
        elif used >= max_tokens:
            episode.stop = "length"
        else:
            if observed not in known:
                known[observed] = _show(observed, builder)
            observed, seen = known[observed]
            prompts = episode.prompt, *(o.prompt for o in episode.observations), seen
            length = sum(len(prompt.token_ids) for prompt in prompts) + used
            if builder.max_tokens and length >= builder.max_tokens:
                episode.stop = "length"
            else:
                episode.observations.append(Observation(used, seen))
                following.append(episode)
        episode.turns.append(EpisodeTurn(text, call, observed))
    return following


def _show(observed: Observed, builder: PromptBuilder) -> tuple[Observed, Prompt]:
    """Return what the model reads after a call, and its tokens and images; an error in place of
    what is longer than the context, or too thin to resize."""
    try:
        return observed, builder.observe(observed)
    except (UserError, ValueError) as error:
        logger.debug("an observation cannot be shown: %s", error)
    observed = Observed("Error: the result cannot be shown to you", is_error=True)
    return observed, builder.observe(observed)
