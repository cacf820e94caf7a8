"""Templates of one pipeline: recorded steps of each denoiser, and the latents between them."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from maskfx.errors import InputError, MissingRequest
from maskfx.pipelines.call_policy import CallPosition
from maskfx.pipelines.schedules.schedule import Schedule
from maskfx.pipelines.templates.budget_shares import BudgetShares, RecordedPart, check_branches
from maskfx.pipelines.templates.recording_attempts import RecordingAttempts, trim
from maskfx.pipelines.waiting import Wait, wait_for_lock, wait_uninterrupted
from maskfx.runtime.cache.serialize import SCHEMA
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.cache.stores.store_entry import EntryKey
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.load_choice import is_for_stores
from maskfx.runtime.reuse.step_selection import EVERY_STEP, StepSelection
from maskfx.runtime.sites.masks import Masks
from maskfx.runtime.templates.budget import Budget
from maskfx.runtime.templates.footprint import Footprint, least_bytes
from maskfx.runtime.templates.templates import Templates

START = "begin"  # the outputs of the pipeline's `prepare_latents`
AFTER = "after"  # latents after each step
LATENTS = "latents"  # used in place of a denoiser's name

CODED_SHARE = 4  # a template's recorded calls of autoencoders take this part of the memory at most


class TemplateIncomplete(Exception):
    """An entry that a template was recorded with is missing or doesn't fit; ends the run."""


class ScheduleMismatch(Exception):
    """The template was recorded with another schedule than the run's; ends the run."""


@dataclass(frozen=True)
class TemplateSource:
    """A template, or image number `index` of the `count` images that it was recorded with."""

    name: str
    index: int = 0
    count: int = 1

    def elements(self, batch: int) -> range:
        """Return this image's elements of a recorded batch; guidance branches lie in order."""
        return range(self.index, batch, self.count) if batch % self.count == 0 else range(batch)


@dataclass(frozen=True)
class StoredTemplate:
    """An available template, its bytes by tier, and whether it is pinned until it is forgotten."""

    name: str
    nbytes: dict[str, int]
    pinned: bool


@dataclass
class TemplateLibrary:
    """Stores recorded runs. A run is complete once its start is stored, which is written last.

    `budget` limits the bytes of one run, its latents included; it decides `share` and `keep`. Runs
    with a budget store the steps of `selection` only.
    """

    tiers: Tiers
    share: int = 1
    keep: str = "both"
    budget: Budget | None = None
    selection: StepSelection = EVERY_STEP
    shares: BudgetShares = field(default_factory=BudgetShares)
    templates: dict[str, Templates] = field(default_factory=dict)
    pictures: dict[str, TemplateSource] = field(default_factory=dict)  # by digest of their content
    attempts: RecordingAttempts = field(default_factory=RecordingAttempts)
    _pinned: dict[str, list[EntryKey]] = field(default_factory=dict)
    _placed: defaultdict[str, list[CallPosition]] = field(default_factory=lambda: defaultdict(list))
    _recorded: dict[str, frozenset[CallPosition]] = field(default_factory=dict)
    # of templates in recording: batch elements, and what was recorded before shares were decided
    _elements: dict[str, Counter[tuple[str, int]]] = field(default_factory=dict)
    _early: dict[str, list[tuple[CallPosition, StepCache]]] = field(default_factory=dict)
    _coded: Counter[str] = field(default_factory=Counter)  # bytes of autoencoders' calls
    _locks: defaultdict[str, threading.Lock] = field(
        default_factory=lambda: defaultdict(threading.Lock)
    )

    def without(self, component: str) -> TemplateLibrary:
        """Return a library of the same runs for a pipeline that has another such component."""
        kept = {n: own for n, own in self.templates.items() if n.partition(".")[0] != component}
        return replace(self, templates=kept)

    def templates_of(
        self,
        name: str,
        denoiser: CompiledDenoiser,
        shape: tuple[int, ...] = (),
        start: Sequence[Tensor] = (),
        template: str | None = None,
    ) -> Templates:
        """Return one denoiser's templates.

        A budget needs the mask's shape, the initial latents, and the denoiser's share: decided, or
        that with which `template` was recorded.
        """
        if name not in self.templates:
            keep = self.keep if denoiser.settings.plans else "both"
            if keep == "both" and is_for_stores(denoiser):
                keep = "keys"  # plans by default take no further bytes
            if self.budget is None:
                kept = Templates(denoiser, self.tiers, keep, self.share, part=name)
                self.templates[name] = kept
            else:
                if name not in self.shares.known and template is not None:
                    self.shares.recall(self.tiers.get(latents_key(template, START, 0)))
                left = self.shares.of(name, self.budget, start, self.selection)
                masks = Masks.anywhere(*shape)
                kept = Templates(denoiser, self.tiers, masks=masks, budget=left, part=name)
                self.templates[name] = kept
        return self.templates[name]

    def take_room(
        self, template: str, denoiser: CompiledDenoiser, inputs: Mapping[str, object]
    ) -> bool:
        """Take the room of a recorded call of an autoencoder; return False if there is none.

        The autoencoders' calls of a template together leave room for the recordings of steps. False
        too if the call can't be narrowed. A call that surely has no room isn't captured.
        """
        room = self.tiers.room / CODED_SHARE - self._coded[template]
        if not denoiser.compilations and least_bytes(denoiser, inputs, self.tiers.encoding) > room:
            return False
        try:
            masks = Masks.anywhere(*denoiser.mask_shape(inputs))
            footprint = Footprint.of(denoiser, masks)
        except (InputError, MissingRequest):
            return False
        batch = next(v.shape[0] for v in inputs.values() if isinstance(v, Tensor))
        needed = batch * footprint.together(self.tiers.encoding)
        if needed > room:
            return False
        self._coded[template] += needed
        return True

    @contextmanager
    def recording(self, template: str, wait: Wait = wait_uninterrupted) -> Iterator[None]:
        """Hold the lock of a template: one run at a time records it, the others wait."""
        trim(self._locks, lambda lock: not lock.locked())
        lock = self._locks[template]
        while not lock.acquire(blocking=False):
            wait(lambda seconds: wait_for_lock(lock, seconds))
        try:
            yield
        except BaseException:
            self._abandon(template)
            raise
        finally:
            self._placed.pop(template, None)  # left by a run that failed
            self._elements.pop(template, None)
            self._early.pop(template, None)
            self._coded.pop(template, None)
            lock.release()

    def _abandon(self, template: str) -> None:
        """Drop what a run that failed has stored of a template."""
        for name, step, kind in self._placed.get(template, []):
            if name == LATENTS:
                self.tiers.drop(latents_key(template, kind, step))
            elif name in self.templates:
                self.tiers.drop(self.templates[name].key(template, step, kind))

    def refuse(self, template: str, why: str) -> None:
        """Note that recording failed; some of the next requests run without the template."""
        self.attempts.fail(template, why)
        self.lose(template)

    # One template.

    def begin(self, template: str) -> None:
        """Start the recording of a template."""
        self._placed[template] = []
        self._elements[template] = Counter()
        self._early[template] = []
        self._coded[template] = 0

    def put(self, template: str, position: CallPosition, cache: StepCache) -> None:
        """Store a recorded call."""
        if self.budget is not None:
            check_branches(self._elements[template], position, cache, self.budget)
        self._placed[template].append(position)
        if self.budget is not None and position.name not in self.templates:
            self._early[template].append((position, cache))
        else:
            self.templates[position.name].put(template, position.step, cache, position.branch)

    def expect(
        self, name: str, denoiser: CompiledDenoiser, shape: tuple[int, ...], start: Sequence[Tensor]
    ) -> Templates | None:
        """Return a denoiser's templates for a recording; None until its share is decided."""
        if self.budget is not None and name not in self.shares.known:
            self.shares.expect(name, denoiser, shape)
            return None
        return self.templates_of(name, denoiser, shape, start)

    def decide_shares(self, template: str, parts: Mapping[str, RecordedPart]) -> None:
        """Divide the budget after a step, and store what waited for it."""
        early = self._early.get(template)
        if not early:
            return
        self._early[template] = []
        last = max(position.step for position, _ in early)
        called = {name for name, step, _ in self._placed[template] if step == last}
        self.shares.decide(called)
        for (name, step, branch), cache in early:
            part = parts[name]
            self.templates_of(name, part.denoiser, part.shape, part.start)
            self.templates[name].put(template, step, cache, branch)

    def put_latents(self, template: str, step: int, latents: Tensor) -> None:
        """Store the latents after a step."""
        self._put(template, AFTER, step, [latents], [])
        self._placed[template].append(CallPosition(LATENTS, step, AFTER))

    def finish(
        self, template: str, start: Iterable[Tensor], schedule: Schedule | None = None
    ) -> None:
        """Complete a template after its last step; `start` are the run's initial latents."""
        placed = self._placed.get(template, [])
        stored = None if schedule is None else schedule.stored()
        calls = [list(call) for call in placed]
        self._put(template, START, 0, start, [calls, stored, dict(self.shares.known)])
        self._placed.pop(template, None)
        self._recorded[template] = frozenset(placed)
        trim(self._recorded)

    def whole(self, template: str) -> bool:
        """Return True if the template was recorded to its end; reads its start."""
        return self.tiers.get(latents_key(template, START, 0)) is not None

    def has(self, template: str) -> bool:
        """Return True if the template seems to be complete, without reading it."""
        return self.tiers.holds([latents_key(template, START, 0)])

    def made_picture(self, template: str) -> bool:
        """Return True for a run that made an image, which no other run can record again."""
        return any(source.name == template for source in list(self.pictures.values()))

    def add_pictures(self, template: str, pictures: Sequence[str]) -> None:
        """Register the images, by digest of their content, that the template's run made."""
        for i, content in enumerate(pictures):
            self.pictures[content] = TemplateSource(template, i, len(pictures))
        trim(self.pictures)

    def lose(self, template: str) -> None:
        """Mark a template as incomplete, as after a lost entry, so that it is recorded again."""
        self._recorded.pop(template, None)
        self.tiers.drop(latents_key(template, START, 0))

    def recorded_calls(self, template: str) -> frozenset[CallPosition]:
        """Return what was recorded: calls of denoisers, and the latents after steps."""
        calls = self._recorded.get(template)
        if calls is None:
            found = self.tiers.get(latents_key(template, START, 0))
            if found is None:
                return frozenset()
            calls = frozenset(CallPosition(n, s, b) for n, s, b in found.cache.constants[0])
            self._recorded[template] = calls
            trim(self._recorded)
        return calls

    def schedule(self, template: str) -> Schedule | None:
        """Return the schedule that the template was recorded with; None if it wasn't stored."""
        found = self.tiers.get(latents_key(template, START, 0))
        stored = None if found is None else found.cache.constants[1]
        return None if stored is None else Schedule(**stored)

    def is_stored(self, template: str, denoisers: Mapping[str, CompiledDenoiser]) -> bool:
        """Return True if the template is complete and all its steps are in some tier."""
        if not self.whole(template):
            return False
        keys = (
            self.templates_of(name, denoisers[name]).key(template, step, branch)
            for name, step, branch in self.recorded_calls(template)
            if name in denoisers and (self.budget is None or name in self.templates)
        )
        return self.tiers.holds(list(keys))

    def start(self, template: str) -> list[Tensor]:
        """Return the run's initial latents; empty if they are missing."""
        return self._latents(template, START, 0)

    def after(self, template: str, step: int) -> list[Tensor]:
        """Return the latents after a step; empty if they are missing."""
        return self._latents(template, AFTER, step)

    def prefetch(self, template: str, rows: bool = False) -> None:
        """Prefetch a template's steps into memory; with `rows`, those that plans want too."""
        for name, step, branch in self._ordered(template):
            self.templates[name].prefetch(template, [step], branch, rows)

    def prefetch_waiting(self, keys: Sequence[EntryKey]) -> None:
        """Prefetch entries for a request that waits: of recordings the rows that plans want."""
        left = dict.fromkeys(keys)
        for part in list(self.templates.values()):
            own = part.own(left)
            part.prefetch_waiting(own)
            left = {key: None for key in left if key not in own}
        for key in left:
            self.tiers.prefetch(key)

    def in_memory(self, template: str, step: int, name: str) -> bool:
        """Return True if all entries of a denoiser's step are available without reading a disk."""
        branches = [b for n, s, b in self.recorded_calls(template) if (n, s) == (name, step)]
        part = self.templates.get(name)
        return part is not None and all(part.in_memory(template, step, b) for b in branches)

    def pin(self, template: str) -> None:
        """Keep a template in memory until it is forgotten."""
        if template not in self._pinned:
            self._pinned[template] = self.keys(template)
            for key in self._pinned[template]:
                self.tiers.pin(key)

    def unpin(self) -> None:
        """Unpin all templates, before the library itself is released."""
        for template in list(self._pinned):
            for key in self._pinned.pop(template, ()):
                self.tiers.unpin(key)

    def nbytes(self, template: str) -> Counter[str]:
        """Return the bytes of a template by name of the tier."""
        found: Counter[str] = Counter()
        for key in self.keys(template):
            for tier, nbytes in self.tiers.bytes_of(key).items():
                found[tier.value] += nbytes
        return found

    def stored_templates(self) -> list[StoredTemplate]:
        """Return the templates recorded here, or found on disk by a call, that still exist."""
        known = dict.fromkeys([*list(self._recorded), *list(self._pinned)])
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
        self._recorded.pop(template, None)
        self.attempts.forget(template)
        for content, source in list(self.pictures.items()):
            if source.name == template:
                self.pictures.pop(content, None)

    def keys(self, template: str) -> list[EntryKey]:
        """Return the keys of a template's entries: recorded steps, latents between them, start."""
        calls = self._ordered(template)
        keys = [self.templates[n].key(template, step, branch) for n, step, branch in calls]
        after = sorted(step for name, step, _ in self.recorded_calls(template) if name == LATENTS)
        keys += [latents_key(template, AFTER, step) for step in after]
        return [*keys, latents_key(template, START, 0)]

    def _ordered(self, template: str) -> list[CallPosition]:
        known = [call for call in self.recorded_calls(template) if call.name in self.templates]
        return sorted(known, key=lambda call: (call.step, call.name, call.branch))

    def _put(
        self,
        template: str,
        kind: str,
        step: int,
        tensors: Iterable[Tensor],
        constants: list[object],
    ) -> None:
        kept = [t.detach().clone() for t in tensors]
        dtype = kept[0].dtype if kept else torch.float32
        cache = StepCache("latents", {}, dtype, kept, {}, constants=constants)
        self.tiers.put(latents_key(template, kind, step), cache)

    def _latents(self, template: str, kind: str, step: int) -> list[Tensor]:
        found = self.tiers.get(latents_key(template, kind, step))
        return found.cache.output if found is not None else []


def latents_key(template: str, kind: str, step: int) -> EntryKey:
    return EntryKey(template, LATENTS, "", "", f"torch {torch.__version__}", SCHEMA, step, kind)
