"""Budgets: choose what a template keeps so that all its steps fit into a number of bytes.

Choices that don't change the image are made freely: inputs or keys and values, per attention, by
predicted time. Choices that change the image need `Budget.allow` and have a fixed order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from maskfx.errors import BudgetError, InputError
from maskfx.ir.argument_checks import check_number, check_type, check_whole, refuse
from maskfx.ir.programs import program
from maskfx.runtime.batch import flops
from maskfx.runtime.explain import amount
from maskfx.runtime.planner.blocks import FLOPS, find_blocks
from maskfx.runtime.planner.blocks import GraphBlock as Stretch
from maskfx.runtime.planner.choices import KEYS, with_plan, work_of
from maskfx.runtime.planner.costs import Costs
from maskfx.runtime.planner.storage_budget import restrict
from maskfx.runtime.planner.timeline import BlockChoice, BlockTimes
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.templates.footprint import ENCODINGS, Footprint, encoding_of

INPUTS = "inputs of keys and values"
RATIO = 0.2  # masked share that times are predicted for if masks may be anywhere
NEAR = 1e-3  # of the predicted time: tolerance to the best choice


@dataclass(frozen=True)
class Budget:
    """Bytes for one template and the lossy choices allowed to meet them.

    Args:
        nbytes: bytes for all recorded steps of all branches.
        steps: number of steps.
        branches: number of guidance branches (elements of the batch, together).
        allow: lossy choices: "16bit", "8bit", "4bit" (4 bits for rows that only attentions read,
            8 for the others) and "share2", "share3", … (record one in n steps; steps in between
            read the linear interpolation of two). The first combination that fits is chosen: the
            smallest share, then the finest encoding. Empty by default: the image doesn't change.
        costs: fitted costs for the predicted times; without them loads are free and time is
            proportional to FLOPs.
        stored: number of steps that are recorded at all, if edits extrapolate the others; then
            none of these is shared. A pipeline sets it by its quality.
    """

    nbytes: float
    steps: int
    branches: int = 1
    allow: Sequence[str] = ()
    costs: Costs | None = None
    stored: int | None = None
    shares: tuple[int, ...] = field(init=False, default=(1,))
    encodings: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        check_number("Budget", "nbytes", self.nbytes, "bytes", above=True)
        check_whole("Budget", "steps", self.steps, 1)
        check_whole("Budget", "branches", self.branches, 1)
        check_whole("Budget", "stored", self.stored, 1, or_none=True)
        if self.stored is not None and self.stored > self.steps:
            raise InputError(f"Budget: stored={self.stored!r}: give 1 to steps={self.steps}")
        if isinstance(self.allow, str) or not isinstance(self.allow, Collection):
            refuse("Budget", "allow", self.allow, 'a list of names, such as ("8bit", "share2")')
        check_type("Budget", "costs", self.costs, Costs, "Costs, or None", or_none=True)
        shares = {1}
        for name in self.allow:
            told = re.fullmatch(r"share([1-9]\d*)", str(name))
            if told:
                shares |= {min(int(told[1]), self.steps)} if self.stored is None else set()
            elif str(name) not in ENCODINGS:
                known = ", ".join([*ENCODINGS, "share2", "share3", "…"])
                raise InputError(f"Budget: allow={name!r}: choose of {known}")
        own = tuple(name for name in ENCODINGS if name == "lossless" or name in self.allow)
        object.__setattr__(self, "shares", tuple(sorted(shares)))
        object.__setattr__(self, "encodings", own)

    def room(self, share: int, alone: int) -> float:
        """Return the bytes for one element of a recorded step.

        `alone` is the bytes of outputs, all that is kept of a step that isn't recorded.
        """
        recorded, others = self.counts(share)
        return (self.nbytes / self.branches - others * alone) / recorded

    def counts(self, share: int) -> tuple[int, int]:
        """Return the number of recorded steps, and of steps that keep their outputs only."""
        if self.stored is not None:
            return self.stored, 0
        recorded = len(recorded_steps(self.steps, share))
        return recorded, self.steps - recorded


def recorded_steps(steps: int, share: int) -> list[int]:
    """Return every `share`-th step and the last one."""
    return sorted({*range(0, steps, share), steps - 1})


@dataclass(frozen=True)
class Keeping:
    """What a template keeps of each step."""

    encoding: str
    share: int
    regions: tuple[str, ...]  # of each region: "both", "keys" or "inputs"
    nbytes: int  # of one element of a recorded step, as counted

    @property
    def name(self) -> str:
        """A short name, equal for equal choices."""
        words = {"both": "b", "keys": "k", "inputs": "i"}
        chosen = "".join(words[kept] for kept in self.regions)
        return f"{self.encoding} share={self.share} {chosen}"


def choose(footprint: Footprint, budget: Budget) -> Keeping:
    """Return the first choice that fits, in the order of `Budget.allow`'s description.

    Raises `BudgetError` if none fits.
    """
    for share in budget.shares:
        room = budget.room(share, footprint.alone)
        for encoding in budget.encodings:
            found = fit(footprint, encoding, share, room, budget.costs)
            if found is not None:
                return found
    raise BudgetError(unmet(footprint, budget))


def fit(
    footprint: Footprint, encoding: str, share: int, room: float, costs: Costs | None
) -> Keeping | None:
    """Return the fastest choice per region within `room` bytes, or None if none fits.

    Both inputs and keys are kept only where a plan's choice between them doesn't change the image.
    """
    interface = footprint.program.interface
    how, count = encoding_of(encoding, interface), len(interface.regions_of(program.KEYS))
    if count and how.lossless and share == 1:
        whole = footprint.together(how)
        if whole <= room:
            return Keeping(encoding, share, ("both",) * count, whole)
    each = region_bytes(footprint, encoding)
    fixed = footprint.together(how, interface.fixed_taps())
    if fixed + sum(map(min, each)) > room:
        return None
    sides = ["keys" if keys <= inputs else "inputs" for keys, inputs in each]
    if any(keys > inputs for keys, inputs in each):
        sides = fastest(footprint, each, room - fixed, costs)
    nbytes = footprint.together(how, interface.taps_for(sides))
    return Keeping(encoding, share, tuple(sides), nbytes)


def region_bytes(footprint: Footprint, encoding: str) -> list[tuple[int, int]]:
    """Return per region the bytes of its keys and values, and of their inputs.

    Taps that every plan reads are not counted.
    """
    interface = footprint.program.interface
    taps = footprint.taps(encoding_of(encoding, interface))
    fixed, out = interface.fixed_taps(), []
    for region in interface.regions_of(program.KEYS):
        keys, inputs = interface.region_taps(region)
        sizes = (sum(taps[t] for t in side - fixed) for side in (keys, inputs))
        out.append((next(sizes), next(sizes)))
    return out


def fastest(
    footprint: Footprint, each: Sequence[tuple[int, int]], room: float, costs: Costs | None
) -> list[str]:
    """Return per region "keys" or "inputs", so that an edit's predicted time is shortest."""
    blocks = find_blocks(footprint.program, footprint.sites)
    times = timed(footprint, blocks, each, costs)
    total = sum(max(c.compute_seconds for c in block.members[0]) for block in times)
    _, found = restrict(times, [room], within=NEAR * total)
    sides = ["keys"] * len(each)
    places = footprint.program.interface.regions_of(program.KEYS)
    for block, picked in zip(blocks, found.selection, strict=True):
        if block.region:
            sides[places.index(block.region)] = "keys" if picked[0] == 0 else "inputs"
    return sides


def timed(
    footprint: Footprint,
    blocks: Sequence[Stretch],
    each: Sequence[tuple[int, int]],
    costs: Costs | None,
) -> list[BlockTimes]:
    """Return each block's choices with predicted times and the bytes a template keeps for them."""
    usual = Mask(footprint.masks.ever)
    if usual.is_full:
        mask = flops.square_mask(footprint.sites.sizes, RATIO)
        usual = usual if mask is None else Mask(mask)
    sites = ActiveSites(footprint.sites.pyramid, footprint.sites.sizes, usual)
    everything = {b.region: usual.everywhere for b in blocks if b.region}
    works = [work_of(blocks, s, 1) for s in (sites, with_plan(sites, everything))]
    seconds = [
        work[:, :FLOPS].sum(1) * 1e-12 if costs is None else costs.compute(work) for work in works
    ]
    places = footprint.program.interface.regions_of(program.KEYS)
    out = []
    for n, block in enumerate(blocks):
        fixed = costs.fixed[n] if costs is not None else 0.0
        if not block.region:
            alone = BlockChoice(KEYS, compute_seconds=float(seconds[0][n]), kept_bytes=(0,))
            out.append(BlockTimes(((alone,),), fixed))
            continue
        choices = [
            BlockChoice(
                name,
                nbytes,
                costs.load(nbytes) if costs is not None else 0.0,
                float(took[n]),
                kept_bytes=(nbytes,),
            )
            for name, nbytes, took in zip(
                (KEYS, INPUTS), each[places.index(block.region)], seconds, strict=True
            )
        ]
        out.append(BlockTimes((tuple(choices),), fixed))
    return out


def unmet(footprint: Footprint, budget: Budget) -> str:
    """Return the error message: the size of the smallest template, and what to allow to fit."""

    interface = footprint.program.interface

    def least(encoding: str, share: int) -> float:
        how = encoding_of(encoding, interface)
        step = footprint.together(how, interface.fixed_taps())
        step += sum(map(min, region_bytes(footprint, encoding)))
        recorded, others = budget.counts(share)
        return budget.branches * (recorded * step + others * footprint.alone)

    now = least(budget.encodings[-1], budget.shares[-1])
    closed = [name for name in ENCODINGS if name not in budget.encodings]
    finest = list(ENCODINGS)[-1]
    text = (
        f"Budget: {budget.steps} steps of {budget.branches} branches don't fit into "
        f"{amount(budget.nbytes)}B; with allow={list(budget.allow)} the smallest template needs "
        f"{amount(now)}B"
    )
    most = budget.steps if budget.stored is None else 1
    for share in range(budget.shares[-1], most + 1):
        opened = [*([finest] if closed else []), *([f"share{share}"] if share > 1 else [])]
        if least(finest, share) <= budget.nbytes:
            return f"{text}; allow {' and '.join(opened)} ({amount(least(finest, share))}B) or more"
    lowest = least(finest, most)
    masks = (
        ""
        if not footprint.masks.any_mask
        else "; or bound the masks of later edits (masks=Masks...)"
    )
    return f"{text}; with all changes allowed {amount(lowest)}B{masks}; give at least that"
