"""The adapters of one call: which updates act at which step of which module.

A call begins without waiting for an adapter that acts later; at the first step at which it acts,
the call waits for it. The picture doesn't depend on when the file was there.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from maskfx.errors import InputError
from maskfx.pipelines.lora_files import LoraTarget
from maskfx.pipelines.template_library import Wait
from maskfx.runtime.lora.adapter import Adapter, Updates, WeightedLayers
from maskfx.runtime.lora.calls import adapted
from maskfx.runtime.lora.layers import SetCache
from maskfx.runtime.lora.profile import Profile
from maskfx.runtime.lora.registry import Adapters, RegisteredAdapter
from maskfx.runtime.lora.residency import AdapterLease
from maskfx.runtime.steps import AnyStep

Loras = Any  # of a call: a name, a path, an Adapter, or a list of these or of (one, weight)


def with_updates(step: AnyStep, updates: Updates) -> AnyStep:
    """Return a step that applies updates to the denoiser's layers."""
    return replace(step, adapters=updates) if updates else step


@dataclass(frozen=True)
class AdapterUse:
    """One adapter of a call.

    Args:
        source: The adapter, or its registration.
        weight: Factor of all its updates.
        start: First step at which it acts, unless there is a profile.
        profile: When it acts.
    """

    source: Adapter | RegisteredAdapter
    weight: float
    start: int = 0
    profile: Profile | None = None

    @property
    def strict(self) -> bool:
        """Whether it acts from the beginning, text encoders included."""
        return not (self.start if self.profile is None else self.profile.start)

    def acts(self, step: int, time: float) -> bool:
        return step >= self.start if self.profile is None else self.profile.acts(time)

    def key(self) -> list[object]:
        """Return what the picture depends on, which is known before the file is read."""
        own = self.source
        name = own.digest if isinstance(own, Adapter) else own.file.key
        return [name, self.weight, self.start, None if self.strict else self.profile]


@dataclass(eq=False)
class HeldAdapter:
    """An adapter of a running call, in memory or in flight."""

    use: AdapterUse
    lease: AdapterLease | None = None

    def adapter(self, wait: Wait) -> Adapter:
        """Return the adapter; wait for it if it isn't there, and raise the error of its load."""
        if self.lease is None:
            assert isinstance(self.use.source, Adapter), "without a lease it is in memory"
            return self.use.source
        if not self.lease.ready:
            began = time.monotonic()
            try:
                wait(self.lease.wait)
            finally:
                self.lease.waited(time.monotonic() - began)
        return self.lease.adapter()


@dataclass(eq=False)
class CallAdapters:
    """The adapters of one call, held until its end."""

    held: Sequence[HeldAdapter]
    wait: Wait
    denoisers: frozenset[str]

    def for_run(self) -> RunAdapters:
        return RunAdapters(self)

    def release(self) -> None:
        for one in self.held:
            if one.lease is not None:
                one.lease.release()

    def check_late(self, use: AdapterUse, adapter: Adapter) -> None:
        """Raise InputError if an adapter that acts later changes what ran before."""
        early = sorted(part for part in adapter.parts if not self.knows(part))
        if early:
            raise InputError(
                f"{adapter.name}: it changes {', '.join(early)}, which runs before the first step, "
                "but it is registered with a later start; register it with start=0, or profile it "
                "again (maskfx adapters profile)"
            )

    def knows(self, part: str) -> bool:
        return any(name.split(".")[0] == part for name in self.denoisers)


@dataclass(eq=False)
class RunAdapters:
    """The adapters of one run of a pipeline's code; one that acts, acts until the end."""

    call: CallAdapters
    _acting: set[int] = field(default_factory=set)

    def updates(self, name: str, step: int, time: float) -> Updates:
        """Return the updates of a denoiser's call, after waiting for those that act."""
        found = []
        for number, held in enumerate(self.call.held):
            if number not in self._acting and not held.use.acts(step, time):
                continue
            adapter = held.adapter(self.call.wait)
            if number not in self._acting and not held.use.strict:
                self.call.check_late(held.use, adapter)
            self._acting.add(number)
            layers = adapter.parts.get(name) or adapter.parts.get(name.split(".")[0], {})
            if layers:
                found.append(WeightedLayers(layers, held.use.weight, adapter.digest))
        return tuple(found)

    @contextmanager
    def around(self, pipe: Any) -> Iterator[None]:
        """Let the modules around the denoisers use the adapters that act from the beginning."""
        updates: dict[str, list[WeightedLayers]] = {}
        for held in self.call.held:
            if not held.use.strict:
                continue
            adapter = held.adapter(self.call.wait)
            for part, layers in adapter.parts.items():
                if not self.call.knows(part):
                    one = WeightedLayers(layers, held.use.weight, adapter.digest)
                    updates.setdefault(part, []).append(one)
        before = {part: pipe.__dict__[part] for part in updates}
        for part, own in updates.items():
            module = getattr(before[part], "maskfx_part", before[part])
            pipe.__dict__[part] = adapted_module(module, own)
        try:
            yield
        finally:
            pipe.__dict__.update(before)


def adapted_module(module: nn.Module, updates: Updates) -> nn.Module:
    """Return a module with the same layers, whose calls apply updates; the layers stay as they are.

    Calls with other adapters, or none, are independent of it.
    """
    made, found = copy.copy(module), SetCache(module).of(updates)
    forward = made.forward

    def call(*args: object, **kwargs: object) -> Any:
        with adapted([(1, found)]):
            return forward(*args, **kwargs)

    made.__dict__["forward"] = functools.wraps(forward)(call)
    return made


def listed(loras: Loras) -> list[tuple[Any, float]]:
    """Return a call's adapters with their weights."""
    if loras is None:
        return []
    several = loras if isinstance(loras, (list, tuple)) and not is_pair(loras) else [loras]
    return [(one[0], float(one[1])) if is_pair(one) else (one, 1.0) for one in several]


def is_pair(value: object) -> bool:
    """Return True for an adapter with its weight."""
    number = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], (int, float))
    return number and not isinstance(value[1], bool)


def resolved(
    loras: Loras, adapters: Callable[[], Adapters], base: Callable[[], str]
) -> tuple[AdapterUse, ...]:
    """Return a call's adapters, by name or path those of the registry.

    Args:
        loras: Argument of the call.
        adapters: The registry, `maskfx.Adapters`.
        base: Returns the name of the base model in profiles.
    """
    found = []
    for source, weight in listed(loras):
        if isinstance(source, Adapter):
            found.append(AdapterUse(source, weight))
            continue
        try:
            known: RegisteredAdapter = adapters().resolve(source)
        except TypeError:
            raise InputError(
                f"lora={source!r:.60}: give the name of a registered adapter, a path that ends "
                "with .safetensors, or a list of (one of these, weight)"
            ) from None
        profile = None
        if known.start is None:
            profile = adapters().profile(known, base())
        found.append(AdapterUse(known, weight, known.start or 0, profile))
    return tuple(found)


def held(
    uses: Sequence[AdapterUse],
    adapters: Callable[[], Adapters],
    target: Callable[[], LoraTarget],
    wait: Wait,
    denoisers: Mapping[str, object],
) -> CallAdapters:
    """Begin to load a call's adapters that aren't in memory."""
    found: list[HeldAdapter] = []
    call = CallAdapters(found, wait, frozenset(denoisers))
    try:
        for use in uses:
            lease = None
            if isinstance(use.source, RegisteredAdapter):
                lease = adapters().acquire(use.source, target().fields, target().kind_digest)
            found.append(HeldAdapter(use, lease))
    except BaseException:
        call.release()
        raise
    return call
