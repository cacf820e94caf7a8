"""StatefulParts: modules that keep state among their attributes while they run, one call at a time.

An autoencoder of videos encodes and decodes frame by frame, and keeps what its convolutions read of
the frames before. Two requests' threads at once would read each other's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

OWN = frozenset(vars(nn.Module()))  # attributes of every module

Attributes = dict[tuple[nn.Module, str], object]


class StatefulParts:
    """Finds out by the first call of each method whether it changes attributes of its module."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
        self._changes: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()

    @contextmanager
    def calling(self, part: nn.Module, method: str) -> Iterator[None]:
        """Wait for other calls of the module, unless this method is known to keep no state."""
        with self._guard:
            lock = self._locks.setdefault(part, threading.RLock())
            known = self._changes.setdefault(part, {})
        if known.get(method) is False:
            yield
            return
        with lock:
            before = None if method in known else attributes(part)
            yield
            if before is not None:
                known[method] = differ(before, attributes(part))


def attributes(part: nn.Module) -> Attributes:
    """Return the attributes of a module and of its parts, without what every module has."""
    return {
        (module, name): value
        for module in part.modules()
        for name, value in vars(module).items()
        if name not in OWN
    }


def differ(before: Attributes, after: Attributes) -> bool:
    """Return True if an attribute was added, removed or set to another object."""
    same = before.keys() == after.keys()
    return not same or any(after[key] is not value for key, value in before.items())
