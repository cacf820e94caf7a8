"""Step planner: plan a denoiser's next edits, and calibrate the costs that plans are based on.

Calibration measures the cost of blocks and loads on this device. Planning passes the choices of
every block and member to the planner and stores its selection as `EditStep.plan`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from maskfx.errors import InputError
from maskfx.ir.lru import LruCache
from maskfx.ir.program import Cached, Program
from maskfx.runtime.batch.frame import Frame, Member
from maskfx.runtime.cache.loader import Loader, LoadJob
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.planner.blocks import GraphBlock, find_blocks
from maskfx.runtime.planner.costs import Costs, Sample, fit
from maskfx.runtime.planner.least_squares import Floats
from maskfx.runtime.planner.plan import QUICK, Plan, plan
from maskfx.runtime.planner.timeline import NOW, BlockChoice, Start
from maskfx.runtime.planner.timeline import BlockTimes as Times
from maskfx.runtime.prefetch import Stopwatch
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.steps import EditStep

CHOICES = 256  # kept: members whose choices are known
KEYS, INPUT = "load keys and values", "load inputs, project again"


@dataclass(frozen=True)
class PlannedBatch:
    """Edits with their plans set, the plan of the batch, and the blocks it was made for."""

    steps: list[EditStep]
    plan: Plan
    blocks: tuple[Times, ...]

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        return self.plan.names(self.blocks)


@dataclass(frozen=True)
class Choices:
    """One member's choices in every block, and its mask."""

    by_block: list[tuple[BlockChoice, ...]]
    mask: Mask


@dataclass
class StepPlanner:
    """Plans the edits of one denoiser.

    Args:
        denoiser: the denoiser whose edits are planned.
        costs: calibrated costs (`calibrate`).
        buffer_bytes: size of the loader's staging buffer; unbounded by default.
        widths: how much to search (see `plan`); no search by default.
    """

    denoiser: CompiledDenoiser
    costs: Costs
    buffer_bytes: float = math.inf
    widths: Sequence[int] = QUICK
    _blocks: dict[tuple[object, ...], list[GraphBlock]] = field(default_factory=dict)
    _choices: LruCache[tuple[object, ...], Choices] = field(
        default_factory=lambda: LruCache(CHOICES)
    )

    def plan(self, steps: Sequence[EditStep], start: Start = NOW) -> PlannedBatch:
        """Return the plan under which this batch ends first; a plan never changes an image."""
        return self._plan(steps, *one_batch(self.denoiser, steps), start)

    def plan_edits(self, steps: Sequence[EditStep]) -> list[EditStep]:
        """Return the edits with their plans, or unchanged if they don't form a single batch."""
        try:
            batch = one_batch(self.denoiser, steps)
        except InputError:
            return list(steps)
        return self._plan(steps, *batch, NOW).steps

    def _plan(
        self, steps: Sequence[EditStep], program: Program, members: Sequence[Member], start: Start
    ) -> PlannedBatch:
        each = [self._member(program, member) for member in members]
        times = tuple(
            Times(tuple(of_block), fixed)
            for of_block, fixed in zip(
                zip(*(member.by_block for member in each), strict=True),
                self.costs.fixed,
                strict=True,
            )
        )
        found = plan(times, self.buffer_bytes, start, widths=self.widths)
        blocks = self._blocks_of(program, members[0].sites)
        planned = []
        for i, step in enumerate(steps):
            picked = zip(blocks, times, found.selection, strict=True)
            projected = {
                block.region: each[i].mask.everywhere.sites
                for block, seconds, chosen in picked
                if seconds.members[i][chosen[i]].name == INPUT
            }
            planned.append(dataclasses.replace(step, plan=projected))
        return PlannedBatch(planned, found, times)

    def _blocks_of(self, program: Program, sites: ActiveSites) -> list[GraphBlock]:
        key = (program.code, *sorted(sites.sizes.items()))
        if key not in self._blocks:
            self._blocks[key] = find_blocks(program, sites)
        return self._blocks[key]

    def _member(self, program: Program, member: Member) -> Choices:
        """Return one member's choices in every block, cached: equal for all steps of a request."""
        assert member.cache is not None
        kept = sum(rows.nbytes for rows in member.cache.rows.values())
        key = (program.code, member.sites, member.batch, kept)
        return self._choices.find(
            key, lambda: Choices(list(self._choose(program, member)), mask_of(member))
        )

    def _choose(self, program: Program, member: Member) -> Iterable[tuple[BlockChoice, ...]]:
        blocks = self._blocks_of(program, member.sites)
        every = {block.region: mask_of(member).everywhere for block in blocks if block.region}
        sides = {KEYS: member.sites, INPUT: with_plan(member.sites, every)}
        moved = {name: bytes_of(program, member, sites) for name, sites in sides.items()}
        seconds = {
            name: self.costs.compute(work_of(blocks, sites, member.batch))
            for name, sites in sides.items()
        }
        for n, block in enumerate(blocks):
            names = choices_of(program, member, block.region)
            out = []
            for name in names:
                nbytes = sum(moved[name].get(loaded, 0) for loaded in block.names)
                compute = float(seconds[name][n])
                out.append(BlockChoice(name, nbytes, self.costs.load(nbytes), compute))
            yield tuple(out)


# The batch of a denoiser's next step.


def one_batch(
    denoiser: CompiledDenoiser, steps: Sequence[EditStep]
) -> tuple[Program, list[Member]]:
    """Return the ragged batch (members with different numbers of active sites) of these edits."""
    plain = [dataclasses.replace(step, plan={}) for step in steps]
    groups = list(denoiser.members(plain))
    if len(groups) != 1 or len(groups[0][1]) != len(steps):
        raise InputError(
            f"these {len(steps)} edits make {len(groups)} batches; plan edits of one program, "
            "with at least one masked site each (explain() lists what runs dense)"
        )
    return groups[0]


def choices_of(program: Program, member: Member, region: int) -> list[str]:
    """Return the names of a region's choices whose rows are in the cache; KEYS if there's none."""
    if not region:
        return [KEYS]
    assert member.cache is not None
    taps = zip((KEYS, INPUT), program.interface.region_taps(region), strict=True)
    return [name for name, needed in taps if needed <= member.cache.rows.keys()] or [KEYS]


def mask_of(member: Member) -> Mask:
    mask = member.sites.mask
    assert mask is not None, "an edit of all sites loads nothing"
    return mask


def with_plan(sites: ActiveSites, regions: Mapping[int, Mask]) -> ActiveSites:
    """Return the same request's sites with other active sites in some regions."""
    return ActiveSites(sites.pyramid, sites.sizes, sites.mask, {**sites.regions, **regions})


def bytes_of(program: Program, member: Member, sites: ActiveSites) -> dict[str, int]:
    """Return the bytes of each loaded input of one member."""
    alone = dataclasses.replace(member, sites=sites)
    frame = Frame(program.interface, (sites,), (member.batch,))
    assert member.cache is not None
    kept = {
        name
        for name, source in program.interface.inputs.items()
        if isinstance(source, Cached) and source.tap in member.cache.rows
    }
    return {job.name: job.nbytes for job in frame.jobs([alone], kept)}


def work_of(blocks: Sequence[GraphBlock], sites: ActiveSites, batch: int) -> Floats:
    return np.stack([block.work(sites, batch) for block in blocks])


# Calibration.


def calibrate(
    denoiser: CompiledDenoiser,
    batches: Sequence[Sequence[EditStep]],
    repeats: int = 3,
    seconds: float = 20.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs:
    """Measure batches of edits and loads of several sizes, and fit costs to them.

    Args:
        denoiser: a denoiser with a loader.
        batches: batches of edits; masks and batch sizes should span those to be planned.
        repeats: measured runs per batch, after one warm-up run.
        seconds: approximate time limit; at least 3 batches are measured.
        clock: clock for the time limit.
    """
    until = clock() + seconds * 0.9
    samples: list[Sample] = []
    for batch in batches:
        if len(samples) >= 3 and clock() > until:
            break
        samples.append(measure(denoiser, batch, repeats))
    return fit(samples, measure_loads(loader_of(denoiser)))


def measure(denoiser: CompiledDenoiser, steps: Sequence[EditStep], repeats: int = 3) -> Sample:
    """Measure how long each block of this batch computes with all its loads done before."""
    program, members = one_batch(denoiser, steps)
    pairs = zip(members, steps, strict=True)
    sites = [with_plan(m.sites, {r: Mask(t) for r, t in s.plan.items()}) for m, s in pairs]
    blocks = find_blocks(program, members[0].sites)
    work = np.stack([work_of(blocks, s, m.batch) for s, m in zip(sites, members, strict=True)]).sum(
        0
    )
    runs, around = [], []
    for index in range(repeats + 1):
        begun = time.perf_counter()
        loadings = denoiser.ahead(steps)
        begun = time.perf_counter() - begun
        for loading in loadings:
            loading.wait()
        denoiser.watch = watch = Stopwatch()
        start = time.perf_counter()
        try:
            denoiser.step(steps)
        finally:
            denoiser.watch = None
        if index:  # the first run builds tables
            runs.append(block_seconds(blocks, watch))
            around.append(begun + time.perf_counter() - start - (watch.stopped - watch.started))
    return Sample(work, np.median(np.stack(runs), 0), statistics.median(around))


def block_seconds(blocks: Sequence[GraphBlock], watch: Stopwatch) -> Floats:
    """Return the seconds of each block, from its first load to the next block's."""
    begins = {name: n for n, block in enumerate(blocks) for name in block.names}
    edges = [(0, watch.started)]
    out = np.zeros(len(blocks))
    for name, asked, got in watch.marks:
        block = begins.get(name, edges[-1][0])
        if block > edges[-1][0]:
            out[edges[-1][0]] += asked - edges[-1][1]
            edges.append((block, got))
    out[edges[-1][0]] += watch.stopped - edges[-1][1]
    return out


def loader_of(denoiser: CompiledDenoiser) -> Loader:
    if denoiser.loader is None:
        raise InputError(
            "this denoiser has no loader, so nothing is loaded; compile(..., loader=Loader())"
        )
    return denoiser.loader


def measure_loads(
    loader: Loader, repeats: int = 3, rows: Sequence[int] = (16, 64, 256, 1024, 4096)
) -> list[tuple[float, float]]:
    """Measure (bytes, seconds) of loads with different numbers of rows."""
    out = []
    for count in rows:
        source = torch.zeros(count, 512)
        taken = []
        for _ in range(repeats + 1):
            job = LoadJob("calibration", source.nbytes, partial(torch.clone, source))
            start = time.perf_counter()
            loader.begin([job]).take("calibration")
            taken.append(time.perf_counter() - start)
        out.append((float(source.nbytes), statistics.median(taken[1:])))
    return out
