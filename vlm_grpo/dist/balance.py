"""The balance of work between ranks: before a rollout by costs, and after it by moves of groups."""

from collections.abc import Callable, Mapping, Sequence

from accelerate import Accelerator

from vlm_grpo.dist.collectives import fail_together, gather_object
from vlm_grpo.types import Group, Prompt

TOLERANCE = 0.02
"""Excess of the most loaded rank over the mean up to which no group is moved."""


def balance_by_cost(costs: Sequence[int], world_size: int) -> list[list[int]]:
    """Return for each rank the indices, ascending, of items whose total costs are about equal.

    The most expensive remaining item goes to the rank with the lowest total so far (Graham's
    longest-processing-time rule, at most 4/3 of the optimum). The result depends on the arguments
    alone, so all ranks compute the same result without communication."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, 0, rank) for rank in range(world_size)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        cost, count, rank = min(loads)
        shares[rank].append(item)
        loads[rank] = (cost + costs[item], count + 1, rank)
    return [sorted(share) for share in shares]


def balance_groups(
    groups: Mapping[int, Group],
    costs: Mapping[int, int],
    load: Callable[[Sequence[int]], list[Prompt]],
    accelerator: Accelerator,
    mini_batches: int = 1,
) -> tuple[dict[int, Group], dict[int, int]]:
    """Divide the groups into mini-batches, and move them between the ranks so that the costs of
    each mini-batch are about equal. All ranks must call it.

    Before the rollout only the lengths of the prompts are known, so it balances these. Completions
    differ in length, resampling replaces groups, and groups without a gradient cost nothing in the
    update. Completions and scores are sent; the receiver loads the prompt from the data, with
    ``load``, which also encodes the images. Groups and costs have the stream's indices.
    ``mini_batches`` divides the number of groups of all ranks. It returns this rank's groups now by
    index, and the number of each index's mini-batch, from 0, for all ranks' groups.
    """
    rank, shares = accelerator.process_index, gather_object([dict(costs)])
    every = sorted(index for share in shares for index in share)
    parts = {index: place * mini_batches // len(every) for place, index in enumerate(every)}
    moves: dict[int, int] = {}
    for part in range(mini_batches):
        moves |= plan_moves([{i: c for i, c in s.items() if parts[i] == part} for s in shares])
    if not moves:
        return dict(groups), parts
    leaving = [index for index in moves if index in groups]
    parcels = gather_object([(i, groups[i].completions, groups[i].scores) for i in leaving])
    received = sorted(parcel for parcel in parcels if moves[parcel[0]] == rank)
    prompts = []
    with fail_together(accelerator):
        prompts = load([index for index, *_ in received])
    kept = {index: group for index, group in groups.items() if index not in moves}
    for prompt, (index, completions, scores) in zip(prompts, received, strict=True):
        kept[index] = Group(prompt, completions, scores)
    return dict(sorted(kept.items())), parts


def plan_moves(shares: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Return the new rank of each item that moves so that ranks have about equal total costs.

    ``shares`` has, for each rank, the costs of its items by the items' numbers, from 0. Moves cost
    time, so items stay where they are if possible: the rank with the highest total gives an item to
    another rank, or exchanges it for a cheaper one, whichever lowers the higher total of the two
    most, until the highest total is near the mean or no such move is left. The result depends on
    the arguments alone, so all ranks compute the same result without communication.
    """
    totals, now = [sum(share.values()) for share in shares], [dict(share) for share in shares]
    while max(totals) > (1 + TOLERANCE) * sum(totals) / len(totals):
        high = totals.index(max(totals))
        options = [
            (max(totals[high] - cost + other, totals[low] + cost - other), low, item, back)
            for low, share in enumerate(now)
            for item, cost in now[high].items()
            for back, other in [(-1, 0), *share.items()]  # -1: nothing comes back
            if 0 < cost - other < totals[high] - totals[low]
        ]
        if not options:
            break
        _, low, item, back = min(options)
        now[low][item] = now[high].pop(item)
        if back >= 0:
            now[high][back] = now[low].pop(back)
        totals = [sum(share.values()) for share in now]
    items = ((item, rank) for rank, share in enumerate(now) for item in share)
    return {item: rank for item, rank in items if item not in shares[rank]}
