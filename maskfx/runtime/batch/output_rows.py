"""The result of an edit as the rows that it computed, for an end that has the recording's output.

The rows outside the mask are those of the recording, so only computed rows need to be sent.
"""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.ir.geometry.lanes import Lane
from maskfx.runtime.batch.rows import Sized, split_axes
from maskfx.runtime.hardware.devices import copied, moved

Places = tuple[slice | Tensor, ...]  # indices into a value with its batch and sites in front


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

    def onto(self, recorded: Tensor, known: MutableMapping[Hashable, Places]) -> Tensor:
        """Return the recorded output with these rows in place of its own.

        Args:
            recorded: The output of the recording.
            known: The places of sites, which outputs of one result share.
        """
        full = copied(recorded, self.rows.device).contiguous()
        ordered = [self.sizes[i] for i in self.order]
        key = id(self.index), *ordered[1 : 1 + self.site_axes]
        if key not in known:
            index = moved(self.index, full.device).long()
            known[key] = places(index, ordered, self.site_axes)
        full.view(self.sizes).permute(self.order)[known[key]] = self.rows
        return full


def output_rows(
    rows: Tensor, recorded: Tensor, lane: Lane, member: Sized, index: Tensor
) -> OutputRows | None:
    """Return computed rows in place of an output; None if they are no smaller than the output.

    Args:
        rows: The rows, (batch, active sites, features...).
        recorded: The output of the recording, which the receiver has.
        lane: The layout of the output.
        member: The edit as a member of a batch.
        index: The active sites, int32.
    """
    axes = split_axes(recorded, lane, member.sites)
    sizes, order, site = axes.sizes, axes.order, axes.sites
    if len(axes.batch) != 1 or not site or prod(sizes) != recorded.numel():
        return None
    if len(index) * (prod(sizes) // prod(sizes[i] for i in site) + 1) >= prod(sizes):
        return None
    shape = [sizes[axes.batch[0]], len(index), *(sizes[i] for i in axes.features)]
    return OutputRows(sizes, order, len(site), index, rows.reshape(shape).contiguous())


def places(index: Tensor, sizes: Sequence[int], site_axes: int) -> Places:
    """Return the indices of sites in a value whose axes are the batch, then those of sites."""
    found: list[Tensor] = []
    for size in reversed(sizes[1 : 1 + site_axes]):
        found.append(index % size)
        index = index // size
    return (slice(None), *reversed(found))


def whole_result(result: object, recorded: Sequence[Tensor]) -> object:
    """Return a result with full outputs in place of `OutputRows`."""
    leaves, spec = pytree.tree_flatten(result)
    if not any(isinstance(leaf, OutputRows) for leaf in leaves):
        return result
    known: dict[Hashable, Places] = {}
    full = [
        leaf.onto(recorded[k], known) if isinstance(leaf, OutputRows) else leaf
        for k, leaf in enumerate(leaves)
    ]
    return pytree.tree_unflatten(full, spec)
