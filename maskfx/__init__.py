"""maskfx: diffusion editing that computes only the masked sites.

Public names are imported on first use, so that the server's front end does not import torch.

May import: every room except serve and cli. Begin with `api.py`.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maskfx.api import compile as compile
    from maskfx.api import explain as explain
    from maskfx.distributed.ranks import Ranks as Ranks
    from maskfx.engine.admission.batch_policy import BatchPolicy as BatchPolicy
    from maskfx.engine.engine import Engine as Engine
    from maskfx.engine.processes.helper_processes import HelperProcesses as HelperProcesses
    from maskfx.engine.processes.services import OwnProcesses as OwnProcesses
    from maskfx.errors import AdapterError as AdapterError
    from maskfx.errors import BudgetError as BudgetError
    from maskfx.errors import Busy as Busy
    from maskfx.errors import CacheError as CacheError
    from maskfx.errors import Cancelled as Cancelled
    from maskfx.errors import CaptureError as CaptureError
    from maskfx.errors import Closed as Closed
    from maskfx.errors import CompileError as CompileError
    from maskfx.errors import DeadlineMissed as DeadlineMissed
    from maskfx.errors import EngineError as EngineError
    from maskfx.errors import InputError as InputError
    from maskfx.errors import MaskError as MaskError
    from maskfx.errors import MaskfxError as MaskfxError
    from maskfx.errors import MissingRequest as MissingRequest
    from maskfx.errors import NumberError as NumberError
    from maskfx.errors import SignatureError as SignatureError
    from maskfx.export.exporter import export as export
    from maskfx.pipelines.adapters.ip_adapters import ip_adapters as ip_adapters
    from maskfx.pipelines.adapters.lora import Lora as Lora
    from maskfx.pipelines.compile import decompile as decompile
    from maskfx.pipelines.compile import template as template
    from maskfx.pipelines.quality import Quality as Quality
    from maskfx.pipelines.state import Template as Template
    from maskfx.runtime.cache.loader import Loader as Loader
    from maskfx.runtime.cache.movers import DeviceMover as DeviceMover
    from maskfx.runtime.cache.step_cache import StepCache as StepCache
    from maskfx.runtime.cache.stores.remote_store import RemoteStore as RemoteStore
    from maskfx.runtime.cache.stores.store import Store as Store
    from maskfx.runtime.cache.tiers import Tiers as Tiers
    from maskfx.runtime.denoiser import CompiledDenoiser as CompiledDenoiser
    from maskfx.runtime.editing import editing as editing
    from maskfx.runtime.lora.adapter import Adapter as Adapter
    from maskfx.runtime.lora.adapter import Difference as Difference
    from maskfx.runtime.lora.adapter import LowRank as LowRank
    from maskfx.runtime.lora.registry import Adapters as Adapters
    from maskfx.runtime.reuse.patches import PatchReuse as PatchReuse
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

# module that defines each public name
HOMES = {
    "Adapter": "maskfx.runtime.lora.adapter",
    "AdapterError": "maskfx.errors",
    "Adapters": "maskfx.runtime.lora.registry",
    "BatchPolicy": "maskfx.engine.admission.batch_policy",
    "Budget": "maskfx.runtime.templates.budget",
    "BudgetError": "maskfx.errors",
    "Busy": "maskfx.errors",
    "CacheError": "maskfx.errors",
    "Cancelled": "maskfx.errors",
    "CaptureError": "maskfx.errors",
    "Closed": "maskfx.errors",
    "CompileError": "maskfx.errors",
    "CompiledDenoiser": "maskfx.runtime.denoiser",
    "DeadlineMissed": "maskfx.errors",
    "DenseStep": "maskfx.runtime.steps",
    "DeviceMover": "maskfx.runtime.cache.movers",
    "Difference": "maskfx.runtime.lora.adapter",
    "EditSession": "maskfx.runtime.reuse.session",
    "EditStep": "maskfx.runtime.steps",
    "Engine": "maskfx.engine.engine",
    "EngineError": "maskfx.errors",
    "HelperProcesses": "maskfx.engine.processes.helper_processes",
    "InputError": "maskfx.errors",
    "Loader": "maskfx.runtime.cache.loader",
    "Lora": "maskfx.pipelines.adapters.lora",
    "LowRank": "maskfx.runtime.lora.adapter",
    "MaskError": "maskfx.errors",
    "MaskfxError": "maskfx.errors",
    "Masks": "maskfx.runtime.sites.masks",
    "MissingRequest": "maskfx.errors",
    "NumberError": "maskfx.errors",
    "OwnProcesses": "maskfx.engine.processes.services",
    "PatchReuse": "maskfx.runtime.reuse.patches",
    "Quality": "maskfx.pipelines.quality",
    "Ranks": "maskfx.distributed.ranks",
    "RecordStep": "maskfx.runtime.steps",
    "RemoteStore": "maskfx.runtime.cache.stores.remote_store",
    "ReusePolicy": "maskfx.runtime.reuse.policy",
    "SignatureError": "maskfx.errors",
    "StepCache": "maskfx.runtime.cache.step_cache",
    "Store": "maskfx.runtime.cache.stores.store",
    "Template": "maskfx.pipelines.state",
    "Templates": "maskfx.runtime.templates.templates",
    "Tiers": "maskfx.runtime.cache.tiers",
    "compile": "maskfx.api",
    "decompile": "maskfx.pipelines.compile",
    "editing": "maskfx.runtime.editing",
    "explain": "maskfx.api",
    "export": "maskfx.export",  # the room itself, which can be called
    "ip_adapters": "maskfx.pipelines.adapters.ip_adapters",
    "reference": "maskfx.shipped",
    "template": "maskfx.pipelines.compile",
}

# former name: present name
RENAMED = {"Processes": "HelperProcesses", "Waiting": "BatchPolicy"}

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name in RENAMED:
        new = RENAMED[name]
        warnings.warn(
            f"maskfx.{name} is called maskfx.{new} now; the old name goes with version 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        return globals().get(new) or __getattr__(new)
    if name not in HOMES:
        raise AttributeError(f"module 'maskfx' has no attribute {name!r}")
    home = import_module(HOMES[name])
    value = globals()[name] = home if HOMES[name] == f"maskfx.{name}" else getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
