"""The folder of one contest: what it was run with, its finished edits, some pictures.

A file is written whole or not at all, so a run may be stopped at any moment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.quality.bed import Case, Pixels

TEMPLATE, MASKED = "template", "mask"


class Folder:
    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        (path / "edits").mkdir(parents=True, exist_ok=True)
        kept = self._about()
        was = kept.setdefault("settings", dict(settings))
        changed = [f"{k}: {was.get(k)} before, {v} now" for k, v in settings.items()
                   if was.get(k) != v]  # fmt: skip
        if changed:
            raise ValueError(
                f"{path}: its edits were made otherwise ({'; '.join(changed)}); "
                "give another --folder, or the settings as they were"
            )
        self.absent: dict[str, str] = {}  # baselines that couldn't be run, and why
        write(self.path / "settings.json", kept)

    def begin(self, header: Mapping[str, Any]) -> None:
        """A process works on the folder from now on; others may do so too."""
        kept = self._about()
        kept["sessions"].append(dict(header))
        write(self.path / "settings.json", kept)

    def leave_out(self, side: str, why: str) -> None:
        """This process doesn't try again; another one may."""
        self.absent[side] = why
        kept = self._about()
        kept["absent"][side] = why
        write(self.path / "settings.json", kept)

    def about(self) -> dict[str, Any]:
        """Settings, and the header of every process that took part; the last one's own first."""
        kept = self._about()
        *earlier, last = kept["sessions"]
        others = {"earlier_sessions": earlier, "settings": kept["settings"]}
        return {**last, **others, "absent": kept["absent"]}

    def _about(self) -> dict[str, Any]:
        return {"sessions": [], "absent": {}, **read(self.path / "settings.json", {})}

    # Edits.

    def edit(self, index: int) -> dict[str, Any]:
        return read(self._place(index), {"index": index, "sides": {}})

    def keep(self, index: int, found: Mapping[str, Any]) -> None:
        write(self._place(index), found)

    def lacks(self, index: int, names: Sequence[str]) -> bool:
        there = self.edit(index)["sides"]
        return any(name not in there for name in names)

    def edits(self, count: int) -> list[dict[str, Any]]:
        """Those of the first `count` that were run."""
        return [self.edit(i) for i in range(count) if self._place(i).exists()]

    def _place(self, index: int) -> Path:
        return self.path / "edits" / f"{index:05d}.json"

    # Pictures.

    def keep_pictures(self, case: Case) -> None:
        """The template, and what the mask leaves over."""
        self.keep_picture(case.index, TEMPLATE, case.edit.pixels)
        cut = np.where(case.edit.mask[..., None], np.uint8(127), case.edit.pixels)
        self.keep_picture(case.index, MASKED, cut)

    def keep_picture(self, index: int, name: str, pixels: Pixels) -> None:
        place = self._picture(index, name)
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place)

    def picture(self, index: int, name: str) -> Pixels | None:
        place = self._picture(index, name)
        return np.asarray(Image.open(place)) if place.exists() else None

    def _picture(self, index: int, name: str) -> Path:
        return self.path / "pictures" / f"{index:05d}" / f"{name}.png"


def read(path: Path, otherwise: dict[str, Any]) -> dict[str, Any]:
    if not path.exists():
        return otherwise
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write(path: Path, content: Mapping[str, Any]) -> None:
    new = path.with_suffix(f".{os.getpid()}")  # several processes may write
    new.write_text(json.dumps(content) + "\n", encoding="utf-8")
    os.replace(new, path)
