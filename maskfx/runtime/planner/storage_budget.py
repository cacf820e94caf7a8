"""Which choices a template can afford: bytes kept on the device, in the host's memory, on disk.

A choice's data can lie in any tier: it then loads as fast as that tier does and counts against that
tier's budget. `restrict` finds the choices whose plan ends first among all that fit, and leaves
them and those that keep nothing: later plans, for whatever batch, choose among these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from maskfx.errors import InputError
from maskfx.runtime.planner.plan import Plan, plan
from maskfx.runtime.planner.timeline import NOW, BlockChoice, BlockTimes, Start


@dataclass(frozen=True)
class StorageTier:
    """A place for cached data. No `bytes_per_second`: on the device already, nothing to load."""

    name: str
    budget_bytes: float
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        if not self.budget_bytes >= 0:
            raise InputError(f"tier {self.name!r}: budget_bytes={self.budget_bytes!r}; 0 or more")


def in_tiers(choice: BlockChoice, tiers: Sequence[StorageTier]) -> tuple[BlockChoice, ...]:
    """The choice once per tier, its data and its extra data there; itself if it has none.

    The bytes it keeps are those it loads: whole tensors of a template, as they are stored.
    """
    if not (choice.load_bytes or choice.extra_bytes):
        return (choice,)
    placed = []
    for number, tier in enumerate(tiers):
        kept = tuple(choice.load_bytes * (i == number) for i in range(len(tiers)))
        extra = tuple(choice.extra_bytes * (i == number) for i in range(len(tiers)))
        named = f"{choice.name}@{tier.name}"
        there = replace(choice, name=named, kept_bytes=kept, extra_kept=extra)
        if tier.bytes_per_second is None:
            there = replace(there, load_bytes=0.0, load_seconds=0.0)
            placed.append(replace(there, extra_bytes=0.0, extra_seconds=0.0))
        else:
            placed.append(there.over(tier.bytes_per_second))
    return tuple(placed)


def placed_in(blocks: Sequence[BlockTimes], tiers: Sequence[StorageTier]) -> tuple[BlockTimes, ...]:
    """Every choice of every block, once per tier."""
    if not tiers:
        raise InputError("no tiers; name at least one place for the cache")
    return tuple(
        replace(
            block,
            members=tuple(
                tuple(there for choice in choices for there in in_tiers(choice, tiers))
                for choices in block.members
            ),
        )
        for block in blocks
    )


def restrict(
    blocks: Sequence[BlockTimes],
    budgets: Sequence[float],
    templates: int = 1,
    buffer_bytes: float = math.inf,
    start: Start = NOW,
    within: float = 0.0,
) -> tuple[tuple[BlockTimes, ...], Plan]:
    """The blocks with the choices that `templates` templates can afford, and the plan behind it.

    budgets: bytes per tier for all templates together. `blocks` is the work that time is predicted
    for; of a batch each member's choices count, so give one member per template that is kept. What
    is kept is exactly what the plan loads: among all selections within the budgets it ends first,
    so no other restriction loses less. `Plan.bound` says if that was proved.
    """
    if templates < 1 or not budgets:
        raise InputError(
            f"{templates} templates, {len(budgets)} budgets; give at least one of each"
        )
    for number, budget in enumerate(budgets):
        if not budget >= 0:
            raise InputError(f"budget {number} is {budget!r} bytes; give 0 or more")
    each = [min(budget / templates, 1e300) for budget in budgets]
    best = plan(blocks, buffer_bytes, start, each, within)
    left = tuple(
        replace(
            block,
            members=tuple(
                tuple(c for i, c in enumerate(choices) if i == index or not _keeps(c))
                for choices, index in zip(block.members, picked, strict=True)
            ),
        )
        for block, picked in zip(blocks, best.selection, strict=True)
    )
    return left, best


def _keeps(choice: BlockChoice) -> bool:
    return any(choice.kept_bytes) or (choice.needs_full and any(choice.extra_kept))
