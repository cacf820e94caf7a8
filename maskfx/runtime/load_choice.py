"""LoadChoice: whether cached rows are loaded ahead of a step and by plans, by where they lie.

Where the rows cross a link to the module's device, or are read from a store, there is something to
hide; elsewhere there isn't.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import nn

from maskfx.config import Settings
from maskfx.runtime.cache.loader import Loader
from maskfx.runtime.cache.step_cache import has_unread
from maskfx.runtime.hardware.offload import device_of
from maskfx.runtime.planning import Planner
from maskfx.runtime.steps import AnyStep, EditStep


class HasLoads(Protocol):
    """What a compiled denoiser states of its loads."""

    module: nn.Module

    @property
    def loader(self) -> Loader | None: ...

    @property
    def compiled_with(self) -> tuple[Settings, Loader | None, Loader | None]: ...


class LoadChoice:
    """The settings and the loader of a denoiser, chosen by the device of its module.

    Args:
        module: The denoiser.
        given: Its settings; `plans` of None is chosen.
        loader: Loads rows in any case.
        link: Loads rows where they cross a link to the device or lie in a store, or if plans are
            demanded.
    """

    def __init__(
        self, module: nn.Module, given: Settings, loader: Loader | None, link: Loader | None
    ) -> None:
        self._module, self._given, self._link = module, given, loader or link
        self._always_loads = loader is not None
        self._chosen: Settings | None = None

    @property
    def given(self) -> tuple[Settings, Loader | None, Loader | None]:
        """Return the arguments, except for the module."""
        return self._given, self._link if self._always_loads else None, self._link

    @property
    def settings(self) -> Settings:
        """Return the settings that are chosen, or that would be chosen now."""
        if self._chosen is not None:
            return self._chosen
        if self._given.plans is not None:
            return self._given
        return replace(self._given, plans=self._hides())

    def choose(self) -> tuple[Settings, Loader | None] | None:
        """Choose settings and loader and return them; None if they are chosen already."""
        if self._chosen is not None:
            return None
        crosses = self._always_loads or self._hides()
        self._chosen = self.settings
        return self._chosen, self._link if crosses or self._chosen.plans else None

    def forget(self) -> None:
        """Choose again, as the module may lie on another device."""
        self._chosen = None

    def describe(self, loader: Loader | None, planner: Planner | None) -> str:
        """Return which rows are loaded ahead and by which plan, or why none are."""
        if loader is None:
            if self._given.plans is None:
                return (
                    "when they are read, without a plan: they lie in the memory that the denoiser "
                    "computes in, so there is nothing to hide"
                )
            return "when they are read: it is compiled without a loader"
        there = "" if loader.takes_all(device_of(self._module)) else "from a store: "
        if planner is None or not self.settings.plans:
            return f"{there}ahead of the step that reads them, without a planner"
        how = planner.describe()
        return f"{there}ahead of the step that reads them, by a plan per batch ({how})"

    def _hides(self) -> bool:
        link = self._link
        return link is not None and (link.has_link(device_of(self._module)) or link.stored)


def is_for_stores(denoiser: HasLoads) -> bool:
    """Return True if plans were chosen only because recorded steps are kept in a store."""
    loader, module = denoiser.loader, denoiser.module
    chosen = denoiser.compiled_with[0].plans is None
    return chosen and loader is not None and not loader.takes_all(device_of(module))


def has_loads(denoiser: HasLoads, steps: Sequence[AnyStep]) -> bool:
    """Return True if rows that these steps read are loaded, rather than read where they lie."""
    if denoiser.loader is None:
        return False
    if denoiser.loader.takes_all(device_of(denoiser.module)):
        return True
    return any(isinstance(step, EditStep) and has_unread(step.cache) for step in steps)
