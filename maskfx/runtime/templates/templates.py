"""Templates: recorded steps by what they are functions of, from whichever tier has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import xxhash
from torch import Tensor

from maskfx.errors import BudgetError, CacheError, InputError
from maskfx.ir.program import KEYS, Program
from maskfx.runtime.cache.quantize import LOSSLESS
from maskfx.runtime.cache.serialize import SCHEMA
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.store_entry import EntryKey
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.sites.masks import Masks, Reach, find_reach
from maskfx.runtime.steps import EditStep
from maskfx.runtime.templates.budget import Budget, Keeping, choose
from maskfx.runtime.templates.footprint import Footprint, encoding_of

KEEPS = ("both", "keys", "inputs")
KEYS_MADE = 4096  # that are remembered: each step asks for one


@dataclass
class Templates:
    """The templates of one denoiser, kept in tiers that several denoisers may share.

    A template's name stands for all that its recordings are functions of besides model, step and
    branch: picture, prompt, noise, scheduler, number of steps, adapters, size. Steps are counted
    by call, since schedulers may repeat timesteps; a branch is one of CFG's calls.

    keep: of each attention with a plan, both what its keys and values are projected from and
    themselves, or one of them: half the bytes, and every plan still gives the same picture.
    between: what lies between blocks too, for a denoiser with stretches. Without it only stretches
    from the first on can be wide, each within the one before.
    masks: the masks that edits may have; what none of them can read isn't kept.
    share: every so many steps one is kept whole, of the others their outputs alone. With `steps`
    (how many there are) these read the straight line between the two around them, without it what
    the one before them recorded: fewer bytes, and another picture inside the mask
    (`bench/storage.py` measures how far).
    budget: bytes for one template, which then decides all of this but `masks` (the size of the
    picture: `Masks.anywhere` if any mask may come), and how rows are packed; see `keeping`.
    """

    denoiser: CompiledDenoiser
    tiers: Tiers
    keep: str = "both"
    share: int = 1
    between: bool = True
    steps: int | None = None
    masks: Masks | None = None
    budget: Budget | None = None
    keeping: Keeping | None = field(init=False, default=None)
    _room: float = field(init=False, default=0.0)
    _reaches: dict[tuple[Any, ...], Reach] = field(init=False, default_factory=dict)
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
                'Templates: between two steps plans would give different pictures; say keep="keys" '
                'or keep="inputs"'
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
        """The entry of this step; `weights` is the denoiser's fingerprint, if known."""
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
            model=f"{type(self.denoiser.module).__name__} {weights}",
            revision=self._revision,
            dtype=str(parameter.dtype).removeprefix("torch."),
            numerics=f"torch {torch.__version__} {parameter.device.type}",
            schema=SCHEMA,
            step=step,
            branch=branch,
        )

    def wants(self, step: int) -> bool:
        """Is this step kept whole, or do its neighbours serve it?"""
        return step % self.share == 0 or (self.steps is not None and step == self.steps - 1)

    def put(self, template: str, step: int, cache: StepCache, branch: str = "") -> None:
        """Keep a recording; of one that its neighbours stand for, the outputs."""
        if self.steps is not None and not 0 <= step < self.steps:
            raise InputError(f"Templates: step {step}, but a template has {self.steps} of them")
        kept = self._kept(cache) if self.wants(step) else replace(cache, rows={}, stats={}, sums={})
        self.tiers.put(self.key(template, step, branch), kept)

    def get(
        self, template: str, step: int, branch: str = "", weights: str | None = None
    ) -> StepCache | None:
        """The recording that serves this step."""
        known = self.denoiser.fingerprint() if weights is None else weights
        keys = [self.key(template, n, branch, known) for n in (step, *self._around(step))]
        found = [self.tiers.get(key) for key in keys]
        own, *around = (one.cache if one is not None else None for one in found)
        if not around or around[0] is None or around[-1] is None:
            return None if around else own
        if own is None:  # nobody put it: its neighbour's outputs serve as well
            own = around[0]
        before, *after = self._around(step)
        weight = (step - before) / (after[0] - before) if after else 0.0
        return own.served_by(around[0], around[-1], weight)

    def edit(
        self,
        template: str,
        step: int,
        inputs: Mapping[str, Any],
        mask: Tensor,
        branch: str = "",
        wide: Mapping[int, Tensor] | None = None,
    ) -> EditStep | None:
        """The edit of one step, or None if the template has no recording for it.

        wide: by stretch of blocks the sites that see the edit (`EditStep.wide`).
        """
        cache = self.get(template, step, branch)
        if cache is None:
            return None
        return EditStep(inputs, mask, cache, any_step=not self.wants(step), wide=wide or {})

    def prefetch(self, template: str, steps: Iterable[int], branch: str = "") -> list[Future[bool]]:
        """Bring steps into memory in the background, in this order."""
        return [self.tiers.prefetch(key) for key in self._keys(template, steps, branch)]

    def in_memory(self, template: str, step: int, branch: str = "") -> bool:
        """Is everything that serves this step on the device or the host?"""
        return all(
            self.tiers.where(key) is not None for key in self._keys(template, [step], branch)
        )

    def pin(self, template: str, steps: Iterable[int], branch: str = "") -> None:
        """Keep these steps where they are; `unpin` the same ones later."""
        for key in self._keys(template, steps, branch):
            self.tiers.pin(key)

    def unpin(self, template: str, steps: Iterable[int], branch: str = "") -> None:
        for key in self._keys(template, steps, branch):
            self.tiers.unpin(key)

    def drop(self, template: str, steps: Iterable[int], branch: str = "") -> None:
        """Remove steps from every tier, and with them those that they serve."""
        for step in dict.fromkeys(steps):
            self.tiers.drop(self.key(template, step, branch))

    def _keys(self, template: str, steps: Iterable[int], branch: str) -> dict[EntryKey, None]:
        """The entries that serve these steps."""
        needed = dict.fromkeys(n for step in steps for n in (*self._around(step), step))
        known = self.denoiser.fingerprint()
        return dict.fromkeys(self.key(template, each, branch, known) for each in needed)

    def _around(self, step: int) -> tuple[int, ...]:
        """The steps whose rows serve one that isn't kept whole: the one before, and after."""
        if self.wants(step):
            return ()
        before = step - step % self.share
        if self.steps is None:
            return (before,)
        return before, min(before + self.share, self.steps - 1)

    @cached_property
    def _revision(self) -> str:
        words = [f"keep={self.keep} plans={self.denoiser.settings.plans} share={self.share}"]
        if self.denoiser.settings.stretches:
            words.append(f"between={'kept' if self.between else 'dropped'}")
        words += [] if self.steps is None else [f"steps={self.steps}"]
        words += [] if self.keeping is None else [self.keeping.name]
        if self.masks is not None:
            told = b"".join(m.numpy().tobytes() for m in (self.masks.ever, self.masks.always))
            words.append(f"masks={xxhash.xxh3_128_hexdigest(told)}")
        return " ".join(words)

    def _kept(self, cache: StepCache) -> StepCache:
        """What edits can load of a recording, packed if a budget says so."""
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
