"""Makes the CompiledDenoiser of a module: the module's own, if it has exported graphs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from maskfx.compiler.capture.arguments.roles import Roles
from maskfx.config import Settings
from maskfx.runtime.cache.loader import Loader
from maskfx.runtime.denoiser import CompiledDenoiser

COMPILES = "maskfx_compiles"  # attribute of a module that has exported graphs in place of weights


def compiled(
    module: nn.Module,
    settings: Settings,
    roles: Mapping[str, Roles] | None = None,
    example_inputs: Mapping[str, object] | None = None,
    loader: Loader | None = None,
    link: Loader | None = None,
) -> CompiledDenoiser:
    """Compile a denoiser; one whose graphs are exported makes its own `CompiledDenoiser`."""
    made = vars(module).get(COMPILES)
    if made is not None:
        found: CompiledDenoiser = made(settings, loader)
        return found
    return CompiledDenoiser(module, settings, roles, example_inputs, loader, link)
