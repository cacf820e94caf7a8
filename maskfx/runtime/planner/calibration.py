"""Calibration: measures how long a denoiser's blocks compute and its loads take on this machine."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from maskfx.errors import InputError
from maskfx.ir.programs.program import KEYS as KEYS_REGION
from maskfx.ir.programs.program import Program
from maskfx.runtime.batch.flops import square_mask
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.computed_rows import with_computed
from maskfx.runtime.cache.loader import Loader, LoadJob
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.execution.prefetch import Stopwatch
from maskfx.runtime.hardware.devices import CPU, moved
from maskfx.runtime.planner.blocks import FLOPS, KINDS, GraphBlock, find_blocks
from maskfx.runtime.planner.choices import (
    can_compute,
    taps_computed,
    whole_seconds,
    with_plan,
    work_of,
)
from maskfx.runtime.planner.costs import Costs, Sample, fit
from maskfx.runtime.planner.least_squares import Floats
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.steps import EditStep

# Masked share, members, and whether keys and values are projected again. The first three differ in
# all that costs depend on, for a time limit that allows no more.
TRIALS = (
    (0.05, 1, False),
    (0.4, 1, True),
    (0.15, 2, False),
    (0.5, 1, False),
    (0.1, 3, True),
    (0.25, 1, False),
)
LOADS = (16, 64, 256, 1024, 4096)  # rows of the loads that are measured
LEAST_WHOLE = 0.1  # of what is predicted: a smaller measured share is noise
LOADS_SECONDS = 2.0  # after which no larger load is measured


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


def calibrate(
    denoiser: CompiledDenoiser,
    batches: Iterable[Sequence[EditStep]],
    repeats: int = 3,
    seconds: float = 20.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs:
    """Measure batches of edits and loads of several sizes, and fit costs to them.

    Args:
        denoiser: a denoiser with a loader.
        batches: batches of edits; masks and batch sizes should span those to be planned.
        repeats: measured runs per batch, after one warm-up run.
        seconds: approximate time limit; at least 3 batches are measured, once each.
        clock: clock for the time limit.
    """
    until = clock() + seconds * 0.9
    trials = measure_all(denoiser, batches, repeats, lambda: clock() > until)
    device = trials[0].device if trials else CPU
    samples = [trial.sample() for trial in trials]
    costs = fit(samples, measure_loads(loader_of(denoiser), device=device))
    return measure_whole(trials[0], costs, repeats, lambda: clock() > until) if trials else costs


def estimate(denoiser: CompiledDenoiser, step: EditStep) -> Costs:
    """Return costs from two runs of one edit: each block's seconds per FLOP, and free loads.

    For rows that are read from a store into the memory that the denoiser computes in: the store's
    speed is known apart from these, and a plan can't wait for a calibration.
    """
    trial = TrialBatch.of(denoiser, [dataclasses.replace(step, plan={}, wide={})])
    runs = [trial.run() for _ in range(2)]  # the first builds tables
    seconds, around = runs[-1]
    flops = trial.work[:, :FLOPS].sum(1)
    usual = float(seconds.sum() / max(flops.sum(), 1.0))
    each = np.divide(seconds, flops, out=np.full(len(flops), usual), where=flops > 0)
    fixed = np.where(flops > 0, 0.0, seconds)
    slopes = tuple((*(float(one),) * FLOPS, 0.0) for one in each)
    return Costs(tuple(map(float, fixed)), slopes, around, 0.0, 0.0)


def measure_whole(trial: TrialBatch, costs: Costs, repeats: int, late: Callable[[], bool]) -> Costs:
    """Return the costs with what is measured of computing the first edit's recording again."""
    step = dataclasses.replace(trial.steps[0], plan={})
    program, [member] = one_batch(trial.denoiser, [step])
    if not can_compute(member) or member.cache is None:
        return costs
    taps = taps_computed(program, member.cache, trial.blocks)
    if not taps:
        return costs
    predicted = sum(whole_seconds(program, trial.blocks, member, costs)[: len(taps) - 1])
    clock, taken = clock_of(trial.device), []
    for number in range(1 + min(repeats, 3)):
        if number > 1 and late():
            break
        computed = with_computed(step.cache, frozenset().union(*taps))
        seconds = []
        for cache in (step.cache, computed):
            own = [dataclasses.replace(step, cache=cache)]
            for loading in trial.denoiser.ahead(own, only=True):
                loading.wait()
            begun = clock()
            trial.denoiser.step(own)
            seconds.append(clock() - begun)
        taken.append(seconds[1] - seconds[0])
    measured = statistics.median(taken[1:])
    return dataclasses.replace(costs, whole=max(measured / predicted, LEAST_WHOLE))


def measure(denoiser: CompiledDenoiser, steps: Sequence[EditStep], repeats: int = 3) -> Sample:
    """Measure how long each block of this batch computes with all its loads done before."""
    [trial] = measure_all(denoiser, [steps], repeats)
    return trial.sample()


def measure_all(
    denoiser: CompiledDenoiser,
    batches: Iterable[Sequence[EditStep]],
    repeats: int = 3,
    late: Callable[[], bool] = lambda: False,
) -> list[TrialBatch]:
    """Measure batches in turn, in several rounds: a change of the machine's speed affects all.

    After it is `late`, no further batch is added to three, and no further round begins.
    """
    trials: list[TrialBatch] = []
    for steps in batches:
        if len(trials) >= 3 and late():
            break
        try:
            trial = TrialBatch.of(denoiser, steps)
            trial.run()  # builds tables; not counted
        except torch.OutOfMemoryError:  # a batch of fewer members may fit
            continue
        trials.append(trial)
    for number in range(repeats):
        if number and late():
            break
        for trial in trials:
            trial.runs.append(trial.run())
    return trials


@dataclass
class TrialBatch:
    """A batch that is measured: its work by block, and the seconds of its runs."""

    denoiser: CompiledDenoiser
    steps: Sequence[EditStep]
    blocks: Sequence[GraphBlock]
    work: Floats
    device: torch.device
    runs: list[tuple[Floats, float]] = field(default_factory=list)

    @classmethod
    def of(cls, denoiser: CompiledDenoiser, steps: Sequence[EditStep]) -> TrialBatch:
        program, members = one_batch(denoiser, steps)
        blocks = find_blocks(program, members[0].sites)
        work = np.zeros((len(blocks), KINDS))
        for member, step in zip(members, steps, strict=True):
            regions = {region: Mask(sites) for region, sites in step.plan.items()}
            work += work_of(blocks, with_plan(member.sites, regions), member.batch)
        return cls(denoiser, steps, blocks, work, members[0].device)

    def run(self) -> tuple[Floats, float]:
        """Return the seconds of each block, and those outside of blocks."""
        clock = clock_of(self.device)
        begun = clock()
        loadings = self.denoiser.ahead(self.steps)
        begun = clock() - begun
        for loading in loadings:
            loading.wait()
        self.denoiser.watch = watch = Stopwatch(clock)
        start = clock()
        try:
            self.denoiser.step(self.steps)
        finally:
            self.denoiser.watch = None
        around = begun + clock() - start - (watch.stopped - watch.started)
        return block_seconds(self.blocks, watch), around

    def sample(self) -> Sample:
        seconds, around = zip(*self.runs, strict=True)
        return Sample(self.work, np.median(np.stack(seconds), 0), statistics.median(around))


def trial_batches(denoiser: CompiledDenoiser, step: EditStep) -> Iterator[list[EditStep]]:
    """Yield batches of edits like this one, with other masks, numbers of members and plans."""
    program, _ = one_batch(denoiser, [step])
    regions = program.interface.regions_of(KEYS_REGION)
    for ratio, count, again in TRIALS:
        mask = square_mask(step.cache.sizes, ratio)
        assert mask is not None, "less than all sites"
        plan = dict.fromkeys(regions, torch.ones_like(mask)) if again else {}
        masks = [turned(mask, number) for number in range(count)]
        yield [dataclasses.replace(step, mask=m, plan=plan, wide={}) for m in masks]


def turned(mask: Tensor, number: int) -> Tensor:
    """Return the mask moved cyclically, so that no two members are equal."""
    return mask.roll(number * max(mask.shape[-1] // 4, 1), -1)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock that waits for what the host has queued on the device."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


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
    loader: Loader,
    repeats: int = 3,
    rows: Sequence[int] = LOADS,
    device: torch.device = CPU,
) -> list[tuple[float, float]]:
    """Measure (bytes, seconds) of loads to a device, with different numbers of rows."""
    out: list[tuple[float, float]] = []
    clock = clock_of(device)
    began = clock()
    for count in rows:
        if len(out) >= 2 and clock() - began > LOADS_SECONDS:
            break
        source = torch.zeros(count, 512)
        taken = []
        for _ in range(repeats + 1):
            job = LoadJob("calibration", source.nbytes, partial(carried, source, device))
            start = clock()
            loader.begin([job], device).take("calibration")
            taken.append(clock() - start)
        out.append((float(source.nbytes), statistics.median(taken[1:])))
    return out


def carried(source: Tensor, device: torch.device) -> Tensor:
    """Pick rows as a step does, and copy them to the device."""
    return moved(source.clone(), device)
