"""CopiedByModule: deep copies and pickles of a denoiser are compiled anew, from its module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from maskfx.compiler.capture.roles import Roles
from maskfx.config import Settings
from maskfx.runtime.cache.loader import Loader

Given = tuple[Settings, Loader | None, Loader | None]


class CopiedByModule:
    """A denoiser whose copy has a copy of its module and the same settings, and no captures."""

    module: nn.Module
    watch_settings: Callable[[], None]

    @property
    def compiled_with(self) -> Given:
        raise NotImplementedError

    @property
    def roles(self) -> Mapping[str, Roles] | None:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: object) -> Any:
        return compiled_anew, (type(self), self.module, self.compiled_with, self.roles)


def compiled_anew(
    kind: Callable[..., CopiedByModule],
    module: nn.Module,
    given: Given,
    roles: Mapping[str, Roles] | None,
) -> CopiedByModule:
    """Return a denoiser of a module that was copied, or read from a pickle."""
    settings, loader, link = given
    made = kind(module, settings, roles, None, loader, link)
    made.watch_settings()
    return made
