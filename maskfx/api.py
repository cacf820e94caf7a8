"""compile() and explain(): the functions that accept a pipeline as well as a denoiser."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from maskfx.config import Settings
from maskfx.errors import InputError
from maskfx.pipelines.check_settings import PipelineSettings, check_names, check_types
from maskfx.pipelines.compile import compile_pipeline, explain_pipeline
from maskfx.pipelines.parts.pipeline import is_pipeline
from maskfx.runtime.cache.loader import Loader
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.explain import explain as table
from maskfx.runtime.make_denoiser import compiled


def compile(
    module: Any,
    mode: str = "mask_cache",
    *,
    example_inputs: Mapping[str, Any] | None = None,
    roles: Mapping[str, tuple[str, ...]] | None = None,
    inductor: bool = False,
    cuda_graphs: bool | None = None,
    prepack: bool = False,
    plans: bool | None = None,
    stretches: bool = False,
    loader: Loader | None = None,
    programs: str | Path | None = None,
    **of_pipeline: Unpack[PipelineSettings],
) -> Any:
    """Compile a diffusers pipeline, or a denoiser, so that edits compute only their masked sites.

    A pipeline is compiled in place and called as before. A denoiser returns a `CompiledDenoiser`.

    Args:
        module: a diffusers pipeline, or a denoiser (`torch.nn.Module`).
        mode, inductor, cuda_graphs, prepack, stretches: see `maskfx.config.Settings`.
        plans: whether edits may project keys and values again in place of loading them. By default
            a pipeline's loads are planned where recorded rows cross a link to the denoiser's
            device, such as from host memory to a GPU, or are read from a store (`tiers=`). A
            denoiser alone is planned if asked for.
        example_inputs: arguments to capture a denoiser with; by default it is captured at its
            first call.
        roles: overrides the inferred batch, image and text dimensions of a denoiser's arguments
            (see `maskfx.compiler.capture.arguments.roles`).
        programs: a directory in which compiled programs are kept. A process that starts with the
            same module, versions and settings captures nothing.
        loader: loads cached rows while the graph computes.
        of_pipeline: `quality=` (by default `"balanced"`, which computes about one step in four;
            `"all-steps"` computes all), `tiers=`, `share=`, `keep=`, `budget=`, `costs=`,
            `adapters=`, `patch_bytes=` and `remember=` of a pipeline: how it edits, and where and
            in how many bytes its templates are stored (`maskfx.pipelines.compile`).
    """
    where = f"compile({type(module).__name__})"
    check_names(where, of_pipeline, ACCEPTED)
    check_types(where, {"loader": loader, "programs": programs, **of_pipeline})
    if plans is None and not is_pipeline(module):
        plans = False
    settings = Settings(
        mode=mode,
        inductor=inductor,
        cuda_graphs=cuda_graphs,
        prepack=prepack,
        plans=plans,
        stretches=stretches,
        programs=None if programs is None else str(programs),
    )
    if is_pipeline(module):
        if example_inputs is not None or roles is not None:
            raise InputError(
                f"{where}: example_inputs= and roles= apply to a "
                "denoiser, not to a pipeline; leave them out, or compile the denoiser alone"
            )
        return compile_pipeline(module, settings, loader=loader, **of_pipeline)
    if not isinstance(module, nn.Module):
        raise InputError(
            f"compile(): expected a pipeline or a denoiser (torch.nn.Module), got "
            f"{type(module).__name__}; pass the loaded object itself"
        )
    if of_pipeline:
        raise InputError(
            f"{where}: {sorted(of_pipeline)} apply to a pipeline, not to "
            "a denoiser; leave them out, or compile the pipeline"
        )
    denoiser = compiled(module, settings, roles, example_inputs, loader)
    denoiser.watch_settings()
    return denoiser


# the keyword arguments of compile()
ACCEPTED = [
    *[p.name for p in inspect.signature(compile).parameters.values() if p.default is not p.empty],
    *PipelineSettings.__annotations__,
]


def explain(denoiser: Any, mask_ratio: float = 0.1) -> str:
    """Return a table of the compiler's changes to a denoiser, or to a pipeline's denoisers."""
    if is_pipeline(denoiser):
        return explain_pipeline(denoiser, mask_ratio)
    if not isinstance(denoiser, CompiledDenoiser):
        raise InputError(
            f"explain(): expected a compiled pipeline or denoiser, got {type(denoiser).__name__}; "
            "pass what maskfx.compile() returned"
        )
    return table(denoiser, mask_ratio)
