"""SiteInputs: how far a denoiser's input changed in each patch since a call read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.ir.geometry.grids import Floats
from maskfx.ops import wide
from maskfx.runtime.hardware.devices import moved
from maskfx.runtime.reuse.judges import Bools
from maskfx.runtime.sites.patches import PatchGrid


class SiteInputs:
    """Finds the image input of a call, and compares it by patch with an earlier one.

    Args:
        grid: The patches.
    """

    def __init__(self, grid: PatchGrid) -> None:
        self.grid = grid
        self._ids: dict[torch.device, Tensor] = {}

    def find(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the image input as (sites, features); None if its sites aren't the mask's."""
        shape = self.grid.shape
        for value in pytree.tree_leaves(dict(inputs)):
            if not isinstance(value, Tensor) or value.dim() < 3:
                continue
            if len(shape) == 2 and tuple(value.shape[-2:]) == shape:
                return value.reshape(-1, shape[0] * shape[1]).t()
            if len(shape) == 1 and value.shape[1] == shape[0]:
                return value.transpose(0, 1).reshape(shape[0], -1)
            return None
        return None

    def change(self, before: Tensor | None, now: Tensor | None) -> Floats:
        """Return the relative change of each patch; infinite if it isn't known."""
        if before is None or now is None:
            return np.full(self.grid.count, np.inf)
        kind = wide(now.dtype)
        before, now = before.to(kind), now.to(kind)
        both = torch.stack([(now - before).abs().mean(1), before.abs().mean(1)], 1)
        sums = both.new_zeros(self.grid.count, 2).index_add_(0, self._on(both.device), both)
        change, size = sums.cpu().numpy().astype(float).T
        found = np.full_like(change, np.inf)
        np.divide(change, size, out=found, where=size > 0)
        return np.asarray(found)

    def read(self, before: Tensor | None, now: Tensor | None, computed: Bools) -> Tensor | None:
        """Return the input as it was last read in each patch."""
        if now is None:
            return before
        if before is None or computed.all():
            return now.detach().clone()
        chosen = moved(torch.from_numpy(computed[self.grid.ids]), now.device)
        return torch.where(chosen[:, None], now, before)

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._ids:
            self._ids[device] = moved(torch.from_numpy(self.grid.ids), device)
        return self._ids[device]
