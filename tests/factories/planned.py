"""Denoisers, each compiled once per process and way, for tests that change no weight."""

from __future__ import annotations

from functools import cache

from torch import nn

import maskfx
from maskfx import Loader, StepCache
from tests.factories.zoo import ZOO, Case


def compiled(
    name: str, plans: bool = True, loading: bool = False
) -> tuple[Case, maskfx.CompiledDenoiser]:
    """A case, and its denoiser after one recording of its first size."""
    return ZOO[name], _compiled(name, plans, loading)


@cache
def _compiled(name: str, plans: bool, loading: bool) -> maskfx.CompiledDenoiser:
    loader = loader_of(name, plans) if loading else None
    denoiser = maskfx.compile(_module(name), plans=plans, loader=loader)
    case = ZOO[name]
    denoiser.record(**case.inputs(case.sizes[0], 0))
    return denoiser


@cache
def loader_of(name: str, plans: bool) -> Loader:
    """What the loading one loads with; its buffer is smaller than a step."""
    return Loader(staging_bytes=1 << 16)


@cache
def _module(name: str) -> nn.Module:
    return ZOO[name].build()


@cache
def recorded(name: str, seed: int = 0) -> StepCache:
    """A recording of one step of the first size."""
    case, denoiser = compiled(name)
    return denoiser.record(**case.inputs(case.sizes[0], seed))[1]
