"""Denoisers with plans, each compiled once per process, for tests that change no weight."""

from __future__ import annotations

from functools import cache

import maskfx
from maskfx import StepCache
from tests.zoo import ZOO, Case


@cache
def compiled(name: str) -> tuple[Case, maskfx.CompiledDenoiser]:
    """A case, and its denoiser after one recording of its first size."""
    case = ZOO[name]
    denoiser = maskfx.compile(case.build(), plans=True)
    denoiser.record(**case.inputs(case.sizes[0], 0))
    return case, denoiser


@cache
def recorded(name: str, seed: int = 0) -> StepCache:
    """A recording of one step of the first size."""
    case, denoiser = compiled(name)
    return denoiser.record(**case.inputs(case.sizes[0], seed))[1]
