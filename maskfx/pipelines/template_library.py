"""The templates of one pipeline: recorded steps of each denoiser, and the latents between them."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from maskfx.errors import BudgetError
from maskfx.pipelines.schedule import Schedule
from maskfx.runtime.cache.serialize import SCHEMA
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.store_entry import EntryKey
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.explain import amount
from maskfx.runtime.sites.masks import Masks
from maskfx.runtime.templates.budget import Budget
from maskfx.runtime.templates.templates import Templates

START = "begin"  # what the pipeline's own preparation of latents gave
AFTER = "after"  # latents after each step
LATENTS = "latents"  # stands among the denoisers' names

KNOWN = 4096  # templates that something is remembered of; the oldest are forgotten
LOOK = 0.05  # seconds between two looks whether a request that waits is to go on
SELDOM = 64  # requests, at most, between two tries to record what couldn't be

Slot = tuple[str, int, str]  # denoiser, step, branch
Aside = Callable[[Callable[[], bool]], None]  # waits until that is so, or raises


def patiently(done: Callable[[], bool]) -> None:
    """Nobody may give up this wait."""
    while not done():
        pass


class TemplateIncomplete(Exception):
    """Something that a template was recorded with isn't there any more; ends the run."""


class ScheduleMismatch(Exception):
    """The template was recorded in other steps than the run makes; ends the run."""


@dataclass(frozen=True)
class TemplateSource:
    """A template, or one picture of so many that it was recorded with."""

    name: str
    index: int = 0
    count: int = 1

    def elements(self, batch: int) -> range:
        """Which of a recorded batch are this picture's: branches of guidance lie in order."""
        return range(self.index, batch, self.count) if batch % self.count == 0 else range(batch)


@dataclass(frozen=True)
class RecordingFailure:
    """Why a template couldn't be had, after so many tries, and which request tries again."""

    why: str
    tries: int
    again: int


@dataclass(frozen=True)
class StoredTemplate:
    """A template that is there, its bytes by tier, and whether it is kept until it is forgotten."""

    name: str
    nbytes: dict[str, int]
    pinned: bool


@dataclass
class TemplateLibrary:
    """Where recorded runs lie. A run is whole once its start is there, which is written last.

    budget: what all of one run may take, its latents too; it decides share and keep.
    """

    tiers: Tiers
    share: int = 1
    keep: str = "both"
    budget: Budget | None = None
    templates: dict[str, Templates] = field(default_factory=dict)
    pictures: dict[str, TemplateSource] = field(default_factory=dict)  # by their content
    asked: Counter[str] = field(default_factory=Counter)
    refused: dict[str, RecordingFailure] = field(default_factory=dict)
    renewed: dict[str, str] = field(default_factory=dict)  # recorded again, and why
    _pinned: dict[str, list[EntryKey]] = field(default_factory=dict)
    _placed: defaultdict[str, list[Slot]] = field(default_factory=lambda: defaultdict(list))
    _slots: dict[str, frozenset[Slot]] = field(default_factory=dict)
    _elements: dict[str, Counter[int]] = field(default_factory=dict)  # being recorded, by step
    _locks: defaultdict[str, threading.Lock] = field(
        default_factory=lambda: defaultdict(threading.Lock)
    )

    def of(
        self,
        name: str,
        denoiser: CompiledDenoiser,
        shape: tuple[int, ...] = (),
        start: Sequence[Tensor] = (),
    ) -> Templates:
        """One denoiser's part; a budget has to know a mask's shape and what a run begins with."""
        if name not in self.templates:
            keep = self.keep if denoiser.settings.plans else "both"
            if self.budget is None:
                self.templates[name] = Templates(denoiser, self.tiers, keep, self.share)
            else:
                left = rest_of(self.budget, start)
                masks = Masks.anywhere(*shape)
                self.templates[name] = Templates(denoiser, self.tiers, masks=masks, budget=left)
        return self.templates[name]

    @contextmanager
    def recording(self, template: str, aside: Aside = patiently) -> Iterator[None]:
        """One run at a time records a template; the others wait for it."""
        trim(self._locks, lambda lock: not lock.locked())
        lock = self._locks[template]
        while not lock.acquire(blocking=False):
            aside(lambda: is_free(lock))
        try:
            yield
        finally:
            self._placed.pop(template, None)  # of a run that failed
            self._elements.pop(template, None)
            lock.release()

    def ask(self, template: str) -> int:
        """How often it was asked for, this time included."""
        self.asked[template] = asked = self.asked[template] + 1
        trim(self.asked)
        trim(self.refused)
        trim(self.renewed)
        return asked

    def refuse(self, template: str, why: str) -> None:
        """It couldn't be recorded; later requests for it try again, ever more seldom."""
        known = self.refused.get(template)
        tries = 1 if known is None else known.tries + 1
        again = self.asked[template] + min(2 ** (tries - 1), SELDOM)
        self.refused[template] = RecordingFailure(why, tries, again)
        self.lose(template)

    def refusal(self, template: str, asked: float) -> str | None:
        """Why the request of this number goes without it, if it has to."""
        known = self.refused.get(template)
        return known.why if known is not None and asked < known.again else None

    # One template.

    def begin(self, template: str) -> None:
        """Its steps come now."""
        self._placed[template] = []
        self._elements[template] = Counter()

    def put(self, template: str, name: str, step: int, branch: str, cache: StepCache) -> None:
        """Keep a recorded step of the denoiser of this name."""
        if self.budget is not None:
            self._check_branches(template, step, cache.sizes.get("batch", 1), self.budget)
        self.templates[name].put(template, step, cache, branch)
        self._placed[template].append((name, step, branch))

    def _check_branches(self, template: str, step: int, count: int, budget: Budget) -> None:
        """A step's calls so far, this one included, are no more elements than the budget is for."""
        elements = self._elements[template]
        total = elements[step] + count
        if total > budget.branches:
            raise BudgetError(
                f"step {step} has {total} branches of guidance times pictures, the budget is for "
                f"{budget.branches}; give Budget(branches={total}), or more if calls follow"
            )
        elements[step] = total

    def put_latents(self, template: str, step: int, latents: Tensor) -> None:
        """Keep the latents after a step."""
        self._put(template, AFTER, step, [latents], [])
        self._placed[template].append((LATENTS, step, AFTER))

    def finish(
        self, template: str, start: Iterable[Tensor], schedule: Schedule | None = None
    ) -> None:
        """All steps are there; `start` is what the run began with."""
        placed = self._placed.pop(template, [])
        told = None if schedule is None else schedule.stored()
        self._put(template, START, 0, start, [[list(slot) for slot in placed], told])
        self._slots[template] = frozenset(placed)
        trim(self._slots)

    def whole(self, template: str) -> bool:
        """Was it recorded, to its end?"""
        return self.tiers.get(latents_key(template, START, 0)) is not None

    def has(self, template: str) -> bool:
        """Does it seem to be whole? It isn't read."""
        return self._there(latents_key(template, START, 0))

    def given(self, template: str) -> bool:
        """Is it a run that made a picture? Then no other run can record it again."""
        return any(source.name == template for source in list(self.pictures.values()))

    def made(self, template: str, pictures: Sequence[str]) -> None:
        """These pictures, by their content, are what its run made."""
        for i, content in enumerate(pictures):
            self.pictures[content] = TemplateSource(template, i, len(pictures))
        trim(self.pictures)

    def lose(self, template: str) -> None:
        """Something of it is gone: it isn't whole any more, and may be recorded again."""
        self._slots.pop(template, None)
        self.tiers.drop(latents_key(template, START, 0))

    def slots(self, template: str) -> frozenset[Slot]:
        """What was recorded: calls of denoisers, and the latents after steps."""
        slots = self._slots.get(template)
        if slots is None:
            found = self.tiers.get(latents_key(template, START, 0))
            if found is None:
                return frozenset()
            slots = frozenset((n, s, b) for n, s, b in found.cache.constants[0])
            self._slots[template] = slots
            trim(self._slots)
        return slots

    def schedule(self, template: str) -> Schedule | None:
        """The steps that it was recorded in, if anybody told."""
        found = self.tiers.get(latents_key(template, START, 0))
        told = None if found is None else found.cache.constants[1]
        return None if told is None else Schedule(**told)

    def kept(self, template: str, denoisers: Mapping[str, CompiledDenoiser]) -> bool:
        """Is it whole, and are all its steps somewhere?"""
        if not self.whole(template):
            return False
        keys = (
            self.of(name, denoisers[name]).key(template, step, branch)
            for name, step, branch in self.slots(template)
            if name in denoisers and (self.budget is None or name in self.templates)
        )
        return all(self._there(key) for key in keys)

    def start(self, template: str) -> list[Any]:
        """What the run began with; nothing if it is gone."""
        return self._latents(template, START, 0)

    def after(self, template: str, step: int) -> list[Any]:
        """The latents after a step; nothing if they are gone."""
        return self._latents(template, AFTER, step)

    def prefetch(self, template: str) -> None:
        """Begin to bring a template's steps into memory."""
        for name, step, branch in self._ordered(template):
            self.templates[name].prefetch(template, [step], branch)

    def in_memory(self, template: str, step: int, name: str) -> bool:
        """Can all that serves a step of this denoiser be had without reading it from disk?"""
        branches = [b for n, s, b in self.slots(template) if (n, s) == (name, step)]
        part = self.templates.get(name)
        return part is not None and all(part.in_memory(template, step, b) for b in branches)

    def pin(self, template: str) -> None:
        """Keep a template in memory until it is forgotten."""
        if template not in self._pinned:
            self._pinned[template] = self.keys(template)
            for key in self._pinned[template]:
                self.tiers.pin(key)

    def unpin(self) -> None:
        """Pin nothing any more, before the shelf itself is let go."""
        for template in list(self._pinned):
            for key in self._pinned.pop(template, ()):
                self.tiers.unpin(key)

    def nbytes(self, template: str) -> Counter[str]:
        """What a template takes, by the tier's name."""
        found: Counter[str] = Counter()
        for key in self.keys(template):
            for tier, nbytes in self.tiers.bytes_of(key).items():
                found[tier.value] += nbytes
        return found

    def shelved(self) -> list[StoredTemplate]:
        """What was recorded here, or found on disk by a call, and is still there."""
        known = dict.fromkeys([*list(self._slots), *list(self._pinned)])
        there = [name for name in known if self.has(name)]
        return [
            StoredTemplate(name, dict(self.nbytes(name)), name in self._pinned) for name in there
        ]

    def forget(self, template: str) -> None:
        """Remove a template from every tier, pinned or not."""
        keys = self.keys(template)
        for key in self._pinned.pop(template, ()):
            self.tiers.unpin(key)
        for key in keys:
            self.tiers.drop(key)
        self._slots.pop(template, None)
        self.asked.pop(template, None)
        self.refused.clear()  # others may have room now
        self.renewed.pop(template, None)
        for content, source in list(self.pictures.items()):
            if source.name == template:
                self.pictures.pop(content, None)

    def keys(self, template: str) -> list[EntryKey]:
        """Every entry of a template: its recorded steps, the latents between them, its start."""
        slots = self._ordered(template)
        keys = [self.templates[n].key(template, step, branch) for n, step, branch in slots]
        after = sorted(step for name, step, _ in self.slots(template) if name == LATENTS)
        keys += [latents_key(template, AFTER, step) for step in after]
        return [*keys, latents_key(template, START, 0)]

    def _ordered(self, template: str) -> list[Slot]:
        known = [slot for slot in self.slots(template) if slot[0] in self.templates]
        return sorted(known, key=lambda slot: (slot[1], slot[0], slot[2]))

    def _there(self, key: EntryKey) -> bool:
        store = self.tiers.store
        return self.tiers.where(key) is not None or (store is not None and store.touch(key))

    def _put(
        self, template: str, kind: str, step: int, tensors: Iterable[Tensor], told: list[Any]
    ) -> None:
        kept = [t.detach().clone() for t in tensors]
        dtype = kept[0].dtype if kept else torch.float32
        cache = StepCache("latents", {}, dtype, kept, {}, constants=told)
        self.tiers.put(latents_key(template, kind, step), cache)

    def _latents(self, template: str, kind: str, step: int) -> list[Any]:
        found = self.tiers.get(latents_key(template, kind, step))
        return found.cache.output if found is not None else []


def is_free(lock: threading.Lock) -> bool:
    """Has nobody got it? It may take a look to know."""
    if not lock.acquire(timeout=LOOK):
        return False
    lock.release()
    return True


def trim(known: dict[str, Any], may_go: Callable[[Any], bool] = lambda _: True) -> None:
    """Forget the oldest, many at a time."""
    if len(known) <= KNOWN:
        return
    for name in list(known)[: len(known) - KNOWN + KNOWN // 8]:
        value = known.get(name)
        if value is not None and may_go(value):
            known.pop(name, None)


def rest_of(budget: Budget, start: Sequence[Tensor]) -> Budget:
    """What is left for a denoiser's steps beside the latents, which are kept after each step."""
    latents = sum(t.nbytes for t in start) + budget.steps * sum(t.nbytes for t in start[:1])
    if latents >= budget.nbytes:
        raise BudgetError(
            f"budget: {budget.steps} steps' latents alone take {amount(latents)}B, the budget is "
            f"{amount(budget.nbytes)}B; give more"
        )
    return replace(budget, nbytes=budget.nbytes - latents)


def latents_key(template: str, kind: str, step: int) -> EntryKey:
    return EntryKey(template, LATENTS, "", "", f"torch {torch.__version__}", SCHEMA, step, kind)
