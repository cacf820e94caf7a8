"""Bytes of a recorded step counted on shapes are those that it holds."""

from dataclasses import replace

import pytest
import torch

import maskfx
from maskfx import Masks
from maskfx.errors import MissingRequest
from maskfx.runtime.cache.quantize import LOSSLESS, Format
from maskfx.runtime.sites.masks import find_reach
from maskfx.runtime.templates.footprint import ENCODINGS, Footprint, encoding_of
from tests.factories import masks
from tests.factories.planned import compiled, recorded

MODELS = ("UNet2DConditionModel-sd15", "FluxTransformer2DModel", "SD3Transformer2DModel")


@pytest.mark.parametrize("name", MODELS)
def test_counts_what_a_recording_holds(name: str) -> None:
    (case, denoiser), cache = compiled(name), recorded(name)
    mask = masks.stroke(case.mask_shape(case.sizes[0]), 0)
    interface = denoiser.programs[cache.program].interface
    for allowed in (Masks.anywhere(*mask.shape), Masks.inside(mask), Masks.exactly(mask)):
        footprint = Footprint.of(denoiser, allowed)
        kept = cache.within(allowed, find_reach(interface, cache.sizes, allowed))
        for how in ENCODINGS:
            encoding = encoding_of(how, interface)
            packed = replace(kept, given=[]).packed(encoding)  # inputs are kept where there is room
            counted = footprint.together(encoding)
            batch = cache.sizes["batch"]
            tables = (batch - 1) * footprint.tables  # one for all elements, counted for each
            assert packed.nbytes() <= batch * counted
            assert batch * counted - tables - packed.nbytes() < 0.05 * packed.nbytes()
            assert sum(footprint.kinds(encoding).values()) == counted
            attended = {t for t, f in encoding.taps.items() if f is Format.INT4}
            assert bool(attended) == (how == "4bit")
        assert footprint.alone * batch == sum(t.nbytes for t in cache.output)
        rows = sum(footprint.taps(LOSSLESS).values())
        assert sum(footprint.levels(LOSSLESS).values()) == rows


def test_what_has_no_program_has_no_footprint() -> None:
    denoiser = maskfx.compile(torch.nn.Linear(2, 2))
    with pytest.raises(MissingRequest, match="no program"):
        Footprint.of(denoiser, Masks.anywhere(4, 4))
