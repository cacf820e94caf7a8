"""The plain values that a module computes with: what a captured graph is a function of."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks")  # of PyTorch, which run around `forward`


def settings_of(module: nn.Module) -> str:
    """Return a digest of a module's plain values: scales of adapters, switches, names.

    Callables of its parts that aren't modules, such as attention processors, hold some too, and so
    do hooks of its parts. The code that computes the module contains them as constants, so a
    captured graph is valid for these values only. The module's own hooks aren't among them: they
    act on its calls.
    """
    found = hashlib.sha256()
    for name, part in module.named_modules():
        found.update(f"{name} {type(part).__name__} {part.training}".encode())
        for line in state_of(part):
            found.update(line.encode())
        called = [(k, v) for k, v in vars(part).items() if not k.startswith("_") and is_called(v)]
        for key, value in [*called, *(hooks_of(part) if name else ())]:
            found.update(f"{key}: ".encode())
            for line in lines_of(value):
                found.update(line.encode())
    return found.hexdigest()


def hooks_of(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what PyTorch calls before and after a module's `forward`, with its kind."""
    for kind in HOOKS:
        for hook in vars(part).get(kind, {}).values():
            yield kind, hook


def lines_of(called: Any) -> Iterator[str]:
    """Yield the name of a callable, and the plain values that it holds."""
    yield name_of(called)
    yield from state_of(called)
    if hasattr(called, "__wrapped__"):  # in place of the method that it calls
        return
    code = getattr(called, "__code__", None)
    if code is not None:
        yield hashlib.sha256(code.co_code).hexdigest()
        yield from (repr(value) for value in code.co_consts if is_plain(value))
    if isinstance(called, partial):
        yield name_of(called.func)
    yield from (repr(value) if is_plain(value) else type(value).__name__ for value in held(called))


def held(called: Any) -> list[Any]:
    """Return what a function's code reads from where it was made, and a partial's arguments."""
    if isinstance(called, partial):
        return [*called.args, *called.keywords.values()]
    found = [*(getattr(called, "__defaults__", None) or ())]
    for cell in getattr(called, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # empty
            continue
    return found


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
        self._module, self._parts = module, list(module.modules())
        self._places = [vars(part) for part in self._parts]
        for values in list(self._places):
            called = (v for k, v in values.items() if not k.startswith("_") and is_called(v))
            self._places += [vars(value) for value in called if hasattr(value, "__dict__")]
        slots = [(p, k) for p in self._places for k, v in p.items() if is_read(k, v)]
        plain = [slot for slot in slots if is_plain(slot[0][slot[1]])]
        other = [slot for slot in slots if not is_plain(slot[0][slot[1]])]
        self._plain, self._other = columns(plain), columns(other)
        self._sizes = list(map(len, self._places))
        self._hooks = [vars(p).get(kind, {}) for p in self._parts[1:] for kind in HOOKS]
        self._hooked = list(chain.from_iterable(self._hooks))  # numbers, each given once
        self._values = copy.deepcopy(list(map(dict.get, *self._plain)))
        self._types = list(map(type, self._values))  # 1 equals True
        self._objects = list(map(dict.get, *self._other))  # held, so that identities stay theirs
        self._identities = list(map(id, self._objects))

    def changed(self) -> bool:
        """Return True if a value may have changed since."""
        try:
            return (
                list(self._module.modules()) != self._parts
                or list(map(len, self._places)) != self._sizes
                or list(chain.from_iterable(self._hooks)) != self._hooked
                or list(map(id, map(dict.get, *self._other))) != self._identities
                or list(map(type, map(dict.get, *self._plain))) != self._types
                or list(map(dict.get, *self._plain)) != self._values
            )
        except (RuntimeError, ValueError):  # an array in place of a plain value
            return True

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
    slots: list[tuple[dict[str, object], str]],
) -> tuple[list[dict[str, object]], list[str]]:
    return [part for part, _ in slots], [key for _, key in slots]


class Switches:
    """The switches of a module's parts, to find out quickly at each call whether one has changed.

    `settings_of` digests all plain values, which takes far longer.
    """

    def __init__(self, module: nn.Module) -> None:
        found = [
            (vars(part), key, value)
            for part in module.modules()
            for key, value in vars(part).items()
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


def state_of(part: object) -> Iterator[str]:
    """Yield the plain attributes of an object; of those beginning with _ only switches and names.

    Others are often bookkeeping, which changes from call to call; None may be a table that the
    first call fills. Names of wrapped functions are skipped: offloading wraps `forward`.
    """
    for key, value in getattr(part, "__dict__", {}).items():
        if key.startswith("__"):
            continue
        known = value is not None and not key.startswith("_") and is_plain(value)
        if known or is_switch(value):
            yield f"{key}={value!r}"


def is_called(value: object) -> bool:
    return callable(value) and not isinstance(value, (nn.Module, type))


def name_of(called: object) -> str:
    """Return the qualified name of a function, or of an object's class."""
    named = called if hasattr(called, "__qualname__") else type(called)
    return f"{named.__module__}.{named.__qualname__}"


def is_switch(value: object) -> bool:
    """Return True for a switch, or for names, such as those of active adapters."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(one, (bool, str)) for one in value)
    return isinstance(value, (bool, str))


def is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))
