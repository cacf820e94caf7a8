"""Index of a worker's recordings: the cache entries of each template that clients named.

With a cache directory, the index has one small file per recording, in a folder with the template's
name. Workers share these files: recordings of other workers and of earlier servers are found,
pinned and removed like those of this worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from maskfx.runtime.cache.store_entry import EntryKey
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

    def __init__(self, tiers: Tiers, cache_dir: Path | None) -> None:
        self._tiers = tiers
        self._folder = None if cache_dir is None else cache_dir / FOLDER
        self._lock = threading.Lock()
        self._by_name: dict[str, Recorded] = {}
        self._held: list[tuple[str, EntryKey]] = []  # (name, entry) of the pins taken by this index
        for folder in self._folders():
            self._by_name[folder.name] = self._read(folder)
            for recording in self._by_name[folder.name].values():
                self._hold(folder.name, recording)

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
        if self._folder is not None:
            recorded = self._read(self._folder / name) | recorded
        return [key for recording in recorded.values() for key in recording.entries]

    def forget(self, name: str) -> list[str]:
        """Remove a template and return the internal names of the recordings that were dropped.

        Recordings that another client name refers to stay in the cache.
        """
        with self._lock:
            recorded = self._by_name.pop(name, {})
            others = set().union(*self._by_name.values())
            if self._folder is not None:
                recorded = self._read(self._folder / name) | recorded
                shutil.rmtree(self._folder / name, ignore_errors=True)
                others |= {own_name(path) for path in self._folder.glob(f"*/*{ENDING}")}
            self._let_go(name)
        gone = [own for own in recorded if own not in others]
        for own in gone:
            for key in recorded[own].entries:
                self._tiers.drop(key)
        return gone

    def on_disk(self) -> dict[str, int]:
        """Return the bytes of each template's readable recordings on disk."""
        found: Counter[str] = Counter()
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

    # Files.

    def _write(self, name: str, own: str) -> None:
        if self._folder is None:
            return
        path = self._folder / name / (own + ENDING)
        fresh = path.with_suffix("." + secrets.token_hex(4))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(msgspec.msgpack.encode(self._by_name[name][own]))
            os.replace(fresh, path)
        except OSError as error:
            log.warning("the index entry of template %r can't be written: %s", name, error.strerror)
            with contextlib.suppress(OSError):
                fresh.unlink()

    def _folders(self) -> list[Path]:
        return [] if self._folder is None else [p for p in self._folder.glob("*") if p.is_dir()]

    def _read(self, folder: Path) -> Recorded:
        """Read the index files of one template; remove invalid files, but not their entries."""
        found: Recorded = {}
        for path in sorted(folder.glob("*" + ENDING)):
            try:
                found[own_name(path)] = msgspec.msgpack.decode(
                    path.read_bytes(), type=TemplateRecording
                )
            except OSError:
                continue
            except msgspec.MsgspecError:
                with contextlib.suppress(OSError):
                    path.unlink()
        return found


def own_name(path: Path) -> str:
    return path.name.removesuffix(ENDING)
