"""The workers that are ready, as the scheduler sees them: what each runs, has room for, keeps warm.

Knows nothing of processes or sockets.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from maskfx.serve.scheduling.load import Demand, Running, TemplateTier, Worker

KNOWN_TEMPLATES = 4096  # of a worker; the oldest are forgotten
GROW_AFTER = 16  # pictures without a shortage of memory, before a batch may grow again
TIERS = {"device": TemplateTier.DEVICE, "host": TemplateTier.HOST, "disk": TemplateTier.DISK}


@dataclass(eq=False)
class WorkerState:
    """A worker that is ready."""

    load: Worker
    most: int  # slots, when memory suffices
    moved: float  # when a step was made, or its first request started
    alone: bool = False  # the request that it runs bears no other beside it
    good: int = 0  # pictures since a shortage
    crowd: int = 0  # requests of the step under way
    spent: float = 0.0  # seconds of all steps so far
    lone: tuple[str, float, float] | None = None  # who has had it alone; since when; spent then

    @property
    def name(self) -> str:
        return self.load.name

    def start(self, demand: Demand, now: float, alone: bool) -> None:
        self.lone = None if self.load.running else (demand.id, now, self.spent)
        if not self.load.running:
            self.moved, self.crowd = now, 0  # whatever crowd there was, it is gone
        self.load.running.append(Running(demand, demand.work.steps))
        self.alone = alone
        self.crowd = max(self.crowd, len(self.load.running))

    def end(self, id: str) -> None:
        self.load.running = [r for r in self.load.running if r.demand.id != id]
        self.alone = self.alone and bool(self.load.running)

    def stepped(self, now: float, seconds: float) -> None:
        """A step is over. Who failed in it has been counted in its crowd."""
        self.moved, self.crowd = now, len(self.load.running)
        self.spent += seconds

    def around(self, id: str, now: float) -> float | None:
        """What a request took besides steps; known if nobody was beside it."""
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
        """Memory didn't suffice for this batch: half of it may run from now on."""
        self.load.slots, self.good = max(1, self.crowd // 2), 0
        return self.crowd

    def made(self) -> None:
        """A picture more: by and by the batch may grow again."""
        self.good += 1
        if self.good % GROW_AFTER == 0:
            self.load.slots = min(self.most, self.load.slots + 1)


@dataclass
class WorkerPool:
    """All of them, and the templates that any can load from disk."""

    mates: dict[str, WorkerState] = field(default_factory=dict)
    on_disk: dict[str, int] = field(default_factory=dict)  # bytes
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)  # by template and tier

    def __len__(self) -> int:
        return len(self.mates)

    def join(self, name: str, slots: int, now: float) -> None:
        warm = dict.fromkeys(self.on_disk, TemplateTier.DISK)
        self.mates[name] = WorkerState(Worker(name, slots, warm=warm), slots, now)

    def leave(self, name: str) -> None:
        """What it alone had in memory is gone."""
        gone = self.mates.pop(name, None)
        for template in gone.load.warm if gone is not None else ():
            left = {mate.load.tier(template) for mate in self.mates.values()}
            if left <= {TemplateTier.DISK, TemplateTier.NONE}:
                self.bytes.pop(template, None)
                if template in self.on_disk:
                    self.bytes[template] = {"disk": self.on_disk[template]}

    def open(self) -> list[Worker]:
        """Where requests may run beside others."""
        return [mate.load for mate in self.mates.values() if not mate.alone]

    def emptiest(self) -> WorkerState | None:
        """For a request that must run alone: where the fewest others are to be waited for."""
        free = [mate for mate in self.mates.values() if not mate.alone]
        return min(free, key=lambda mate: len(mate.load.running), default=None)

    def warmed(self, name: str, template: str, bytes: dict[str, int]) -> None:
        """A worker served from a template's recording: it has it."""
        mate = self.mates.get(name)
        if mate is None:
            return
        held = [tier for key, tier in TIERS.items() if bytes.get(key)]
        self._know(mate.load, template, min(held, default=TemplateTier.HOST))
        self.bytes[template] = bytes
        trim(self.bytes)
        if bytes.get("disk"):
            self.on_disk[template] = bytes["disk"]
            trim(self.on_disk)
            for other in self.mates.values():
                other.load.warm.setdefault(template, TemplateTier.DISK)
                trim(other.load.warm)

    def forget(self, template: str) -> None:
        self.on_disk.pop(template, None)
        self.bytes.pop(template, None)
        for mate in self.mates.values():
            mate.load.warm.pop(template, None)

    def with_template(self, template: str) -> tuple[str, ...]:
        return tuple(name for name, mate in self.mates.items() if template in mate.load.warm)

    def size(self, template: str | None) -> int:
        """Bytes of a template's recording, as far as anybody said."""
        return max(self.bytes.get(template or "", {}).values(), default=0)

    def _know(self, worker: Worker, template: str, tier: TemplateTier) -> None:
        worker.warm.pop(template, None)
        worker.warm[template] = tier
        trim(worker.warm)


def trim(known: MutableMapping[str, Any]) -> None:
    while len(known) > KNOWN_TEMPLATES:
        del known[next(iter(known))]
