"""LateLora: an adapter of a call that is a file, which is loaded while the call runs.

A call begins without waiting for an adapter that acts later. At the first step at which it acts the
call waits for it, however early the file was there: the picture doesn't depend on the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeGuard

from maskfx.errors import InputError
from maskfx.pipelines.adapters.lora import CallAdapters, Lora
from maskfx.pipelines.adapters.lora_files import LoraTarget
from maskfx.pipelines.waiting import Wait
from maskfx.runtime.lora.adapter import Adapter
from maskfx.runtime.lora.profile import Profile
from maskfx.runtime.lora.registry import Adapters, RegisteredAdapter
from maskfx.runtime.lora.residency import AdapterLease

NEVER = 1 << 62  # a step that no run reaches
WANTED = (
    "give the name of a registered adapter, a path that ends with .safetensors, an Adapter, or a "
    "list of these or of (one of these, weight)"
)

LoraSource = str | os.PathLike[str] | Adapter | Lora
# `lora=` of a call: see WANTED
Loras = (
    LoraSource | tuple[LoraSource, float] | Sequence[LoraSource | tuple[LoraSource, float]] | None
)


@dataclass(frozen=True)
class LateLora(Lora):
    """An adapter of one call that is in a file.

    Until it acts, `adapter` has no updates, and its digest is what the picture depends on: the file
    as it was registered, and from when on it acts.

    Args:
        source: The registration.
        start: The first step at which it acts, unless there is a profile.
        profile: When it acts, in times of the scheduler.
        lease: The loaded file, or its load in flight, while a call runs.
    """

    source: RegisteredAdapter | None = None
    start: int = 0
    profile: Profile | None = None
    lease: AdapterLease | None = None

    @classmethod
    def registered(cls, known: RegisteredAdapter, weight: float, profile: Profile | None) -> Lora:
        start = known.start or 0
        digest = f"{known.file.key} {start} {profile}"
        empty = Adapter(known.name, digest, {})
        return cls(empty, weight, NEVER, True, known, start, profile)

    @property
    def strict(self) -> bool:
        """Whether it acts from the beginning, on text encoders too."""
        return not (self.start if self.profile is None else self.profile.start)

    def acts(self, step: int, time: float) -> bool:
        return step >= self.start if self.profile is None else self.profile.acts(time)

    def loaded(self, wait: Wait, step: int) -> Lora:
        """Return the adapter, acting from a step on; wait for it, and raise the error of its load.

        `wait` is the engine's way to wait: it ends at the request's deadline, and the steps of
        other requests go on.
        """
        assert self.lease is not None, "a running call holds its adapters"
        if not self.lease.ready:
            began = time.monotonic()
            try:
                wait(self.lease.wait)
            finally:
                self.lease.waited(time.monotonic() - began)
        return Lora(self.lease.adapter(), self.weight, step, self.recorded)


def resolved(
    loras: Loras, adapters: Callable[[], Adapters], base: Callable[[], str]
) -> list[object] | None:
    """Return a call's adapters as `CallAdapters.of` takes them, those with names as `LateLora`.

    Args:
        loras: Argument of the call.
        adapters: Returns the registry.
        base: Returns the name of the base model in profiles.
    """
    if loras is None:
        return None
    several: Sequence[object] = [loras]
    if isinstance(loras, (list, tuple)) and not is_pair(loras):
        several = loras
    found: list[object] = []
    for one in several:
        source, weight = one if is_pair(one) else (one, 1.0)
        if isinstance(source, (str, os.PathLike)):
            known = adapters().resolve(source)
            profile = adapters().profile(known, base()) if known.start is None else None
            found.append(LateLora.registered(known, weight, profile))
        elif isinstance(source, (Adapter, Lora)):
            found.append(one)
        elif isinstance(one, (list, tuple)) and len(one) == 2:
            raise InputError(f"lora: weight={one[1]!r:.60}: give a finite number, such as 0.8")
        else:
            raise InputError(f"lora={source!r:.60}: {WANTED}")
    return found


def is_pair(value: object) -> TypeGuard[tuple[object, float]]:
    """Return True for an adapter with its weight."""
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and isinstance(value[1], (int, float))
        and not isinstance(value[1], bool)
    )


@contextmanager
def held(
    call: CallAdapters, adapters: Callable[[], Adapters], target: Callable[[], LoraTarget]
) -> Iterator[CallAdapters]:
    """Hold the files of a call's adapters within the context; loads of absent ones begin."""
    leases: list[AdapterLease] = []

    def hold(one: Lora) -> Lora:
        if not isinstance(one, LateLora):
            return one
        assert one.source is not None, "it is registered"
        lease = adapters().acquire(one.source, target().fields, target().kind_digest)
        leases.append(lease)
        return replace(one, lease=lease)

    try:
        yield CallAdapters(tuple(map(hold, call.items)))
    finally:
        for lease in leases:
            lease.release()


def prefetch(
    call: CallAdapters, adapters: Callable[[], Adapters], target: Callable[[], LoraTarget]
) -> None:
    """Begin to load the files of a call that waits."""
    for one in call.items:
        if isinstance(one, LateLora) and one.source is not None:
            adapters().prefetch(one.source, target().fields, target().kind_digest)


def from_start(call: CallAdapters, wait: Wait) -> CallAdapters:
    """Return a run's adapters at its beginning, after waiting for those that act from there on."""
    return changed(call, lambda one: one.loaded(wait, 0) if one.strict else one)


def from_step(
    call: CallAdapters,
    step: int,
    times: Callable[[], tuple[float, ...]],
    wait: Wait,
    denoisers: Collection[str],
) -> CallAdapters:
    """Return a run's adapters at a step, after waiting for those that act from there on."""

    def act(one: LateLora) -> Lora:
        if not one.acts(step, times()[0]):
            return one
        found = one.loaded(wait, step)
        check_late(found.adapter, denoisers)
        return found

    return changed(call, act)


def changed(call: CallAdapters, change: Callable[[LateLora], Lora]) -> CallAdapters:
    late = [one for one in call.items if isinstance(one, LateLora)]
    found: Mapping[int, Lora] = {id(one): change(one) for one in late}
    if all(found[id(one)] is one for one in late):
        return call
    return CallAdapters(tuple(found.get(id(one), one) for one in call.items))


def check_late(adapter: Adapter, denoisers: Collection[str]) -> None:
    """Raise InputError if an adapter that acts later changes what ran before the first step."""
    early = sorted(adapter.parts.keys() - set(denoisers))
    if early:
        raise InputError(
            f"{adapter.name}: it changes {', '.join(early)}, which runs before the first step, but "
            "it is registered with a later start; register it with start=0, or profile it again "
            "(maskfx adapters profile)"
        )
