"""Deep copies and pickles of a denoiser: compiled anew, from a copy of its module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from torch import nn

from maskfx.compiler.capture.arguments.roles import Roles
from maskfx.config import Settings
from maskfx.runtime.cache.loader import Loader

Given = tuple[Settings, Loader | None, Loader | None]


class Watching(Protocol):
    """A denoiser that can watch the settings of its module."""

    @property
    def watch_settings(self) -> Callable[[], None]: ...


Denoiser = TypeVar("Denoiser", bound=Watching)


def compiled_anew(
    kind: Callable[..., Denoiser],
    module: nn.Module,
    given: Given,
    roles: Mapping[str, Roles] | None,
) -> Denoiser:
    """Return a denoiser of a module that was copied, or read from a pickle; it has no captures."""
    settings, loader, link = given
    made = kind(module, settings, roles, None, loader, link)
    made.watch_settings()
    return made
