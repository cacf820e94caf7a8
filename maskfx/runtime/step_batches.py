"""StepBatches: the calls of one step as ragged batches, one per program and device.

Knows nothing of how calls are validated, of locks and of changed weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from torch import nn

from maskfx.ir.programs.program import Program
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.cache.loader import Loading
from maskfx.runtime.execution.dense_fallback import recorded_output, run_in_full
from maskfx.runtime.execution.executor import BatchExecutor, Split
from maskfx.runtime.execution.twins import Changed
from maskfx.runtime.programs.program_cache import ProgramCache
from maskfx.runtime.steps import ValidatedCall
from maskfx.runtime.validation.sample_calls import SampleCalls
from maskfx.runtime.weights import Weights


class StepBatches:
    """Groups validated calls by program, and runs or prepares the batches.

    Args:
        module: The denoiser, which computes calls without a program.
        weights: Its weights.
        cache: The programs, by their code.
        samples: Divides a call into calls of one sample, where no program computes the whole.
        executor: Runs the batches.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: Weights,
        cache: ProgramCache,
        samples: SampleCalls,
        executor: BatchExecutor,
    ) -> None:
        self._module, self._weights, self._cache = module, weights, cache
        self._samples, self._executor = samples, executor

    def run(self, calls: Sequence[ValidatedCall], split: Split | None) -> list[object]:
        """Run the calls, those that consist of calls of one sample as these."""
        each = [self._samples.calls(call) for call in calls]
        results = iter(self._run_parts([part for parts in each for part in parts], split))
        return [
            self._samples.joined(call, list(islice(results, len(parts))))
            for call, parts in zip(calls, each, strict=True)
        ]

    def _run_parts(self, calls: Sequence[ValidatedCall], split: Split | None) -> list[object]:
        """Run the calls of each program as one batch, and calls without a program one by one."""
        results: list[object] = [None] * len(calls)
        # a split step waits unlocked, and the programs may change meanwhile
        batches: dict[str, tuple[Program, list[int]]] = {}
        for i, call in enumerate(calls):
            program = call.inputs.compilation.program
            if call.edits_nothing and call.inputs.compilation.capture.module is not None:
                results[i] = recorded_output(call)
            elif program is None:
                results[i] = run_in_full(call, self._module, self._weights)
            else:
                batches.setdefault(program.code, (program, []))[1].append(i)
        for program, members in batches.values():
            outputs = self._executor.run(program, [calls[i] for i in members], split)
            for i, output in zip(members, outputs, strict=True):
                results[i] = output
        return results

    def prepared(
        self, calls: Sequence[ValidatedCall], changed: Changed | None
    ) -> list[tuple[Program, Frame, list[Member]]]:
        """Return the batches with the values of their inputs; see `BatchExecutor.prepared`."""
        return [
            batch
            for program, own in self._by_program(call for call in calls if call.has_rows)
            for batch in self._executor.prepared(program, own, changed)
        ]

    def batches(
        self, calls: Sequence[ValidatedCall]
    ) -> Iterator[tuple[Program, Frame, list[Member]]]:
        """Yield the batches of edits with active sites."""
        active = [call for call in calls if call.has_rows]
        parts = (own for call in active for own in self._samples.calls(call) if own.has_rows)
        for program, own in self._by_program(parts):
            members = self._executor.members(program, own)
            for frame, chosen in self._executor.batches(program, members):
                yield program, frame, chosen

    def ahead(self, calls: Sequence[ValidatedCall], only: bool) -> list[Loading]:
        """Prefetch the rows that these calls read; with `only`, cancel what others read."""
        loads = self._executor.graphs.loads
        groups = list(self.batches(calls))
        if only:
            loads.forget_others([member for *_, members in groups for member in members])
        return [loading for group in groups for loading in loads.ahead(*group, next_step=only)]

    def groups(
        self, calls: Sequence[ValidatedCall]
    ) -> Iterator[tuple[Program, list[int], list[Member]]]:
        """Yield, per program, the calls with active sites: their numbers, and them as members.

        Calls whose samples have programs or picture sizes of their own are left out.
        """
        rows = enumerate(call.has_rows and not call.parts for call in calls)
        active = {number: calls[number] for number, has_rows in rows if has_rows}
        for code in dict.fromkeys(call.inputs.program_code for call in active.values()):
            program = self._cache.programs[code]
            own = {n: call for n, call in active.items() if call.inputs.program_code == code}
            yield program, list(own), self._executor.members(program, list(own.values()))

    def _by_program(
        self, calls: Iterable[ValidatedCall]
    ) -> Iterator[tuple[Program, list[ValidatedCall]]]:
        """Yield the calls of each program."""
        groups: dict[str, list[ValidatedCall]] = {}
        for call in calls:
            groups.setdefault(call.inputs.program_code, []).append(call)
        for code, own in groups.items():
            yield self._cache.programs[code], own
