"""Replays: whether a program's graph is replayed from CUDA graphs, whole or in padded pieces."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from functools import partial

import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from maskfx import ops
from maskfx.config import Settings
from maskfx.ir.programs.program import Program
from maskfx.runtime.backends import cuda_graphs
from maskfx.runtime.backends.graph_function import Run
from maskfx.runtime.backends.whole_steps import WholeGraph, WholeSteps
from maskfx.runtime.batch.captured_inputs import BatchInputs
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.batch.padding import PaddedFrame, can_pad
from maskfx.runtime.batch.row_addresses import AddressBook
from maskfx.runtime.cache.loader import StagedRows
from maskfx.runtime.hardware.devices import free_share


class Replays:
    """What one denoiser replays.

    A layout that comes again is captured whole. Others run operator by operator or, if the settings
    ask for CUDA graphs, in padded pieces, whose captures serve all layouts of a size; Inductor's
    code isn't cut, and runs as it is.

    Args:
        settings: How the denoiser was compiled.
    """

    def __init__(self, settings: Settings) -> None:
        self.pieces = settings.cuda_graphs is True and not settings.inductor
        self._on = settings.cuda_graphs is not False
        self._anywhere = settings.cuda_graphs is True
        self._why = "it is compiled with cuda_graphs=False"  # why nothing is captured
        self.paddings: MutableMapping[Frame, PaddedFrame] = WeakIdKeyDictionary()
        self._known: dict[str, bool] = {}
        self._books: dict[tuple[str, torch.device], AddressBook] = {}
        self._whole: dict[torch.device, WholeSteps] = {}

    def replayed(self, program: Program, device: torch.device) -> bool:
        """Return True if the graph of a program can be replayed on a device."""
        if not self._on or not (self._anywhere or cuda_graphs.recorder_on(device) is not None):
            return False
        if program.code not in self._known:
            known = has_known_sizes(program.module.graph)
            self._known[program.code] = known and can_pad(program.interface)
        return self._known[program.code]

    def in_pieces(self, program: Program, device: torch.device) -> bool:
        """Return True if the graph of a program runs in pieces that CUDA graphs replay."""
        return self.pieces and self.replayed(program, device)

    def padded(self, program: Program, recording: bool, frame: Frame) -> PaddedFrame | None:
        """Return the padding of a batch whose graph is replayed in pieces."""
        if recording or not self.in_pieces(program, frame.device):
            return None
        if frame not in self.paddings:
            self.paddings[frame] = PaddedFrame(frame)
        return self.paddings[frame]

    def whole(
        self,
        program: Program,
        make: Callable[[], Run],
        frame: Frame,
        members: Sequence[Member],
        loading: StagedRows | None,
    ) -> object:
        """Run the graph of a replayed program from a capture; return None if it isn't captured."""
        steps = self._steps_on(frame.device)
        if steps is None:
            return None
        step = BatchInputs(frame, members, self.book(program, frame.device), loading)
        return steps.run(frame, WholeGraph(program.code, make), step)

    def note(self, program: Program, frame: Frame, members: Sequence[Member]) -> None:
        """Note that a batch runs otherwise now, so that its next step is captured."""
        steps = self._steps_on(frame.device)
        if steps is not None:
            book = self.book(program, frame.device)
            steps.note(frame, program.code, BatchInputs(frame, members, book))

    def _steps_on(self, device: torch.device) -> WholeSteps | None:
        if device not in self._whole:
            recorder = cuda_graphs.recorder_on(device)
            if recorder is None:
                return None
            self._whole[device] = WholeSteps(recorder, partial(free_share, device))
        return self._whole[device]

    def book(self, program: Program, device: torch.device) -> AddressBook:
        """Return the addresses of a program's recordings on a device."""
        key = program.code, device
        if key not in self._books:
            self._books[key] = AddressBook(program.interface, device)
        return self._books[key]

    def describe(self) -> str:
        """Return whether steps are replayed whole, and how many captures there are."""
        if not self._on:
            return f"run operator by operator: {self._why}"
        count = sum(map(len, self._whole.values()))
        if not count:
            return "run as others do: none is captured, which needs a CUDA device"
        return f"are replayed whole from CUDA graphs ({count} captured)"

    def drop(self, code: str) -> None:
        """Drop what is known of a program that no longer exists."""
        self._known.pop(code, None)
        for key in [key for key in self._books if key[0] == code]:
            del self._books[key]

    def stop(self, why: str) -> None:
        """Drop all captures, and make no more."""
        self.pieces = self._on = False
        self._why = why
        self.forget()

    def forget(self) -> None:
        """Drop all captures; the programs they belong to are gone."""
        self._known.clear()
        self._books.clear()
        for whole in self._whole.values():
            whole.forget()


def has_known_sizes(graph: fx.Graph) -> bool:
    """Return True if all sizes follow from those of the inputs, as Inductor needs it.

    The rows of an expert depend on data.
    """
    return not any(node.target in (ops.run_whole, ops.chosen) for node in graph.nodes)
