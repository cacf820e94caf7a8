"""Ranks split steps along the lines of a picture, and along the frames of a video."""

from __future__ import annotations

from typing import Any

import pytest

import maskfx
from maskfx import DenseStep, EditStep, RecordStep
from maskfx.runtime.steps import SplitRun
from tests.distributed.exchanges.test_late_group import late
from tests.distributed.test_ranks import BOUND, cache_error, error, shares
from tests.factories.masks import MASKS
from tests.factories.own_cases import OWN
from tests.factories.thread_ranks import ThreadRanks
from tests.factories.zoo import ZOO

OWNS = (
    "axial",
    "film-in-turn",
    "motion-text-for-each-frame",
    "motion-one-text",
    "motion-one-key",
    "companions",
)
NAMES = (
    *OWNS,
    "UNetMotionModel",
    "LatteTransformer3DModel",
    "UNetSpatioTemporalConditionModel",
    "UNet3DConditionModel",
)
SPLITS = (
    (2, "equal"),
    (2, "unequal"),
    (3, "unequal"),
    (3, "empty"),
    (4, "equal"),
    (8, "unequal"),
    (2, "members"),
)


@pytest.mark.parametrize(
    "name", [n if n in OWNS else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_a_mixed_batch_of_lines(name: str) -> None:
    case = OWN[name] if name in OWN else ZOO[name]
    denoiser = maskfx.compile(case.build())
    sizes = (case.sizes[0], case.sizes[-1])
    steps: list[Any] = []
    for number, (size, kind) in enumerate(zip(sizes, ("random", "stroke"), strict=True)):
        cache = denoiser.record(**case.inputs(size, number))[1]
        mask = MASKS[kind](case.mask_shape(size), number)
        steps.append(EditStep(case.inputs(size, number), mask, cache))
    steps += [RecordStep(case.inputs(sizes[1], 5)), DenseStep(case.inputs(sizes[0], 6))]
    for ranks, kind in SPLITS:
        split = ThreadRanks(denoiser.settings, shares(kind, ranks, len(steps), texts=(False, True)))
        wanted, got = denoiser.step(steps), denoiser.step(steps, split)
        assert split.batches > 0
        for step, ours, theirs in zip(steps, got, wanted, strict=True):
            if isinstance(step, RecordStep):
                assert cache_error(ours[1], theirs[1]) < BOUND
            ours, theirs = (x[0] if isinstance(step, RecordStep) else x for x in (ours, theirs))
            assert error(ours, theirs) < BOUND


@pytest.mark.parametrize("name", ["axial", "film-in-turn", "motion-text-for-each-frame"])
def test_late_exchanges_of_equal_steps(name: str) -> None:
    """Rows of the step before are those of this step then, whichever lines a rank reads."""
    case = OWN[name]
    denoiser, size = maskfx.compile(case.build()), case.sizes[0]
    cache = denoiser.record(**case.inputs(size, 0))[1]
    edit = EditStep(case.inputs(size, 0), MASKS["random"](case.mask_shape(size), 1), cache)
    steps: list[Any] = [edit, DenseStep(case.inputs(size, 2))]
    split = ThreadRanks(denoiser.settings, shares("equal", 2, 2))
    wanted, runs = denoiser.step(steps), [SplitRun() for _ in steps]
    for number in range(2):
        own = [late(step, run, number) for step, run in zip(steps, runs, strict=True)]
        got = denoiser.step(own, split)
        assert max(map(error, got, wanted)) < BOUND
    assert [run.reads for run in runs] == [1, 1]
