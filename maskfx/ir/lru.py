"""LruCache: a bounded mapping that evicts the least recently used entry."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """Holds at most `limit` entries. `get`, `put` and `find` count as uses."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value | None:
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: Key, value: Value) -> Value:
        """Store an entry, evict beyond the limit, and return the value."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self.limit:
            self._entries.popitem(last=False)
        return value

    def find(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the entry; make and store it if there is none."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        return self.put(key, make())

    def remove(self, key: Key) -> None:
        """Remove an entry, if it is there."""
        self._entries.pop(key, None)

    def keep_only(self, keys: set[Key]) -> None:
        """Remove the entries with other keys."""
        for key in self._entries.keys() - keys:
            del self._entries[key]

    def items(self) -> list[tuple[Key, Value]]:
        """Return keys and values, least recently used first."""
        return list(self._entries.items())

    def clear(self) -> None:
        self._entries.clear()

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)
