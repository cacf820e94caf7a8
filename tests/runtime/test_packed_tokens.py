"""Packed tokens that are cut at the places an argument gives, or padded: parts have own rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import maskfx
from maskfx.export.exporter import export
from tests.factories.masks import MASKS
from tests.factories.own_cases import OWN
from tests.factories.zoo import Size
from tests.runtime.test_oracle import assert_kept_outside, assert_near

CASE = OWN["packed-between"]
SIZE = Size(1, 8, 8, 5)
TOKENS = 64


@pytest.fixture(scope="module")
def denoiser() -> maskfx.CompiledDenoiser:
    return maskfx.compile(CASE.build())


def inputs(count: int, seed: int = 0) -> dict[str, Any]:
    return {**CASE.inputs(SIZE, seed), "count": count}


def rows(denoiser: maskfx.CompiledDenoiser) -> list[bool]:
    return [one.program is not None for one in denoiser.compilations]


def test_cuts_follow_an_argument(denoiser: maskfx.CompiledDenoiser) -> None:
    """One program serves every place, several of them in one step."""
    steps, wanted, outputs = [], [], []
    for count in (10, 1, 33, TOKENS - 1):
        output, kept = denoiser.record(**inputs(count, count))
        mask = MASKS["random"]((TOKENS,), count)
        steps.append(maskfx.EditStep(inputs(count, count), mask, kept))
        wanted.append(CASE.build()(**inputs(count, count)))
        outputs.append(output)
    for step, got, expected, output in zip(
        steps, denoiser.edit(steps), wanted, outputs, strict=True
    ):
        assert_near(got, expected)
        assert_kept_outside(step.mask, got, output)
    assert rows(denoiser) == [True]


@pytest.mark.wrong_program
@pytest.mark.parametrize("count", [0, TOKENS, TOKENS + 6])
def test_a_cut_that_leaves_nothing_runs_dense(count: int) -> None:
    """The call's own result is returned, and the report states the place."""
    own = maskfx.compile(CASE.build())
    own.record(**inputs(10))
    output, _ = own.record(**inputs(count))
    assert_near(output, CASE.build()(**inputs(count)))
    assert rows(own) == [True, False]
    assert f"are cut at [{count}] of {TOKENS}" in own.explain()


def test_a_recording_cut_elsewhere_is_refused(denoiser: maskfx.CompiledDenoiser) -> None:
    _, kept = denoiser.record(**inputs(10))
    step = maskfx.EditStep(inputs(12), MASKS["random"]((TOKENS,), 0), kept)
    with pytest.raises(maskfx.CacheError, match=r"recorded with \[10\], the inputs say \[12\]"):
        denoiser.edit([step])


def test_padding_that_is_nothing_at_some_size() -> None:
    """Sizes at capture avoid a padding of none, which would mean something else."""
    case = OWN["packed-filled"]
    for tokens in (58, 63):  # captured at 64 otherwise, and one less than that
        size = Size(1, 1, tokens, 8)
        own = maskfx.compile(case.build())
        for other in (size, case.sizes[0], Size(2, 3, 7, 3)):
            expected = case.build()(**case.inputs(other, 0))
            _, kept = own.record(**case.inputs(other, 0))
            mask = MASKS["random"](case.mask_shape(other), 1)
            got = own.edit([maskfx.EditStep(case.inputs(other, 0), mask, kept)])[0]
            assert_near(got, expected)
        assert rows(own) == [True]


@pytest.mark.parametrize("name", ["packed-between", "packed-filled-together"])
def test_an_export_names_the_rows(name: str, tmp_path: Path) -> None:
    case = OWN[name]
    own = maskfx.compile(case.build())
    own.record(**case.inputs(SIZE, 0))
    with pytest.raises(maskfx.InputError, match="part of a sequence, or pad several"):
        export(own, tmp_path / "out", format="pt2", example_inputs=case.inputs(SIZE, 0))
