"""Index of a worker's recordings: the cache entries of each template that clients named.

With a `cache_dir`, the index has one small file per recording, in a folder with the template's
name. Workers share these files: recordings of other workers and of earlier servers are found,
pinned and removed like those of this worker.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from maskfx.runtime.cache.stores.small_files import files_of
from maskfx.runtime.cache.stores.store_entry import EntryKey
from maskfx.runtime.cache.tier_entry import Tier
from maskfx.runtime.cache.tiers import Tiers

FOLDER, ENDING = "recordings", ".entries"

log = logging.getLogger(__name__)


class TemplateRecording(msgspec.Struct, frozen=True):
    """The cache entries of one recording; `pinned` if a client requested it explicitly."""

    entries: tuple[EntryKey, ...]
    pinned: bool


Recorded = dict[str, TemplateRecording]  # by the recording's internal name


class Recordings:
    """Every recording of each template, by the name that clients use."""

    def __init__(self, tiers: Tiers, cache_dir: Path | str | None) -> None:
        self._tiers = tiers
        self._files = files_of(cache_dir)
        self._lock = threading.Lock()
        self._by_name: dict[str, Recorded] = dict(self._read())
        self._held: list[tuple[str, EntryKey]] = []  # (name, entry) of the pins taken by this index
        for name, recorded in self._by_name.items():
            for recording in recorded.values():
                self._hold(name, recording)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def add(self, name: str, own: str, entries: Sequence[EntryKey], *, pinned: bool) -> None:
        """Add a recording to a template.

        Args:
            name: The client's name of the template.
            own: The recording's internal name.
            entries: The recording's cache entries.
            pinned: Whether a client requested the recording explicitly.
        """
        with self._lock:
            recorded = self._by_name.setdefault(name, {})
            known = recorded.get(own)
            if known is None or pinned > known.pinned:
                recorded[own] = TemplateRecording(tuple(entries), pinned)
                self._hold(name, recorded[own])  # this pin outlives the eviction of its adapter
                self._write(name, own)

    def entries(self, name: str) -> list[EntryKey]:
        """Return the cache entries of a template's recordings, those of other workers included."""
        with self._lock:
            recorded = dict(self._by_name.get(name, {}))
        recorded = self._read(name).get(name, {}) | recorded
        return [key for recording in recorded.values() for key in recording.entries]

    def forget(self, name: str) -> list[str]:
        """Remove a template and return the internal names of the recordings that were dropped.

        Recordings that another client name refers to stay in the cache.
        """
        with self._lock:
            recorded = self._by_name.pop(name, {})
            others = set().union(*self._by_name.values())
            if self._files is not None:
                recorded = self._read(name).get(name, {}) | recorded
                found = self._names("")
                for file in found:
                    if template_of(file) == name:
                        self._files.remove(file)
                others |= {own_name(file) for file in found if template_of(file) != name}
            self._let_go(name)
        gone = [own for own in recorded if own not in others]
        for own in gone:
            for key in recorded[own].entries:
                self._tiers.drop(key)
        return gone

    def on_disk(self) -> dict[str, int]:
        """Return the bytes of each template's readable recordings on disk."""
        found: Counter[str] = Counter()
        if self._tiers.store is not None:
            self._tiers.store.ls()  # an object store returns many sizes at a time
        for name, recorded in self._by_name.items():
            for recording in recorded.values():
                for key in recording.entries:
                    found[name] += self._tiers.bytes_of(key).get(Tier.DISK, 0)
        return dict(+found)

    def _hold(self, name: str, recording: TemplateRecording) -> None:
        if recording.pinned:
            for key in recording.entries:
                self._tiers.pin(key)
                self._held.append((name, key))

    def _let_go(self, name: str) -> None:
        for holder, key in self._held:
            if holder == name:
                self._tiers.unpin(key)
        self._held = [one for one in self._held if one[0] != name]

    def close(self) -> None:
        """Wait until the files are written."""
        if self._files is not None:
            self._files.settle()

    # Files.

    def _write(self, name: str, own: str) -> None:
        if self._files is None:
            return

        def failed(error: OSError) -> None:
            log.warning("the index entry of template %r can't be written: %s", name, error.strerror)

        data = msgspec.msgpack.encode(self._by_name[name][own])
        self._files.write_later(f"{FOLDER}/{name}/{own}{ENDING}", data, failed)

    def _names(self, name: str) -> list[str]:
        """Return the names of a template's index files, of all templates if `name` is empty."""
        try:
            assert self._files is not None, "only files have names"
            found = self._files.names(f"{FOLDER}/{name}".rstrip("/"))
        except OSError as error:
            log.warning("the index of templates can't be listed: %s", error.strerror)
            return []
        return [file for file in found if file.endswith(ENDING) and file.count("/") == 2]

    def _read(self, name: str = "") -> dict[str, Recorded]:
        """Read the index files of one template, or of all, by template.

        Invalid files are removed, but not their entries.
        """
        found: defaultdict[str, Recorded] = defaultdict(dict)
        if self._files is None:
            return found
        for file in self._names(name):
            try:
                data = self._files.read(file)
                recording = msgspec.msgpack.decode(data, type=TemplateRecording)
                found[template_of(file)][own_name(file)] = recording
            except OSError:
                continue
            except msgspec.MsgspecError:
                self._files.remove(file)
        return found


def template_of(file: str) -> str:
    return file.split("/")[1]


def own_name(file: str) -> str:
    return file.split("/")[2].removesuffix(ENDING)
