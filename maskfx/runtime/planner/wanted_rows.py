"""Which cached rows a plan reads of a recording: those that may be read before a request runs."""

from __future__ import annotations

from collections.abc import Sequence

from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import Cached, Rest
from maskfx.runtime.backends.eager import first_uses
from maskfx.runtime.planner.choices import INPUT, WHOLE, Choices, projects


def wanted_taps(program: Program, plan: tuple[Choices, Sequence[int]] | None) -> list[str]:
    """Return the taps that a plan reads, in the order of the graph.

    Args:
        program: The program.
        plan: One member's choices and what is selected of them; None reads keys and values.
    """
    by_name: dict[str, str] = {}  # choice of the block that reads an input
    if plan is not None:
        choices, selection = plan
        for block, choice in zip(choices.blocks, choices.names_of(selection), strict=True):
            by_name.update(dict.fromkeys(block.names, choice))
    order = [name for _, names in first_uses(program.module.graph) for name in names]
    return list(dict.fromkeys(tap for name in order if (tap := tap_read(program, name, by_name))))


def tap_read(program: Program, name: str, by_name: dict[str, str]) -> str | None:
    """Return the tap that an input reads under the choice of its block; None if it reads none."""
    source, choice = program.interface.inputs[name], by_name.get(name, "")
    if not isinstance(source, Cached) or choice == WHOLE:
        return None
    if projects(program, source):
        return source.tap if choice == INPUT else None
    keys = isinstance(source, Rest) and program.interface.region_of(source)
    return None if keys and choice == INPUT else source.tap
