"""A run without an engine: its adapters may be in the denoisers' weights between its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import nn

from maskfx.pipelines.parts.stand_in import users_of
from maskfx.pipelines.runs.execute import execute
from maskfx.pipelines.runs.run import Execute
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.in_place import share_weights
from maskfx.runtime.lora.in_place_costs import ChosenBy


@contextmanager
def adapters_written(
    components: Mapping[str, object], denoisers: Mapping[str, CompiledDenoiser]
) -> Iterator[Execute]:
    """Yield what executes the calls of one run with adapters; at its end they are taken out.

    Whether they are written is decided by counts, so that equal runs have equal bits. They never
    are where another part or another compiled pipeline has the weights too: it would see them.

    Args:
        components: The pipeline's components.
        denoisers: The denoisers among them.
    """
    if not own_weights(components, denoisers):
        yield execute
        return
    try:
        yield partial(execute, in_place=ChosenBy.COUNTS)
    finally:
        for denoiser in denoisers.values():
            denoiser.in_place.end()


def own_weights(
    components: Mapping[str, object], denoisers: Mapping[str, CompiledDenoiser]
) -> bool:
    """Return True if only calls of these denoisers read their weights."""
    modules = [denoiser.module for denoiser in denoisers.values()]
    if any(users_of(module) != 1 for module in modules):
        return False
    inside = {id(part) for module in modules for part in module.modules()}
    others = [
        part
        for part in components.values()
        if isinstance(part, nn.Module) and id(part) not in inside and not holds(part, modules)
    ]
    return not share_weights([*modules, *others])


def holds(part: nn.Module, modules: list[nn.Module]) -> bool:
    """Return True if a part is made of denoisers, as a list of nets is."""
    inner = {id(one) for one in part.modules()}
    return any(id(module) in inner for module in modules)
