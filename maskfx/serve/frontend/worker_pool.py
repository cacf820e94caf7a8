"""The ready workers as the scheduler sees them: running requests, free slots, warm templates.

Knows nothing of processes or sockets.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from maskfx.scheduling.load import Demand, Running, TemplateTier, Work, Worker

Known = TypeVar("Known")
KNOWN_TEMPLATES = 4096  # per worker; the oldest are dropped
GROW_AFTER = 16  # images since the last out-of-memory failure, before the batch limit is raised
TIERS = {"device": TemplateTier.DEVICE, "host": TemplateTier.HOST, "disk": TemplateTier.DISK}


@dataclass(eq=False)
class WorkerState:
    """The state of a ready worker."""

    load: Worker
    most: int  # slots if memory is sufficient
    moved: float  # time of the last step, or of the first request's start
    disk: str = ""  # identifies the directory of its templates
    alone: bool = False  # its request must not share the batch
    aside: set[str] = field(default_factory=set)  # requests that take no part in its steps
    good: int = 0  # images since the last out-of-memory failure
    crowd: int = 0  # requests in the current step
    spent: float = 0.0  # total seconds of all steps
    held: dict[str, dict[str, int]] = field(
        default_factory=dict
    )  # bytes in memory, by template and tier
    # id of the request that has been the only one since its start, its start, `spent` at that time
    lone: tuple[str, float, float] | None = None

    @property
    def name(self) -> str:
        return self.load.name

    def stepping(self) -> Worker:
        """Return the worker without requests that wait aside; of these, `most` are left out."""
        running = self.load.running
        aside = [one for one in running if one.demand.id in self.aside][: self.most]
        if not aside:
            return self.load
        return replace(self.load, running=[one for one in running if one not in aside])

    def start(self, demand: Demand, now: float, alone: bool) -> None:
        self.lone = None if self.load.running else (demand.id, now, self.spent)
        if not self.load.running:
            self.moved, self.crowd = now, 0  # the requests counted before have ended
        self.load.running.append(Running(demand, demand.work.steps))
        self.alone = alone
        self.crowd = max(self.crowd, len(self.load.running))

    def end(self, id: str) -> None:
        self.load.running = [r for r in self.load.running if r.demand.id != id]
        self.alone = self.alone and bool(self.load.running)

    def stepped(self, now: float, seconds: float) -> None:
        """Record a finished step. Requests that failed in it count as part of its batch."""
        self.moved, self.crowd = now, len(self.load.running)
        self.spent += seconds

    def loaded(self, batch: Sequence[Work]) -> int:
        """Return the bytes that a step of these requests loads from memory.

        0 if it reads some from disk: then its time shows the speed of neither.
        """
        tiers = {self.load.warm.get(work.template) for work in batch if work.template is not None}
        return 0 if TemplateTier.DISK in tiers else sum(work.bytes for work in batch)

    def around(self, id: str, now: float) -> float | None:
        """Return a request's seconds outside steps; None if it shared the worker."""
        if self.lone is None or self.lone[0] != id:
            return None
        _, began, spent = self.lone
        return max(0.0, now - began - (self.spent - spent))

    def moved_on(self, id: str, left: int, now: float) -> None:
        self.moved = now
        for running in self.load.running:
            if running.demand.id == id:
                running.left = max(0, left)

    def short(self) -> int:
        """Halve the slots after an out-of-memory failure; return the size of the failed batch."""
        self.load.slots, self.good = max(1, self.crowd // 2), 0
        return self.crowd

    def made(self) -> None:
        """Count a finished image; every `GROW_AFTER` of them add a slot, up to `most`."""
        self.good += 1
        if self.good % GROW_AFTER == 0:
            self.load.slots = min(self.most, self.load.slots + 1)


@dataclass
class WorkerPool:
    """The ready workers, and the templates on the disks that they share."""

    mates: dict[str, WorkerState] = field(default_factory=dict)
    on_disk: dict[str, int] = field(default_factory=dict)  # bytes by template
    disks: dict[str, set[str]] = field(default_factory=dict)  # of each template on disk

    def __len__(self) -> int:
        return len(self.mates)

    def join(self, name: str, slots: int, now: float, disk: str = "") -> None:
        """Add a worker; `disk` identifies the directory where its templates are."""
        there = [template for template in self.on_disk if disk in self.disks[template]]
        warm = dict.fromkeys(there, TemplateTier.DISK)
        self.mates[name] = WorkerState(Worker(name, slots, warm=warm), slots, now, disk)

    def leave(self, name: str) -> None:
        """Remove a worker and what it reported; templates on the disk stay."""
        self.mates.pop(name, None)

    def open(self) -> list[Worker]:
        """Return the workers that accept requests into a shared batch, as they step now."""
        return [mate.stepping() for mate in self.mates.values() if not mate.alone]

    def emptiest(self) -> WorkerState | None:
        """Return the worker with the fewest requests, for a request that must run alone."""
        free = [mate for mate in self.mates.values() if not mate.alone]
        return min(free, key=lambda mate: len(mate.load.running), default=None)

    def warmed(self, name: str, template: str, bytes: dict[str, int]) -> None:
        """Record that a worker has a template's recording.

        Args:
            name: The worker; no effect if it isn't in the pool.
            template: The template.
            bytes: Size of the recording by tier.
        """
        mate = self.mates.get(name)
        if mate is None:
            return
        tiers = [tier for key, tier in TIERS.items() if bytes.get(key)]
        remember(mate.load.warm, template, min(tiers, default=TemplateTier.HOST))
        remember(mate.held, template, bytes)
        if bytes.get("disk"):
            self.on_disk[template] = bytes["disk"]
            trim(self.on_disk)
            self.disks.setdefault(template, set()).add(mate.disk)
            trim(self.disks)
            for other in self.mates.values():
                if other.disk == mate.disk:
                    other.load.warm.setdefault(template, TemplateTier.DISK)
                    trim(other.load.warm)

    def warmed_in_memory(self, name: str, template: str, bytes: dict[str, int]) -> None:
        """Record that only this worker finds a recording, wherever its entries are."""
        self.warmed(name, template, {tier: size for tier, size in bytes.items() if tier != "disk"})

    def reader(self, template: str) -> str | None:
        """Return the worker that should read a template; None if one has it, or it isn't on disk.

        It is the one with the fewest steps left to do.
        """
        tiers = {mate.load.warm.get(template) for mate in self.mates.values()}
        if tiers & {TemplateTier.DEVICE, TemplateTier.HOST}:
            return None
        able = [m for m in self.mates.values() if m.load.warm.get(template) is TemplateTier.DISK]
        least = min(able, key=lambda m: sum(r.left for r in m.load.running), default=None)
        return None if least is None else least.name

    def read(self, name: str, template: str) -> None:
        """Record that a worker reads a template into memory."""
        remember(self.mates[name].load.warm, template, TemplateTier.HOST)

    def forget(self, template: str) -> None:
        self.on_disk.pop(template, None)
        self.disks.pop(template, None)
        for mate in self.mates.values():
            mate.load.warm.pop(template, None)
            mate.held.pop(template, None)

    def with_template(self, template: str) -> tuple[str, ...]:
        return tuple(name for name, mate in self.mates.items() if template in mate.load.warm)

    def holder(self, template: str | None, name: str) -> str | None:
        """Return the worker to start a request on that only a holder of its template can serve.

        None while all that have it are busy. Without any it is `name`, which reports that.
        """
        able = [] if template is None else self.with_template(template)
        if not able or name in able:
            return name
        return next((n for n in able if self.mates[n].load.free > 0), None)

    def sizes(self, template: str | None) -> dict[str, int]:
        """Return the size of a template's recording by tier; in memory, the largest."""
        sizes: dict[str, int] = {}
        for mate in self.mates.values():
            for tier, size in mate.held.get(template or "", {}).items():
                sizes[tier] = max(size, sizes.get(tier, 0))
        if template in self.on_disk:
            sizes["disk"] = self.on_disk[template]
        return sizes

    def size(self, template: str | None) -> int:
        """Return the largest reported size of a template's recording; 0 if unknown."""
        return max(self.sizes(template).values(), default=0)


def remember(known: MutableMapping[str, Known], template: str, value: Known) -> None:
    """Set an entry and make it the newest."""
    known.pop(template, None)
    known[template] = value
    trim(known)


def trim(known: MutableMapping[str, Known]) -> None:
    while len(known) > KNOWN_TEMPLATES:
        del known[next(iter(known))]
