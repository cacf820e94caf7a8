"""What the ranks of a lease are asked for, with what each of them still has to be sent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from maskfx.distributed.messages import (
    PartRequest,
    PartResult,
    WholeRequest,
    WholeResult,
    WriteRequest,
)
from maskfx.distributed.rank_child import RankProcess
from maskfx.distributed.rank_pool import Lease, RankPool
from maskfx.runtime.backends.code_run import CodeKey
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
    compiled = code_of(pool)
    requests: dict[int, PartRequest] = {}
    for place, number in enumerate(lease.ranks):
        shares = [part.partition.has_part(m, place) for m in range(len(steps))]
        if any(shares):
            process = lease.processes.all[number]
            own, gone, reload = pool.steps.sent(process, steps, shares)
            ended = tuple(process.runs.difference(alive))
            requests[number] = replace(
                part,
                steps=own,
                place=place,
                ended=ended,
                dropped=gone,
                reload=reload,
                compiled=compiled,
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
    compiled = code_of(pool)
    return {number: WholeRequest(*own, written, compiled) for number, own in sent.items()}


def code_of(pool: RankPool) -> dict[CodeKey, str]:
    """Return the compiled code that there is, and where."""
    return {} if pool.code is None else dict(pool.code.places)


def write_requests(
    pool: RankPool, processes: Mapping[int, RankProcess], updates: Updates
) -> dict[int, WriteRequest]:
    """Return what ranks are asked for that write adapters into their weights."""
    step = DenseStep({}, updates)
    return {n: WriteRequest(*pool.steps.sent(one, [step], [True])) for n, one in processes.items()}


def note_code(
    pool: RankPool,
    results: Iterable[PartResult | WholeResult],
    steps: Sequence[AnyStep],
    single: bool = False,
) -> None:
    """Have the code compiled that ranks lacked; see `CodeCompiler.note`."""
    if pool.code is not None:
        pool.code.note((one.code for one in results), steps, single)
