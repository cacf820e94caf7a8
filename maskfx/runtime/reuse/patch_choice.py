"""PatchChoice: chooses the patches of each stretch while a step runs, from the stretch's input.

A stretch computes the patches whose input differs enough from the one that it read when it last
computed them. The choices of all members of a batch are made together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from torch import Tensor

from maskfx.ir.geometry.grids import Floats
from maskfx.runtime.reuse.judges import Bools, Judge, PatchFeatures, TableJudge, Threshold
from maskfx.runtime.reuse.patches import PatchReuse, PatchState
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.sites.patches import PatchGrid
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


@dataclass(frozen=True, eq=False)
class PatchSites:
    """Returns the sites of patches.

    Args:
        grid: The patches.
        within: The sites that may be computed; None: all.
    """

    grid: PatchGrid
    within: Tensor | None = None

    def __call__(self, row: Bools) -> Mask:
        mask = self.grid.mask(row)
        return Mask(mask if self.within is None else mask & self.within)


@dataclass(eq=False)
class PatchChoice:
    """The choices of one call, made while its step runs; ranks that make them have equal copies.

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
    together: Together | None = None
    _masks: dict[bytes, Mask] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin()

    def __getstate__(self) -> dict[str, object]:
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {**kept, "together": None, "_masks": {}}

    def __setstate__(self, kept: dict[str, object]) -> None:
        self.__dict__.update(kept)
        self.begin()

    @property
    def choose(self) -> Choose:
        return choose_patches

    def begin(self) -> None:
        self.computed = np.zeros_like(self.state.age, bool)
        self.changes = np.full(self.state.age.shape, np.nan, np.float32)
        self.chosen, self.together = [], None

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

    def take(self, row: int, key: bytes) -> Mask:
        """Return the sites of what a stretch computes; `key` is that, as bytes."""
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = self.mask_of(self.computed[row])
        self.chosen.append(mask)
        return mask


class Alike:
    """Choices with one judge that ask it about the same stretches.

    Their patches lie side by side: all arrays have a row per stretch, and `computed` and `changes`
    of each choice are parts of those here.
    """

    def __init__(self, choices: Sequence[PatchChoice]) -> None:
        self.choices, first = choices, choices[0]
        self.judge, self._follows = (
            first.judge,
            [first.follows(r) for r in range(len(first.computed))],
        )
        states = [choice.state for choice in choices]
        counts = [state.patches for state in states]
        self.age = np.concatenate([state.age for state in states], 1)
        self.since = np.concatenate([state.since for state in states], 1)
        self.forced = self.age > np.repeat([choice.settings.age for choice in choices], counts)
        self.inside = np.concatenate([choice.inside for choice in choices])
        self.inputs = np.concatenate([choice.inputs for choice in choices])
        self.computed = np.concatenate([choice.computed for choice in choices], 1)
        self.changes = np.concatenate([choice.changes for choice in choices], 1)
        alone = len(choices) == 1
        self.noise = first.noise if alone else np.repeat([c.noise for c in choices], counts)
        self.call = first.call if alone else np.repeat([c.call for c in choices], counts)
        ends = np.cumsum(counts).tolist()
        self.parts = [slice(end - own, end) for end, own in zip(ends, counts, strict=True)]
        # a table is looked up by age and noise for all stretches at once
        self._places = (
            self.judge.places(self.age, self.noise) if isinstance(self.judge, TableJudge) else None
        )
        for choice, part in zip(choices, self.parts, strict=True):
            choice.computed, choice.changes = self.computed[:, part], self.changes[:, part]

    def choose(self, row: int, changes: Sequence[Floats | None]) -> list[Mask]:
        """Return the sites that a stretch computes, by choice."""
        if self._follows[row]:
            found = self.computed[row - 1]
        elif isinstance(self.judge, TableJudge) and self._places is not None:
            found = self.judge.at(self._places[row], self._changed(row, changes))
        else:
            known = self._changed(row, changes)[None], self.age[row][None]
            features = PatchFeatures(*known, self.noise, self.call, row + 1)
            found = self.judge.computes(features)[0]
        computed = self.computed[row]
        np.logical_or(found, self.forced[row], out=computed)
        computed &= self.inside
        keys = computed.tobytes()  # a byte for each patch
        pairs = zip(self.choices, self.parts, strict=True)
        return [choice.take(row, keys[part]) for choice, part in pairs]

    def _changed(self, row: int, changes: Sequence[Floats | None]) -> Floats:
        """Return the change that the judge decides a stretch by, for each patch."""
        known: Floats = self.changes[row]
        given = [own for own in changes if own is not None]
        if row == 0:
            known[:] = self.inputs
        elif len(given) == len(changes):
            np.concatenate(given, out=known, casting="same_kind")
        else:
            for part, own in zip(self.parts, changes, strict=True):
                if own is not None:
                    known[part] = own
        if (squares := np.dot(known, known)) == squares:
            return known  # else some change is not a number
        found: Floats = np.where(np.isnan(known), self.since[row], known)
        return found


class Together:
    """The choices of a batch, which are decided together where they are alike."""

    def __init__(self, choices: Sequence[PatchChoice]) -> None:
        self.choices = list(choices)
        groups: dict[object, list[int]] = {}
        for number, choice in enumerate(choices):
            joins = isinstance(choice.judge, Threshold | TableJudge)
            asked = choice.settings.sets, tuple(choice.state.followers), choice.state.stretches
            groups.setdefault((choice.judge if joins else number, asked), []).append(number)
            choice.together = self
        self._groups = [(Alike([choices[n] for n in own]), own) for own in groups.values()]

    def choose(self, row: int, changes: Sequence[Floats | None]) -> list[Mask]:
        """Return the sites that a stretch computes, by choice."""
        if len(self._groups) == 1:
            return self._groups[0][0].choose(row, changes)
        found: dict[int, Mask] = {}
        for group, own in self._groups:
            masks = group.choose(row, [changes[number] for number in own])
            found |= zip(own, masks, strict=True)
        return [found[number] for number in range(len(self.choices))]


def choose_patches(
    choices: Sequence[PatchChoice], stretch: int, changes: Sequence[Floats | None]
) -> list[Mask]:
    """Return the sites that a stretch computes, by call."""
    own = choices[0].together
    if own is None or own.choices != list(choices):
        own = Together(choices)
    return own.choose(stretch - 1, changes)
