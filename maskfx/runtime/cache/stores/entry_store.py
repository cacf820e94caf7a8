"""EntryStore: what the disk tier needs of its store, a directory or an object store."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from maskfx.runtime.cache.stores.entry_parts import EntryParts
from maskfx.runtime.cache.stores.read_speed import ReadSpeed
from maskfx.runtime.cache.stores.store import Report, StoreCounters
from maskfx.runtime.cache.stores.store_entry import Buffer, EntryKey, StoreEntry


class EntryStore(Protocol):
    """Entries under keys: whole ones only, however many processes share them."""

    @property
    def counters(self) -> StoreCounters: ...

    @property
    def speed(self) -> ReadSpeed: ...

    def put(self, key: EntryKey, payload: Buffer) -> bool:
        """Store an entry, maybe in the background; return False if it can't be written."""
        ...

    def get(self, key: EntryKey, ttl: float | None = None) -> bytearray | None:
        """Return the payload, or None; with `ttl`, an entry unused for longer is removed."""
        ...

    def parts(self, key: EntryKey, ttl: float | None = None) -> EntryParts | None:
        """Return the payload to be read in parts; None if the entry is absent, or read whole."""
        ...

    def touch(self, key: EntryKey) -> bool:
        """Mark an entry as used now; return True if it exists."""
        ...

    def touch_all(self, keys: Sequence[EntryKey]) -> bool:
        """Mark entries as used now; return True if all of them exist."""
        ...

    def nbytes(self, key: EntryKey) -> int:
        """Return the size of an entry, or 0 if there is none."""
        ...

    def total_bytes(self) -> int:
        """Return the size of all entries; never waits for a network."""
        ...

    def drop(self, key: EntryKey) -> object:
        """Remove an entry."""
        ...

    def ls(self) -> list[StoreEntry]:
        """List the entries, least recently used first, without reading their content."""
        ...

    def prefix(self, entry: StoreEntry) -> bytes:
        """Return the first bytes of an entry's payload, unchecked, or b"" if it can't be read."""
        ...

    def verify(self) -> Report:
        """Read every entry; remove damaged ones."""
        ...

    def gc(
        self,
        budget_bytes: int | None = None,
        ttl: float | None = None,
        keep: Collection[bytes] = (),
    ) -> Report:
        """Remove entries unused for `ttl` seconds, then the least recently used over a budget."""
        ...

    def trim(self, budget_bytes: int | None, ttl: float | None, keep: Collection[bytes]) -> None:
        """Do what `gc` does, maybe later and in the background."""
        ...

    def settle(self) -> bool:
        """Wait until everything is written; return False if something can't be."""
        ...
