"""A loss and an advantage estimator from a user's file, checked before they are used."""

import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlm_grpo.config.objective import GROUP_ESTIMATORS, ObjectiveSettings
from vlm_grpo.errors import UserError
from vlm_grpo.task import FAILURES
from vlm_grpo.task.registry import load_file
from vlm_grpo.training.objective.advantages import STEP_ESTIMATORS, AdvantageInputs, StepEstimator
from vlm_grpo.training.objective.losses import Surrogate
from vlm_grpo.training.objective.token_batch import TokenBatch

LENGTHS = (3, 1, 4, 2)
"""Tokens of the completions that a loss is checked on."""
PER_COMPLETION = ("advantages", "lengths", "active", "behind_variant")
"""Fields of a batch with a value for each completion; other tensors have one for each token."""
TOLERANCE = 1e-9
"""Largest difference from a cut, in float64: far above rounding, far below a change of formula."""


def load_surrogate(settings: ObjectiveSettings) -> Surrogate | None:
    """Load the loss that ``objective.loss`` names; None if it names none.

    The function gets the importance ratio of each token, (M,), the ``TokenBatch`` with its
    ``old_logprobs``, and the settings, and returns the policy loss of each token, (M,), before
    weighting. Its values for a completion must not depend on the other completions of the
    micro-batch, whose number is up to ``optim.max_tokens_per_batch``. ``UserError``: there is no
    such function, it fails, its result has another shape or no gradient, or it depends on how a
    step is cut into micro-batches.
    """
    if settings.loss is None:
        return None
    return _load("loss", settings.loss, lambda loss: _find_problem(loss, settings))


def load_estimator(name: str) -> StepEstimator | None:
    """Return the step estimator of this name, or load the one that ``FILE.py:NAME`` names; None:
    the advantages of each group are its own.

    The function gets ``AdvantageInputs`` and returns one advantage per completion, (n,), or a
    sequence of (T,) advantages. The order of the groups, which depends on the ranks, must not
    change them. ``UserError``: there is no such function, it fails, its result has another shape or
    is not finite, or it depends on that order.
    """
    if name in STEP_ESTIMATORS or name in GROUP_ESTIMATORS:
        return STEP_ESTIMATORS.get(name)
    return _load("advantage_estimator", name, _find_estimator_problem)


def _load(setting: str, value: str, find_problem: Callable[[Any], str | None]) -> Any:
    path, _, name = value.rpartition(":")
    function = getattr(load_file(Path(path), setting.replace("_", " ")), name, None)
    if not callable(function):
        raise UserError(f"objective.{setting}={value}: the file has no function {name}")
    try:
        problem = find_problem(function)
    except FAILURES as error:  # the user's function may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).name == Path(path).name]
        last = (own or frames)[-1]
        problem = f"{Path(last.filename).name}, line {last.lineno}: {type(error).__name__}: {error}"
    if problem:
        raise UserError(f"objective.{setting}={value}: {problem}")
    return function


def _find_estimator_problem(estimator: StepEstimator) -> str | None:
    """Compare the advantages of random completions with those in another order of the groups."""
    batch, groups = _draw_batch(), torch.tensor([0, 0, 1, 1])
    order = [2, 3, 0, 1]
    for penalties in (None, [part.abs() for part in batch.logprobs.detach().split(LENGTHS)]):
        inputs = AdvantageInputs(batch.advantages, groups, batch.lengths, penalties)
        moved = None if penalties is None else [penalties[row] for row in order]
        turned = AdvantageInputs(inputs.rewards[order], groups, batch.lengths[order], moved)
        found, again = _split(estimator(inputs)), _split(estimator(turned))
        shapes = [{(), (length,)} for length in LENGTHS]
        if len(found) != len(shapes) or any(
            values.shape not in allowed for values, allowed in zip(found, shapes, strict=True)
        ):
            return (
                "it must return one advantage per completion, or for each completion a tensor of "
                "one per token"
            )
        if not all(values.isfinite().all() for values in found):
            return "an advantage is not finite on ordinary values"
        pairs = zip([found[row] for row in order], again, strict=True)
        if any((one - other).abs().max() > TOLERANCE for one, other in pairs):
            return (
                "its advantages depend on the order of the groups: use inputs.groups to tell which "
                "completions belong together"
            )
    return None


def _split(advantages: object) -> list[Tensor]:
    is_known = isinstance(advantages, Tensor | Sequence)
    return [torch.as_tensor(part) for part in advantages] if is_known else []


def _find_problem(loss: Surrogate, settings: ObjectiveSettings) -> str | None:
    """Compare the gradient of a random step with the sum of those of its halves."""
    batch = _draw_batch()
    assert batch.old_logprobs is not None
    values = loss((batch.logprobs - batch.old_logprobs).exp(), batch, settings)
    is_tensor = isinstance(values, Tensor)
    if not is_tensor or values.shape != batch.logprobs.shape:
        found = f"one of shape {list(values.shape)}" if is_tensor else type(values).__name__
        return f"it must return a tensor of one value per token, not {found}"
    if not values.requires_grad:
        return "its values have no gradient: use the ratio or batch.logprobs without detaching them"
    every, half = range(len(LENGTHS)), len(LENGTHS) // 2
    whole, halves = (
        _compute_gradient(cuts, loss, settings) for cuts in ([every], [every[:half], every[half:]])
    )
    if not whole.isfinite().all():
        return "its gradient is not finite on ordinary values"
    difference = (halves - whole).abs().max().item()
    if difference <= TOLERANCE * whole.abs().max().clamp(min=1).item():
        return None
    return (
        f"its gradient depends on how a step is cut into micro-batches (by {difference:.2g}): "
        "compute each value from its own completion, without sums or means over the batch; "
        "batch.completion_mean and batch.completion_sum are those over a completion, and "
        "loss_type sets how the values are reduced"
    )


def _draw_batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(LENGTHS)
    count = int(lengths.sum())

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logprobs = -draw(count).exp()
    near = [(logprobs + 0.3 * draw(count)).clamp(max=0) for _ in range(3)]
    return TokenBatch(
        logprobs=logprobs.requires_grad_(),
        completion=torch.arange(len(LENGTHS)).repeat_interleave(lengths),
        advantages=draw(len(LENGTHS)),
        lengths=lengths,
        old_logprobs=near[0].detach(),
        reference_logprobs=near[1].detach(),
        sampler_logprobs=near[2].detach(),
        entropies=draw(count).exp(),
        active=torch.tensor([True, True, True, False]),
        scores=defaultdict(near[1].detach),  # whatever a method may score
    )


def _select(batch: TokenBatch, rows: range) -> TokenBatch:
    """Return the batch of some completions, with gradients into the whole batch's log-probs."""
    tokens = (batch.completion >= rows.start) & (batch.completion < rows.stop)
    changed = {
        name: value[list(rows) if name in PER_COMPLETION else tokens]
        for name, value in vars(batch).items()
        if isinstance(value, Tensor)
    }
    changed["completion"] = changed["completion"] - rows.start
    scores = defaultdict(lambda: batch.scores["any"][tokens])
    return replace(batch, **changed, scores=scores)


def _compute_gradient(
    cuts: Sequence[range], loss: Surrogate, settings: ObjectiveSettings
) -> Tensor:
    """Return the gradient of the log-probs of a step that is cut into these completions."""
    batch, total = _draw_batch(), torch.zeros(())
    for part in (_select(batch, rows) for rows in cuts):
        assert part.old_logprobs is not None
        total = total + loss((part.logprobs - part.old_logprobs).exp(), part, settings).sum()
    return torch.autograd.grad(total, batch.logprobs)[0]
