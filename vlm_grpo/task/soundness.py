"""Checks of a task on its gold answers and on known exploits of rewards, without a model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from vlm_grpo.errors import UserError, bullets
from vlm_grpo.task import FAILURES, Task
from vlm_grpo.task.scorer import REWARD_TIMEOUT, RewardScorer, get_full_reward
from vlm_grpo.types import Example, Score
from vlm_grpo.utils.timing import can_interrupt, time_limit

_ROUNDING = 1e-6  # Tolerance for floating-point rounding in a reward between 0 and 1
_HEDGE_BOUND = 0.5
"""Reward allowed for two answers at once: if several are requested, half of them are right."""
_EXPLOIT_ROWS = 200
"""Rows on which exploits are tried; a reward with a flaw shows it within a few rows."""
_BATCH_ROWS = 20
"""Rows on which a task with batch rewards is scored, which may be slow or cost money."""
_GROUP_SIZE = 4  # Completions in the group that batch rewards are tried on
_PARSE_SECONDS = 0.05
"""Limit for parsing a text of 100,000 characters: ten times what the shipped parsers take, so that
a slow machine refuses none, and a hundredth of what quadratic time takes."""

_HOSTILE = {
    "100,000 letters": "a" * 100_000,
    "100,000 brackets": "[" * 100_000,
    "100,000 digits": "9" * 100_000,
    "10,000 tags": "<answer>" * 10_000,
    "10,000 boxes": "[" + "[1,2,3,4]," * 10_000 + "]",
    "a zero byte": "\x00",
    "half a surrogate pair": "\ud800",
    "not a number": '{"bbox_2d": [NaN, Infinity, 1e999, -1]}',
}
"""Texts on which parsers have raised exceptions or hung."""


@dataclass(frozen=True)
class Exploit:
    """A text that exploits a flawed reward, and the share of the full reward that it may earn."""

    name: str
    text: str
    bound: float = 0.0


def check_task(task: Task, examples: Sequence[Example]) -> Iterator[str]:
    """Check a task on examples, and yield the lines of a report.

    ``UserError``: gold answers earn less than the full reward, an exploit earns more than its
    bound, or the parser raises or is slow; it lists all problems of the first check that failed.
    """
    written = ((e.id, task.write(task.gold_answer(e), e)) for e in examples)
    wrong = [f"{name}: {text!r}" for name, text in written if not isinstance(text, str)]
    _raise("gold answers for which write returns no text", wrong)
    full = get_full_reward(task)
    if full <= 0:
        raise UserError("no reward has a positive weight: training would learn nothing")
    rows = examples[:_EXPLOIT_ROWS]
    if batch_rules := task.batch_rules():
        examples = rows = examples[:_BATCH_ROWS]
        yield f"{', '.join(batch_rules)} scores batches: checked on the first {len(rows)} examples"
    golds = [task.gold(example) for example in examples]
    scores = _score(task, golds, examples)
    shares = _reward_shares(golds, examples, scores, full)
    bad = _find_bad_golds(task, golds, examples, scores)
    _raise("gold answers that do not earn the full reward", bad)
    yield f"gold answers earn {fmean(shares):.3f} of the full reward, at least {min(shares):.3f}"
    if batch_rules:
        same, copies = [golds[0]] * _GROUP_SIZE, [examples[0]] * _GROUP_SIZE
        group = _reward_shares(same, copies, _score(task, same, copies, [0] * _GROUP_SIZE), full)
        yield (
            f"in a group of {_GROUP_SIZE} equal completions, the gold answer earns "
            f"{fmean(group):.3f}"
        )

    yield from _check_exploits(task, rows, examples, full)
    _raise("texts that the parser cannot handle", _find_parser_problems(task, examples[0]))
    yield "the parser handles hostile texts, each within 50 ms"

    text, count = Counter(golds).most_common(1)[0]
    texts = [text] * len(rows)
    earned = fmean(_reward_shares(texts, rows, _score(task, texts, rows), full))
    yield f"always answering {text[:60]!r}, the answer of {count} rows, earns {earned:.3f}"
    yield f"{type(task).__name__} is sound on this data"


def build_exploits(task: Task, example: Example, other: Example) -> list[Exploit]:
    """Build the known exploits of rewards that apply to any task, from the gold answer of an
    example; ``other`` has another gold answer, for hedging."""
    gold = task.write(task.gold_answer(example), example)
    hedge = task.write(task.gold_answer(other), example)

    def tagged(text: str) -> str:
        return f"<answer>{text}</answer>"

    def in_form(text: str) -> str:
        return tagged(text) if task.tags else text

    exploits = [
        Exploit("an empty text", ""),
        Exploit("white space", " \n\t"),
        Exploit("empty tags", "<answer></answer>" if task.tags else "<think></think>"),
        Exploit("the answer inside the thinking", f"<think>{in_form(gold)}</think>"),
        Exploit("thinking that does not end", f"<think>{in_form(gold)}"),
    ]
    if hedge != gold:  # the same answer twice is one answer
        exploits += [
            Exploit("two answers with or between", in_form(f"{gold} or {hedge}"), _HEDGE_BOUND),
            Exploit("two answers, listed", in_form(f"{hedge}, {gold}"), _HEDGE_BOUND),
        ]
    if task.tags:
        exploits += [
            Exploit("the answer without tags", gold),
            Exploit("an unclosed tag", f"<answer>{gold}"),
            Exploit("two tagged answers", tagged(hedge) + tagged(gold)),
            Exploit("the answer twice", tagged(gold) * 2),
        ]
    return exploits


def _score(
    task: Task,
    texts: Sequence[str],
    examples: Sequence[Example],
    groups: Sequence[int] | None = None,
) -> list[Score]:
    with RewardScorer(REWARD_TIMEOUT, logs_failures=False) as scorer:
        return scorer(task, texts, examples, groups=groups)


def _reward_shares(
    texts: Sequence[str], examples: Sequence[Example], scores: Sequence[Score], full: float
) -> list[float]:
    """Return the reward of each text as a share of the full reward."""
    for text, example, score in zip(texts, examples, scores, strict=True):
        if score.failures:
            trace = next(iter(score.failures.values()))
            raise UserError(
                f"{', '.join(score.failures)} failed on example {example.id!r} with the text "
                f"{text[:60]!r}:\n{trace}"
            )
    return [(score.total or 0.0) / full for score in scores]


def _find_bad_golds(
    task: Task, golds: Sequence[str], examples: Sequence[Example], scores: Sequence[Score]
) -> list[str]:
    rules, weights = task.reward_rules(), task.reward_weights()
    problems = []
    for text, example, score in zip(golds, examples, scores, strict=True):
        least = task.gold_reward(example)
        short = {
            name: value
            for name, value in score.rewards.items()
            if weights[name] > 0
            and value is not None
            and value < (least if rules[name].needs_answer else 0.0) - _ROUNDING
        }
        if short:
            parsed = "holds no answer" if score.answer is None else f"is parsed as {score.answer!r}"
            earned = ", ".join(f"{name} {value:.3f}" for name, value in short.items())
            problems.append(f"{example.id}: {text[:60]!r} {parsed} and earns {earned}")
    return problems


def _check_exploits(
    task: Task, rows: Sequence[Example], examples: Sequence[Example], full: float
) -> Iterator[str]:
    """Yield one line per exploit with the largest share that it earned on the rows."""
    worst: dict[str, float] = {}
    problems: list[str] = []
    pairs = []
    for example in rows:
        gold = task.gold_answer(example)
        other = next((e for e in examples if task.gold_answer(e) != gold), example)
        pairs += [(exploit, example) for exploit in build_exploits(task, example, other)]
    texts, tried = [exploit.text for exploit, _ in pairs], [example for _, example in pairs]
    shares = _reward_shares(texts, tried, _score(task, texts, tried), full)
    for (exploit, example), share in zip(pairs, shares, strict=True):
        worst[exploit.name] = max(worst.get(exploit.name, share), share)
        if share > exploit.bound + _ROUNDING:
            problems.append(
                f"{exploit.name} earns {share:.3f}, above {exploit.bound}, "
                f"on {example.id}: {exploit.text[:60]!r}"
            )
    _raise("exploits that earn too much", problems)
    for name, share in worst.items():
        yield f"{name} earns at most {share:.3f}"


def _find_parser_problems(task: Task, example: Example) -> list[str]:
    problems = []
    limit = REWARD_TIMEOUT if can_interrupt() else None  # as in training
    for name, text in _HOSTILE.items():
        text = f"<answer>{text}</answer>" if task.tags else text
        times = []
        for _ in range(3):  # the fastest of three: the machine may be busy
            start = time.perf_counter()
            try:
                with time_limit(limit) as call:
                    call(task.read, text, example)
            except FAILURES as error:  # a user's parser may raise anything
                problems.append(f"{name}: it raised {type(error).__name__}: {error}")
                break
            times.append(time.perf_counter() - start)
        if times and min(times) > _PARSE_SECONDS:
            problems.append(f"{name}: it took {1000 * min(times):.0f} ms, more than 50 ms")
    return problems


def _raise(what: str, problems: Sequence[str]) -> None:
    if problems:
        raise UserError(f"{len(problems)} {what}:\n{bullets(problems)}")
