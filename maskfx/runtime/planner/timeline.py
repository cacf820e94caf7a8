"""Timeline: simulate two streams, loads and compute, for one choice per block and member.

The rules, shared by the planner, its baselines and its tests:

- Loads run one after another, in the order of the blocks. A block's loads are one transfer.
- A block's compute starts when its load has ended and the block before it has been computed.
- A load starts only when its bytes fit into the staging buffer. They are freed when their block's
  compute ends. Loads may run ahead of compute as far as the buffer allows, also into later steps.
- A choice that needs the full residual stream where it isn't live adds an extra load for it.
  Live means: the stream, and in a UNet each skip that is still to be read, holds all sites.

Knows nothing of tensors. Times are seconds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from maskfx.errors import InputError

Selection = Sequence[Sequence[int]]  # per block and member, the index of its choice


# The fields of a choice that the planner reads, in the order of `BlockChoice.packed`.
NUMBERS = (
    "compute_seconds",
    "leaves_full",
    "load_seconds",
    "load_bytes",
    "needs_full",
    "extra_seconds",
    "extra_bytes",
)
_numbers_of = attrgetter(*NUMBERS)
_pack = struct.Struct(f"{len(NUMBERS)}d").pack


def _refuse(where: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{where}: {name}={value!r}; give a finite number, 0 or more")


@dataclass(frozen=True)
class BlockChoice:
    """One way to execute one block for one member.

    Args:
        name: name of the choice.
        load_bytes: bytes to load.
        load_seconds: seconds to load them.
        compute_seconds: seconds of compute.
        needs_full: whether the full stream must be live at the entry; if it isn't, the extra load
            is added.
        leaves_full: whether the full stream is live at the exit.
        extra_bytes: bytes of the extra load; infinite if the full stream can't be loaded, so that
            the choice can only follow one that leaves it live.
        extra_seconds: seconds of the extra load.
        kept_bytes: bytes that a template keeps for this choice, by tier (`storage_budget.py`).
        extra_kept: bytes that a template keeps for the extra load, by tier.
    """

    name: str
    load_bytes: float = 0.0
    load_seconds: float = 0.0
    compute_seconds: float = 0.0
    needs_full: bool = False
    leaves_full: bool = False
    extra_bytes: float = 0.0
    extra_seconds: float = 0.0
    kept_bytes: tuple[float, ...] = ()
    extra_kept: tuple[float, ...] = ()
    packed: bytes = field(init=False, repr=False, compare=False)  # NUMBERS, packed once

    def __post_init__(self) -> None:
        numbers = _numbers_of(self)
        for name, value in zip(NUMBERS, numbers, strict=True):
            if not 0 <= value < math.inf and (name, value) != ("extra_bytes", math.inf):
                _refuse(f"choice {self.name!r}", **{name: value})
        for value in (*self.kept_bytes, *self.extra_kept):
            _refuse(f"choice {self.name!r}", kept_bytes=value)
        object.__setattr__(self, "packed", _pack(*numbers))

    def over(self, bytes_per_second: float) -> BlockChoice:
        """Return the choice with load times for a bandwidth."""
        if not bytes_per_second > 0:
            raise InputError(f"bytes_per_second={bytes_per_second!r}; give a positive number")
        load, extra = self.load_bytes / bytes_per_second, self.extra_bytes / bytes_per_second
        extra = extra if extra < math.inf else 0.0
        return replace(self, load_seconds=load, extra_seconds=extra)


@dataclass(frozen=True, eq=False)
class BlockTimes:
    """The choices of one block, per member of a ragged batch.

    A ragged batch has members with different numbers of active sites. Blocks compare by identity,
    because the planner caches its tables by it.

    Args:
        members: choices per member.
        fixed_seconds: seconds of compute per block, independent of the members.
        begins_step: whether the stream is live at the entry in any case, as at a step's first
            block.
    """

    members: tuple[tuple[BlockChoice, ...], ...]
    fixed_seconds: float = 0.0
    begins_step: bool = False

    def __post_init__(self) -> None:
        _refuse("block", fixed_seconds=self.fixed_seconds)
        if not self.members:
            raise InputError("block: no members; give each member's choices")
        for number, choices in enumerate(self.members):
            if not choices:
                raise InputError(f"block: member {number} has no choices; give it at least one")


@dataclass(frozen=True)
class Start:
    """State of the two streams at the start of a step, in seconds from now.

    Args:
        load: time from which the load stream is idle; less than `compute` if it runs ahead.
        compute: time from which the compute stream is idle.
        live: whether the full stream is live.
        staged: (bytes, time when they are freed) of the contents of the staging buffer.
    """

    load: float = 0.0
    compute: float = 0.0
    live: bool = True
    staged: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.load) and self.load <= self.compute < math.inf):
            raise InputError(
                f"start: load={self.load!r}, compute={self.compute!r}; a block's load ends before "
                "its compute, so load must not be the later one"
            )
        for held, freed in self.staged:
            _refuse("start", staged_bytes=held)
            if not freed <= self.compute:
                raise InputError(f"start: bytes freed at {freed!r}, after compute={self.compute!r}")


NOW = Start()


class Cost(NamedTuple):
    """Costs of one block for the batch: seconds of load, bytes staged, seconds of compute."""

    load: float
    staged: float
    compute: float


@dataclass(frozen=True)
class Timeline:
    """Start and end of each block's load and compute; an empty load has start = end."""

    loads: tuple[tuple[float, float], ...]
    computes: tuple[tuple[float, float], ...]
    costs: tuple[Cost, ...]
    start: Start = field(default=NOW)

    @property
    def end(self) -> float:
        return self.computes[-1][1]

    @property
    def bubbles(self) -> tuple[tuple[float, float], ...]:
        """Intervals in which the compute stream waits for a load."""
        ends = [self.start.compute, *(end for _, end in self.computes)]
        spans = zip(ends, (begin for begin, _ in self.computes), strict=False)
        return tuple((a, b) for a, b in spans if b > a)

    def carry(self, live: bool = True) -> Start:
        """Return the start of the next step, relative to the end of this one."""
        end = self.end
        begun = zip(self.costs, self.computes, strict=True)
        staged = [(cost.staged, span[1]) for cost, span in begun] + list(self.start.staged)
        last = max([self.start.load, *(stop for _, stop in self.loads)])
        left = tuple((held, freed - end) for held, freed in staged if held and freed > last)
        return Start(load=last - end, compute=0.0, live=live, staged=left)


def repeat(step: Sequence[BlockTimes], times: int) -> tuple[BlockTimes, ...]:
    """Return the blocks of `times` consecutive steps."""
    if times < 1 or not step:
        raise InputError(f"repeat: {len(step)} blocks, {times} times; give at least one of each")
    first = replace(step[0], begins_step=True)
    return (first, *step[1:]) * times


def batch_costs(
    blocks: Sequence[BlockTimes], selection: Selection, live: bool = True
) -> list[Cost]:
    """Return the costs of each block, summed over members."""
    flags = [live] * len(blocks[0].members)
    costs = []
    for number, (block, picked) in enumerate(zip(blocks, selection, strict=True)):
        load = staged = 0.0
        compute = block.fixed_seconds
        if len(picked) != len(flags) or len(block.members) != len(flags):
            raise InputError(
                f"block {number}: {len(picked)} choices for {len(flags)} members; give one for each"
            )
        for member, index in enumerate(picked):
            choice = block.members[member][index]
            load += choice.load_seconds
            staged += choice.load_bytes
            compute += choice.compute_seconds
            if choice.needs_full and not (flags[member] or block.begins_step):
                if math.isinf(choice.extra_bytes):
                    raise InputError(
                        f"block {number}: {choice.name!r} needs the rows of all sites, which can't "
                        "be loaded; select what computes them for the block before"
                    )
                load += choice.extra_seconds
                staged += choice.extra_bytes
            flags[member] = choice.leaves_full
        costs.append(Cost(load, staged, compute))
    return costs


def run_streams(
    costs: Iterable[Cost], buffer_bytes: float, start: Start = NOW, overlap: bool = True
) -> Timeline:
    """Schedule each load and compute as early as the rules allow.

    Without `overlap` a load also waits for all compute before it.
    """
    all_costs = tuple(costs)
    load_end, compute_end = start.load, start.compute
    staged = sorted(start.staged, key=lambda held: held[1])  # (bytes, when freed), oldest first
    held = sum(size for size, _ in staged)
    oldest = 0
    loads: list[tuple[float, float]] = []
    computes = []
    for seconds, size, computing in all_costs:
        # comparisons instead of max(): called several times per plan
        begin = load_end if overlap or load_end > compute_end else compute_end
        if seconds or size:
            while held + size > buffer_bytes and oldest < len(staged):
                gone, freed = staged[oldest]
                held, oldest, begin = held - gone, oldest + 1, freed if freed > begin else begin
                if oldest == len(staged):
                    held = 0.0  # discard rounding errors of the sum
            if size > buffer_bytes:
                raise InputError(
                    f"block {len(loads)}: its load has {size:g} bytes, the staging buffer "
                    f"{buffer_bytes:g}; give more or choose what loads less"
                )
            load_end = begin + seconds
        loads.append((begin, load_end))
        begin = load_end if load_end > compute_end else compute_end
        compute_end = begin + computing
        computes.append((begin, compute_end))
        staged.append((size, compute_end))
        held += size
    return Timeline(tuple(loads), tuple(computes), all_costs, start)


def simulate(
    blocks: Sequence[BlockTimes],
    selection: Selection,
    buffer_bytes: float = math.inf,
    start: Start = NOW,
    overlap: bool = True,
) -> Timeline:
    """Return the timeline of a selection: one choice per block and member."""
    check(blocks, buffer_bytes)
    if len(selection) != len(blocks):
        raise InputError(f"{len(selection)} selections for {len(blocks)} blocks; give one for each")
    costs = batch_costs(blocks, selection, start.live)
    return run_streams(costs, buffer_bytes, start, overlap)


def check(blocks: Sequence[BlockTimes], buffer_bytes: float) -> None:
    """Raise `InputError` if no plan can be made of these blocks and buffer size."""
    if not blocks:
        raise InputError("no blocks; a step has at least one")
    if not buffer_bytes >= 0:
        raise InputError(f"buffer_bytes={buffer_bytes!r}; give 0 or more")
    sizes = {len(block.members) for block in blocks}
    if len(sizes) > 1:
        raise InputError(f"blocks of {sorted(sizes)} members; give each block the whole batch")
