"""The host's inputs of a batch equal the runtime's: tables and rows bit for bit."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest

import maskfx
from maskfx.export.host import Edit, Record
from tests.export.hosted import (
    array,
    arrays,
    denoiser_of,
    frame_inputs,
    host_inputs,
    host_of,
    members_of,
    recording_of,
    skip_refused,
)
from tests.factories.masks import MASKS
from tests.factories.zoo import ZOO, Size

FLUX = "FluxTransformer2DModel"
SHORT = (FLUX, pytest.param("AuraFlowTransformer2DModel", marks=pytest.mark.slow))
KINDS = ("random", "stroke", "one_site", "border", "dense_random")
SUMMED = ("rest_stats", "rest_sum")  # sums over sites, in another order of additions


def compare(
    name: str,
    settings: tuple[str, ...],
    sizes: tuple[Size, ...],
    kinds: tuple[str, ...],
    low: bool,
    seed: int = 0,
) -> None:
    """Compare all inputs of one batch: an edit of each size, and a recording."""
    case, denoiser = ZOO[name], denoiser_of(name, settings)
    steps: list[Any] = []
    calls: list[Edit | Record] = []
    for number, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        inputs = case.inputs(size, seed + number)
        kept = denoiser.record(**inputs)[1]
        mask = MASKS[kind](case.mask_shape(size), seed + number)
        steps.append(maskfx.EditStep(inputs, mask, kept))
        calls.append(Edit(arrays(inputs), mask.numpy(), recording_of(kept)))
    steps.append(maskfx.RecordStep(case.inputs(sizes[0], seed)))
    calls.append(Record(arrays(case.inputs(sizes[0], seed))))
    program, members = members_of(denoiser, steps)
    host, run = host_of(name, settings, sizes[0], low)
    made = host_inputs(host, calls, run, "record")
    if low:
        from maskfx.compiler.lower import lower

        program = lower(program)
    wanted = frame_inputs(program, members)
    assert list(made) == list(wanted)
    kind_of = {i["name"]: i["source"]["kind"] for i in host.manifest["graphs"]["record"]["inputs"]}
    for key, value in wanted.items():
        expected, found = array(value), made[key]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), key
        if kind_of[key] in SUMMED:
            scale = np.abs(expected).max(initial=1e-3)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * scale, err_msg=key)
        else:
            np.testing.assert_array_equal(found, expected, err_msg=key)


def batch_of(name: str) -> tuple[Size, ...]:
    """Sizes that one program serves: those of the zoo with the text and parity of the first."""
    return tuple(islice(cycle(ZOO[name].sizes[:3]), 3))


@pytest.mark.parametrize("low", [False, True], ids=["compiled", "lowered"])
@pytest.mark.parametrize("name", SHORT)
def test_inputs_of_a_ragged_batch_equal_the_runtimes(name: str, low: bool):
    compare(name, (), batch_of(name), KINDS[:3], low)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [("plans",), ("plans", "stretches")], ids=" ".join)
def test_inputs_of_regions_equal_the_runtimes(settings: tuple[str, ...]):
    compare(FLUX, settings, batch_of(FLUX), KINDS[2:], True)


@pytest.mark.slow
@pytest.mark.parametrize("low", [False, True], ids=["compiled", "lowered"])
@pytest.mark.parametrize("name", ZOO)
def test_inputs_of_every_model_equal_the_runtimes(name: str, low: bool):
    skip_refused(name)
    compare(name, (), ZOO[name].sizes[:1] * 3, KINDS[:3], low, seed=1)
