"""The result of an edit as the rows that it computed, for an end that has the recording's output.

The rows outside the mask are those of the recording, so only computed rows need to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.ir.lanes import Lane
from maskfx.runtime.batch.rows import Sized, split_axes


@dataclass(frozen=True)
class OutputRows:
    """The computed rows of one output, in place of the output.

    Args:
        sizes: The sizes of the output's axes, each split into batch, sites and features.
        order: The axes of the batch, then those of sites, then features.
        site_axes: The number of axes of sites.
        index: The computed sites, int32.
        rows: Their rows, (batch, sites, features...).
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    site_axes: int
    index: Tensor
    rows: Tensor

    def onto(self, recorded: Tensor) -> Tensor:
        """Return the recorded output with these rows in place of its own."""
        full = recorded.clone(memory_format=torch.contiguous_format)
        view = full.view(self.sizes).permute(self.order)
        view[self._places()] = self.rows
        return full

    def _places(self) -> tuple[Any, ...]:
        return places(self.index.long(), [self.sizes[i] for i in self.order], self.site_axes)


def computed_rows(
    result: Any, lanes: Sequence[Lane | None], member: Sized, recorded: Sequence[Any]
) -> Any:
    """Return a result with `OutputRows` in place of the outputs for which they are smaller.

    Args:
        result: The result of an edit.
        lanes: The layout of each of its outputs.
        member: The edit as a member of a batch.
        recorded: The outputs of its recording, which the receiver has.
    """
    leaves, spec = pytree.tree_flatten(result)
    if member.sites.full or not len(leaves) == len(lanes) == len(recorded):
        return result
    indices: dict[tuple[str, ...], Tensor] = {}
    found = []
    for leaf, lane, other in zip(leaves, lanes, recorded, strict=True):
        alike = isinstance(leaf, Tensor) and isinstance(other, Tensor) and leaf.shape == other.shape
        rows = rows_of(leaf, lane, member, indices) if alike and lane is not None else None
        found.append(leaf if rows is None else rows)
    return pytree.tree_unflatten(found, spec)


def rows_of(
    full: Tensor, lane: Lane, member: Sized, indices: dict[tuple[str, ...], Tensor]
) -> OutputRows | None:
    """Return the computed rows of an output; None if they are no smaller than the output."""
    sites = member.sites
    if lane.kind != "rows" or not full.is_contiguous():
        return None
    axes = split_axes(full, lane, sites)
    sizes, order, site = axes.sizes, axes.order, axes.sites
    if len(axes.batch) != 1 or not site or prod(sizes) != full.numel():
        return None
    if lane.segments not in indices:  # one tensor for all outputs with these sites
        indices[lane.segments] = sites.laid_out(lane.segments, sites.active).int()
    index = indices[lane.segments]
    if len(index) * (prod(sizes) // prod(sizes[i] for i in site) + 1) >= prod(sizes):
        return None
    view = full.view(sizes).permute(order)
    rows = view[places(index.long(), [sizes[i] for i in order], len(site))]
    return OutputRows(sizes, order, len(site), index, rows.contiguous())


def places(index: Tensor, sizes: Sequence[int], site_axes: int) -> tuple[Any, ...]:
    """Return the indices of sites in a value whose axes are the batch, then those of sites."""
    found: list[Tensor] = []
    for size in reversed(sizes[1 : 1 + site_axes]):
        found.append(index % size)
        index = index // size
    return (slice(None), *reversed(found))


def whole_result(result: Any, recorded: Sequence[Any]) -> Any:
    """Return a result with full outputs in place of `OutputRows`."""
    leaves, spec = pytree.tree_flatten(result)
    if not any(isinstance(leaf, OutputRows) for leaf in leaves):
        return result
    full = [
        leaf.onto(recorded[k]) if isinstance(leaf, OutputRows) else leaf
        for k, leaf in enumerate(leaves)
    ]
    return pytree.tree_unflatten(full, spec)
