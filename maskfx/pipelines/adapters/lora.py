"""Adapters of one pipeline call: which act on which module, with which weight, from which step on.

Denoisers and ControlNets get the updates with each of their calls. The other modules, such as text
encoders, run in the request's thread, within `applied`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import isfinite

from torch import nn
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from maskfx.errors import InputError
from maskfx.ir.argument_checks import check_flag
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.lora.adapter import Adapter, Updates, WeightedLayers
from maskfx.runtime.lora.calls import AdaptedCalls, adapted
from maskfx.runtime.lora.layers import AdapterSet, check_updates, joined_sets


@dataclass(frozen=True)
class Lora:
    """An adapter of one call.

    Args:
        adapter: The adapter.
        weight: Factor of its updates.
        first: The first step at which it acts on denoisers. With 1 or more it doesn't act on text
            encoders, which run before. Where steps are extrapolated, it acts from the next computed
            step on.
        recorded: Whether templates are recorded with it. Without, edits with any adapter read one
            template: outside the mask the picture is as it is without the adapter, and the masked
            sites attend to keys and values without it. Edits of that kind save the recording, and
            look best where the adapter changes the subject and not the style of the picture.
    """

    adapter: Adapter
    weight: float = 1.0
    first: int = 0
    recorded: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.adapter, Adapter):
            seen = type(self.adapter).__name__
            raise InputError(
                f"lora: adapter is a {seen}; give an Adapter, (Adapter, weight) or Lora(...)"
            )
        number = isinstance(self.weight, (int, float)) and not isinstance(self.weight, bool)
        if not number or not isfinite(self.weight):
            raise InputError(f"lora: weight={self.weight!r}: give a finite number, such as 0.8")
        check_flag("lora", "recorded", self.recorded)
        if type(self.first) is not int or self.first < 0:
            raise InputError(f"lora: first={self.first!r}: give a step's number, counted from 0")

    @classmethod
    def of(cls, value: object) -> Lora:
        """Return an item of a call's `lora=`, with defaults for what isn't given."""
        if isinstance(value, Lora):
            return value
        if isinstance(value, (tuple, list)) and len(value) == 2:
            return cls(*value)
        return cls(value)  # type: ignore[arg-type]

    @property
    def key(self) -> tuple[str, float, int]:
        return self.adapter.digest, float(self.weight), self.first


@dataclass(frozen=True)
class CallAdapters:
    """The adapters of one call, in the order in which they were given."""

    items: tuple[Lora, ...] = ()
    _known: dict[tuple[str, tuple[bool, ...]], Updates] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(cls, given: object) -> CallAdapters:
        """Check the `lora=` of a call."""
        if given is None:
            return cls()
        if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
            raise InputError(
                f"lora={given!r:.60}: give a list of Adapter, (Adapter, weight) or Lora(...)"
            )
        return cls(tuple(map(Lora.of, given)))

    @property
    def key(self) -> list[tuple[str, float, int]]:
        """What a picture depends on, of the adapters that act."""
        return [one.key for one in self.items if one.weight]

    @property
    def recorded(self) -> CallAdapters:
        """Those that templates are recorded with."""
        return CallAdapters(tuple(one for one in self.items if one.recorded))

    def at(self, name: str, step: int) -> Updates:
        """Return the updates of a component at a step."""
        if not self.items:
            return ()
        acting = tuple(one.first <= step for one in self.items)
        if (name, acting) not in self._known:
            self._known[name, acting] = tuple(
                WeightedLayers(one.adapter.parts[name], float(one.weight), one.adapter.digest)
                for one, acts in zip(self.items, acting, strict=True)
                if acts and name in one.adapter.parts
            )
        return self._known[name, acting]

    def check(
        self,
        components: Mapping[str, object],
        denoisers: Mapping[str, CompiledDenoiser],
    ) -> None:
        """Check that the pipeline has the components and layers that the adapters change."""
        for one in self.items:
            for name, layers in one.adapter.parts.items():
                where = f"lora: adapter {one.adapter.name!r} changes {name!r}"
                if name not in denoisers and name not in components:
                    raise InputError(
                        f"{where}, and the pipeline has {sorted({*denoisers, *components})}; load "
                        "the adapter for this pipeline"
                    )
                update = [WeightedLayers(layers, 1.0, one.adapter.digest)]
                if name in denoisers:
                    denoisers[name].adapters.check(update)
                elif isinstance(module := module_of(components[name]), nn.Module):
                    check_updates(module, update, None)

    def around(
        self, components: Mapping[str, object], denoisers: Mapping[str, CompiledDenoiser]
    ) -> dict[int, AdapterSet]:
        """Return the checked adapters of each module that isn't a denoiser, by its id."""
        found: dict[int, AdapterSet] = {}
        for name in dict.fromkeys(name for one in self.items for name in one.adapter.parts):
            module, updates = module_of(components.get(name)), self.at(name, 0)
            updates = [update for update in updates if update.weight]
            if name not in denoisers and isinstance(module, nn.Module) and updates:
                key = tuple((u.digest, u.weight, id(u.layers)) for u in updates)
                found[id(module)] = check_updates(module, updates, key)
        return found


_APPLIED: ContextVar[Mapping[int, AdapterSet]] = ContextVar("maskfx adapters", default={})  # noqa: B039


@contextmanager
def applied(around: Mapping[int, AdapterSet]) -> Iterator[None]:
    """Apply adapters to the modules that this thread calls within the context."""
    if not around:
        yield
        return
    token = _APPLIED.set(around)
    try:
        with adapted([(1, joined_sets(list(around.values())))]):
            yield
    finally:
        _APPLIED.reset(token)


@contextmanager
def suspended() -> Iterator[None]:
    """Apply no adapters within the context: denoisers get theirs with each step."""
    if isinstance(_get_current_function_mode(), AdaptedCalls):
        with _pop_mode_temporarily():
            yield
    else:
        yield


def adapters_of(part: object) -> AdapterSet | None:
    """Return the adapters that act on a module in this thread."""
    return _APPLIED.get().get(id(part))


def module_of(part: object) -> object:
    """Return the module behind a proxy, which may run it elsewhere."""
    return getattr(part, "maskfx_part", part)
