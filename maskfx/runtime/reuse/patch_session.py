"""PatchSession: one request's denoiser calls that compute only the patches that changed.

The first steps run in full and are recorded into a rolling cache; then each step computes the
patches that `patches.py` selects (with order="stretch" while it runs), reads the others' rows as
they were last computed, and replaces those that it computes. The caller batches and runs the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.errors import CacheError
from maskfx.ir.programs.program import STRETCH
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.cache.rolling.rolling_rest import replace_rest
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.hardware.devices import moved
from maskfx.runtime.reuse.judges import Bools
from maskfx.runtime.reuse.kept_outputs import KeptOutputs
from maskfx.runtime.reuse.patch_calls import (
    Branch,
    ObservedCall,
    PatchCall,
    PatchCounts,
    PendingCall,
    shares_of,
)
from maskfx.runtime.reuse.patch_choice import PatchChoice, PatchSites, StretchState
from maskfx.runtime.reuse.patches import PatchDecision, PatchReuse, PatchState
from maskfx.runtime.reuse.session import Times, recorded, times_of
from maskfx.runtime.reuse.site_inputs import SiteInputs
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.sites.patches import PatchGrid
from maskfx.runtime.steps import AnyStep, DenseStep, EditStep, RecordStep

RECORDED = 2  # full steps that are recorded before the first one that keeps patches
# Share of kept sites below which a call computes all: its rows cost 5 to 16 % more than the module.
LEAST_KEPT = 1 / 6
Finish = Callable[[PendingCall], AnyStep]  # makes the step of a call whose patches are decided


@dataclass
class PatchSession:
    """Plans the calls of one request and of one denoiser.

    `ask` returns the step of a call, and `take` the call's output from the step's result. Calls are
    identified by their number and branch, as in `EditSession`. `close` gives the memory back.

    Args:
        denoiser: The denoiser, compiled with stretches.
        pool: Holds the rows of the request.
        settings: How patches are chosen.
        grid: The patches.
        mask: The sites that are edited; None edits all. Others are computed in full calls only.
        refresh: With a mask, the number of calls from one full call to the next.
        note: Receives the reason why calls run in full.
        counts: Sums the patches that are computed.
        observer: Receives the calls, for training; the judge must compute all patches.
    """

    denoiser: CompiledDenoiser
    pool: RollingPool
    settings: PatchReuse
    grid: PatchGrid
    mask: Tensor | None = None
    refresh: int = 4
    note: Callable[[str], None] = lambda text: None
    counts: PatchCounts = field(default_factory=PatchCounts)
    observer: Callable[[ObservedCall], None] | None = None
    _branches: dict[str, Branch] = field(default_factory=dict)
    _asked: dict[tuple[int, str], PendingCall] = field(default_factory=dict)
    _known: dict[bytes, Tensor] = field(default_factory=dict)  # masks of all patches

    def __post_init__(self) -> None:
        self._judge, self._inputs = self.settings.decides, SiteInputs(self.grid)
        self._by_stretch = self.settings.order == "stretch"
        if self._by_stretch and not self.denoiser.runs_by_stretch:
            self._by_stretch = False
            self.note('its graph runs as a whole, so patches are chosen with order="step"')
        if self.mask is not None and bool(self.mask.all()):
            self.mask = None
        self._masked = None if self.mask is None else self.mask.detach().cpu()
        self._inside = (
            np.ones(self.grid.count, bool) if self.mask is None else self.grid.touched(self.mask)
        )

    # Calls.

    def ask(
        self,
        ordinal: int,
        branch: str,
        inputs: Mapping[str, object],
        times: Times | None = None,
        calls: int | None = None,
    ) -> AnyStep:
        """Return the step to run for a call; pass its result to `take`."""
        found = self.begin(ordinal, branch, inputs, times, calls)
        return found.step() if isinstance(found, PatchDecision) else found

    def begin(
        self,
        ordinal: int,
        branch: str,
        inputs: Mapping[str, object],
        times: Times | None = None,
        calls: int | None = None,
    ) -> AnyStep | PatchDecision:
        """Return the step to run for a call, or what has to be decided first, with other requests'.

        Args:
            ordinal: The call's index; must increase within a branch.
            branch: Its guidance branch.
            inputs: The denoiser's arguments.
            times: The scheduler's times; by default those among `inputs`.
            calls: The number of calls that the branch will have, if known.
        """
        own = self._branches.setdefault(branch, Branch())
        found = self._inputs.find(inputs)
        if own.cache is not None and not own.fits(found):
            own.close()
        number, settings = own.calls, self.settings
        noise = own.noise(times or times_of(inputs, ordinal))
        if own.refused or settings.keeps_nothing or settings.is_last(ordinal, calls):
            own.close()
            return self._pend(ordinal, branch, PendingCall(PatchCall.DENSE, number, inputs, noise))
        if own.cache is None:
            late = number >= settings.first - RECORDED
            kind = PatchCall.RECORD if late else PatchCall.DENSE
            return self._pend(ordinal, branch, PendingCall(kind, number, inputs, noise))
        assert own.state is not None, "a cache without a state"
        everywhere = number < settings.first or self.mask is None
        everywhere = everywhere or number - own.full >= self.refresh
        pending = PendingCall(PatchCall.PATCHES, number, inputs, noise, None, everywhere)

        def finish(decided: PendingCall) -> AnyStep:
            known = decided if self._by_stretch else self._cheapest(own, decided)
            return self._pend(ordinal, branch, known)

        if number < settings.first or (self.mask is not None and everywhere):
            return finish(replace(pending, computed=np.ones_like(own.state.age, bool)))
        return self._decided(own, pending, found, finish)

    def begin_template(
        self, ordinal: int, branch: str, template: EditStep, times: Times, calls: int | None
    ) -> AnyStep | PatchDecision | None:
        """Return the step of an edit of a template that keeps patches inside of the mask.

        Outside of the mask the rows are the template's of this step. Return None if the edit of the
        template runs as it is: in the last steps, or where its rows can't be kept.

        Args:
            ordinal: The call's index.
            branch: Its guidance branch.
            template: The edit of the template's recording of this call.
            times: The scheduler's times.
            calls: The number of calls that the branch will have, if known.
        """
        own, inputs = self._branches.setdefault(branch, Branch()), template.inputs
        found, number = self._inputs.find(inputs), own.calls
        if own.cache is not None and not own.fits(found):
            own.close()
        noise = own.noise(times or times_of(inputs, ordinal))
        if own.refused or self.settings.keeps_nothing or self.settings.is_last(ordinal, calls):
            own.close()
            return None
        mask = Mask(template.mask)
        begins = own.cache is None
        try:
            if begins:
                pending = PendingCall(PatchCall.RECORD, number, inputs, noise)
                self._start(own, pending, template.cache)
            else:
                assert own.cache is not None, "checked above"
                replace_rest(own.cache, template.cache, mask)
        except CacheError as error:
            own.refused = True
            own.close()
            self.note(f"its patches aren't reused: {error}")
        if own.cache is None or own.state is None:
            return None
        self._lay_under(own.cache, template.cache)
        computed = np.broadcast_to(self._inside, own.state.age.shape)
        pending = PendingCall(PatchCall.PATCHES, number, inputs, noise, computed, False)
        finish = partial(self._pend, ordinal, branch)
        if begins or number < self.settings.first:
            return finish(pending)
        return self._decided(own, pending, found, finish)

    def _decided(
        self, own: Branch, pending: PendingCall, found: Tensor | None, finish: Finish
    ) -> AnyStep | PatchDecision:
        """Return the step of a call that chooses its patches, or what is to be decided before."""
        assert own.state is not None, "a cache without a state"
        change, noise, number = self._inputs.change(own.read, found), pending.noise, pending.number
        if not self._by_stretch:
            state, settings, judge = own.state, self.settings, self._judge
            settle = partial(self._settled, pending, finish)
            return PatchDecision(state, settings, judge, change, noise, number, settle)

        sites = PatchSites(self.grid, None if pending.everywhere else self._masked)
        choice = PatchChoice(
            self.settings, self._judge, own.state, change, self._inside, noise, number, sites
        )
        return finish(replace(pending, computed=None, choice=choice))

    def _settled(self, pending: PendingCall, finish: Finish, computed: Bools) -> AnyStep:
        return finish(replace(pending, computed=computed & self._inside))

    def _lay_under(self, cache: RollingCache, recording: StepCache) -> None:
        """Replace a cache's outputs outside of the mask by a recording's."""
        if self._masked is None:
            return
        inside = self._outputs()
        cells = np.arange(inside.count) < self.grid.count
        for kept, new in zip(cache.output, recording.output, strict=True):
            if isinstance(kept, Tensor):
                chosen = inside.chosen(cells, kept, moved(new, kept.device))
                assert isinstance(chosen, Tensor), "it is given tensors"
                kept.copy_(chosen)

    def _cheapest(self, own: Branch, pending: PendingCall) -> PendingCall:
        """Return the call as it is cheapest: calls in full are recorded only where rows are read.

        If the last call that kept patches kept all of them, calls in full run as the module does,
        and the first one to read rows again is computed in full and recorded in its turn.
        """
        assert pending.computed is not None, "patches without a choice"
        share = float(shares_of(pending, self.grid, self._masked).mean())
        if share > 1 - LEAST_KEPT and pending.everywhere:
            pending = replace(pending, computed=np.ones_like(pending.computed))
            share = 1.0
        if share == 0:
            own.partial = False
            return pending
        first = pending.number < self.settings.first
        if share == 1 and not own.partial and not first and self.observer is None:
            return replace(pending, kind=PatchCall.WHOLE)
        own.partial = own.partial or share < 1
        if own.stale:
            return replace(pending, computed=np.ones_like(pending.computed), everywhere=True)
        return pending

    def _pend(self, ordinal: int, branch: str, pending: PendingCall) -> AnyStep:
        self._asked[ordinal, branch] = pending
        inputs = pending.inputs
        if pending.kind in (PatchCall.DENSE, PatchCall.WHOLE):
            return DenseStep(inputs)
        if pending.kind is PatchCall.RECORD:
            return RecordStep(inputs)
        cache = self._branches[branch].cache
        assert cache is not None, "patches without a cache"
        if pending.choice is not None:
            within = self._mask_of(np.ones(self.grid.count, bool), pending.everywhere, self._known)
            return EditStep(
                inputs, within, cache, any_step=True, record=True, choice=pending.choice
            )
        assert pending.computed is not None, "patches without a choice"
        known: dict[bytes, Tensor] = {}
        masks = [self._mask_of(row, pending.everywhere, known) for row in pending.computed]
        wide_ = dict(enumerate(masks, 1))
        return EditStep(inputs, masks[-1], cache, any_step=True, wide=wide_, record=True)

    def take(self, ordinal: int, branch: str, result: object) -> Any:
        """Return the full output of a call from its step's result."""
        pending, own = self._asked.pop((ordinal, branch)).done, self._branches[branch]
        output = result
        if pending.kind is PatchCall.RECORD:
            output, recording = recorded(result, ordinal, branch)
            self._start(own, pending, recording)
        elif pending.kind is not PatchCall.DENSE and own.cache is not None:
            self._advance(own, pending, output)
        output = self._continued(own, pending, output)
        own.calls = pending.number + 1
        if self.observer is not None:
            self._observe(branch, own, pending, output)
        self.counts.add(shares_of(pending, self.grid, self._masked), self.sites)
        return output

    def fail(self, ordinal: int, branch: str) -> None:
        """Prepare for a result that was computed in full without the cache of a call."""
        pending = self._asked[ordinal, branch]
        self._branches[branch].close()
        self._asked[ordinal, branch] = replace(
            pending, kind=PatchCall.DENSE, computed=None, choice=None
        )

    def close(self) -> None:
        """Give the rows of the request back to the pool."""
        for branch in self._branches.values():
            branch.close()

    # State.

    def _start(self, own: Branch, pending: PendingCall, recording: StepCache) -> None:
        """Keep a recorded call as the first values of the branch's rolling cache."""
        program = self.denoiser.programs.get(recording.program)
        stretches = 0 if program is None else len(program.interface.regions_of(STRETCH))
        why = self._judge.refusal(stretches) if stretches else "it isn't divided into stretches"
        if program is None or why:
            own.refused = True
            self.note(f"it runs in full: {why}")
            return
        try:
            own.cache = self.pool.start(
                program, recording, patches=self.grid, since_read=self._by_stretch
            )
        except CacheError as error:
            own.refused = True
            self.note(f"it runs in full: {error}")
            return
        assert own.cache.changes is not None, "a cache that isn't watched"
        reported = set(own.cache.changes.boundaries.values())
        kind = StretchState if self._by_stretch else PatchState
        own.state = kind(stretches, self.grid.count, reported)
        own.full = pending.number
        self._read(own, pending.inputs, np.ones(self.grid.count, bool))

    def _advance(self, own: Branch, pending: PendingCall, output: object) -> None:
        assert own.state is not None, "a cache without a state"
        assert own.cache is not None, "a cache that was closed"
        assert pending.computed is not None, "patches without a choice"
        if self._by_stretch:
            changes = None if pending.choice is None else pending.choice.changes
        else:
            found = None if own.cache.changes is None else own.cache.changes.read()
            changes = None if found is None else found[1:]
        own.state.advance(pending.computed, changes)
        if pending.kind is PatchCall.WHOLE:
            own.stale = True
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            if len(leaves) == len(own.cache.output):
                own.cache.take_outputs(leaves, own.cache.step)
        elif pending.everywhere and pending.computed.all():
            own.stale = False
        self._read(own, pending.inputs, pending.computed[0])
        if pending.everywhere and pending.computed.all():
            own.full = pending.number

    def _observe(self, branch: str, own: Branch, pending: PendingCall, output: object) -> None:
        inputs, outputs = self._inputs.find(pending.inputs), self._inputs.find({"": output})
        if self.observer is None or own.state is None or inputs is None or outputs is None:
            return
        rates, noise = own.state.rate.copy(), pending.noise
        self.observer(ObservedCall(branch, inputs.clone(), outputs.clone(), rates, noise))

    def _continued(self, own: Branch, pending: PendingCall, output: object) -> object:
        """Return an output whose kept patches continue their last outputs, if so configured."""
        if self.settings.outputs != "extrapolate" or own.refused or self.settings.keeps_nothing:
            return output
        leaves, spec = pytree.tree_flatten(output)
        own.outputs = own.outputs or self._outputs()
        cells = np.ones(own.outputs.count, bool)
        if pending.computed is not None:
            cells = np.resize(pending.computed[-1], own.outputs.count)
            cells[self.grid.count :] &= pending.everywhere
        own.outputs.learn(pending.number, leaves, cells)
        leaves = own.outputs.at(pending.number, leaves, ~cells)
        return pytree.tree_unflatten(leaves, spec)

    def _outputs(self) -> KeptOutputs:
        count = self.grid.count if self._masked is None else 2 * self.grid.count
        return KeptOutputs(self._cells(), self.grid.shape, count)

    def _cells(self) -> NDArray[np.int64]:
        """Return the patch of each site; sites outside of the mask have numbers of their own."""
        if self._masked is None:
            return self.grid.ids
        outside = ~self._masked.reshape(-1).numpy()
        return np.asarray(self.grid.ids + self.grid.count * outside)

    @cached_property
    def sites(self) -> int:
        return prod(self.grid.shape)

    def _mask_of(self, row: Bools, everywhere: bool, known: dict[bytes, Tensor]) -> Tensor:
        key = row.tobytes()
        if key not in known:
            mask = self.grid.mask(row)
            known[key] = mask if everywhere or self._masked is None else mask & self._masked
        return known[key]

    def _read(self, own: Branch, inputs: Mapping[str, object], computed: Bools) -> None:
        """Store the input where the first stretch has read it."""
        own.read = self._inputs.read(own.read, self._inputs.find(inputs), computed)
