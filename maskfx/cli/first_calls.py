"""What a pipeline first calls each of its denoisers with, found without running a model.

The pipeline's own code makes the call, from a folder whose weights aren't read: its modules have
one number of memory for each weight, and their large products are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

import maskfx
from maskfx.cli.try_model import call_arguments
from maskfx.errors import InputError
from maskfx.export.light_parts import LightParts
from maskfx.export.shell import blank_like
from maskfx.export.weight_files import WeightFiles
from maskfx.pipelines.parts.stand_in import find_denoisers, named_arguments
from maskfx.serve.model_folder import index_of
from maskfx.serve.models.canvas import Canvas
from maskfx.serve.models.model_source import (
    LIBRARIES,
    absent_parts,
    import_notices_hidden,
    library_bars,
    told_by,
)
from maskfx.serve.models.pipeline_set import PipelineSet
from maskfx.serve.models.warmup import STEPS, scene

Arguments = dict[str, object]


class AllCalled(Exception):
    """Each denoiser was called: the rest of the run gives nothing."""


def first_calls(folder: Path) -> dict[str, Arguments]:
    """Return the arguments of the first call of each denoiser that the pipeline calls, by name.

    Values that weren't computed are zero.
    """
    with import_notices_hidden():
        light = LightParts({name: blank(folder, name) for name in modules_in(folder)})
    pipe = around(folder, light.modules)
    found = find_denoisers(pipe.components)
    denoisers = {name: one for name, one in found.items() if name in light.modules}
    family = PipelineSet.of(pipe, maskfx.compile, told_by(str(folder)))
    member, size = family.main, family.size()
    canvas = Canvas(scene(0, size), np.ones(size[::-1], bool), family.multiple)
    given = call_arguments(member, canvas, STEPS)
    with light.running(), collecting(denoisers) as calls:
        try:
            member.plain(**given)
        except AllCalled:
            pass
        except Exception as error:
            raise InputError(
                f"{folder}: the first call of {', '.join(denoisers)} can't be found without "
                f"running the pipeline ({type(error).__name__}: {error}); leave --no-compare out"
            ) from error
    return {name: pytree.tree_map(light.settled, call) for name, call in calls.items()}


@contextmanager
def collecting(denoisers: Mapping[str, nn.Module]) -> Iterator[dict[str, Arguments]]:
    """Collect the arguments of first calls; raise AllCalled when there is one of each."""
    calls: dict[str, Arguments] = {}

    def watch(name: str, module: nn.Module) -> RemovableHandle:
        signature = inspect.signature(type(module).forward)

        def called(own: nn.Module, args: tuple[object, ...], named: dict[str, object]) -> None:
            given = named_arguments(signature, (own, *args), named)
            given.pop(next(iter(signature.parameters)))
            calls.setdefault(name, given)
            if len(calls) == len(denoisers):
                raise AllCalled

        return module.register_forward_pre_hook(called, with_kwargs=True)

    hooks = [watch(name, module) for name, module in denoisers.items()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def around(folder: Path, parts: Mapping[str, nn.Module]) -> Any:
    """Return the folder's pipeline with these modules, of which nothing is loaded."""
    import diffusers

    load: Callable[..., Any] = diffusers.DiffusionPipeline.from_pretrained
    options: dict[str, object] = {**dict.fromkeys(absent_parts(folder)), **parts}
    with library_bars(False), import_notices_hidden():
        try:
            pipe = load(folder, use_safetensors=True, local_files_only=True, **options)
        except (OSError, ValueError) as error:
            raise InputError(
                f"model {folder} can't be loaded: {error}; expected a diffusers pipeline whose "
                "weights are safetensors"
            ) from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


def modules_in(folder: Path) -> list[str]:
    """Return the names of the pipeline's parts that are modules of the known libraries."""
    return [name for name in index_of(folder) if class_in(folder, name) is not None]


def class_in(folder: Path, name: str) -> type[nn.Module] | None:
    """Return the class of a part, if it is a module of the known libraries."""
    match index_of(folder)[name]:
        case [str(library), str(kind)] if library in LIBRARIES:
            found = getattr(import_module(library), kind, None)
            return found if isinstance(found, type) and issubclass(found, nn.Module) else None
    return None


def without_weights(folder: Path, name: str) -> nn.Module:
    """Return a part of the pipeline whose weights are on the meta device; its tables have data."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped,unused-ignore]

    kind: Any = class_in(folder, name)
    with init_empty_weights():
        if hasattr(kind, "config_class") and kind.config_class is not None:  # of transformers
            module = kind(kind.config_class.from_pretrained(folder / name))
        else:
            module = kind.from_config(kind.load_config(folder / name))
    made: nn.Module = module.eval().requires_grad_(False)
    return made


def blank(folder: Path, name: str) -> nn.Module:
    """Return a part with one number of memory for each weight, in the dtype of its files."""
    module = without_weights(folder, name)
    files = WeightFiles(folder / name).tensors.values()
    dtype = next((v.dtype for v in files if v.is_floating_point()), torch.float32)
    for part in module.modules():
        for key, value in part._parameters.items():
            if value is not None and value.is_meta:
                part._parameters[key] = blank_like(value, dtype)  # type: ignore[assignment]
    return module
