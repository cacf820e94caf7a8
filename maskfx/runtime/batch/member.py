"""Member: one request of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from maskfx.runtime.cache.rolling.rolling_cache import RollingCache
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.hardware.devices import CPU
from maskfx.runtime.lora.stacks import NamedSet
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.sites.stretch_choice import StretchChoice


@dataclass
class Member:
    """One request of a batch; it has as many owners (batch elements) as its `batch`.

    With a `choice`, its sites are chosen stretch by stretch while the graph runs; `regions` are
    those that compute other sites than their stretch.
    """

    sites: ActiveSites
    batch: int
    given: dict[str, Sequence[Any]]
    cache: StepCache | None = None
    recording: bool = False
    written: RollingCache | None = None
    device: torch.device = CPU
    adapters: NamedSet | None = None
    choice: StretchChoice | None = None
    regions: Mapping[int, Mask] = field(default_factory=dict)


def in_batches(members: Sequence[Member]) -> list[list[int]]:
    """Return the member numbers of each batch: one device each, members of equal size adjacent."""
    groups: dict[torch.device, list[int]] = {}
    for number in sorted(
        range(len(members)), key=lambda i: (members[i].batch, members[i].sites.counts)
    ):
        groups.setdefault(members[number].device, []).append(number)
    return list(groups.values())
