"""Exchanges that return the rows of the step before: ranks as threads, and what they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import maskfx
from maskfx import DenseStep, EditStep
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.late_runs import cut_evenly
from maskfx.ir.programs.head_sources import WAYS, AttentionWay
from maskfx.runtime.steps import LateExchange, RecordStep, SplitRun
from tests.distributed import tiny
from tests.distributed.test_ranks import BOUND, cache_error, error, shares
from tests.factories.masks import MASKS
from tests.factories.thread_ranks import ThreadRanks
from tests.factories.zoo import ZOO
from tests.runtime.validation import test_sample_calls as ragged

BY_SIZE = ("ControlNetModel", "HiDreamImageTransformer2DModel")  # a program for each size
SIZES = [(8, 8, 1), (8, 12, 2), (12, 8, 1)]


def ranks_of(
    count: int, members: int, kind: str = "equal", way: AttentionWay = "gathered"
) -> ThreadRanks:
    return ThreadRanks(tiny.compiled().settings, shares(kind, count, members), way)


def late(step: Any, run: SplitRun, number: int) -> Any:
    return replace(step, late=LateExchange(run, number))


def several(seed: int) -> list[Any]:
    """Edits and a dense member of several sizes and batches."""
    denoiser, steps = tiny.compiled(), []
    for number, size in enumerate(SIZES[:2]):
        cache = denoiser.record(**tiny.inputs(seed + number, *size))[1]
        mask = MASKS["random"](size[:2], seed + number)
        steps.append(EditStep(tiny.inputs(seed + number + 10, *size), mask, cache))
    return [*steps, DenseStep(tiny.inputs(seed + 20, *SIZES[2]))]


def worst(got: list[Any], wanted: list[Any]) -> float:
    return max(error(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["equal", "unequal", "empty"])
@pytest.mark.parametrize("count", [2, 3])
def test_equal_inputs_give_what_waiting_gives(count: int, kind: str, way: AttentionWay) -> None:
    """Rows of the step before are those of this step then."""
    denoiser, steps = tiny.compiled(), several(count)
    split = ranks_of(count, len(steps), kind, way)
    wanted, runs = denoiser.step(steps), [SplitRun() for _ in steps]
    for number in range(3):
        own = [late(step, run, number) for step, run in zip(steps, runs, strict=True)]
        assert worst(denoiser.step(own, split), wanted) < BOUND
    divided = sum(sum(share > 0 for share in own) > 1 for own in split.partition.shares)
    assert sorted(run.reads for run in runs) == [0] * (len(runs) - divided) + [2] * divided


def test_a_rank_reads_its_own_rows_of_this_step_and_others_of_the_last() -> None:
    """Each half of the picture changes between the steps; the far one isn't seen to change."""
    denoiser, split, run = tiny.compiled(), ranks_of(2, 1), SplitRun()
    before, now = tiny.inputs(1), tiny.inputs(1)
    now["sample"] = now["sample"] * 1.3
    denoiser.step([late(DenseStep(before), run, 0)], split)
    (got,) = denoiser.step([late(DenseStep(now), run, 1)], split)
    (mixed, exact) = (denoiser.step([DenseStep(one)])[0] for one in (mixture(before, now), now))
    assert error(got, exact) > 1e-3  # it does read earlier rows
    # the first row of sites depends on the other half by sums over sites and the attention alone
    assert error(got[:, :, :1], mixed[:, :, :1]) < error(got[:, :, :1], exact[:, :, :1])
    (again,) = denoiser.step([late(DenseStep(now), run, 2)], split)
    assert error(again, exact) < error(got, exact)


def mixture(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What the first of two ranks sees: its half of this step, and the other of the last."""
    sample = now["sample"].clone()
    sample[:, :, 4:] = before["sample"][:, :, 4:]
    return {**now, "sample": sample}


CHANGES = ("first step", "a step left out", "repeated", "shares", "ranks", "mask", "size", "kind")


@pytest.mark.parametrize("what", CHANGES)
def test_a_step_that_is_divided_anew_waits(what: str) -> None:
    denoiser, split, run = tiny.compiled(), ranks_of(2, 1), SplitRun()
    inputs, cache = tiny.inputs(1), denoiser.record(**tiny.inputs(0))[1]
    step, number = EditStep(inputs, MASKS["square"]((8, 8), 0), cache), 1
    if what != "first step":
        denoiser.step([late(step, run, 0)], split)
    other: Any = replace(step, inputs=tiny.inputs(2))
    match what:
        case "a step left out":
            number = 2
        case "repeated":
            number = 0
        case "shares":
            split.partition = Partition(((2.0, 1.0),))
        case "ranks":
            split.ranks = ("another", "process")
        case "mask":
            other = replace(other, mask=MASKS["border"]((8, 8), 0))
        case "size":
            other = DenseStep(tiny.inputs(2, 12, 12))
        case "kind":
            other = DenseStep(tiny.inputs(2))
    (got,) = denoiser.step([late(other, run, number)], split)
    assert run.reads == 0
    assert error(got, denoiser.step([other])[0]) < BOUND
    (got,) = denoiser.step([late(other, run, number + 1)], split)
    assert run.reads == 1, "the step after it reads"


def test_members_that_wait_and_those_that_record_share_the_step_and_stay_exact() -> None:
    """What joins and leaves changes neither their results nor those of the late member."""
    denoiser, run, alone = tiny.compiled(), SplitRun(), SplitRun()
    edit, other, dense = several(4)
    first, second = ranks_of(2, 1), ranks_of(2, 1)
    mates: list[list[Any]] = [[], [other, dense], [RecordStep(tiny.inputs(5))], []]
    for number, own in enumerate(mates):
        step = replace(edit, inputs=tiny.inputs(40 + number))
        first.partition = shares("equal", 2, 1 + len(own))
        got = denoiser.step([late(step, run, number), *own], first)
        (wanted,) = denoiser.step([late(step, alone, number)], second)
        assert error(got[0], wanted) < BOUND
        for one, ours, theirs in zip(own, got[1:], denoiser.step(own) if own else [], strict=True):
            if isinstance(one, RecordStep):
                assert error(ours[0], theirs[0]) < BOUND
                assert cache_error(ours[1], theirs[1]) < BOUND
            else:
                assert error(ours, theirs) < BOUND
    assert run.reads == alone.reads == len(mates) - 1
    assert error(wanted, denoiser.step([step])[0]) > 10 * BOUND  # it isn't exact, and may differ


def test_ranks_hold_the_rows_of_requests_that_go_on() -> None:
    denoiser, split = tiny.compiled(), ranks_of(2, 1)
    runs = [SplitRun() for _ in range(3)]
    step = DenseStep(tiny.inputs(1))
    for run in runs:
        denoiser.step([late(step, run, 0)], split)
    held = split.held[0]
    each = held.nbytes // 3
    assert len(held.runs) == 3
    assert 0 < each * 3 == held.nbytes
    for number in range(1, 4):  # later steps take no more
        denoiser.step([late(step, runs[0], number)], split)
    assert held.nbytes == 3 * each
    runs[0].close()
    del runs[1:], run  # as if requests were dropped without an end
    denoiser.step([step], split)
    assert [one.nbytes for one in split.held.values()] == [0, 0]


def test_requests_without_room_wait() -> None:
    denoiser, split = tiny.compiled(), ranks_of(2, 1)
    step, runs = DenseStep(tiny.inputs(1)), [SplitRun(), SplitRun()]
    denoiser.step([late(step, runs[0], 0)], split)
    nbytes = max(held.nbytes for held in split.held.values())
    for held in split.held.values():
        held.limit = nbytes
    for number in range(1, 4):
        steps = [late(DenseStep(tiny.inputs(number)), run, number) for run in runs]
        split.partition = shares("equal", 2, 2)
        got = denoiser.step(steps, split)
        assert error(got[1], denoiser.step(steps[1:])[0]) < BOUND
    assert [run.reads for run in runs] == [3, 0]
    runs[0].close()
    split.partition = shares("equal", 2, 1)
    for number in (4, 5):
        denoiser.step([late(step, runs[1], number)], split)
    assert runs[1].reads == 1


def test_a_step_may_wait_and_hold_rows_for_the_next_one() -> None:
    denoiser, split, run = tiny.compiled(), ranks_of(2, 1), SplitRun()
    for number in range(3):
        step = DenseStep(tiny.inputs(number), late=LateExchange(run, number, waits=number < 2))
        (got,) = denoiser.step([step], split)
        assert (error(got, denoiser.step([step])[0]) < BOUND) == (number < 2)
    assert run.reads == 1


def test_late_members_are_cut_evenly() -> None:
    one = LateExchange(SplitRun(), 0)
    found = cut_evenly(Partition(((1.0, 0.0), (0.25, 0.75)), (True, True)), [one, None])
    assert found.shares == ((1.0, 1.0), (0.25, 0.75))
    assert found.texts == (False, True), "late texts are whole"


def test_texts_that_ranks_share_may_be_late() -> None:
    """A step divided anew waits, and equal inputs give what waiting gives."""
    denoiser, split, run = tiny.compiled(tiny.Joint), ranks_of(2, 1), SplitRun()
    step, other = (DenseStep(tiny.inputs(seed)) for seed in (1, 2))
    split.partition = shares("equal", 2, 1)
    denoiser.step([late(other, run, 0)], split)
    split.partition = shares("equal", 2, 1, texts=(True,))
    for number in (1, 2):
        (got,) = denoiser.step([late(step, run, number)], split)
        assert run.reads == number - 1
        assert error(got, denoiser.step([step])[0]) < BOUND
    (got,) = denoiser.step([late(other, run, 3)], split)
    assert error(got, denoiser.step([other])[0]) > 10 * BOUND, "it reads the last step's text"


@pytest.mark.slow
def test_samples_of_a_call_that_run_one_by_one_keep_rows_of_their_own() -> None:
    denoiser, inputs = ragged.denoiser(), ragged.make([7, 4], 9)
    output, cache = denoiser.record(**inputs)
    step, run = EditStep(inputs, ragged.a_mask(), cache), SplitRun()
    split = ThreadRanks(denoiser.settings, shares("equal", 2, 2), seconds=600)
    for number in range(3):
        (got,) = denoiser.step([late(step, run, number)], split)
        assert error(got, output) < BOUND
    assert run.reads == 2
    assert len(split.late.alive) == 2
    run.close()
    assert not split.late.alive


CLASSES = [
    "SD3Transformer2DModel",
    "FluxTransformer2DModel",
    "QwenImageTransformer2DModel",
    "Lumina2Transformer2DModel",
    "UNet2DConditionModel-sd15",
    "UNet2DConditionModel-residuals",
    "ControlNetModel",
    "SanaTransformer2DModel",
    "PixArtTransformer2DModel",
    "HiDreamImageTransformer2DModel",
    "WanTransformer3DModel",
    "SanaVideoTransformer3DModel",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_diffusers(name: str) -> None:
    """Equal inputs give what waiting gives."""
    case = ZOO[name]
    denoiser = maskfx.compile(case.build())
    denoiser.record(**case.inputs(case.sizes[0], 0))
    size = case.sizes[0]
    cache = denoiser.record(**case.inputs(size, 0))[1]
    mask = MASKS["random"](case.mask_shape(size), 0)
    steps: list[Any] = [
        EditStep(case.inputs(size, 0), mask, cache),
        DenseStep(case.inputs(case.sizes[-1], 6)),
    ]
    split = ThreadRanks(denoiser.settings, shares("unequal", 3, len(steps)), seconds=600)
    wanted, runs = denoiser.step(steps), [SplitRun() for _ in steps]
    for number in range(2):
        own = [late(step, run, number) for step, run in zip(steps, runs, strict=True)]
        assert worst(denoiser.step(own, split), wanted) < 1e-4
    if split.batches == 2:  # of one program
        assert [run.reads for run in runs] == [1, 1]
    assert split.batches == 2 or name in BY_SIZE
