"""The templates of one pipeline: recorded steps of each denoiser, and the latents between them."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maskfx.compiled import CompiledDenoiser
from maskfx.runtime.cache import StepCache
from maskfx.runtime.encode import SCHEMA
from maskfx.runtime.store import EntryKey
from maskfx.runtime.tiers import Tiers
from maskfx.templates import Templates

START = "start"  # what the pipeline's own preparation of latents gave
AFTER = "after"  # latents after each step


@dataclass
class Shelf:
    """Where recorded runs lie. A run is whole once its start is there, which is written last."""

    tiers: Tiers
    share: int = 1
    keep: str = "both"
    templates: dict[str, Templates] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)  # content of a picture -> template
    asked: Counter[str] = field(default_factory=Counter)
    placed: defaultdict[str, list[tuple[str, int, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )  # template -> denoiser, step and branch of what this process recorded
    _locks: defaultdict[str, threading.Lock] = field(
        default_factory=lambda: defaultdict(threading.Lock)
    )

    def of(self, name: str, denoiser: CompiledDenoiser) -> Templates:
        """One denoiser's part."""
        if name not in self.templates:
            keep = self.keep if denoiser.settings.plans else "both"
            self.templates[name] = Templates(denoiser, self.tiers, keep, self.share)
        return self.templates[name]

    @contextmanager
    def recording(self, template: str) -> Iterator[None]:
        """One run at a time records a template; the others wait for it."""
        with self._locks[template]:
            yield

    def whole(self, template: str) -> bool:
        return self.tiers.get(latents_key(template, START, 0)) is not None

    def put_latents(self, template: str, kind: str, step: int, tensors: Iterable[Tensor]) -> None:
        kept = [t.detach().clone() for t in tensors]
        dtype = kept[0].dtype if kept else torch.float32
        self.tiers.put(latents_key(template, kind, step), StepCache("latents", {}, dtype, kept, {}))

    def latents(self, template: str, kind: str, step: int) -> list[Any]:
        """What was put there; nothing if it is gone."""
        found = self.tiers.get(latents_key(template, kind, step))
        return found.cache.output if found is not None else []

    def put(self, template: str, name: str, step: int, branch: str, cache: StepCache) -> None:
        """Keep a recorded step of the denoiser of this name."""
        self.templates[name].put(template, step, cache, branch)
        self.placed[template].append((name, step, branch))

    def prefetch(self, template: str) -> None:
        """Begin to bring a template's steps into memory."""
        for name, step, branch in self.placed[template]:
            self.templates[name].prefetch(template, [step], branch)

    def pin(self, template: str) -> None:
        """Keep a template's steps in memory."""
        for name, step, branch in self.placed[template]:
            self.templates[name].pin(template, [step], branch)


def latents_key(template: str, kind: str, step: int) -> EntryKey:
    return EntryKey(template, "latents", "", "", f"torch {torch.__version__}", SCHEMA, step, kind)
