"""RankBatch: a batch of a step, as a group of ranks gets it to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch.utils import _pytree as pytree

from maskfx.distributed.stretch_sums import expected
from maskfx.ir.programs.program import Program
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.execution.twins import Changed
from maskfx.runtime.steps import AnyStep, ValidatedCall


@dataclass(frozen=True)
class RankBatch:
    """A batch.

    Args:
        program: What computes it; with adapters, a program with low-rank terms.
        recording: Whether to emit what a recording keeps.
        frame: Its frame.
        calls: Its members.
        members: The same, with the values of their inputs.
        plain: The program without low-rank terms, from which costs are predicted: the terms cost
            little beside their layers.
        changed: The parameters that adapters change; None without adapters.
    """

    program: Program
    recording: bool
    frame: Frame
    calls: Sequence[ValidatedCall]
    members: Sequence[Member]
    plain: Program
    changed: Changed | None

    @classmethod
    def of(
        cls,
        denoiser: CompiledDenoiser,
        program: Program,
        recording: bool,
        frame: Frame,
        calls: Sequence[ValidatedCall],
        members: Sequence[Member],
        written: bool = False,
    ) -> RankBatch:
        """Return a batch; with `written`, its members' adapters are in the ranks' weights."""
        terms = denoiser.adapters.terms(program.code)
        plain = program if terms is None else denoiser.programs[terms.code]
        if written:
            return cls(plain, recording, frame, calls, members, plain, None)
        changed = None if terms is None else terms.changed
        return cls(program, recording, frame, calls, members, plain, changed)

    @property
    def emits(self) -> frozenset[int] | None:
        """The places of the taps that rolling caches keep; None if a member records all."""
        if not self.recording or any(member.recording for member in self.members):
            return None
        blocks = [member.written.block for member in self.members if member.written is not None]
        taps = enumerate(self.program.interface.taps.values())
        return frozenset(
            place
            for place, tap in taps
            if any(tap.name in one.taps or (tap.segments, tap.stats) in one.keys for one in blocks)
        )

    @property
    def single(self) -> bool:
        """Whether its members are the samples of calls that run sample by sample."""
        return any(call.inputs.compilation.capture.single for call in self.calls)

    @cached_property
    def expected(self) -> tuple[Frame, Sequence[Member]]:
        """The frame and members by which costs are predicted."""
        if self.frame.by_stretch:
            return expected(self.frame, self.members)
        return self.frame, self.members

    @cached_property
    def steps(self) -> list[AnyStep]:
        """The members as steps; a sample has its own arguments."""
        if not self.single:
            return [call.step for call in self.calls]
        return [
            replace(call.step, inputs=pytree.tree_unflatten(call.inputs.values, call.inputs.spec))
            for call in self.calls
        ]
