"""PatchReuse and PatchState: which patches each stretch of blocks computes at the next step.

A patch is a square of sites (`runtime/sites/patches.py`), a stretch a run of consecutive blocks.
With order="step" all sets of a step are decided before it, from what the step before reported; with
order="stretch" see `patch_choice.py`. Numbers only: no tensors, no denoiser; `patch_session.py`
executes the decisions.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maskfx.errors import InputError
from maskfx.ir.grids import Floats
from maskfx.runtime.reuse.judges import (
    AUTO,
    Bools,
    Judge,
    PatchFeatures,
    Threshold,
    cascade,
    judge_in,
    load_judge,
)

KEPT_OUTPUTS = ("hold", "extrapolate")
SETS = ("alike", "each")
ORDERS = ("step", "stretch")


@dataclass(frozen=True)
class PatchReuse:
    """Configures how a request reuses its patches across steps.

    Args:
        threshold: The least relative change of a stretch's input, mean over a patch, from which the
            patch is computed there. Defaults to 0.1; 0 computes all.
        age: The most steps that a patch is kept in a stretch. Defaults to 6; 0 computes all.
        first: The number of steps at the start that compute all patches. Defaults to 3; two of them
            are recorded, because a change needs two.
        last: The number of steps at the end that compute all patches. Defaults to 1; without effect
            where the number of steps isn't known.
        side: The latent sites along a patch's side; for packed tokens, the tokens. Defaults to 8;
            with judge="auto" it is that of the judge's training.
        outputs: What the denoiser's output is in patches that aren't computed: "extrapolate"
            (default) continues their last outputs, "hold" repeats the last one.
        sets: Which patches the stretches of a step compute: "alike" (default) all of them those
            that any stretch needs, so that a patch is computed from end to end or not at all;
            "each" every stretch those that it needs. With order="stretch", "alike" means that all
            stretches behind the second compute what it does.
        order: When it is decided: "step" (default) before a step, for all stretches, by the changes
            that the step before reported; "stretch" before each stretch, by how far its input in
            this step differs from the one that it last read, which is kept for it.
        judge: What decides in place of the threshold: a file of `maskfx train-judge`, "auto" for
            the file judge.npz in the model's folder, or an object with the methods of
            `maskfx.runtime.reuse.judges.Judge`. The two pipelines of `maskfx.reference` have such
            a file; where there is none, "auto" leaves the decision to the threshold.
    """

    threshold: float = 0.1
    age: int = 6
    first: int = 3
    last: int = 1
    side: int = 8
    outputs: str = "extrapolate"
    sets: str = "alike"
    judge: Judge | str | os.PathLike[str] | None = None
    order: str = "step"

    def __post_init__(self) -> None:
        for name, least in (("age", 0), ("first", 0), ("last", 0), ("side", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InputError(
                    f"PatchReuse: {name}={value!r}: give a whole number, {least} or more"
                )
        for name, known in (("outputs", KEPT_OUTPUTS), ("sets", SETS), ("order", ORDERS)):
            if getattr(self, name) not in known:
                raise InputError(
                    f"PatchReuse: {name}={getattr(self, name)!r}: choose one of {', '.join(known)}"
                )
        Threshold(self.threshold)
        if self.judge == AUTO:
            return
        if isinstance(self.judge, (str, os.PathLike)):
            load_judge(self.judge)
        elif self.judge is not None and not hasattr(self.judge, "computes"):
            raise InputError(
                f'PatchReuse: judge={self.judge!r}: give a file of maskfx train-judge, "auto", '
                "or an object with the methods of a Judge"
            )

    @classmethod
    def of(cls, given: PatchReuse | float) -> PatchReuse:
        """Return settings, or those with a threshold."""
        return given if isinstance(given, PatchReuse) else cls(threshold=given)

    @property
    def decides(self) -> Judge:
        """Return the judge."""
        if self.judge is None or self.judge == AUTO:
            return Threshold(float(self.threshold))
        return load_judge(self.judge) if isinstance(self.judge, (str, os.PathLike)) else self.judge

    @property
    def keeps_nothing(self) -> bool:
        return self.age == 0 or self.decides.keeps_nothing

    def in_folders(self, folders: Sequence[Path]) -> PatchReuse:
        """Return the settings for a model in these folders: "auto" is its judge, or none."""
        if self.judge != AUTO:
            return self
        path = judge_in(folders)
        side = None if path is None else load_judge(path).card.get("side")
        return replace(self, judge=path, side=side if isinstance(side, int) else self.side)

    def is_last(self, step: int, steps: int | None) -> bool:
        """Return True if a step computes all patches because it is among the last ones."""
        return steps is not None and step >= steps - self.last


@dataclass
class PatchState:
    """What one guidance branch of a request knows of its patches; arrays have a row per stretch.

    Args:
        stretches: The number of stretches.
        patches: The number of patches.
        reported: The stretches, from 1, whose input's changes are reported by the step before.
    """

    stretches: int
    patches: int
    reported: Collection[int]
    age: NDArray[np.int64] = field(init=False)  # steps since the patch was computed there
    since: Floats = field(init=False)  # change of the input since then
    rate: Floats = field(init=False)  # change of the input per step, as last reported

    def __post_init__(self) -> None:
        shape = self.stretches, self.patches
        self.age = np.ones(shape, np.int64)
        self.since = np.zeros(shape, np.float32)
        self.rate = np.full(shape, np.inf, np.float32)

    @cached_property
    def sources(self) -> Sequence[int | None]:
        """The row of the stretch that makes each stretch's input; None for the first."""
        return [None, *range(self.stretches - 1)]

    @cached_property
    def followers(self) -> list[int]:
        """Rows of stretches whose input isn't reported: they compute what the one before does."""
        return [n - 1 for n in range(2, self.stretches + 1) if n not in self.reported]

    def decide(
        self, settings: PatchReuse, judge: Judge, inputs: Floats, noise: float, call: int
    ) -> Bools:
        """Return, by stretch and patch, what the next step computes.

        Args:
            settings: The greatest age, and whether stretches compute alike.
            judge: What decides.
            inputs: The relative change of the denoiser's input since the first stretch read it.
            noise: The time of the step divided by that of the first one.
            call: The number of the call.
        """
        resting = self.since.copy()
        resting[0] = inputs
        moving = resting.copy()
        moving[1:] += self.rate[1:] * self.age[:-1].astype(np.float32)
        both = [judge.computes(PatchFeatures(c, self.age, noise, call)) for c in (moving, resting)]
        for row in self.followers:
            both[0][row], both[1][row] = True, False
        found = cascade(both[0], both[1], self.age > settings.age, self.sources)
        return np.broadcast_to(found.any(0), found.shape) if settings.sets == "alike" else found

    def advance(self, computed: Bools, changes: Floats | None) -> None:
        """Learn what a step computed, and how far the inputs of stretches changed by it.

        Args:
            computed: What the step computed, by stretch and patch.
            changes: The relative changes, 0 where no row was replaced; None if none is known.
        """
        if changes is None:
            changes = np.zeros(computed.shape, np.float32)
        else:
            changes = changes.astype(np.float32)
            rate = changes[1:] / self.age[:-1].astype(np.float32)
            self.rate[1:] = np.where(computed[:-1], rate, self.rate[1:])
        self.since = np.where(computed, np.float32(0), self.since + changes)
        self.since[0] = 0.0
        self.age = np.where(computed, 1, self.age + 1)
