"""LateResults: results that a run's denoisers read of one another one step late.

A result of a denoiser that a call of another denoiser reads is that of a side network, such as a
ControlNet. No names of networks are known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from torch.utils import _pytree as pytree

from maskfx.pipelines.deferred import Deferred, DeferredOperation, ValueSource
from maskfx.pipelines.runs.call_inputs import ShapeKey

Key = tuple[str, str, ShapeKey | None]  # denoiser, branch, shapes of its inputs


class RunCall(Protocol):
    """What is used of a denoiser call of the run."""

    name: str
    branch: str
    step: int
    steps: int | None
    inputs: dict[str, object]
    shape: ShapeKey | None
    values: Sequence[object] | None
    late: bool

    def sources(self) -> Sequence[RunCall]: ...

    def wait(self) -> None: ...


class LateResults:
    """Replaces this step's results among the inputs of a call by those of the step before.

    They are always those of the previous computed step, even if this step's are there in time: a
    picture depends on its request, and not on the speed of a link or on other requests. This step's
    results are read where there are none before that fit: at the first step, where shapes or
    settings change, and where an adapter begins to act.
    """

    def __init__(self) -> None:
        self.read = 0  # number of results that were read one step late
        self._sides: set[str] = set()  # denoisers whose results others read
        self._now: dict[Key, RunCall] = {}  # calls of the current computed step
        self._before: dict[Key, RunCall] = {}  # calls of the computed step before it
        self._step = self._in_time = -1
        self._running: list[RunCall] = []  # calls that a step didn't wait for

    def add(self, call: RunCall) -> None:
        """Note a call that is computed."""
        if call.step != self._step:
            for known in self._now.values():
                if known.values is not None:
                    known.inputs = {}  # else each call would hold those before it in memory
            self._before, self._now, self._step = self._now, {}, call.step
        self._now[key_of(call)] = call

    def read_in_time(self, step: int) -> None:
        """Let calls of this step read its own results."""
        self._in_time = step

    def exchange(self, call: RunCall) -> None:
        """Give a call the results of the step before in the place of this step's."""
        sources: dict[int, ValueSource] = {}

        def earlier(value: object) -> object:
            if not isinstance(value, Deferred):
                return value
            source = self._earlier(value.source, call, sources)
            if source is value.source:
                return value
            return Deferred(value.like, value.device, value.ledger, source, value.place)

        call.inputs = pytree.tree_map(earlier, call.inputs)

    def _earlier(
        self, source: ValueSource, reader: RunCall, known: dict[int, ValueSource]
    ) -> ValueSource:
        """Return the source of the same value one step before; itself if there is none."""
        if id(source) not in known:
            if isinstance(source, DeferredOperation):
                known[id(source)] = self._earlier_operation(source, reader, known)
            else:
                known[id(source)] = self._earlier_call(source, reader)
        return known[id(source)]

    def _earlier_operation(
        self, operation: DeferredOperation, reader: RunCall, known: dict[int, ValueSource]
    ) -> ValueSource:
        changed = False

        def earlier(value: object) -> object:
            nonlocal changed
            if not isinstance(value, Deferred):
                return value
            source = self._earlier(value.source, reader, known)
            if source is value.source:
                return value
            changed = True
            return Deferred(value.like, value.device, value.ledger, source, value.place)

        args, kwargs = pytree.tree_map(earlier, (operation.args, operation.kwargs))
        return DeferredOperation(operation.function, args, kwargs) if changed else operation

    def _earlier_call(self, source: Any, reader: RunCall) -> ValueSource:
        if source.name == reader.name or source.step != reader.step:
            return source  # type: ignore[no-any-return]
        self._sides.add(source.name)
        before = self._before.get(key_of(source))
        if before is None or reader.step == self._in_time:
            return source  # type: ignore[no-any-return]
        self.read += 1
        if not source.late:
            source.late = True
            self._running = [one for one in self._running if one.values is None] + [source]
        return before

    def held(self, call: RunCall) -> RunCall | None:
        """Return the call of a side network that stands for one at a step that isn't computed.

        None for other denoisers: their outputs are extrapolated. Nothing that is computed reads
        this result, so it isn't waited for.
        """
        return self._now.get(key_of(call)) if call.name in self._sides else None

    def spare(self, calls: Sequence[RunCall]) -> list[RunCall]:
        """Return the calls of the last step that nothing reads."""
        read = {id(source) for call in calls for source in call.sources()}
        return [
            call
            for call in calls
            if call.late
            and call.steps is not None
            and call.step + 1 >= call.steps
            and id(call) not in read
        ]

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Wait at the end for calls that are computed elsewhere, and raise their errors."""
        try:
            yield
        except BaseException:
            for call in self._running:
                with suppress(Exception):
                    call.wait()
            raise
        for call in self._running:
            call.wait()


def key_of(call: RunCall) -> Key:
    return call.name, call.branch, call.shape
