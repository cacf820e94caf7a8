"""PatchChoice: chooses the patches of each stretch while a step runs, from the stretch's input.

A stretch computes the patches whose input differs enough from the one that it read when it last
computed them. The choices of all members of a batch are made together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from maskfx.ir.grids import Floats
from maskfx.runtime.reuse.judges import Bools, Judge, PatchFeatures, judge_together
from maskfx.runtime.reuse.patches import PatchReuse, PatchState
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.sites.stretch_choice import Choose


@dataclass
class StretchState(PatchState):
    """What one guidance branch knows of its patches, if stretches are chosen while steps run.

    `since` is the change of a stretch's input from the one that it last read, by patch.
    """

    def advance(self, computed: Bools, changes: Floats | None) -> None:
        """Learn what a step computed.

        Args:
            computed: What the step computed, by stretch and patch.
            changes: How far the inputs of stretches differed from those last read, as compared in
                the step; not a number where they weren't compared. None if nothing was.
        """
        if changes is not None:
            self.since = np.where(np.isnan(changes), self.since, changes).astype(np.float32)
        self.since = np.where(computed, np.float32(0), self.since)
        self.since[0] = 0.0
        self.age = np.where(computed, 1, self.age + 1)


@dataclass(eq=False)
class PatchChoice:
    """The choices of one call, made while its step runs.

    Args:
        settings: The greatest age, and whether stretches compute alike.
        judge: What decides.
        state: What is known before the step.
        inputs: The relative change of the denoiser's input since the first stretch read it.
        inside: The patches that may be computed.
        noise: The time of the step divided by that of the first one.
        call: The number of the call.
        mask_of: Returns the sites of patches.
    """

    settings: PatchReuse
    judge: Judge
    state: PatchState
    inputs: Floats
    inside: Bools
    noise: float
    call: int
    mask_of: Callable[[Bools], Mask]
    computed: Bools = field(init=False)  # by stretch and patch
    changes: Floats = field(init=False)
    chosen: list[Mask] = field(init=False)
    _masks: dict[bytes, Mask] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin()

    @property
    def choose(self) -> Choose:
        return choose_patches

    def begin(self) -> None:
        self.computed = np.zeros_like(self.state.age, bool)
        self.changes = np.full(self.state.age.shape, np.nan, np.float32)
        self.chosen = []

    @property
    def deciding(self) -> int:
        """Return the row of the first stretch whose input is compared within the step."""
        rows = range(1, self.state.stretches)
        return next((row for row in rows if row not in self.state.followers), rows.stop)

    def follows(self, row: int) -> bool:
        """Return True if a stretch computes what the one before it does."""
        alike = self.settings.sets == "alike" and row > self.deciding
        return alike or row in self.state.followers

    def compares(self, stretch: int) -> bool:
        """Return True if the judge is asked about a stretch, by its input."""
        return not self.follows(stretch - 1)

    def features(self, row: int, changes: Floats | None) -> PatchFeatures:
        """Return what the judge decides a stretch by."""
        if row == 0:
            self.changes[0] = self.inputs
        elif changes is not None:
            self.changes[row] = changes
        known = self.changes[row]
        change = np.where(np.isnan(known), self.state.since[row], known)[None]
        return PatchFeatures(change, self.state.age[row][None], self.noise, self.call, row + 1)

    def take(self, row: int, computed: Bools) -> Mask:
        """Store what a stretch computes; return its sites."""
        self.computed[row] = computed & self.inside
        key = self.computed[row].tobytes()
        if key not in self._masks:
            self._masks[key] = self.mask_of(self.computed[row])
        self.chosen.append(self._masks[key])
        return self._masks[key]


def choose_patches(
    choices: Sequence[PatchChoice], stretch: int, changes: Sequence[Floats | None]
) -> list[Mask]:
    """Return the sites that a stretch computes, by call."""
    row = stretch - 1
    asked = [n for n, choice in enumerate(choices) if not choice.follows(row)]
    features = {n: choices[n].features(row, changes[n]) for n in asked}
    found = judge_together([(choices[n].judge, features[n]) for n in asked])
    decided = {n: computed[0] for n, computed in zip(asked, found, strict=True)}
    return [
        choice.take(
            row,
            (decided[n] if n in decided else choice.computed[row - 1])
            | (choice.state.age[row] > choice.settings.age),
        )
        for n, choice in enumerate(choices)
    ]
