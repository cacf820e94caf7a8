"""maskfx: diffusion editing that computes only the masked sites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from maskfx.budget import Budget
from maskfx.compiled import CompiledDenoiser
from maskfx.config import Settings
from maskfx.editing import editing
from maskfx.errors import CacheError, CaptureError, InputError, MaskError, MaskfxError
from maskfx.reuse import ReusePolicy
from maskfx.runtime.cache import StepCache
from maskfx.runtime.loader import Loader
from maskfx.runtime.reach import Masks
from maskfx.session import EditSession
from maskfx.steps import DenseStep, EditStep, RecordStep
from maskfx.templates import Templates

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "CacheError",
    "CaptureError",
    "CompiledDenoiser",
    "DenseStep",
    "EditSession",
    "EditStep",
    "InputError",
    "Loader",
    "MaskError",
    "MaskfxError",
    "Masks",
    "RecordStep",
    "ReusePolicy",
    "StepCache",
    "Templates",
    "compile",
    "editing",
    "explain",
]


def compile(
    module: nn.Module,
    mode: str = "mask_cache",
    *,
    example_inputs: Mapping[str, Any] | None = None,
    roles: Mapping[str, tuple[str, ...]] | None = None,
    inductor: bool = False,
    prepack: bool = False,
    plans: bool = False,
    loader: Loader | None = None,
) -> CompiledDenoiser:
    """Compile a denoiser so that edits compute only their masked sites.

    Without `example_inputs` the module is captured at its first call. `roles` overrides which
    dimension of an argument is the batch, the picture or the text (see `maskfx.roles`). With a
    `loader` an edit's cached rows are loaded while its graph computes.
    """
    settings = Settings(mode=mode, inductor=inductor, prepack=prepack, plans=plans)
    if not isinstance(module, nn.Module):
        raise InputError(
            f"compile() takes a denoiser (torch.nn.Module), got {type(module).__name__}"
        )
    return CompiledDenoiser(module, settings, roles, example_inputs, loader)


def explain(denoiser: CompiledDenoiser, mask_ratio: float = 0.1) -> str:
    """What the compiler did to a denoiser, as a table for people."""
    return denoiser.explain(mask_ratio)
