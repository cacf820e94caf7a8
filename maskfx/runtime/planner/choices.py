"""Choices: what each block of a step may load or project again, for one member of a batch.

A member without cached rows, such as a recording, has no choice: it computes all sites.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from maskfx.ir.program import Program
from maskfx.ir.sources import Cached
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.member import Member
from maskfx.runtime.planner.blocks import GraphBlock
from maskfx.runtime.planner.costs import Costs
from maskfx.runtime.planner.least_squares import Floats
from maskfx.runtime.planner.timeline import BlockChoice
from maskfx.runtime.planning import LoadTrade
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask

KEYS, INPUT = "load keys and values", "load inputs, project again"
Menu = tuple[BlockChoice, ...]


@dataclass(frozen=True, eq=False)
class Choices:
    """One member's choices in every block, and the bytes of each input that they load."""

    menus: tuple[Menu, ...]
    blocks: Sequence[GraphBlock]
    moved: Mapping[str, Mapping[str, int]]  # by name of the choice and of the input
    everywhere: Tensor | None  # all sites, which a plan projects again
    kept: int = 0  # bytes of the recorded step

    @cached_property
    def names(self) -> set[str]:
        """The names of all inputs that some choice loads."""
        return {name for block in self.blocks for name in block.names}

    def plan(self, selection: Sequence[int]) -> dict[int, Tensor]:
        """Return the plan of an edit (`EditStep.plan`) that a selection stands for."""
        if self.everywhere is None:
            return {}
        picked = zip(self.blocks, self.menus, selection, strict=True)
        return {block.region: self.everywhere for block, menu, i in picked if menu[i].name == INPUT}

    def fixed(self, selection: Sequence[int], pending: set[str], costs: Costs) -> Choices:
        """Return the same with a selection made, whose inputs are loaded except for `pending`."""
        menus = []
        for block, menu, index in zip(self.blocks, self.menus, selection, strict=True):
            chosen, moved = menu[index], self.moved[menu[index].name]
            left = sum(moved.get(name, 0) for name in block.names if name in pending)
            if left != chosen.load_bytes:
                chosen = dataclasses.replace(chosen, load_bytes=left, load_seconds=costs.load(left))
            menus.append((chosen,))
        return dataclasses.replace(self, menus=tuple(menus))

    def trade(self, costs: Costs) -> LoadTrade | None:
        """Return what may be loaded or computed again; None for a member that loads nothing."""
        keys, inputs = (sum(self.moved.get(name, {}).values()) for name in (KEYS, INPUT))
        if not keys or not costs.load_slope:
            return None
        again = sum(menu[-1].compute_seconds - menu[0].compute_seconds for menu in self.menus)
        both = all(
            len(menu) > 1 for menu, b in zip(self.menus, self.blocks, strict=True) if b.region
        )
        avoided = keys - inputs if both else 0
        return LoadTrade(
            nbytes=keys,
            bandwidth=1 / costs.load_slope,
            loaded=min(1.0, keys / self.kept),
            avoidable=max(0.0, avoided / keys),
            per_byte=max(0.0, again / avoided) if avoided > 0 else 0.0,
        )


def loading(nbytes: float, costs: Costs) -> dict[str, float]:
    return {"load_bytes": nbytes, "load_seconds": costs.load(nbytes)}


def choices_of_member(
    program: Program, blocks: Sequence[GraphBlock], member: Member, costs: Costs
) -> Choices:
    """Return one member's choices: equal for all steps of a request."""
    if member.cache is None or member.sites.mask is None or member.written is not None:
        work = costs.compute(work_of(blocks, member.sites, member.batch)).tolist()
        only = tuple((BlockChoice(KEYS, compute_seconds=seconds),) for seconds in work)
        return Choices(only, blocks, {KEYS: {}}, None)
    everywhere = member.sites.mask.everywhere
    sides = {
        KEYS: member.sites,
        INPUT: with_plan(member.sites, {b.region: everywhere for b in blocks if b.region}),
    }
    moved = {KEYS: bytes_of(program, member, member.sites, program.interface.inputs)}
    chosen = {name for block in blocks if block.region for name in block.names}
    fixed = {name: nbytes for name, nbytes in moved[KEYS].items() if name not in chosen}
    moved[INPUT] = fixed | bytes_of(program, member, sides[INPUT], chosen)
    seconds = {
        name: costs.compute(work_of(blocks, sites, member.batch)) for name, sites in sides.items()
    }
    menus = tuple(
        tuple(
            BlockChoice(
                name,
                compute_seconds=float(seconds[name][n]),
                **loading(sum(moved[name].get(each, 0) for each in block.names), costs),  # type: ignore[arg-type]
            )
            for name in names_of(program, member, block.region)
        )
        for n, block in enumerate(blocks)
    )
    return Choices(menus, blocks, moved, everywhere.sites, member.cache.nbytes())


def names_of(program: Program, member: Member, region: int) -> list[str]:
    """Return the names of a region's choices whose rows are in the cache; KEYS if there's none."""
    if not region:
        return [KEYS]
    assert member.cache is not None
    taps = zip((KEYS, INPUT), program.interface.region_taps(region), strict=True)
    return [name for name, needed in taps if needed <= member.cache.rows.keys()] or [KEYS]


def with_plan(sites: ActiveSites, regions: Mapping[int, Mask]) -> ActiveSites:
    """Return the same request's sites with other active sites in some regions."""
    return ActiveSites(sites.pyramid, sites.sizes, sites.mask, {**sites.regions, **regions})


def bytes_of(
    program: Program, member: Member, sites: ActiveSites, names: Iterable[str]
) -> dict[str, int]:
    """Return the bytes of those of these inputs that are loaded for one member."""
    alone = dataclasses.replace(member, sites=sites)
    frame = Frame(program.interface, Layout((sites,), (member.batch,)), member.device)
    assert member.cache is not None
    sources = ((name, program.interface.inputs[name]) for name in names)
    kept = {
        name
        for name, source in sources
        if isinstance(source, Cached) and source.tap in member.cache.rows
    }
    return frame.loaded_bytes([alone], kept)


def work_of(blocks: Sequence[GraphBlock], sites: ActiveSites, batch: int) -> Floats:
    return np.stack([block.work(sites, batch) for block in blocks])
