"""Drawn: chooses sites of stretches that were drawn before. Ranks import it from here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.sites.stretch_choice import Choose


@dataclass
class Drawn:
    """Chooses sites that were drawn before, and has the inputs of stretches compared.

    Args:
        masks: The sites of each stretch.
        alike: Whether all of them are equal; then one stretch's input alone is compared.
    """

    masks: Sequence[Mask]
    alike: bool
    chosen: list[Mask] = field(default_factory=list)

    @property
    def choose(self) -> Choose:
        return take

    def compares(self, stretch: int) -> bool:
        return not self.alike or stretch == 2

    def begin(self) -> None:
        self.chosen.clear()


def take(choices: Sequence[Drawn], stretch: int, changes: object) -> list[Mask]:
    for choice in choices:
        choice.chosen.append(choice.masks[stretch - 1])
    return [choice.masks[stretch - 1] for choice in choices]
