"""AdapterNames: the LoRA files that clients may name, by their names in the front end.

Only names are kept here; workers read the files. A name is one of the allow-list, and its file is a
regular one in the directory itself.
"""

from __future__ import annotations

import re
import stat
from dataclasses import replace
from pathlib import Path

from maskfx.errors import InputError
from maskfx.serve.errors import no_lora
from maskfx.serve.request import NAME, AdapterInfo, Card

SUFFIX = ".safetensors"


class AdapterNames:
    """The registered files of a directory; at start, all of them.

    Args:
        folder: The directory, or None if the server has none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: dict[str, AdapterInfo] = {}
        self._names: tuple[str, ...] | None = None  # sorted; None after a change
        if folder is not None:
            if not folder.is_dir():
                raise InputError(
                    f"lora_dir {folder}: no such directory; create it, or correct the setting"
                )
            for path in sorted(folder.glob(f"*{SUFFIX}")):
                found = self._look(path.stem)
                if found is not None:
                    self._known[path.stem] = found

    @property
    def names(self) -> tuple[str, ...]:
        if self._names is None:
            self._names = tuple(sorted(self._known))
        return self._names

    def all(self) -> list[AdapterInfo]:
        return [self._known[name] for name in self.names]

    def listed(self, card: Card) -> Card:
        """Return a model's card with the names, if it takes LoRAs."""
        loras = self.names if "lora" in card.takes else ()
        return card if loras == card.loras else replace(card, loras=loras)

    def get(self, name: str) -> AdapterInfo:
        found = self._known.get(name)
        if found is None:
            raise no_lora("adapter")
        return found

    def register(self, name: str) -> AdapterInfo:
        """Look at a file; ApiError lora_not_found if there is none of this name."""
        found = self._look(name)
        if found is None:
            raise no_lora("name")
        self._known[name], self._names = found, None
        return found

    def remove(self, name: str) -> None:
        self.get(name)
        del self._known[name]
        self._names = None

    def _look(self, name: str) -> AdapterInfo | None:
        if self._folder is None or re.fullmatch(NAME[1:-1], name, re.ASCII) is None:
            return None
        try:
            seen = (self._folder / f"{name}{SUFFIX}").lstat()
        except OSError:
            return None
        if not stat.S_ISREG(seen.st_mode):
            return None
        return AdapterInfo(name, seen.st_size, int(seen.st_mtime))
