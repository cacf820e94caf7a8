"""StretchSteps: runs batches stretch by stretch, each on the sites that are chosen right before it.

The first stretch is chosen from the inputs of the denoiser, each later one from what the stretches
before it have computed in this step. Other members of the batch run along with their own sites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from maskfx import ops
from maskfx.compiler.build_program import taps_of
from maskfx.compiler.fuse import fused
from maskfx.compiler.pieces import Piece, sink_late
from maskfx.compiler.stretch_pieces import stretch_pieces
from maskfx.ir.geometry.grids import Floats
from maskfx.ir.programs.program import KEYS, STRETCH, Interface, Program
from maskfx.runtime.backends.eager import Runner
from maskfx.runtime.backends.graph_function import Fetch, Run
from maskfx.runtime.backends.pieces import PieceRunner
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.rolling.read_inputs import InputChanges, Sums, relative
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache
from maskfx.runtime.sites.stretch_choice import choose_together
from maskfx.runtime.sites.stretch_sites import StretchSites

RunnerKey = tuple[str, frozenset[str], bool]  # a program's code, its late inputs, with kernels

# Given a stretch and the sums of its changes by member, returns those of all rows of the members.
Together = Callable[[int, dict[int, Sums]], dict[int, Sums]]


@dataclass
class StretchRunner:
    """The graph of a program that records, in pieces, and the nodes that are its taps."""

    pieces: PieceRunner[Piece]
    taps: Mapping[str, str]


@dataclass
class StretchSteps:
    """Runs the batches of one denoiser that have members whose stretches are chosen."""

    runners: dict[RunnerKey, StretchRunner] = field(default_factory=dict)

    def run(
        self,
        program: Program,
        frame: Frame,
        members: Sequence[Member],
        fetch: Fetch,
        together: Together = lambda stretch, sums: sums,
    ) -> object:
        """Run a batch; return what the program's graph that records does.

        Args:
            program: The program.
            frame: The frame of the batch, `by_stretch`.
            members: The members, with the sites of the first stretches chosen (`choose_first`).
            fetch: Returns the inputs of the graph.
            together: Adds what other ranks found, where the batch is a part of the members' rows.
        """
        runner = self._runner(program, frame, members)
        caches = {n: chosen_of(m)[1] for n, m in enumerate(members) if m.choice is not None}
        changes = InputChanges(frame.layout, caches)
        watched = {n: members[n] for n in caches}

        def before(number: int, values: Mapping[str, Tensor]) -> None:
            stretch = number + 1
            open_ = {n: m for n, m in watched.items() if not chosen_of(m)[0].has(stretch)}
            if open_:
                choices = [member.choice for member in open_.values()]
                compared = any(choice and choice.compares(stretch) for choice in choices)
                sums: dict[int, Sums] = {}
                if compared:
                    found = changes.at(stretch, lambda tap: values[runner.taps[tap]])
                    sums = together(stretch, found)
                choose(program.interface, open_, stretch, sums)
            frame.bring(members, runner.pieces.pieces[number].inputs)

        return runner.pieces(fetch, before)

    def drop(self, codes: Sequence[str]) -> None:
        """Drop what runs the programs of these codes."""
        for key in [key for key in self.runners if key[0] in codes]:
            del self.runners[key]

    def _runner(self, program: Program, frame: Frame, members: Sequence[Member]) -> StretchRunner:
        """Return what runs a program; one made for more late inputs gives the same results."""
        late, kernels = frame.late(members), ops.has_kernels(frame.device)
        for code, most, with_kernels in self.runners:
            if (code, with_kernels) == (program.code, kernels) and late <= most:
                return self.runners[code, most, with_kernels]
        found = self.runners[program.code, late, kernels] = make_runner(program, late, kernels)
        return found


def make_runner(program: Program, late: frozenset[str], kernels: bool) -> StretchRunner:
    module = sink_late(program.recording, late) if late else program.recording
    pieces = stretch_pieces(module, program.interface)

    def compile_piece(piece: Piece) -> Run:
        return Runner(fused(piece.module, pointwise=kernels))

    stretches = len(program.interface.regions_of(STRETCH))
    assert len(pieces) == stretches, f"{len(pieces)} pieces of {stretches} stretches"
    ends = taps_of(program.recording)
    names = {tap: str(node.name) for tap, node in zip(program.interface.taps, ends, strict=True)}
    return StretchRunner(PieceRunner(pieces, compile_piece), names)


def choose_first(interface: Interface, members: Sequence[Member]) -> set[int]:
    """Choose the first stretch of each member, and later ones as long as none computes anything.

    Return the numbers of the members that compute nothing in any stretch.
    """
    left = {n: member for n, member in enumerate(members) if member.choice is not None}
    for choice in {id(m.choice): m.choice for m in left.values()}.values():
        choice.begin()  # type: ignore[union-attr]
    for stretch in interface.regions_of(STRETCH):
        if left:
            choose(interface, left, stretch, {})
        left = {n: m for n, m in left.items() if chosen_of(m)[0].chosen(stretch).is_empty}
    return set(left)


def apart(groups: Sequence[list[int]], members: Sequence[Member]) -> list[list[int]]:
    """Return batches without members whose stretches are chosen, and batches of these alone."""
    chosen = {n for n, member in enumerate(members) if member.choice is not None}
    return [
        [number for number in group if (number in chosen) == own]
        for group in groups
        for own in (False, True)
    ]


def choose(
    interface: Interface,
    members: Mapping[int, Member],
    stretch: int,
    sums: Mapping[int, Floats],
) -> None:
    """Choose the sites of a stretch for these members.

    Args:
        interface: The program's.
        members: The members by number; several may be parts of one call, which are chosen together.
        stretch: The number of the stretch.
        sums: By member, how far its input differs (`InputChanges.at`).
    """
    calls: dict[int, list[int]] = {}
    for number, member in members.items():
        calls.setdefault(id(member.choice), []).append(number)
    found = [members[own[0]].choice for own in calls.values()]
    changes = [changes_of(own, sums) for own in calls.values()]
    masks = choose_together([c for c in found if c is not None], stretch, changes)
    last = stretch == interface.regions_of(STRETCH)[-1]
    keys = [n for n in interface.regions_of(KEYS) if interface.regions[n - 1].inside == stretch]
    for own, mask in zip(calls.values(), masks, strict=True):
        for number in own:
            sites = chosen_of(members[number])[0]
            for region in (stretch, *keys, *([0] if last else [])):
                sites.choose(region, members[number].regions.get(region, mask))


def changes_of(own: Sequence[int], sums: Mapping[int, Floats]) -> Floats | None:
    """Return how far the input of one call differs by patch; None if nothing was compared."""
    parts = [sums[number] for number in own if number in sums]
    return relative(np.sum(parts, axis=0)) if parts else None


def chosen_of(member: Member) -> tuple[StretchSites, RollingCache]:
    """Return the sites and the cache of a member whose stretches are chosen."""
    assert isinstance(member.sites, StretchSites), "a member without a choice"
    assert isinstance(member.cache, RollingCache), "checked with the step"
    return member.sites, member.cache
