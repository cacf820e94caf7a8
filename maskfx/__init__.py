"""maskfx: diffusion editing that computes only the masked sites.

Names are imported at their first use: a server's front has no need of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maskfx.ambient import editing as editing
    from maskfx.budget import Budget as Budget
    from maskfx.compiled import CompiledDenoiser as CompiledDenoiser
    from maskfx.engine.engine import Engine as Engine
    from maskfx.engine.processes import Processes as Processes
    from maskfx.engine.waiting import Waiting as Waiting
    from maskfx.errors import CacheError as CacheError
    from maskfx.errors import CaptureError as CaptureError
    from maskfx.errors import InputError as InputError
    from maskfx.errors import MaskError as MaskError
    from maskfx.errors import MaskfxError as MaskfxError
    from maskfx.pipelines.compiled import decompile as decompile
    from maskfx.pipelines.compiled import template as template
    from maskfx.pipelines.quality import Quality as Quality
    from maskfx.pipelines.works import Template as Template
    from maskfx.reuse import ReusePolicy as ReusePolicy
    from maskfx.runtime.cache import StepCache as StepCache
    from maskfx.runtime.loader import Loader as Loader
    from maskfx.runtime.reach import Masks as Masks
    from maskfx.session import EditSession as EditSession
    from maskfx.shipped import reference as reference
    from maskfx.steps import DenseStep as DenseStep
    from maskfx.steps import EditStep as EditStep
    from maskfx.steps import RecordStep as RecordStep
    from maskfx.surface import compile as compile
    from maskfx.surface import explain as explain
    from maskfx.templates import Templates as Templates

__version__ = "0.1.0"

# where each public name is made
HOMES = {
    "Budget": "maskfx.budget",
    "CacheError": "maskfx.errors",
    "CaptureError": "maskfx.errors",
    "CompiledDenoiser": "maskfx.compiled",
    "DenseStep": "maskfx.steps",
    "EditSession": "maskfx.session",
    "EditStep": "maskfx.steps",
    "Engine": "maskfx.engine.engine",
    "InputError": "maskfx.errors",
    "Loader": "maskfx.runtime.loader",
    "MaskError": "maskfx.errors",
    "MaskfxError": "maskfx.errors",
    "Masks": "maskfx.runtime.reach",
    "Processes": "maskfx.engine.processes",
    "Quality": "maskfx.pipelines.quality",
    "RecordStep": "maskfx.steps",
    "ReusePolicy": "maskfx.reuse",
    "StepCache": "maskfx.runtime.cache",
    "Template": "maskfx.pipelines.works",
    "Templates": "maskfx.templates",
    "Waiting": "maskfx.engine.waiting",
    "compile": "maskfx.surface",
    "decompile": "maskfx.pipelines.compiled",
    "editing": "maskfx.ambient",
    "explain": "maskfx.surface",
    "reference": "maskfx.shipped",
    "template": "maskfx.pipelines.compiled",
}

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'maskfx' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
