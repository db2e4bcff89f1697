"""Checks of a task on its gold answers and on known exploits of rewards, without a model."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from vlm_grpo.errors import UserError, bullets
from vlm_grpo.task import FAILURES, Task
from vlm_grpo.task.episodes import EnvironmentRunner, demonstrate
from vlm_grpo.task.scorer import REWARD_TIMEOUT, RewardScorer, get_full_reward
from vlm_grpo.types import Example, Score
from vlm_grpo.utils.time_limit import can_interrupt, time_limit

_ROUNDING = 1e-6  # Tolerance for floating-point rounding in a reward between 0 and 1
_LEAST_SHARE, _MAX_POOR = 0.5, 0.1
"""At most this share of the gold answers may earn less than half of the full reward, as boxes do
that are smaller than the units in which a model writes them."""
_BOUNDS = {"two answers with or between": 0.5, "two answers, listed": 0.67}
"""The share of the full reward that exploits may earn if it is not 0: of two answers at once, half
are right if several are requested, and the F1 of a right and a wrong object is 2/3."""
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


def check_task(task: Task, examples: Sequence[Example]) -> Iterator[str]:
    """Check a task and its environment on examples, and yield the lines of a report.

    ``UserError``: gold answers earn less than the full reward, an exploit earns more than its
    bound, the parser raises or is slow, a demonstration fails, or a hostile call is not answered;
    it lists all problems of the first check that failed.
    """
    given = task
    if task.environment is not None:
        yield from _check_environment(task, examples[:_BATCH_ROWS])
        task = task.without_tools()
    written = ((e.id, task.write(task.gold_answer(e), e)) for e in examples)
    wrong = [f"{name}: {text!r}" for name, text in written if not isinstance(text, str)]
    _raise("gold answers for which write returns no text", wrong)
    rules, weights = task.reward_rules(), task.reward_weights().items()
    reads_answers = any(weight > 0 and rules[name].needs_answer for name, weight in weights)
    if get_full_reward(given) <= 0:
        raise UserError("no reward has a positive weight: training would learn nothing")
    if given.environment is None or reads_answers:
        yield from _check_answers(task, examples)
    else:
        yield "all rewards are for whole episodes: what answers alone earn is not checked"
    _raise("texts that the parser cannot handle", _find_parser_problems(task, examples[0]))
    yield "the parser handles hostile texts, each within 50 ms"
    yield f"{type(task).__name__} is sound on this data"


def _check_answers(task: Task, examples: Sequence[Example]) -> Iterator[str]:
    """Check what gold answers earn, exploits, and the most frequent answer."""
    full = get_full_reward(task)
    rows = examples[:_EXPLOIT_ROWS]
    if batch_rules := task.batch_rules():
        examples = rows = examples[:_BATCH_ROWS]
        yield f"{', '.join(batch_rules)} scores batches: checked on the first {len(rows)} examples"
    golds = [task.gold(example) for example in examples]
    scores = _score(task, golds, examples)
    bad = _find_bad_golds(task, golds, examples, scores)
    _raise("gold answers that do not earn the full reward", bad)
    shares = [(score.total or 0.0) / full for score in scores]
    yield f"gold answers earn {fmean(shares):.3f} of the full reward, at least {min(shares):.3f}"
    poor = [f"{e.id}: {s:.3f}" for e, s in zip(examples, shares, strict=True) if s < _LEAST_SHARE]
    if len(poor) > _MAX_POOR * len(examples):
        _raise(
            "gold answers that earn less than half of the full reward, so that no completion can "
            "earn it (boxes of a few pixels: enlarge the images, or leave these rows out)",
            poor,
        )
    if batch_rules:
        scores = _score(task, [golds[0]] * _GROUP_SIZE, [examples[0]] * _GROUP_SIZE, grouped=True)
        earned = fmean((score.total or 0.0) / full for score in scores)
        yield f"in a group of {_GROUP_SIZE} equal completions, the gold answer earns {earned:.3f}"

    yield from _check_exploits(task, rows, examples, full)

    text, count = Counter(golds).most_common(1)[0]
    scores = _score(task, [text] * len(rows), rows)
    earned = fmean((score.total or 0.0) / full for score in scores)
    yield f"always answering {text[:60]!r}, the answer of {count} rows, earns {earned:.3f}"


def _check_environment(task: Task, examples: Sequence[Example]) -> Iterator[str]:
    """Call the tools as demonstrated, and as nobody should."""
    environment, scores, problems = task.environment, list[float](), list[str]()
    yield f"{type(environment).__name__} has the tools {', '.join(environment.tools)}"
    with EnvironmentRunner() as runner:
        for number, row in enumerate(examples):
            example, start = runner.begin(environment, row)
            turns = demonstrate(runner, start, task, example)
            for text, seen in ((turn.text, turn.observed) for turn in turns if turn.observed):
                line = f"{text!r} reads {seen.text[:300]!r}"
                problems += [line] * seen.is_error
                if number == 0:
                    yield line
            scores.append(task.score(task.gold(example), example, turns=turns).total or 0.0)
        _raise("demonstrated calls that fail", problems)
        yield f"demonstrations with gold answers earn {fmean(scores):.3f} on average"
        bodies = ["", "[" * 20_000, '{"name": "<image>", "arguments": {}}', '{"name": "\\ud800"}']
        for name, found in environment.tools.items():
            wrong = {key: [[1e9, {"<image>": None}]] for key in found.parameters}
            bodies.append(json.dumps({"name": name, "arguments": wrong}))
        begin, end = environment.call_tags
        steps = runner.step([start.state] * len(bodies), [f"{begin}{b}{end}" for b in bodies])
    answers = [observed.text for *_, observed in steps if observed is not None]
    if len(answers) < len(bodies):
        raise UserError("a hostile call got no answer: step must return one for each call")
    yield f"{len(bodies)} hostile calls are answered in text; the last one reads {answers[-1]!r}"


def build_exploits(task: Task, example: Example, other: Example) -> dict[str, str]:
    """Return the known exploits of rewards that apply to any task, by name, made from the gold
    answer of an example; ``other`` has another gold answer, for hedging."""
    gold = task.write(task.gold_answer(example), example)
    hedge = task.write(task.gold_answer(other), example)

    def in_form(text: str) -> str:
        return f"<answer>{text}</answer>" if task.tags else text

    exploits = {
        "an empty text": "",
        "white space": " \n\t",
        "empty tags": "<answer></answer>" if task.tags else "<think></think>",
        "the answer inside the thinking": f"<think>{in_form(gold)}</think>",
        "thinking that does not end": f"<think>{in_form(gold)}",
    }
    if hedge != gold:  # the same answer twice is one answer
        exploits |= {
            "two answers with or between": in_form(f"{gold} or {hedge}"),
            "two answers, listed": in_form(f"{hedge}, {gold}"),
        }
    if task.tags:
        exploits |= {
            "the answer without tags": gold,
            "an unclosed tag": f"<answer>{gold}",
            "two tagged answers": in_form(hedge) + in_form(gold),
            "the answer twice": in_form(gold) * 2,
        }
    return exploits


def _score(
    task: Task, texts: Sequence[str], examples: Sequence[Example], grouped: bool = False
) -> list[Score]:
    """Score texts, each as a group of its own or all as one; a rule that fails is an error."""
    groups = [0] * len(texts) if grouped else None
    with RewardScorer(REWARD_TIMEOUT, logs_failures=False) as scorer:
        scores = scorer(task, texts, examples, groups=groups)
    for text, example, score in zip(texts, examples, scores, strict=True):
        if score.failures:
            trace = next(iter(score.failures.values()))
            raise UserError(
                f"{', '.join(score.failures)} failed on example {example.id!r} with the text "
                f"{text[:60]!r}:\n{trace}"
            )
    return scores


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
    tried: list[tuple[str, str, Example]] = []
    for example in rows:
        gold = task.gold_answer(example)
        golds = ((task.gold_answer(e), e) for e in examples)
        # Of the same kind: rows may ask for options or for numbers.
        others = (e for answer, e in golds if type(answer) is type(gold) and answer != gold)
        other = next(others, example)
        exploits = build_exploits(task, example, other).items()
        tried += [(name, text, example) for name, text in exploits]
    scores = _score(task, [text for _, text, _ in tried], [example for *_, example in tried])
    for (name, text, example), score in zip(tried, scores, strict=True):
        share, bound = (score.total or 0.0) / full, _BOUNDS.get(name, 0.0)
        worst[name] = max(worst.get(name, share), share)
        if share > bound + _ROUNDING:
            problems.append(
                f"{name} earns {share:.3f}, above {bound}, on {example.id}: {text[:60]!r}"
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
        for _ in range(10):  # until it is fast enough: the machine may be busy
            clock, processor = time.perf_counter(), time.process_time()
            try:
                with time_limit(limit) as call:
                    call(task.read, text, example)
            except FAILURES as error:  # a user's parser may raise anything
                problems.append(f"{name}: it raised {type(error).__name__}: {error}")
                break
            taken = time.perf_counter() - clock
            # Other processes may take most of the clock's time, but not ten times the limit.
            used = time.process_time() - processor
            times.append(taken if taken > 10 * _PARSE_SECONDS else used)
            if times[-1] <= _PARSE_SECONDS:
                break
        if times and min(times) > _PARSE_SECONDS:
            problems.append(f"{name}: it took {1000 * min(times):.0f} ms, more than 50 ms")
    return problems


def _raise(what: str, problems: Sequence[str]) -> None:
    if problems:
        raise UserError(f"{len(problems)} {what}:\n{bullets(problems)}")
