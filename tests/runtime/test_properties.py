"""The first oracle again, with sizes, masks and other members drawn at random."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import maskfx
from tests.factories.masks import MASKS
from tests.factories.zoo import ZOO, Size
from tests.runtime.test_oracle import (
    assert_kept_outside,
    assert_near,
    denoiser_of,
    dense_run,
    record,
)

pytestmark = pytest.mark.slow

# case -> what its sides are multiples of, and the range of that multiple
SIDES = {
    "UNet2DConditionModel-sd15": (1, 5, 18),
    "UNet2DModel-noattn": (4, 1, 5),
    "FluxTransformer2DModel": (1, 2, 9),
    "SD3Transformer2DModel": (2, 2, 8),
    "PixArtTransformer2DModel": (2, 2, 8),
}


@st.composite
def batches(draw: st.DrawFn) -> tuple[str, list[tuple[Size, str, int]]]:
    """A case and one to four members: size, kind of mask, seed."""
    name = draw(st.sampled_from(sorted(SIDES)))
    unit, low, high = SIDES[name]
    side = st.integers(low, high).map(lambda n: n * unit)
    sizes = st.builds(Size, st.integers(1, 2), side, side, st.integers(2, 12))
    member = st.tuples(sizes, st.sampled_from(sorted(MASKS)), st.integers(0, 99))
    return name, draw(st.lists(member, min_size=1, max_size=4))


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(batches())
def test_any_batch_of_edits_reproduces_dense_runs(
    batch: tuple[str, list[tuple[Size, str, int]]],
) -> None:
    name, members = batch
    case = ZOO[name]
    steps, outputs = [], []
    for size, kind, seed in members:
        output, kept = record(name, size, seed)
        mask = MASKS[kind](case.mask_shape(size), seed)
        steps.append(maskfx.EditStep(case.inputs(size, seed), mask, kept))
        outputs.append(output)
    got = denoiser_of(name).edit(steps)
    for i, (size, kind, seed) in enumerate(members):
        assert_near(got[i], dense_run(name, size, seed), f"{kind} at {size}")
        assert_kept_outside(steps[i].mask, got[i], outputs[i], f"{kind} at {size}")
