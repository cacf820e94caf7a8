"""Courses: what each denoiser call of a run becomes, and what its latents are outside the mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from maskfx.compiled import CompiledDenoiser
from maskfx.pipelines.masks import Box, cropped, grid_of, grown, pooled
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.shelf import AFTER, START, Shelf
from maskfx.runtime.cache import StepCache
from maskfx.session import EditSession
from maskfx.steps import AnyStep, DenseStep, EditStep, RecordStep


@dataclass(frozen=True)
class Place:
    """Which call of a run: its denoiser's name, the scheduler's step, the branch within it."""

    name: str
    step: int
    branch: str


class Course(Protocol):
    """What a run wants of its calls."""

    def prepared(
        self, outputs: Sequence[Any], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[Any]: ...

    def ask(self, place: Place, denoiser: CompiledDenoiser, inputs: Mapping[str, Any]) -> AnyStep:
        """The step that this call shall be."""
        ...

    def take(self, place: Place, result: Any) -> Any:
        """The call's output, of what its step gave."""
        ...

    def stepped(self, step: int, latents: Tensor) -> Tensor: ...


class DenseCourse:
    """Everything in full; only batched."""

    def prepared(
        self, outputs: Sequence[Any], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[Any]:
        return outputs

    def ask(self, place: Place, denoiser: CompiledDenoiser, inputs: Mapping[str, Any]) -> AnyStep:
        return DenseStep(inputs)

    def take(self, place: Place, result: Any) -> Any:
        return result

    def stepped(self, step: int, latents: Tensor) -> Tensor:
        return latents


@dataclass
class RecordCourse:
    """Everything in full, and kept as a template; it is whole once `finish` was called."""

    shelf: Shelf
    template: str
    _start: list[Tensor] = field(default_factory=list)
    _asked: set[Place] = field(default_factory=set)

    def prepared(
        self, outputs: Sequence[Any], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[Any]:
        self._start = [v.clone() for v in outputs if isinstance(v, Tensor)]
        return outputs

    def ask(self, place: Place, denoiser: CompiledDenoiser, inputs: Mapping[str, Any]) -> AnyStep:
        if not self.shelf.of(place.name, denoiser).wants(place.step):
            return DenseStep(inputs)
        self._asked.add(place)
        return RecordStep(inputs)

    def take(self, place: Place, result: Any) -> Any:
        if place not in self._asked:
            return result
        self._asked.remove(place)
        output, cache = result
        self.shelf.put(self.template, place.name, place.step, place.branch, cache)
        return output

    def stepped(self, step: int, latents: Tensor) -> Tensor:
        self.shelf.put_latents(self.template, AFTER, step, [latents])
        return latents

    def finish(self) -> None:
        self.shelf.put_latents(self.template, START, 0, self._start)


@dataclass
class EditCourse:
    """Masked sites only, from a template or from the run's own steps.

    Outside the mask the latents are the template's at every step, so that the background is the one
    that was recorded, whatever the noise of this run.
    """

    mask: Tensor  # of pixels
    quality: Quality
    shelf: Shelf
    template: str | None
    steps: int | None = None  # of the scheduler, if known
    notes: Counter[str] = field(default_factory=Counter)  # what ran in full, for explain()
    _pixels: Tensor | None = None  # of what the pipeline works on
    _tokens: int = 0
    _sites: dict[tuple[int, ...], Tensor | None] = field(default_factory=dict)
    _sessions: dict[str, EditSession] = field(default_factory=dict)
    _asked: dict[Place, EditSession] = field(default_factory=dict)
    _shapes: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    _weights: dict[str, str] = field(default_factory=dict)  # they don't change during a run

    def prepared(
        self, outputs: Sequence[Any], height: int | None, width: int | None, box: Box | None
    ) -> Sequence[Any]:
        mask = cropped(self.mask, box)
        self._pixels = pooled(mask, (int(height or mask.shape[0]), int(width or mask.shape[1])))
        first = next((v for v in outputs if isinstance(v, Tensor)), None)
        if first is not None and first.dim() == 3:
            self._tokens = first.shape[1]
        if self.template is None:
            return outputs
        kept = iter(self.shelf.latents(self.template, START, 0))
        return [self._outside(v, next(kept, None)) if isinstance(v, Tensor) else v for v in outputs]

    def ask(self, place: Place, denoiser: CompiledDenoiser, inputs: Mapping[str, Any]) -> AnyStep:
        mask = self._mask_of(place.name, denoiser, inputs)
        if mask is None:
            self.notes[f"{place.name}: its sites are no grid of the picture; it runs dense"] += 1
            return DenseStep(inputs)
        ends = self.steps is not None and place.step >= self.steps - self.quality.last
        if place.step < self.quality.first or ends:
            return DenseStep(inputs)
        if self.template is not None:
            part = self.shelf.of(place.name, denoiser)
            if place.name not in self._weights:
                self._weights[place.name] = denoiser.fingerprint()
            weights = self._weights[place.name]
            cache = part.get(self.template, place.step, place.branch, weights)
            if cache is not None:
                fitted = of_batch(cache, batch_of(inputs, cache))
                return EditStep(inputs, mask, fitted, any_step=not part.wants(place.step))
            self.notes[f"{place.name}: no recording of a step; it goes by its own steps"] += 1
        session = self._sessions.get(place.name)
        if session is None or session.mask.shape != mask.shape:
            session = self._sessions[place.name] = EditSession(mask, self.quality.cold())
        self._asked[place] = session
        return session.ask(place.step, place.branch, inputs)

    def take(self, place: Place, result: Any) -> Any:
        session = self._asked.pop(place, None)
        return result if session is None else session.take(place.step, place.branch, result)

    def stepped(self, step: int, latents: Tensor) -> Tensor:
        if self.template is None:
            return latents
        kept = self.shelf.latents(self.template, AFTER, step)
        return self._outside(latents, kept[0] if kept else None)

    def _outside(self, own: Tensor, kept: Tensor | None) -> Tensor:
        """Own values where masked, the template's elsewhere."""
        if kept is None or kept.dim() != own.dim() or kept.shape[1:] != own.shape[1:]:
            return own
        sites = self._sites_of(tuple(own.shape))
        if sites is None:
            return own
        index = [i * len(kept) // len(own) for i in range(len(own))]
        return torch.where(sites.to(own.device), own, kept[index].to(own))

    def _sites_of(self, shape: tuple[int, ...]) -> Tensor | None:
        """The mask over a latent of this shape, ready to broadcast."""
        if len(shape) == 3:
            sites = self._packed(shape[1])
            return None if sites is None else sites[:, None]
        return self._grid(shape[-2:]) if len(shape) in (4, 5) else None

    def _grid(self, size: tuple[int, ...]) -> Tensor:
        assert self._pixels is not None, "a pipeline prepares its latents first"
        if size not in self._sites:
            self._sites[size] = grown(pooled(self._pixels, size), self.quality.margin)
        found = self._sites[size]
        assert found is not None
        return found

    def _packed(self, tokens: int) -> Tensor | None:
        """The mask over tokens in rows; those that follow the latents' own are references."""
        own = self._tokens if 0 < self._tokens <= tokens else tokens
        assert self._pixels is not None, "a pipeline prepares its latents first"
        grid = grid_of(own, *self._pixels.shape)
        if grid is None:
            return None
        return torch.cat([self._grid(grid).flatten(), torch.zeros(tokens - own, dtype=torch.bool)])

    def _mask_of(
        self, name: str, denoiser: CompiledDenoiser, inputs: Mapping[str, Any]
    ) -> Tensor | None:
        if self._pixels is None:
            return None
        picture = next(
            (v.shape for v in inputs.values() if isinstance(v, Tensor) and v.dim() >= 3), None
        )
        key = (name, picture)
        if key not in self._shapes:
            self._shapes[key] = denoiser.mask_shape(inputs)
        shape = self._shapes[key]
        if not prod(shape):
            return None
        return self._grid(shape) if len(shape) == 2 else self._packed(shape[0])


def batch_of(inputs: Mapping[str, Any], cache: StepCache) -> int:
    """The batch of a call; lists of samples have none."""
    if "batch" not in cache.sizes:
        return 1
    found = (v for v in inputs.values() if isinstance(v, Tensor) and v.dim() >= 3)
    return next(found, torch.empty(cache.sizes["batch"])).shape[0]


def of_batch(cache: StepCache, batch: int) -> StepCache:
    """A recording for a call of another batch.

    Branches of guidance lie in order, each with all its pictures; without guidance the last, the
    conditional one, is left.
    """
    kept = cache.sizes.get("batch", batch)
    if kept == batch:
        return cache
    if batch < kept:
        return cache.of_elements(range(kept - batch, kept))
    return cache.of_elements([i * kept // batch for i in range(batch)])
