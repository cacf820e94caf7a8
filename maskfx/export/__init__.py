"""Exports a compiled denoiser for deployments without PyTorch: graphs, manifest, host.

`maskfx.export` is also called: `maskfx.export(pipe, path)`. The host and the manifest need NumPy
alone, so nothing here imports PyTorch before that call.

May import: pipelines, runtime, compiler, ops, ir, config, errors. Begin with `exporter.py`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class CallableRoom(ModuleType):
    """The room as a function: what `exporter.export` does."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        from maskfx.export.exporter import export

        return export(*args, **named)


sys.modules[__name__].__class__ = CallableRoom
