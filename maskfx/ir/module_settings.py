"""The plain values that a module computes with: what a captured graph is a function of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


def settings_of(module: nn.Module) -> str:
    """Return a digest of a module's plain values: scales of adapters, switches, names.

    Callables of its parts that aren't modules, such as attention processors, hold some too. The
    code that computes the module contains them as constants, so a captured graph is valid for these
    values only.
    """
    found = hashlib.sha256()
    for name, part in module.named_modules():
        found.update(f"{name} {type(part).__name__} {part.training}".encode())
        for line in state_of(part):
            found.update(line.encode())
        for key, value in vars(part).items():
            if not key.startswith("_") and is_called(value):
                found.update(f"{key}: {name_of(value)}".encode())
                for line in state_of(value):
                    found.update(line.encode())
    return found.hexdigest()


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

    def _now(self) -> list[Any]:
        return list(map(dict.get, self._parts, self._keys))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give all of them their first values within the context."""
        now = self._now()
        self._set(self._known)
        try:
            yield
        finally:
            self._set(now)

    def _set(self, values: list[Any]) -> None:
        for part, key, value in zip(self._parts, self._keys, values, strict=True):
            part[key] = value


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
