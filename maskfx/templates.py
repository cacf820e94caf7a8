"""Templates: recorded steps by what they are functions of, from whichever tier has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maskfx.compiled import CompiledDenoiser
from maskfx.errors import InputError
from maskfx.program import KEYS
from maskfx.runtime.cache import StepCache
from maskfx.runtime.encode import SCHEMA
from maskfx.runtime.store import EntryKey
from maskfx.runtime.tiers import Tiers
from maskfx.steps import EditStep

KEEPS = ("both", "keys", "inputs")


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
    share: so many neighbouring steps are served by the recording of the first: fewer bytes, and
    another picture (`bench/storage.py` measures how far).
    """

    denoiser: CompiledDenoiser
    tiers: Tiers
    keep: str = "both"
    share: int = 1
    between: bool = True

    def __post_init__(self) -> None:
        if self.keep not in KEEPS:
            raise InputError(f"Templates: keep={self.keep!r}: choose one of {', '.join(KEEPS)}")
        if type(self.share) is not int or self.share < 1:
            raise InputError(f"Templates: share={self.share!r}: give 1 or more steps")

    def key(
        self, template: str, step: int, branch: str = "", weights: str | None = None
    ) -> EntryKey:
        """The entry that serves this step; `weights` is the denoiser's fingerprint, if known."""
        known = self.denoiser.fingerprint() if weights is None else weights
        parameter = next(self.denoiser.module.parameters(), torch.empty(0))
        return EntryKey(
            template=template,
            model=f"{type(self.denoiser.module).__name__} {known}",
            revision=f"keep={self.keep} plans={self.denoiser.settings.plans}{self._stretches()}",
            dtype=str(parameter.dtype).removeprefix("torch."),
            numerics=f"torch {torch.__version__} {parameter.device.type}",
            schema=SCHEMA,
            step=step - step % self.share,
            branch=branch,
        )

    def wants(self, step: int) -> bool:
        """Is this step's recording kept, or does a neighbour's serve it?"""
        return step % self.share == 0

    def put(self, template: str, step: int, cache: StepCache, branch: str = "") -> None:
        """Keep a recording; one that a neighbour's stands for is dropped."""
        if self.wants(step):
            self.tiers.put(self.key(template, step, branch), cache, self._kept(cache))

    def get(
        self, template: str, step: int, branch: str = "", weights: str | None = None
    ) -> StepCache | None:
        """The recording that serves this step."""
        found = self.tiers.get(self.key(template, step, branch, weights))
        return found.cache if found is not None else None

    def edit(
        self, template: str, step: int, inputs: Mapping[str, Any], mask: Tensor, branch: str = ""
    ) -> EditStep | None:
        """The edit of one step, or None if the template has no recording for it."""
        cache = self.get(template, step, branch)
        if cache is None:
            return None
        return EditStep(inputs, mask, cache, any_step=not self.wants(step))

    def prefetch(self, template: str, steps: Iterable[int], branch: str = "") -> list[Future[bool]]:
        """Bring steps into memory in the background, in this order."""
        keys = dict.fromkeys(self.key(template, step, branch) for step in steps)
        return [self.tiers.prefetch(key) for key in keys]

    def pin(self, template: str, steps: Iterable[int], branch: str = "") -> None:
        """Keep these steps where they are; `unpin` the same ones later."""
        for key in dict.fromkeys(self.key(template, step, branch) for step in steps):
            self.tiers.pin(key)

    def unpin(self, template: str, steps: Iterable[int], branch: str = "") -> None:
        for key in dict.fromkeys(self.key(template, step, branch) for step in steps):
            self.tiers.unpin(key)

    def drop(self, template: str, steps: Iterable[int], branch: str = "") -> None:
        """Remove steps from every tier."""
        for key in dict.fromkeys(self.key(template, step, branch) for step in steps):
            self.tiers.drop(key)

    def _stretches(self) -> str:
        between = "kept" if self.between else "dropped"
        return f" between={between}" if self.denoiser.settings.stretches else ""

    def _kept(self, cache: StepCache) -> set[str] | None:
        """The taps that plans and stretches can load; None for all of them."""
        program = self.denoiser.programs.get(cache.program)
        if (self.keep == "both" and self.between) or program is None:
            return None
        left = set(cache.rows)
        if not self.between:
            left -= program.interface.crossing_taps()
        for region in program.interface.regions_of(KEYS) if self.keep != "both" else ():
            keys, inputs = program.interface.region_taps(region)
            left -= inputs - keys if self.keep == "keys" else keys - inputs
        return left
