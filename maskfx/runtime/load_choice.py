"""LoadChoice: whether cached rows are loaded ahead of a step and by plans, by where they lie.

Where the rows cross a link to the module's device there is something to hide; elsewhere there
isn't.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from maskfx.config import Settings
from maskfx.runtime.cache.loader import Loader
from maskfx.runtime.hardware.offload import device_of
from maskfx.runtime.planning import Planner


class LoadChoice:
    """The settings and the loader of a denoiser, chosen by the device of its module.

    Args:
        module: The denoiser.
        given: Its settings; `plans` of None is chosen.
        loader: Loads rows in any case.
        link: Loads rows where they cross a link to the device, or if plans are demanded.
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
        return replace(self._given, plans=self._crosses_link())

    def choose(self) -> tuple[Settings, Loader | None] | None:
        """Choose settings and loader and return them; None if they are chosen already."""
        if self._chosen is not None:
            return None
        crosses = self._always_loads or self._crosses_link()
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
                    "computes in, so there is nothing to hide; steps on disk are read whole before"
                )
            return "when they are read: it is compiled without a loader"
        if planner is None or not self.settings.plans:
            return "ahead of the step that reads them, without a planner"
        return f"ahead of the step that reads them, by a plan per batch ({planner.describe()})"

    def _crosses_link(self) -> bool:
        return self._link is not None and self._link.has_link(device_of(self._module))
