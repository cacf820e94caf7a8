"""Shells: modules of a denoiser's class and config, with exported graphs in place of weights.

A pipeline of diffusers takes one as any other module: it has the weights' names, shapes and dtypes
but one number of memory for each.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn

from maskfx.config import Settings
from maskfx.errors import InputError
from maskfx.export.denoiser import ExportedDenoiser
from maskfx.export.manifest import NAME, read_manifest
from maskfx.ir.values import copy_of
from maskfx.pipelines.parts.stand_in import named_arguments
from maskfx.runtime.cache.loader import Loader
from maskfx.runtime.make_denoiser import COMPILES

CONFIG = "config.json"


def exported_parts(folder: Path) -> dict[str, Path]:
    """Return the exported denoisers of a pipeline's folder by component name."""
    if not folder.is_dir():
        return {}
    parts = {part.name: part for part in sorted(folder.iterdir()) if (part / NAME).is_file()}
    return {name: part for name, part in parts.items() if (part / CONFIG).is_file()}


def load_shell(directory: Path) -> nn.Module:
    """Return a module for an exported denoiser of a pipeline; its forward runs the dense graph."""
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    kind = getattr(import_module("diffusers"), str(config.get("_class_name")), None)
    if kind is None:
        raise InputError(
            f"{directory}: diffusers has no class {config.get('_class_name')!r}; install the "
            "version that the manifest names"
        )
    dtype = getattr(torch, read_manifest(directory)["dtype"])
    with torch.device("meta"):
        module: nn.Module = kind.from_config(config)
    empty(module, dtype)
    return run_from(module.eval(), directory)


def empty(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace each weight by one number that is seen everywhere in its shape.

    Floating-point weights get this dtype, which is what a pipeline reads of them.
    """
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                if value is not None:
                    kind = dtype if value.is_floating_point() else value.dtype
                    table[name] = blank_like(value, kind)  # type: ignore[assignment]


def blank_like(value: Tensor, dtype: torch.dtype) -> Tensor:
    blank = torch.zeros((), dtype=dtype).expand(value.shape)
    return nn.Parameter(blank, requires_grad=False) if isinstance(value, nn.Parameter) else blank


def run_from(module: nn.Module, directory: Path) -> nn.Module:
    """Let a module run the exported graphs of a directory: its forward, and once compiled."""
    plain = ExportedDenoiser(module, directory)
    original = module.forward
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(*args: object, **named: object) -> object:
        inputs: Mapping[str, object] = named_arguments(signature, args, named)
        return plain.dense({name: copy_of(value) for name, value in inputs.items()})

    def compiles(settings: Settings, loader: Loader | None) -> ExportedDenoiser:
        return ExportedDenoiser(module, directory, settings, loader)

    module.__dict__["forward"] = forward
    module.__dict__[COMPILES] = compiles
    return module
