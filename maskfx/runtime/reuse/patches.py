"""PatchReuse and PatchState: which patches each stretch of blocks computes at the next step.

A patch is a square of sites (`runtime/sites/patches.py`), a stretch a run of consecutive blocks.
With order="step" all sets of a step are decided before it, from what the step before reported; with
order="stretch" see `patch_choice.py`. Numbers only: no tensors, no denoiser; `patch_session.py`
executes the decisions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from maskfx.errors import InputError
from maskfx.ir.argument_checks import check_choice, check_number, check_whole
from maskfx.ir.geometry.grids import Floats
from maskfx.runtime.reuse.judges import (
    AUTO,
    Bools,
    Judge,
    PatchFeatures,
    Threshold,
    cascade,
    judge_in,
    judge_together,
    load_judge,
)

if TYPE_CHECKING:
    from maskfx.runtime.steps import AnyStep

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
            check_whole("PatchReuse", name, getattr(self, name), least)
        for name, known in (("outputs", KEPT_OUTPUTS), ("sets", SETS), ("order", ORDERS)):
            check_choice("PatchReuse", name, getattr(self, name), known)
        check_number("PatchReuse", "threshold", self.threshold)
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
        [found] = decide_together([PatchDecision(self, settings, judge, inputs, noise, call)])
        return found

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


@dataclass(frozen=True, eq=False)
class PatchDecision:
    """What one call's next step computes, to be decided; see `PatchState.decide`.

    Args:
        settle: Returns the step of the call when it is decided.
    """

    state: PatchState
    settings: PatchReuse
    judge: Judge
    inputs: Floats
    noise: float
    call: int
    settle: Callable[[Bools], AnyStep] | None = None

    def features(self) -> tuple[PatchFeatures, PatchFeatures]:
        """Return the features if the stretches before compute a patch, and if they keep it."""
        state = self.state
        resting = state.since.copy()
        resting[0] = self.inputs
        moving = resting.copy()
        moving[1:] += state.rate[1:] * state.age[:-1].astype(np.float32)
        found = [PatchFeatures(c, state.age, self.noise, self.call) for c in (moving, resting)]
        return found[0], found[1]

    def step(self, computed: Bools | None = None) -> AnyStep:
        """Return the step of the call; without `computed` it is decided by itself."""
        assert self.settle is not None, "a decision of no call"
        return self.settle(decide_together([self])[0] if computed is None else computed)


def decide_together(asked: Sequence[PatchDecision]) -> list[Bools]:
    """Return, by decision, what its step computes, by stretch and patch.

    The patches of all requests with as many stretches lie side by side: each judge is asked once,
    and what a stretch passes on to the next one is followed for all of them at once.
    """
    groups: dict[int, list[int]] = {}
    for number, one in enumerate(asked):
        groups.setdefault(one.state.stretches, []).append(number)
    found: dict[int, Bools] = {}
    for numbers in groups.values():
        own = [asked[number] for number in numbers]
        judged = judge_together([(one.judge, each) for one in own for each in one.features()])
        for place, one in enumerate(own):
            for row in one.state.followers:
                judged[2 * place][row], judged[2 * place + 1][row] = True, False
        forced = [one.state.age > one.settings.age for one in own]
        parts = (judged[::2], judged[1::2], forced)
        moving, resting, always = (np.concatenate(part, 1) for part in parts)
        computed = cascade(moving, resting, always, own[0].state.sources)
        ends = np.cumsum([one.state.patches for one in own])[:-1]
        for number, one, each in zip(numbers, own, np.split(computed, ends, 1), strict=True):
            alike = one.settings.sets == "alike"
            found[number] = np.broadcast_to(each.any(0), each.shape) if alike else each
    return [found[number] for number in range(len(asked))]
