"""StretchChoice: what chooses the sites of a step's stretches while the step runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from maskfx.ir.geometry.grids import Floats
from maskfx.runtime.sites.mask import Mask


class StretchChoice(Protocol):
    """Chooses the sites that each stretch of one member computes."""

    @property
    def choose(self) -> Choose:
        """Return what chooses for this member and others like it at once."""
        ...

    @property
    def chosen(self) -> Sequence[Mask]:
        """Return the sites of the stretches that were chosen so far."""
        ...

    def compares(self, stretch: int) -> bool:
        """Return True if the choice depends on how far the stretch's input differs."""
        ...

    def begin(self) -> None:
        """Forget what was chosen; a step that failed runs again."""
        ...


# Returns the sites that a stretch computes, by member. The arguments are the members, the number of
# the stretch from 1, and by member how far the stretch's input differs from the one that it last
# read, by patch: not a number where the stretch before computed nothing, None for the first stretch
# and where nothing is compared.
Choose = Callable[[Sequence[Any], int, Sequence[Floats | None]], Sequence[Mask]]


def choose_together(
    choices: Sequence[StretchChoice], stretch: int, changes: Sequence[Floats | None]
) -> list[Mask]:
    """Return the sites of a stretch by member, with one call for all of one kind."""
    kinds: dict[Choose, list[int]] = {}
    for number, choice in enumerate(choices):
        kinds.setdefault(choice.choose, []).append(number)
    found: dict[int, Mask] = {}
    for choose, own in kinds.items():
        masks = choose([choices[n] for n in own], stretch, [changes[n] for n in own])
        found |= dict(zip(own, masks, strict=True))
    return [found[number] for number in range(len(choices))]
