"""InPlace: adapters that all members of a step share, in the weights for as long as they do.

Layers then cost what they cost without adapters. Recordings, keys and fingerprints are those of
low-rank terms: the module's own weights and the adapters' digests. Any other use of the denoiser
takes the updates out first, bit for bit.

Processes that compute its steps elsewhere, over weights in shared memory, write into copies of
their own (`private`); what they chose is in `elsewhere`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from maskfx.config import Settings
from maskfx.ir.values import PLAIN_TENSORS
from maskfx.runtime.execution.executor import BatchExecutor
from maskfx.runtime.hardware import private_memory
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.lora.in_place_costs import (
    ChosenBy,
    Elsewhere,
    InPlaceCosts,
    SharedStep,
    fewer_multiplications,
)
from maskfx.runtime.lora.layers import AdapterSet, SetCache
from maskfx.runtime.lora.patch import WeightPatch
from maskfx.runtime.programs.program_cache import ProgramCache
from maskfx.runtime.weights import Weights

PRIVATE_BYTES = 4 << 30  # of weights in shared memory that one process may copy


class InPlace:
    """The updates in one denoiser's weights.

    Args:
        module: The denoiser's module.
        weights: Detects changes of its weights; those made here are none.
        programs: The denoiser's programs.
        executor: Runs them; holds weights in other layouts.
        adapters: Checks sets of adapters.
        lock: Held while a step runs, and while weights are written.
        settings: Returns how the denoiser is compiled.
        changes: Brings the module to its device, and follows changes of its weights.
        clock: Returns seconds.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: Weights,
        programs: ProgramCache,
        executor: BatchExecutor,
        adapters: SetCache,
        lock: AbstractContextManager[object],
        settings: Callable[[], Settings],
        changes: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs = InPlaceCosts()
        self.elsewhere: dict[str, Elsewhere] = {}  # by the name of what computes steps
        self.private = False  # other processes keep the weights that they share with this one
        self.followers: list[Callable[[], None]] = []  # are called when weights have changed
        self._weights, self._programs, self._executor = weights, programs, executor
        self._adapters, self._lock = adapters, lock
        self._settings, self._changes, self._clock = settings, changes, clock
        self._patch = WeightPatch(module)
        self._serving = False  # a step that may use the written weights runs
        self._run: object = None  # key of the adapters of the latest steps
        self.refused = ""  # why adapters that members share aren't written
        self._took = 0.0  # seconds of writing what is written
        self._work = 0

    @property
    def written(self) -> bool:
        return self._patch.patched

    @property
    def in_use(self) -> bool:
        """Whether adapters are in the weights, here or where the latest steps were computed."""
        return self.written or any(one.written for one in list(self.elsewhere.values()))

    def all_costs(self) -> list[InPlaceCosts]:
        """Return what was measured here, and elsewhere."""
        return [self.costs, *(one.costs for one in list(self.elsewhere.values()))]

    @contextmanager
    def step(
        self,
        updates: Updates,
        members: int,
        sites: int,
        left: int,
        by: ChosenBy = ChosenBy.COSTS,
    ) -> Iterator[bool]:
        """Run a step whose members all have these adapters; yield whether they are in the weights.

        Args:
            updates: The adapters; () if members have different ones, or none.
            members: Number of members.
            sites: That they compute.
            left: Steps in which these adapters will act, this one included.
            by: What decides whether they are written.
        """
        with self._lock:
            if updates and not self.written:
                self._changes()  # they are written over the weights as they are now
            own = self._set(updates)
            if own is None:
                self._leave_run()
                yield False
                return
            work = work_of(own)
            kind = SharedStep.of(members, sites, work)
            if self._run != own.key:
                self._leave_run()
                self._run = own.key
                self.costs.begin(kind, left)
            if by is ChosenBy.COUNTS:
                wanted = self.written or fewer_multiplications(work, sites * terms_of(own), left)
            else:
                wanted = self.costs.wants(kind, work, sites, left, self.written)
            if self.written and not wanted:
                self.leave()
            elif not self.written and wanted:
                self._write(updates, own, work)
            began = self._clock()
            self._serving = self.written
            try:
                yield self.written
            finally:
                self._serving = False
            self.costs.add_step(kind, self.written, sites, self._clock() - began)

    def write(self, updates: Updates) -> str:
        """Write updates because another process has chosen it; return why that can't be.

        Others that are there are taken out first, and they are if these can't be written.
        """
        with self._lock:
            self.leave()
            self._changes()
            own = self._set(updates)
            if own is None:
                return self.refused
            try:
                self._write(updates, own, work_of(own))
            except (OSError, MemoryError, RuntimeError) as error:  # no memory is left, for example
                self.leave()
                return f"{type(error).__name__}: {error}"
            return ""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep what `write` has written for a step."""
        with self._lock:
            assert self.written, "write() comes first"
            self._serving = True
            try:
                yield
            finally:
                self._serving = False

    def leave(self) -> None:
        """Take the updates out of the weights, unless a step that uses them runs in this thread.

        In others the lock is waited for.
        """
        if not self.written:
            return
        with self._lock:
            if self._serving or not self.written:
                return
            began = self._clock()
            self._follow()
            with self._weights.writing():
                self._patch.remove()
            self._follow()
            self._adapters.written = None
            self.costs.fell_back += self.costs.unfinished
            self.costs.add_write(self._work, self._took + self._clock() - began)

    def _leave_run(self) -> None:
        """Take out what other members don't share."""
        self.leave()
        self.costs.end()
        self._run = None

    def end(self) -> None:
        """Take the updates out because no request is left that uses them."""
        if self._run is None:
            return
        with self._lock:
            self.leave()
            self.costs.end()
            self._run = None

    def _set(self, updates: Updates) -> AdapterSet | None:
        """Return the checked adapters; None if there are none, or they can't be written."""
        if not updates:
            return None
        written, self._adapters.written = self._adapters.written, None
        try:
            own = self._adapters.of(updates)
        finally:
            self._adapters.written = written
        self.refused = "" if own is None else self.refusal(own, self.private)
        return None if self.refused else own

    def refusal(self, own: AdapterSet, private: bool) -> str:
        """Return why adapters can't be written; "" if they can.

        Args:
            own: The adapters.
            private: Whether other processes keep the weights that they share.
        """
        settings = self._settings()
        if settings.inductor and settings.prepack:
            return "Inductor's code holds packed weights (prepack=True); compile without prepack"
        if any(type(one.weight) not in PLAIN_TENSORS for one in own.layers):
            return (
                "they change weights that are packed (quantized), and sums rounded to their steps "
                "aren't what low-rank terms compute"
            )
        if any(one.weight.is_inference() for one in own.layers):
            return (
                "weights are inference tensors, of which changes aren't seen; load the model "
                "outside of torch.inference_mode()"
            )
        weights = [one.weight for one in own.layers if one.weight.device.type == "cpu"]
        shared = [one for one in weights if one.is_shared()]
        if not shared:
            return ""
        if not private:
            return "the weights lie in memory that other processes read"
        size = sum(one.nbytes for one in shared)
        if size > PRIVATE_BYTES:
            return (
                f"each process would copy {size} bytes of weights, and the limit is {PRIVATE_BYTES}"
            )
        return private_memory.refusal(shared)

    def describe(self) -> str:
        """Return what was measured and chosen, or why nothing is written; "" without adapters."""
        texts = [description(self.refused, self.costs)]
        for name, one in list(self.elsewhere.items()):
            if text := description(one.refused, one.costs):
                texts.append(f"In {name}: {text}")
        return "\n".join(filter(None, texts))

    def _write(self, updates: Updates, own: AdapterSet, work: int) -> None:
        began = self._clock()
        self._weights.fingerprint()  # of the weights as they are: it stays theirs
        self._follow()
        with self._weights.writing():
            self._patch.apply(updates, self.private)
        self._follow()
        self._adapters.written = own.key
        self.costs.written += 1
        self._took, self._work = self._clock() - began, work

    def _follow(self) -> None:
        """Compute weights in other layouts again, where these have changed."""
        for program in list(self._programs.programs.values()):
            self._executor.derived.follow(program)
        self._executor.graphs.follow_packed()
        for follow in self.followers:
            follow()


def description(refused: str, costs: InPlaceCosts) -> str:
    if refused:
        return f"Adapters that all members of a step share aren't written: {refused}."
    return costs.describe()


def work_of(own: AdapterSet) -> int:
    """Return the multiplications that make the updates of all weights, and the numbers copied."""
    return sum(one.weight.numel() * (2 + one.rank) for one in own.layers)


def terms_of(own: AdapterSet) -> int:
    """Return the multiplications of the low-rank terms of all layers for one site."""
    found = 0
    for one in own.layers:
        outputs, inputs = one.weight.shape[0], one.weight[:1].numel()
        found += one.rank * (inputs + outputs)
        if one.differences:  # rows of it are multiplied by another weight
            found += one.weight.numel()
    return found


def share_weights(modules: Sequence[nn.Module]) -> bool:
    """Return True if two of these have parameters in common: both would see the adapters."""
    found = [{id(weight) for weight in module.parameters()} for module in modules]
    return sum(map(len, found)) > len(set().union(*found))


def shared(sets: Sequence[Updates]) -> Updates:
    """Return the adapters of all members if they are the same; () if not."""
    keys = {tuple((u.digest, u.weight, id(u.layers)) for u in own) for own in sets}
    return sets[0] if len(keys) == 1 else ()
