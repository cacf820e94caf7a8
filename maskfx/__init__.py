"""maskfx: diffusion editing that computes only the masked sites.

Names are imported at their first use: a server's front has no need of torch.

May import: every room but serve and cli. Begin with `api.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maskfx.api import compile as compile
    from maskfx.api import explain as explain
    from maskfx.engine.batch_policy import Waiting as Waiting
    from maskfx.engine.engine import Engine as Engine
    from maskfx.engine.helper_processes import Processes as Processes
    from maskfx.errors import CacheError as CacheError
    from maskfx.errors import CaptureError as CaptureError
    from maskfx.errors import InputError as InputError
    from maskfx.errors import MaskError as MaskError
    from maskfx.errors import MaskfxError as MaskfxError
    from maskfx.pipelines.compile import decompile as decompile
    from maskfx.pipelines.compile import template as template
    from maskfx.pipelines.quality import Quality as Quality
    from maskfx.pipelines.state import Template as Template
    from maskfx.runtime.cache.loader import Loader as Loader
    from maskfx.runtime.cache.step_cache import StepCache as StepCache
    from maskfx.runtime.denoiser import CompiledDenoiser as CompiledDenoiser
    from maskfx.runtime.editing import editing as editing
    from maskfx.runtime.reuse.policy import ReusePolicy as ReusePolicy
    from maskfx.runtime.reuse.session import EditSession as EditSession
    from maskfx.runtime.sites.masks import Masks as Masks
    from maskfx.runtime.steps import DenseStep as DenseStep
    from maskfx.runtime.steps import EditStep as EditStep
    from maskfx.runtime.steps import RecordStep as RecordStep
    from maskfx.runtime.templates.budget import Budget as Budget
    from maskfx.runtime.templates.templates import Templates as Templates
    from maskfx.shipped import reference as reference

__version__ = "0.1.0"

# where each public name is made
HOMES = {
    "Budget": "maskfx.runtime.templates.budget",
    "CacheError": "maskfx.errors",
    "CaptureError": "maskfx.errors",
    "CompiledDenoiser": "maskfx.runtime.denoiser",
    "DenseStep": "maskfx.runtime.steps",
    "EditSession": "maskfx.runtime.reuse.session",
    "EditStep": "maskfx.runtime.steps",
    "Engine": "maskfx.engine.engine",
    "InputError": "maskfx.errors",
    "Loader": "maskfx.runtime.cache.loader",
    "MaskError": "maskfx.errors",
    "MaskfxError": "maskfx.errors",
    "Masks": "maskfx.runtime.sites.masks",
    "Processes": "maskfx.engine.helper_processes",
    "Quality": "maskfx.pipelines.quality",
    "RecordStep": "maskfx.runtime.steps",
    "ReusePolicy": "maskfx.runtime.reuse.policy",
    "StepCache": "maskfx.runtime.cache.step_cache",
    "Template": "maskfx.pipelines.state",
    "Templates": "maskfx.runtime.templates.templates",
    "Waiting": "maskfx.engine.batch_policy",
    "compile": "maskfx.api",
    "decompile": "maskfx.pipelines.compile",
    "editing": "maskfx.runtime.editing",
    "explain": "maskfx.api",
    "reference": "maskfx.shipped",
    "template": "maskfx.pipelines.compile",
}

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'maskfx' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
