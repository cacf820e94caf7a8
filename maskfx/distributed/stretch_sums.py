"""How ranks choose the sites of stretches together while a step runs, and how it is repeated here.

Each rank compares the rows that it has with those that a stretch last read. The ranks send each
other their sums by patch, add them in the same order, and decide alike, each for itself. The
process that asked them makes the same decisions from the same sums after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from maskfx.distributed.division.partition import Partition
from maskfx.errors import InputError
from maskfx.ir.programs.program import STRETCH, Interface
from maskfx.ops.exchange import Group
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.rolling.read_inputs import Sums
from maskfx.runtime.execution.stretch_steps import choose, chosen_of
from maskfx.runtime.sites.active import ActiveSites

FIRST = 1 << 20  # the number of the first of these exchanges; those of a graph have smaller ones


@dataclass
class StretchSums:
    """Adds the sums of all ranks during one step.

    Args:
        group: The ranks, as this one sees them.
        ranks: Those that compute a part of the batch.
        found: By stretch, the sums of each member, once they are added.
    """

    group: Group
    ranks: Sequence[int]
    found: dict[int, dict[int, Sums]] = field(default_factory=dict)

    @classmethod
    def of(cls, group: Group, partition: Partition) -> StretchSums:
        members, ranks = range(len(partition.shares)), range(partition.ranks)
        return cls(group, [r for r in ranks if any(partition.has_part(m, r) for m in members)])

    def __call__(self, stretch: int, sums: dict[int, Sums]) -> dict[int, Sums]:
        own = torch.from_numpy(np.concatenate(list(sums.values())))
        others = [rank for rank in self.ranks if rank != self.group.rank]
        incoming = {rank: torch.empty_like(own) for rank in others}
        if others:
            self.group.exchange(dict.fromkeys(others, own), incoming, FIRST + stretch)
        parts = {**incoming, self.group.rank: own}
        total = torch.stack([parts[rank] for rank in self.ranks]).sum(0).numpy()
        ends = np.cumsum([len(one) for one in sums.values()])[:-1]
        self.found[stretch] = dict(zip(sums, np.split(total, ends), strict=True))
        return self.found[stretch]


@dataclass(frozen=True)
class StretchChoices:
    """What the ranks of a step have chosen.

    Args:
        sums: By stretch, what they decided by.
        masks: By stretch, the sites of each member.
    """

    sums: Mapping[int, Mapping[int, Sums]]
    masks: Mapping[int, Sequence[bytes]]

    @classmethod
    def of(
        cls, interface: Interface, members: Sequence[Member], sums: Mapping[int, Mapping[int, Sums]]
    ) -> StretchChoices:
        return cls(sums, {stretch: masks_of(members, stretch) for stretch in stretches(interface)})

    def repeat(self, interface: Interface, members: Sequence[Member]) -> None:
        """Make the same choices for the members here; some may be made already.

        Raises InputError if a choice decides differently here.
        """
        for stretch in stretches(interface):
            left = {n: m for n, m in enumerate(members) if not chosen_of(m)[0].has(stretch)}
            if left:
                choose(interface, left, stretch, dict(self.sums.get(stretch, {})))
            if list(self.masks[stretch]) != masks_of(members, stretch):
                raise InputError(
                    f"EditStep.choice: ranks chose other sites for stretch {stretch} than this "
                    "process, from the same changes; the choice and its judge must depend on "
                    'nothing else, or give PatchReuse(order="step")'
                )


def stretches(interface: Interface) -> Sequence[int]:
    return interface.regions_of(STRETCH)


def masks_of(members: Sequence[Member], stretch: int) -> list[bytes]:
    return [chosen_of(member)[0].chosen(stretch).content for member in members]


def expected(frame: Frame, members: Sequence[Member]) -> tuple[Frame, list[Member]]:
    """Return a batch whose sites are known, by which the costs of one are predicted.

    Each stretch is taken to compute the sites of the last one that is chosen.
    """
    interface = frame.interface
    found = []
    for member in members:
        sites = chosen_of(member)[0]
        last = max(stretch for stretch in stretches(interface) if sites.has(stretch))
        known = ActiveSites(interface.pyramid, sites.sizes, sites.chosen(last))
        found.append(replace(member, sites=known, choice=None))
    layout = Layout(tuple(m.sites for m in found), tuple(m.batch for m in found))
    return Frame(interface, layout, frame.device, code=frame.code), found
