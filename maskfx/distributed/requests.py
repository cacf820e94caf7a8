"""What the ranks of a lease are asked for, with what each of them still has to be sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from maskfx.distributed.messages import PartRequest, WholeRequest, WriteRequest
from maskfx.distributed.rank_child import RankProcess
from maskfx.distributed.rank_pool import Lease, RankPool
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.steps import AnyStep, DenseStep


def part_requests(
    pool: RankPool,
    lease: Lease,
    part: PartRequest,
    steps: Sequence[AnyStep],
    alive: Collection[int],
) -> dict[int, PartRequest]:
    """Return what each rank with a share of a member is asked for.

    Args:
        pool: Knows what the ranks hold.
        lease: The ranks.
        part: What is the same for all of them.
        steps: The members.
        alive: The requests that haven't ended.
    """
    pool.save_programs()
    requests: dict[int, PartRequest] = {}
    for place, number in enumerate(lease.ranks):
        shares = [part.partition.has_part(m, place) for m in range(len(steps))]
        if any(shares):
            process = lease.processes.all[number]
            own, gone, reload = pool.steps.sent(process, steps, shares)
            ended = tuple(process.runs.difference(alive))
            requests[number] = replace(
                part, steps=own, place=place, ended=ended, dropped=gone, reload=reload
            )
    return requests


def whole_requests(
    pool: RankPool, lease: Lease, steps: Mapping[int, Sequence[AnyStep]], written: bool
) -> dict[int, WholeRequest]:
    """Return what each rank is asked for that computes steps alone; `steps` are those of each."""
    pool.save_programs()
    sent = {
        number: pool.steps.sent(lease.processes.all[number], own, [True] * len(own))
        for number, own in steps.items()
    }
    return {number: WholeRequest(*own, written) for number, own in sent.items()}


def write_requests(
    pool: RankPool, processes: Mapping[int, RankProcess], updates: Updates
) -> dict[int, WriteRequest]:
    """Return what ranks are asked for that write adapters into their weights."""
    step = DenseStep({}, updates)
    return {n: WriteRequest(*pool.steps.sent(one, [step], [True])) for n, one in processes.items()}
