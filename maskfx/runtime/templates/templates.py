"""Templates: recorded steps, keyed by everything they depend on, stored in the cache's tiers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
import xxhash
from torch import Tensor

from maskfx.errors import BudgetError, CacheError, InputError
from maskfx.ir.programs.program import KEYS, Program
from maskfx.runtime.cache.quantize import LOSSLESS
from maskfx.runtime.cache.serialize import SCHEMA
from maskfx.runtime.cache.step_cache import StepCache, read_rows
from maskfx.runtime.cache.stores.store_entry import EntryKey
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.sites.masks import Masks, Reach, find_reach
from maskfx.runtime.steps import EditStep
from maskfx.runtime.templates.budget import Budget, Keeping, choose
from maskfx.runtime.templates.footprint import Footprint, encoding_of

KEEPS = ("both", "keys", "inputs")
KEYS_MADE = 4096  # number of entry keys memoized: each step needs one


@dataclass
class Templates:
    """Stores and reads the templates of one denoiser in tiers that several denoisers may share.

    A template's name must identify everything that its recordings depend on besides model, step
    and branch: image, prompt, noise, scheduler, number of steps, adapters, size. Steps are
    numbered by call, since schedulers may repeat timesteps; a branch is one of the calls of
    classifier-free guidance.

    Args:
        denoiser: the compiled denoiser whose recordings these are.
        tiers: where the recordings are stored.
        keep: rows kept of each attention that has a plan: "keys" (keys and values), "inputs"
            (what these are projected from) or "both". One of them halves the bytes, and every plan
            still gives the same image.
        share: record one in `share` steps in full and keep only the outputs of the others. Fewer
            bytes, but another image inside the mask (`bench/storage.py` measures the difference).
        between: keep the rows between blocks too, for a denoiser with stretches (runs of
            consecutive blocks). Without them only stretches from the first on can be wide, each
            within the one before.
        steps: number of steps of a template. With it, steps that `share` leaves out read the
            linear interpolation of the two recorded steps around them; without it, the recorded
            step before them.
        masks: the masks that edits may have; rows that none of them can read aren't kept.
        budget: bytes for one template. A budget chooses `keep`, `share` and the encoding of rows
            (the choice is in `keeping`); it requires `masks`, for the size of the image
            (`Masks.anywhere` allows any mask).
        part: the denoiser's name among those that share the tiers; denoisers of equal weights
            have recordings of their own under different names.
    """

    denoiser: CompiledDenoiser
    tiers: Tiers
    keep: str = "both"
    share: int = 1
    between: bool = True
    steps: int | None = None
    masks: Masks | None = None
    budget: Budget | None = None
    part: str = ""
    keeping: Keeping | None = field(init=False, default=None)
    _room: float = field(init=False, default=0.0)
    _reaches: dict[Hashable, Reach] = field(init=False, default_factory=dict)
    _keys_made: dict[tuple[str, str, int, str], EntryKey] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.keep not in KEEPS:
            raise InputError(f"Templates: keep={self.keep!r}: choose one of {', '.join(KEEPS)}")
        for name, count in (("share", self.share), ("steps", self.steps)):
            if count is not None and (type(count) is not int or count < 1):
                raise InputError(f"Templates: {name}={count!r}: give 1 or more steps")
        if self.budget is not None:
            self._obey(self.budget)
        elif self.share > 1 and self.steps is not None and self.keep == "both":
            raise InputError(
                "Templates: with share above 1, plans would give different pictures; pass "
                'keep="keys" or keep="inputs"'
            )

    def _obey(self, budget: Budget) -> None:
        if (self.keep, self.share, self.steps) != ("both", 1, None):
            raise InputError("Templates: a budget decides keep, share and steps; leave them out")
        if self.tiers.encoding != LOSSLESS:
            raise InputError(
                "Templates: a budget decides how rows are packed; give it tiers without encoding="
            )
        if self.masks is None:
            raise InputError(
                "Templates: a budget needs masks=, at least Masks.anywhere(*size), to know the size"
            )
        footprint = Footprint.of(self.denoiser, self.masks)
        self.keeping = choose(footprint, budget)
        self._room = budget.room(self.keeping.share, footprint.alone)
        self.share, self.steps = self.keeping.share, budget.steps

    def key(
        self, template: str, step: int, branch: str = "", weights: str | None = None
    ) -> EntryKey:
        """Return the entry key of this step; `weights` is the denoiser's fingerprint, if known."""
        known = self.denoiser.fingerprint() if weights is None else weights
        wanted = known, template, step, branch
        key = self._keys_made.get(wanted)
        if key is None:
            if len(self._keys_made) >= KEYS_MADE:
                self._keys_made.clear()
            key = self._keys_made[wanted] = self._key(*wanted)
        return key

    def _key(self, weights: str, template: str, step: int, branch: str) -> EntryKey:
        parameter = next(self.denoiser.module.parameters(), torch.empty(0))
        return EntryKey(
            template=template,
            model=f"{self.part} {type(self.denoiser.module).__name__} {weights}".lstrip(),
            revision=self._revision,
            dtype=str(parameter.dtype).removeprefix("torch."),
            numerics=f"torch {torch.__version__} {parameter.device.type}",
            schema=SCHEMA,
            step=step,
            branch=branch,
        )

    def wants(self, step: int) -> bool:
        """Return True if this step is kept in full, False if its neighbours serve it."""
        return step % self.share == 0 or (self.steps is not None and step == self.steps - 1)

    def put(self, template: str, step: int, cache: StepCache, branch: str = "") -> None:
        """Store a recording; only its outputs if neighbouring steps serve this step."""
        if self.steps is not None and not 0 <= step < self.steps:
            raise InputError(
                f"Templates: step {step}, but steps are 0 to {self.steps - 1}; give "
                "Templates(steps=) the steps of the longest call"
            )
        kept = self._kept(cache) if self.wants(step) else outputs_of(cache)
        self.tiers.put(self.key(template, step, branch), kept)

    def get(
        self, template: str, step: int, branch: str = "", weights: str | None = None
    ) -> StepCache | None:
        """Return the recording that serves this step, or None."""
        known = self.denoiser.fingerprint() if weights is None else weights
        keys = [self.key(template, n, branch, known) for n in (step, *self._around(step))]
        found = [self.tiers.get(key, self._in_parts) for key in keys]
        own, *around = (one.cache if one is not None else None for one in found)
        if not around or around[0] is None or around[-1] is None:
            return None if around else own
        if own is None:  # not stored: use the outputs of the recorded step before it
            own = around[0]
        before, *after = self._around(step)
        weight = (step - before) / (after[0] - before) if after else 0.0
        return own.served_by(around[0], around[-1], weight)

    def edit(
        self,
        template: str,
        step: int,
        inputs: Mapping[str, object],
        mask: Tensor,
        branch: str = "",
        wide: Mapping[int, Tensor] | None = None,
    ) -> EditStep | None:
        """Return the edit of one step, or None if the template has no recording for it.

        Args:
            template: name of the template.
            step: index of the step.
            inputs: the denoiser's arguments.
            mask: the sites to edit.
            branch: guidance branch of the call.
            wide: the sites that see the edit, by stretch of blocks (`EditStep.wide`).
        """
        cache = self.get(template, step, branch)
        if cache is None:
            return None
        return EditStep(inputs, mask, cache, any_step=not self.wants(step), wide=wide or {})

    def prefetch(
        self, template: str, steps: Iterable[int], branch: str = "", rows: bool = False
    ) -> list[Future[bool]]:
        """Prefetch steps into memory in the background, in this order.

        Where a planner chooses what is read of their rows, all but the rows. With `rows`, for a
        request that waits, also those that a plan will want; they are part of the bytes that the
        tiers hold, and are left to the step that reads them if these have no room.
        """
        keys = self._keys(template, steps, branch)
        if rows:
            return self.prefetch_waiting(list(keys))
        return [self.tiers.prefetch(key, self._in_parts) for key in keys]

    def prefetch_waiting(self, keys: Sequence[EntryKey]) -> list[Future[bool]]:
        """Prefetch the entries that a request will read which waits, with the rows it wants."""
        if not self._in_parts:
            return [self.tiers.prefetch(key) for key in keys]
        return [self.tiers.prefetch(key, True, partial(self._read_rows, key)) for key in keys]

    def own(self, keys: Iterable[EntryKey]) -> list[EntryKey]:
        """Return those of these entries that are recordings of this denoiser."""
        known = self.denoiser.fingerprint()
        return [key for key in keys if key == self.key(key.template, key.step, key.branch, known)]

    def _read_rows(self, key: EntryKey, cache: StepCache | None) -> bool:
        """Read what a plan will want of an entry, as long as it is in memory."""
        planner = self.denoiser.planner
        if cache is not None and planner is not None:
            read_rows(cache, planner.wanted(cache), lambda: self.tiers.where(key) is not None)
        return cache is not None

    def in_memory(self, template: str, step: int, branch: str = "") -> bool:
        """Whether all entries that serve this step are on the device or the host."""
        return all(
            self.tiers.where(key) is not None for key in self._keys(template, [step], branch)
        )

    def pin(self, template: str, steps: Iterable[int], branch: str = "") -> None:
        """Pin these steps' entries in their tiers; `unpin` the same ones later."""
        for key in self._keys(template, steps, branch):
            self.tiers.pin(key)

    def unpin(self, template: str, steps: Iterable[int], branch: str = "") -> None:
        for key in self._keys(template, steps, branch):
            self.tiers.unpin(key)

    def drop(self, template: str, steps: Iterable[int], branch: str = "") -> None:
        """Remove steps from every tier; steps that they serve can't be read any more either."""
        for step in dict.fromkeys(steps):
            self.tiers.drop(self.key(template, step, branch))

    def _keys(self, template: str, steps: Iterable[int], branch: str) -> dict[EntryKey, None]:
        """Return the keys of the entries that serve these steps, in order."""
        needed = dict.fromkeys(n for step in steps for n in (*self._around(step), step))
        known = self.denoiser.fingerprint()
        return dict.fromkeys(self.key(template, each, branch, known) for each in needed)

    def _around(self, step: int) -> tuple[int, ...]:
        """Return the recorded steps before and after one that isn't kept in full; else none."""
        if self.wants(step):
            return ()
        before = step - step % self.share
        if self.steps is None:
            return (before,)
        return before, min(before + self.share, self.steps - 1)

    @property
    def _in_parts(self) -> bool:
        """Whether rows on disk are read by plans or by ranks, instead of whole steps."""
        plans = self.denoiser.settings.plans and self.denoiser.planner is not None
        return bool(plans or self.denoiser.reads_apart)

    @cached_property
    def _revision(self) -> str:
        words = [f"keep={self.keep} plans={self.denoiser.settings.plans} share={self.share}"]
        if self.denoiser.settings.stretches:
            words.append(f"between={'kept' if self.between else 'dropped'}")
        words += [] if self.steps is None else [f"steps={self.steps}"]
        words += [] if self.keeping is None else [self.keeping.name]
        words += [] if self.tiers.encoding == LOSSLESS else [repr(self.tiers.encoding)]
        if self.masks is not None:
            told = b"".join(m.numpy().tobytes() for m in (self.masks.ever, self.masks.always))
            words.append(f"masks={xxhash.xxh3_128_hexdigest(told)}")
        return " ".join(words)

    def _kept(self, cache: StepCache) -> StepCache:
        """Return the rows of a recording that edits can load, encoded if a budget requires it."""
        program = self.denoiser.programs.get(cache.program)
        if program is None:
            parts = self.keep != "both" or not self.between or self.masks or self.budget
            if cache.rows and parts:
                raise CacheError(
                    "Templates: this step was recorded by a program that the denoiser doesn't "
                    "have, so what to keep of it isn't known; record it with this denoiser"
                )
            return cache
        if self.masks is not None:
            cache = cache.within(self.masks, self._reach(program, cache.sizes, self.masks))
        interface = program.interface
        count = len(interface.regions_of(KEYS))
        crossing = set() if self.between else interface.crossing_taps()
        if self.keeping is None:
            needed = interface.taps_for([self.keep] * count) - crossing
            return cache.packed(LOSSLESS, needed & cache.rows.keys())
        sides, how = self.keeping.regions, encoding_of(self.keeping.encoding, interface)
        if len(sides) == count:
            needed = interface.taps_for(sides) - crossing
            cache = cache.packed(how, needed & cache.rows.keys())
        room = int(self._room * cache.sizes.get("batch", 1))
        if cache.nbytes() > room and cache.rows:
            cache = replace(cache, given=[])  # then no plan computes rows from the inputs
        if cache.nbytes() > room:
            raise BudgetError(
                f"Templates: a step of {cache.sizes} takes {cache.nbytes()} bytes, the budget has "
                f"{room} for it; make Templates after the first call with inputs like these"
            )
        return cache

    def _reach(self, program: Program, sizes: dict[str, int], masks: Masks) -> Reach:
        key = (program.code, *sorted(sizes.items()))
        if key not in self._reaches:
            self._reaches[key] = find_reach(program.interface, sizes, masks)
        return self._reaches[key]


def outputs_of(cache: StepCache) -> StepCache:
    """Return a recording without what its neighbours serve."""
    given = [] if cache.rows else cache.given
    return replace(cache, rows={}, stats={}, sums={}, given=given)
