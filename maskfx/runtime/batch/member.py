"""Member: one request of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from maskfx.runtime.cache.rolling import RollingCache
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.devices import CPU
from maskfx.runtime.lora.stacks import NamedSet
from maskfx.runtime.sites.active import ActiveSites


@dataclass
class Member:
    """One request of a batch; it has as many owners (batch elements) as its `batch`."""

    sites: ActiveSites
    batch: int
    given: dict[str, Sequence[Any]]
    cache: StepCache | None = None
    recording: bool = False
    written: RollingCache | None = None
    device: torch.device = CPU
    adapters: NamedSet | None = None
