"""KeptOutputs: continues the last outputs of patches that a step doesn't compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskfx.ir.values import copy_of
from maskfx.ops import wide
from maskfx.runtime.hardware.devices import moved
from maskfx.runtime.reuse.forecast import KEPT, weights_of

Bools = NDArray[np.bool_]
NEVER = -1  # the call number of an answer that isn't there


class KeptOutputs:
    """Extrapolates each cell's outputs over call numbers, as `forecast.Curve` does whole outputs.

    Args:
        cells: The cell of each site of a mask of the call, flattened: a patch or a part of one.
        shape: The shape of the mask.
        count: The number of cells; some may have no site.
    """

    def __init__(self, cells: NDArray[np.int64], shape: tuple[int, ...], count: int) -> None:
        self.cells, self.shape, self.count = cells, shape, count
        self.known = np.full((KEPT, self.count), NEVER)  # call numbers of the answers, by cell
        self._answers: list[list[object]] = []

    def learn(self, now: int, leaves: Sequence[object], computed: Bools) -> None:
        """Store the outputs of the cells that call number `now` computed."""
        if not self._answers or shapes(self._answers[-1]) != shapes(leaves):
            self._answers = [[copy_of(leaf) for leaf in leaves] for _ in range(KEPT)]
            self.known[:] = NEVER
            self.known[-1] = now
            return
        again = computed & (self.known[-1] == now)
        older = self.known[1:].copy()
        moving = computed & ~again
        self.known[:-1, moving] = older[:, moving]
        self.known[-1, computed] = now
        for place in range(KEPT):
            last = place == KEPT - 1
            newer = leaves if last else self._answers[place + 1]
            cells = computed if last else moving
            self._answers[place] = [
                self.chosen(cells, new, old)
                for new, old in zip(newer, self._answers[place], strict=True)
            ]

    def at(self, now: int, leaves: Sequence[object], kept: Bools) -> list[Any]:
        """Return outputs whose kept cells are extrapolated to call number `now`.

        Values that don't lie on the sites of the mask are returned as they are.
        """
        kept = kept & (self.known[-2] != NEVER)
        if not kept.any() or shapes(self._answers[-1]) != shapes(leaves):
            return list(leaves)
        weights = self._weights(now, kept)
        out: list[object] = []
        for leaf, *column in zip(leaves, *self._answers, strict=True):
            if not isinstance(leaf, Tensor) or self._form(leaf) is None:
                out.append(leaf)
                continue
            kind = wide(leaf.dtype)
            total = torch.zeros_like(leaf, dtype=kind)
            for row, value in zip(weights, column, strict=True):
                assert isinstance(value, Tensor), "answers have the same shapes"
                total += self._spread(row, leaf).to(kind) * value.to(kind)
            out.append(self.chosen(kept, total.to(leaf.dtype), leaf))
        return out

    def _weights(self, now: int, kept: Bools) -> NDArray[np.float32]:
        found = np.zeros((KEPT, self.count), np.float32)
        cells = np.flatnonzero(kept)
        columns, which = np.unique(self.known[:, cells], axis=1, return_inverse=True)
        for number, column in enumerate(columns.T):
            known = [int(at) for at in column if at != NEVER]
            own = cells[which.reshape(-1) == number]
            found[KEPT - len(known) :, own] = np.array(weights_of(known, now))[:, None]
        return found

    def chosen(self, cells: Bools, new: object, old: object) -> object:
        """Return the new value in these cells and the old one elsewhere."""
        if cells.all() or self._form(new) is None:
            return copy_of(new)  # also of an output that has no sites
        assert isinstance(new, Tensor), "an output with sites"
        assert isinstance(old, Tensor), "an answer has the same shape"
        return torch.where(self._spread(cells, new), new, old)

    def _spread(self, of_cells: NDArray[np.generic], like: Tensor) -> Tensor:
        """Return a value per cell as a tensor that broadcasts over an output."""
        form = self._form(like)
        assert form is not None, "an output without the mask's sites"
        return moved(torch.from_numpy(of_cells[self.cells]).view(form), like.device)

    def _form(self, leaf: object) -> tuple[int, ...] | None:
        """Return the shape that a value per site broadcasts in; None if the output has no sites."""
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return None
        if len(self.shape) > 1:
            return placed(self.shape, leaf.shape)
        return (-1, 1) if leaf.dim() == 3 and leaf.shape[1] == self.shape[0] else None


def placed(sites: tuple[int, ...], shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape in which a value per site broadcasts over an output; None if it can't.

    Frames of a video may lie before the channels or behind them, and the channels may be last.
    """
    *frames, height, width = sites
    if not frames:
        return sites if len(shape) >= 3 and tuple(shape[-2:]) == sites else None
    if len(shape) != 5:
        return None
    if tuple(shape[1:4]) == sites:
        return (*sites, 1)
    if tuple(shape[2:]) == sites:
        return sites
    found = (shape[1], *shape[3:]) == sites
    return (*frames, 1, height, width) if found else None


def shapes(leaves: Sequence[object]) -> list[object]:
    return [getattr(leaf, "shape", None) for leaf in leaves]
