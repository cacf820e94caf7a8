"""Choices that fit a template's byte budgets.

`restrict` finds the selection with the fastest plan among all that fit, and keeps its choices and
those that store nothing: later plans, for any batch, choose among these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from maskfx.errors import InputError
from maskfx.runtime.planner.plan import Plan, plan
from maskfx.runtime.planner.timeline import NOW, BlockChoice, BlockTimes, Start


def restrict(
    blocks: Sequence[BlockTimes],
    budgets: Sequence[float],
    templates: int = 1,
    buffer_bytes: float = math.inf,
    start: Start = NOW,
    within: float = 0.0,
) -> tuple[tuple[BlockTimes, ...], Plan]:
    """Return the blocks with the choices that fit the budgets, and the plan that selected them.

    What is kept is exactly what the plan loads: among all selections within the budgets it ends
    first, so no other restriction loses less time; `Plan.optimal` is True if that was proved.

    Args:
        blocks: the work that time is predicted for. Each member's choices count in a batch, so
            pass one member per kept template.
        budgets: bytes per tier for all templates together.
        templates: number of templates that share the budgets.
        buffer_bytes: size of the staging buffer; unbounded by default.
        start: state of the two streams at the start of the step.
        within: tolerance of the plan in seconds.
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
