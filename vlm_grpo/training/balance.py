"""Moving whole groups between ranks after the rollout, to balance the update.

Before the rollout only the lengths of the prompts are known, so it balances these. Completions
differ in length, resampling replaces groups, and groups without a gradient cost nothing in the
update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from accelerate import Accelerator

from vlm_grpo.config.run import Settings
from vlm_grpo.dist.collectives import fail_together, gather_object, plan_moves
from vlm_grpo.training.advantages import has_spread
from vlm_grpo.training.batch import build_slices
from vlm_grpo.types import Group, Prompt

BACKWARD_COST = 2
"""Cost of a backward pass in forward passes."""


def estimate_cost(
    group: Group, reward_weights: Mapping[str, float], settings: Settings, shared: bool
) -> int:
    """Estimate the tokens of a group in forward passes after its rollout; with ``shared``, its
    completions share one pass of their prompt.
    """
    objective = settings.objective
    is_skipped = settings.can_skip_zero_advantages and objective.beta == 0
    is_skipped = is_skipped and not has_spread(group, reward_weights, objective)
    masked = objective.mask_truncated_completions
    every = [True] * len(group.completions)
    active = [not (is_skipped or (masked and c.stop == "length")) for c in group.completions]

    def count(keep: Sequence[bool]) -> int:
        repeated = 0 if shared else max(0, sum(keep) - 1) * len(group.prompt.token_ids)
        return repeated + sum(piece.num_tokens for piece in build_slices([group], keep))

    references = objective.needs_reference * (2 if objective.kl_in == "reward" else 1)
    updates = objective.num_iterations * (1 + BACKWARD_COST)
    return references * count(every) + updates * count(active)


def balance_groups(
    groups: Mapping[int, Group],
    costs: Mapping[int, int],
    load: Callable[[Sequence[int]], list[Prompt]],
    accelerator: Accelerator,
    mini_batches: int = 1,
) -> tuple[dict[int, Group], tuple[int, ...], dict[int, int]]:
    """Divide the groups into mini-batches, and move them between the ranks so that the costs of
    each mini-batch are about equal. All ranks must call it.

    Completions and scores are sent; the receiver loads the prompt from the data, with ``load``,
    which also encodes the images. Groups and costs have the stream's indices. ``mini_batches``
    divides the number of groups of all ranks. It returns this rank's groups now by index, the
    indices of those that it has received, and the number of each index's mini-batch, from 0, for
    all ranks' groups.
    """
    rank, shares = accelerator.process_index, gather_object([dict(costs)])
    every = sorted(index for share in shares for index in share)
    parts = {index: place * mini_batches // len(every) for place, index in enumerate(every)}
    moves: dict[int, int] = {}
    for part in range(mini_batches):
        moves |= plan_moves([{i: c for i, c in s.items() if parts[i] == part} for s in shares])
    if not moves:
        return dict(groups), (), parts
    leaving = [index for index in moves if index in groups]
    parcels = gather_object([(i, groups[i].completions, groups[i].scores) for i in leaving])
    received = sorted(parcel for parcel in parcels if moves[parcel[0]] == rank)
    indices, prompts = [index for index, *_ in received], []
    with fail_together(accelerator):
        prompts = load(indices)
    kept = {index: group for index, group in groups.items() if index not in moves}
    for prompt, (index, completions, scores) in zip(prompts, received, strict=True):
        kept[index] = Group(prompt, completions, scores)
    return dict(sorted(kept.items())), tuple(indices), parts
