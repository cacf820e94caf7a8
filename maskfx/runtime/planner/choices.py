"""Choices: what each block of a step may load or compute again, for one member of a batch.

A block's cached rows are loaded, or keys and values projected again from loaded inputs, or the
block is computed whole: for all sites of the recorded inputs too, whose rows follow from those of
the block before. So the blocks that are computed whole are the first ones.

A member without cached rows, such as a recording, has no choice: it computes all sites.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from maskfx.ir.programs.program import Program
from maskfx.ir.programs.sources import Cached, Loaded, Source
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.computed_rows import is_exact, with_computed
from maskfx.runtime.cache.rows import StoredValue, stored_parts
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.planner.blocks import GraphBlock
from maskfx.runtime.planner.costs import Costs
from maskfx.runtime.planner.least_squares import Floats
from maskfx.runtime.planner.timeline import BlockChoice
from maskfx.runtime.planning import LoadTrade
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.steps import EditStep

KEYS, INPUT = "load keys and values", "load inputs, project again"
WHOLE = "compute whole, load nothing"
Menu = tuple[BlockChoice, ...]


class Load(NamedTuple):
    """The bytes of an input that cross the link, and the seconds of reading their store before."""

    nbytes: int
    reading: float = 0.0


@dataclass(frozen=True, eq=False)
class Choices:
    """One member's choices in every block, and the loads of each input that they read.

    Args:
        menus: the choices, by block.
        blocks: the blocks.
        moved: loads by name of the choice and of the input.
        everywhere: all sites, which a plan projects again.
        kept: bytes of the recorded step.
        taps: the cached rows that each block reads, where it may be computed whole.
    """

    menus: tuple[Menu, ...]
    blocks: Sequence[GraphBlock]
    moved: Mapping[str, Mapping[str, Load]]
    everywhere: Tensor | None
    kept: int = 0
    taps: Sequence[Collection[str]] = ()

    @cached_property
    def names(self) -> set[str]:
        """The names of all inputs that some choice loads."""
        return {name for block in self.blocks for name in block.names}

    def names_of(self, selection: Sequence[int]) -> list[str]:
        """Return the name of the selected choice of each block."""
        return [menu[i].name for menu, i in zip(self.menus, selection, strict=True)]

    def planned(self, step: EditStep, selection: Sequence[int]) -> EditStep:
        """Return an edit that does what is selected."""
        chosen, plan = self.names_of(selection), dict[int, Tensor]()
        if self.everywhere is not None:
            regions = (
                b.region for b, name in zip(self.blocks, chosen, strict=True) if name == INPUT
            )
            plan = dict.fromkeys(regions, self.everywhere)
        whole = [taps for taps, name in zip(self.taps, chosen, strict=False) if name == WHOLE]
        cache = with_computed(step.cache, frozenset().union(*whole))
        return dataclasses.replace(step, plan=plan, cache=cache)

    def fixed(self, selection: Sequence[int], pending: set[str], costs: Costs) -> Choices:
        """Return the same with a selection made, whose inputs are loaded except for `pending`."""
        menus = []
        for block, menu, index in zip(self.blocks, self.menus, selection, strict=True):
            chosen, moved = menu[index], self.moved[menu[index].name]
            left = total(moved.get(name) for name in block.names if name in pending)
            if left.nbytes != chosen.load_bytes:
                chosen = dataclasses.replace(chosen, **loading(left, costs))  # type: ignore[arg-type]
            menus.append((chosen,))
        return dataclasses.replace(self, menus=tuple(menus))

    def trade(self, costs: Costs) -> LoadTrade | None:
        """Return what may be loaded or computed again; None for a member that loads nothing."""
        keys, inputs = (total(self.moved.get(name, {}).values()).nbytes for name in (KEYS, INPUT))
        if not keys or not costs.load_slope:
            return None
        pairs = [(menu[0], input_of(menu)) for menu in self.menus]
        again = sum(two.compute_seconds - one.compute_seconds for one, two in pairs if two)
        both = all(two for (_, two), b in zip(pairs, self.blocks, strict=True) if b.region)
        avoided = keys - inputs if both else 0
        return LoadTrade(
            nbytes=keys,
            bandwidth=1 / costs.load_slope,
            loaded=min(1.0, keys / self.kept),
            avoidable=max(0.0, avoided / keys),
            per_byte=max(0.0, again / avoided) if avoided > 0 else 0.0,
        )


def input_of(menu: Menu) -> BlockChoice | None:
    """Return the choice of projecting again, beside another one."""
    return next((choice for choice in menu[1:] if choice.name == INPUT), None)


def total(loads: Iterable[Load | None]) -> Load:
    found = [load for load in loads if load is not None]
    return Load(sum(load.nbytes for load in found), sum(load.reading for load in found))


def loading(load: Load, costs: Costs) -> dict[str, float]:
    return {"load_bytes": load.nbytes, "load_seconds": costs.load(load.nbytes) + load.reading}


def choices_of_member(
    program: Program,
    blocks: Sequence[GraphBlock],
    member: Member,
    costs: Costs,
    copies: bool = True,
) -> Choices:
    """Return one member's choices: equal for all steps of a request.

    `copies`: whether rows in the memory of a CPU are loaded too (see `Frame.jobs`).
    """
    if member.cache is None or member.sites.mask is None or member.written is not None:
        work = costs.compute(work_of(blocks, member.sites, member.batch)).tolist()
        only = tuple((BlockChoice(KEYS, compute_seconds=seconds),) for seconds in work)
        return Choices(only, blocks, {KEYS: {}}, None)
    everywhere = member.sites.mask.everywhere
    sides = {
        KEYS: member.sites,
        INPUT: with_plan(member.sites, {b.region: everywhere for b in blocks if b.region}),
    }
    order = list(dict.fromkeys(name for block in blocks for name in block.names))
    chosen = {name for block in blocks if block.region for name in block.names}
    loads = {name: loads_of(program, member, own, order, copies) for name, own in sides.items()}
    fixed = {name: load for name, load in loads[KEYS].items() if name not in chosen}
    moved = {
        KEYS: loads[KEYS],
        INPUT: fixed | {name: load for name, load in loads[INPUT].items() if name in chosen},
    }
    seconds = {
        name: costs.compute(work_of(blocks, sites, member.batch)) for name, sites in sides.items()
    }
    menus = [
        tuple(
            BlockChoice(
                name,
                compute_seconds=float(seconds[name][n]),
                **loading(total(map(moved[name].get, block.names)), costs),  # type: ignore[arg-type]
            )
            for name in names_of(program, member, block.region)
        )
        for n, block in enumerate(blocks)
    ]
    taps = taps_computed(program, member.cache, blocks) if can_compute(member) else []
    if taps:
        recorded = whole_seconds(program, blocks, member, costs)
        menus[0] = tuple(dataclasses.replace(choice, leaves_full=True) for choice in menus[0])
        for n in range(1, len(taps)):
            both = float(seconds[KEYS][n]) + recorded[n - 1]
            menus[n] += (BlockChoice(WHOLE, 0.0, 0.0, both, True, True, extra_bytes=math.inf),)
        moved[WHOLE] = {}
    return Choices(tuple(menus), blocks, moved, everywhere.sites, member.cache.nbytes(), taps)


def can_compute(member: Member) -> bool:
    """Return True if rows of a member's recording can be computed again as they were recorded.

    Its inputs have to be known, of the member's own sizes, and it has no adapters.
    """
    cache = member.cache
    if cache is None or member.written is not None:
        return False
    return bool(cache.given) and not cache.adapters and cache.sizes == member.sites.sizes


def taps_computed(
    program: Program, cache: StepCache, blocks: Sequence[GraphBlock]
) -> list[frozenset[str]]:
    """Return the cached rows of the first blocks, as far as all of them can be computed again.

    Rows in fewer bits can't: an edit would depend on whether it computes them. Of the first block,
    which begins with the step, there are none.
    """
    found = []
    for block in blocks:
        sources = [program.interface.inputs[name] for name in block.names]
        taps = [s.tap for s in sources if isinstance(s, Cached) and not projects(program, s)]
        if not all(tap in cache.rows and is_exact(cache.rows[tap]) for tap in taps):
            break
        found.append(frozenset(taps))
    return found if len(found) > 1 else []


def projects(program: Program, source: Source) -> bool:
    """Return True for rows that keys and values are projected from again."""
    return isinstance(source, Loaded) and bool(program.interface.region_of(source))


def whole_seconds(
    program: Program, blocks: Sequence[GraphBlock], member: Member, costs: Costs
) -> list[float]:
    """Return the seconds in which each block computes all sites of a recording."""
    every = ActiveSites(program.interface.pyramid, member.sites.sizes, None)
    seconds = costs.compute(work_of(blocks, every, member.batch)) + np.array(costs.fixed)
    return [float(each) for each in costs.whole * seconds]


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


def loads_of(
    program: Program, member: Member, sites: ActiveSites, names: Sequence[str], copies: bool
) -> dict[str, Load]:
    """Return the loads of those of these inputs that are loaded for one member.

    `names` are in the order in which they are read: rows that several inputs are made of are read
    from a store for the first one.
    """
    alone = dataclasses.replace(member, sites=sites)
    frame = Frame(program.interface, Layout((sites,), (member.batch,)), member.device)
    assert member.cache is not None
    kept, inputs = member.cache.rows, program.interface.inputs
    taps = {n: s.tap for n in names if isinstance(s := inputs[n], Cached) and s.tap in kept}
    found, read = {}, set[int]()
    for name, nbytes in frame.loaded_bytes([alone], taps, copies).items():
        reading = 0.0
        for part in stored_parts(kept[taps[name]]):
            if id(part) not in read:
                read.add(id(part))
                reading += seconds_of(part)
        found[name] = Load(nbytes, reading)
    return found


def seconds_of(part: StoredValue) -> float:
    """Return the seconds of reading rows from their store; 0 before its speed is known."""
    fixed, slope = part.speed.line or (0.0, 0.0)
    return fixed + slope * part.nbytes


def work_of(blocks: Sequence[GraphBlock], sites: ActiveSites, batch: int) -> Floats:
    return np.stack([block.work(sites, batch) for block in blocks])
