"""The plain values that a module computes with: what a captured graph is a function of."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain

from torch import nn

from maskfx.ir.modules.callables import hooks_of, is_called, is_plain, lines_of
from maskfx.ir.modules.lent_methods import own_count, own_item, own_items
from maskfx.ir.modules.number_settings import Place, without_numbers


def settings_of(module: nn.Module, numbers: Collection[Place] | None = None) -> str:
    """Return a digest of a module's plain values: scales of adapters, switches, names.

    Callables of its parts that aren't modules, such as attention processors, hold some too, and the
    hooks of its parts are functions that a graph contains. The code that computes the module has
    all of them as constants, so a captured graph is valid for these values only. The module's own
    hooks aren't among them: they act on its calls. Neither are methods that a step lends to parts.

    Args:
        module: the module.
        numbers: where numbers are known to stand; if given, the digest is one of what isn't a
            number.
    """
    found = hashlib.sha256()
    for name, part in module.named_modules():
        found.update(f"{name} {type(part).__name__} {part.training}".encode())
        for line in state_of(part, (name,), numbers):
            found.update(line.encode())
        for key, value in own_items(vars(part)):
            if not key.startswith("_") and is_called(value):
                lines = state_of(value, (name, key), numbers)
                for line in (f"{key}:", *lines_of(value), *lines):
                    found.update(line.encode())
        for hooks in hooks_of(part) if name else ():
            for line in (line for hook in hooks.values() for line in lines_of(hook)):
                found.update(f"hook {line}".encode())
    return found.hexdigest()


class KnownSettings:
    """`settings_of` a module, digested again only if one of the values may have changed.

    Values are compared in lists, which takes a small part of the time of a digest. Any thread may
    ask.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._known: tuple[SeenValues, str] | None = None

    def digest(self) -> str:
        """Return what `settings_of` returns for the module."""
        known = self._known
        if known is None or known[0].changed():
            seen = SeenValues(self.module)  # before the digest, so that no change is missed
            known = self._known = seen, settings_of(self.module)
        return known[1]

    def restore(self) -> None:
        """Give the module's parts the objects and switches that they had at the last digest."""
        if self._known is not None:
            self._known[0].restore()


class SeenValues:
    """The values of a module that `settings_of` may read, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self._inside = [part._modules for part in self._parts]  # of each, its parts by name
        self._tree = list(self._nested())
        self._places = [vars(part) for part in self._parts]
        for values in list(self._places):
            called = (v for k, v in own_items(values) if not k.startswith("_") and is_called(v))
            self._places += [vars(value) for value in called if hasattr(value, "__dict__")]
        slots = [(p, k, v) for p in self._places for k, v in own_items(p) if is_read(k, v)]
        plain = [slot for slot in slots if is_plain(slot[2])]
        other = [slot for slot in slots if not is_plain(slot[2])]
        self._plain, self._other = columns(plain), columns(other)
        self._sizes = list(map(own_count, self._places))
        self._hooks = [hooks for part in self._parts[1:] for hooks in hooks_of(part)]
        self._hooked = list(self._hooking())
        self._values = copy.deepcopy([value for _, _, value in plain])
        self._types = list(map(type, self._values))  # 1 equals True
        self._objects = [value for _, _, value in other]  # held, so that identities stay theirs
        self._identities = list(map(id, self._objects))

    def changed(self) -> bool:
        """Return True if a value may have changed since."""
        try:
            return self._differ(dict.get, len) and self._differ(own_item, own_count)
        except (RuntimeError, ValueError):  # an array in place of a plain value
            return True

    def _differ(self, get: Callable[..., object], count: Callable[..., int]) -> bool:
        values = list(map(get, *self._plain))
        return (
            list(self._nested()) != self._tree
            or list(map(count, self._places)) != self._sizes
            or list(map(id, map(get, *self._other))) != self._identities
            or list(map(type, values)) != self._types
            or values != self._values
            or list(self._hooking()) != self._hooked
        )

    def _nested(self) -> Iterator[object]:
        """Return the parts of all parts, which takes far less time than a walk through the tree."""
        return chain.from_iterable(map(dict.values, self._inside))

    def _hooking(self) -> Iterator[object]:
        """Return the hooks of all parts."""
        return chain.from_iterable(map(dict.values, self._hooks))

    def restore(self) -> None:
        """Set what isn't a plain value, and switches, as they were."""
        for part, key, value in zip(*self._other, self._objects, strict=True):
            if part.get(key) is not value:
                part[key] = value
        for part, key, value in zip(*self._plain, self._values, strict=True):
            if isinstance(value, bool) and part.get(key) is not value:
                part[key] = value


def is_read(key: str, value: object) -> bool:
    """Return True for an attribute that `settings_of` may read, now or with another value."""
    empty = value is None or (isinstance(value, (list, tuple)) and not value)
    return not key.startswith("_") or (not key.startswith("__") and (empty or is_switch(value)))


def columns(
    slots: list[tuple[dict[str, object], str, object]],
) -> tuple[list[dict[str, object]], list[str]]:
    return [part for part, _, _ in slots], [key for _, key, _ in slots]


class Switches:
    """The switches of a module's parts, to find out quickly at each call whether one has changed.

    `settings_of` digests all plain values, which takes far longer.
    """

    def __init__(self, module: nn.Module) -> None:
        found = [
            (vars(part), key, value)
            for part in module.modules()
            for key, value in list(vars(part).items())
            if not key.startswith("_") and key != "training" and isinstance(value, bool)
        ]
        self._parts = [part for part, _, _ in found]
        self._keys = [key for _, key, _ in found]
        self._known = [value for _, _, value in found]

    def changed(self) -> bool:
        """Return True if one has another value than at first."""
        return self._now() != self._known

    def _now(self) -> list[object]:
        return list(map(dict.get, self._parts, self._keys))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give all of them their first values within the context."""
        slots = zip(self._parts, self._keys, self._now(), self._known, strict=True)
        changed = [slot for slot in slots if slot[2] != slot[3]]
        for part, key, _, known in changed:
            part[key] = known
        try:
            yield
        finally:
            for part, key, now, _ in changed:
                part[key] = now


class RunSettings:
    """The settings of a module during one run that captures are valid for.

    Args:
        switches: Its switches, which are compared at each call.
        known: Its settings, compared at each call too; None where nothing sets them during a run.
    """

    def __init__(self, switches: Switches, known: KnownSettings | None = None) -> None:
        self._switches, self._known = switches, known
        self._digest = None if known is None else known.digest()

    def changed(self) -> bool:
        """Return True if they are other ones than at first."""
        other = self._known is not None and self._known.digest() != self._digest
        return other or self._switches.changed()

    def switched(self) -> AbstractContextManager[None]:
        """Give the module its first switches within the context."""
        return self._switches.restored() if self._switches.changed() else nullcontext()


def state_of(
    part: object, place: Place = (), numbers: Collection[Place] | None = None
) -> Iterator[str]:
    """Yield the plain attributes of an object; of those beginning with _ only switches and names.

    Others are often bookkeeping, which changes from call to call; None may be a table that the
    first call fills. Names of wrapped functions are skipped: offloading wraps `forward`.
    """
    for key, value in own_items(getattr(part, "__dict__", {})):
        if key.startswith("__"):
            continue
        known = value is not None and not key.startswith("_") and is_plain(value)
        if known or is_switch(value):
            shown = value if numbers is None else without_numbers(value, (*place, key), numbers)
            yield f"{key}={shown!r}"


def is_switch(value: object) -> bool:
    """Return True for a switch, or for names, such as those of active adapters."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(one, (bool, str)) for one in value)
    return isinstance(value, (bool, str))
