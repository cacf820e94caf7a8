"""Commands on a directory or object store of recorded steps: list, verify and clean up."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from maskfx.errors import InputError
from maskfx.runtime.cache.serialize import read_labels
from maskfx.runtime.cache.stores.entry_store import EntryStore
from maskfx.runtime.cache.stores.objects import is_url
from maskfx.runtime.cache.stores.remote_store import RemoteStore
from maskfx.runtime.cache.stores.store import Report, Store
from maskfx.runtime.cache.stores.store_entry import StoreEntry


def ls(directory: str) -> int:
    """Print the entries, least recently used first."""
    store = _store(directory)
    entries = store.ls()
    now = time.time()
    for entry in entries:
        age = max(0.0, now - entry.used)
        about = f"{age:9.0f} s  {_about(store, entry)}"
        print(f"{entry.digest.hex()[:16]}  {size(entry.nbytes):>9}  {about}")
    print(f"{len(entries)} entries, {size(sum(entry.nbytes for entry in entries))}")
    return _status(store)


def verify(directory: str) -> int:
    """Read every entry and remove damaged ones; return 1 if there were any."""
    store = _store(directory)
    report = store.verify()
    _tell(report)
    return 1 if report.removed or report.unreadable else _status(store)


def gc(directory: str, budget: int | None, ttl: float | None) -> int:
    """Remove entries unused for `ttl` seconds, then the least recently used over the budget."""
    for name, value in (("--budget", budget), ("--ttl", ttl)):
        if value is not None and not value >= 0:
            raise InputError(f"{name} {value}: give 0 or more")
    store = _store(directory)
    _tell(store.gc(budget, ttl))
    return _status(store)


def size(nbytes: int) -> str:
    """Format a number of bytes: 1.2 MB."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _tell(report: Report) -> None:
    print(f"{report.entries} entries, {size(report.nbytes)}")
    print(f"removed {report.removed}, {size(report.freed)}")
    if report.unreadable:
        print(f"neither readable nor removable: {report.unreadable}")


def _status(store: EntryStore) -> int:
    """Return 0, or 1 if an object store failed, so that not all of its entries were seen."""
    if isinstance(store, RemoteStore) and (store.reads.failures or store.writes.failures):
        print(f"{store.url}: some of its answers are absent, see above", file=sys.stderr)
        return 1
    return 0


def _about(store: EntryStore, entry: StoreEntry) -> str:
    """Return the key's fields as labelled by its writer; not checked against the hash."""
    labels = read_labels(store.prefix(entry))
    return " ".join(f"{name}={value}" for name, value in labels.items() if value) or "?"


def _store(place: str) -> EntryStore:
    if is_url(place):
        return RemoteStore(place)
    if not Path(place).is_dir():
        raise InputError(f"{place}: no such directory; give the directory of a Store, or a URL")
    return Store(Path(place))
