"""Every denoiser class of the zoo over ranks gives what it gives on one, at several degrees."""

from __future__ import annotations

from typing import Any

import pytest

import maskfx
from maskfx import DenseStep, EditStep, RecordStep
from maskfx.compiler.rank_twins import split_program
from maskfx.ir.programs.head_sources import AttentionWay
from tests.distributed.test_ranks import BOUND, error, shares
from tests.factories.masks import MASKS
from tests.factories.thread_ranks import ThreadRanks
from tests.factories.zoo import ZOO

SPLITS: tuple[tuple[int, str, AttentionWay, tuple[bool, ...]], ...] = (
    (2, "equal", "gathered", (True,)),
    (2, "unequal", "keys by rank", (False,)),
    (2, "equal", "heads", (False, True)),
    (3, "unequal", "gathered", (False, True)),
    (3, "empty", "keys by rank", (True,)),
    (3, "unequal", "heads", (True,)),
    (4, "unequal", "keys by rank", (True,)),
    (4, "equal", "gathered", (False,)),
    (4, "equal", "heads", (False,)),
    (8, "unequal", "keys by rank", (True,)),
    (8, "equal", "heads", (False, True)),
    (2, "members", "gathered", (False,)),
)


def reasons(denoiser: maskfx.CompiledDenoiser) -> str:
    """Return why steps of a denoiser can't be split; "" if they can."""
    splits = [split_program(program) for program in denoiser.programs.values()]
    return "; ".join(one for one in splits if isinstance(one, str)) if splits else "no program"


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_classes_of_diffusers(name: str) -> None:
    case = ZOO[name]
    denoiser = maskfx.compile(case.build())
    steps: list[Any] = []
    for number, size in enumerate((case.sizes[0], case.sizes[-1])):
        inputs = case.inputs(size, number)
        cache = denoiser.record(**inputs)[1]
        mask = MASKS["random"](denoiser.mask_shape(inputs), number)
        steps += [EditStep(case.inputs(size, number), mask, cache)]
    assert reasons(denoiser) == ""
    steps += [RecordStep(case.inputs(case.sizes[-1], 5)), DenseStep(case.inputs(case.sizes[0], 6))]
    wanted = denoiser.step(steps)
    for ranks, kind, way, texts in SPLITS:
        own = shares(kind, ranks, len(steps), texts=texts)
        split = ThreadRanks(denoiser.settings, own, way)
        got = denoiser.step(steps, split)
        assert split.batches > 0
        for step, ours, theirs in zip(steps, got, wanted, strict=True):
            ours, theirs = (x[0] if isinstance(step, RecordStep) else x for x in (ours, theirs))
            assert error(ours, theirs) < BOUND
