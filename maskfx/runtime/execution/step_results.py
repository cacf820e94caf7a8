"""StepResults: what one run of a graph gives each member: an output in full, and a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from maskfx.ir.geometry.lanes import Lane
from maskfx.ir.late import wait_for
from maskfx.ir.programs.program import KEYS, Interface
from maskfx.ir.values import copy_of
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.batch.output_rows import OutputRows, output_rows
from maskfx.runtime.batch.rows import empty_output, own_rows, place_rows, tap_parts
from maskfx.runtime.cache.step_cache import StepCache, keep_rows
from maskfx.runtime.hardware.devices import copied
from maskfx.runtime.steps import EditStep, ValidatedCall

LEAST = 8  # times the bytes of the inputs has a recording that keeps them


@dataclass(frozen=True)
class StepResults:
    """The results of a batch.

    Args:
        interface: Of the program.
        frame: The frame of the batch.
        calls, members: What the batch computed.
        outputs: The rows of the program's outputs.
        emitted: The rows that a recording keeps; empty if no member records.
        fingerprint: Returns the fingerprint of the weights.
    """

    interface: Interface
    frame: Frame
    calls: Sequence[ValidatedCall]
    members: Sequence[Member]
    outputs: Sequence[Tensor]
    emitted: Sequence[Tensor]
    fingerprint: Callable[[], str]
    _indices: dict[tuple[int, tuple[str, ...]], Tensor] = field(default_factory=dict)

    def of(self, index: int) -> object:
        """Return the output of a member, and its recording if it records."""
        call, member = self.calls[index], self.members[index]
        flat = [self._output(index, k, rows) for k, rows in enumerate(self.outputs)]
        if member.written is not None:
            step = {name: value.clone() for name, value in call.inputs.step_arguments()}
            member.written.take_outputs(flat, step)
        output = call.inputs.unflatten(flat)
        return (output, self._recording(index, flat)) if member.recording else output

    def _output(self, index: int, number: int, rows: Tensor) -> Any:
        """Return an output in full: a member's rows over a copy of the recorded output.

        A step that asks for its rows alone gets these, if the output has more.
        """
        member, lane, frame = self.members[index], self.interface.outputs[number], self.frame
        assert lane is not None
        own = own_rows(rows, lane, frame.layout, index)
        if lane.kind != "rows":
            return own.clone()
        recorded = member.cache.output[number] if member.cache is not None else None
        where = frame.layout.active(lane.segments)[index]
        if recorded is None:
            full = empty_output(own, lane, member)
        elif (alone := self._alone(index, own, recorded, lane, where)) is not None:
            return alone
        else:
            full = copied(recorded, member.device)
        place_rows(full, own, lane, member.sites, frame.tables.on(where, member.device))
        return full

    def _alone(
        self, index: int, rows: Tensor, recorded: Tensor, lane: Lane, where: Tensor
    ) -> OutputRows | None:
        """Return a member's rows of an output if its step asks for them alone."""
        step, member = self.calls[index].step, self.members[index]
        if not isinstance(step, EditStep) or not step.rows or member.written is not None:
            return None
        key = index, lane.segments
        if key not in self._indices:  # one tensor for all outputs with these sites
            self._indices[key] = where.int()
        return output_rows(rows, recorded, lane, member, self._indices[key])

    def _recording(self, index: int, flat: Sequence[Tensor]) -> StepCache:
        """Return the recording of a member: its outputs and the rows that the graph emitted."""
        call, alone = self.calls[index], len(self.calls) == 1
        plans = bool(self.interface.regions_of(KEYS))  # they may compute rows from the inputs
        inputs = [copy_of(wait_for(value)) for value in call.inputs.values] if plans else ()
        cache = call.recording([t.clone() for t in flat], self.fingerprint(), inputs)
        taps = list(self.interface.taps.values())
        parts = [
            [
                p if alone and owns(p, call.inputs.values) else p.clone()
                for p in tap_parts(tap, rows, self.frame.layout, index)
            ]
            for tap, rows in zip(taps, self.emitted, strict=True)
        ]
        keep_rows(cache, taps, parts)
        if input_bytes(cache) * LEAST > cache.nbytes():
            cache.given = []
        return cache


def input_bytes(cache: StepCache) -> int:
    return sum(value.nbytes for value in cache.given if isinstance(value, Tensor))


def owns(rows: Tensor, arguments: Sequence[object]) -> bool:
    """Return True if a recording may keep these rows without a copy.

    They must fill their memory and share none with an argument.
    """
    memory = rows.untyped_storage()
    if memory.nbytes() != rows.nbytes:
        return False
    values = map(wait_for, arguments)
    given = [v for v in values if isinstance(v, Tensor) and not v.is_meta]
    return all(memory.data_ptr() != v.untyped_storage().data_ptr() for v in given)
