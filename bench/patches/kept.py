"""The rows that a comparison has made so far, in one file: a run goes on where one was stopped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.quality.folder import read, write

Row = dict[str, Any]


class Kept:
    """Rows by task, picture and side. The file is written whole after each picture.

    Args:
        path: The file; without one, rows are kept in memory.
        settings: What all rows must have in common.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path = path
        found = {} if path is None else read(path, {})
        was = found.get("settings", dict(settings))
        changed = [f"{k}: {was.get(k)} before, {v} now" for k, v in settings.items()
                   if was.get(k) != v]  # fmt: skip
        if changed:
            raise ValueError(
                f"{path}: its rows were made otherwise ({'; '.join(changed)}); give another file, "
                "or the settings as they were"
            )
        self._all: dict[str, Any] = {"settings": was, "tasks": {}, "sessions": [], **found}

    def begin(self, header: Mapping[str, Any]) -> None:
        """Note the command, commit and hardware of a run that adds rows."""
        self._all["sessions"].append(dict(header))

    @property
    def sessions(self) -> list[Row]:
        return list(self._all["sessions"])

    def lacking(self, task: str, picture: int, sides: Iterable[str]) -> list[str]:
        """The sides that a picture lacks and that the model can take."""
        known = self._task(task)
        made = known["pictures"].get(str(picture), {})
        return [side for side in sides if side not in made and side not in known["absent"]]

    def add(self, task: str, picture: int, rows: Mapping[str, Row]) -> None:
        self._task(task)["pictures"].setdefault(str(picture), {}).update(rows)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write(self.path, self._all)

    def leave_out(self, task: str, side: str, why: str) -> None:
        """Note a side that the model can't take; it isn't tried again."""
        self._task(task)["absent"][side] = why

    def absent(self, task: str) -> dict[str, str]:
        return dict(self._task(task)["absent"])

    def rows(self, task: str, side: str) -> dict[int, Row]:
        """A side's rows by picture."""
        pictures = self._task(task)["pictures"].items()
        return {int(picture): made[side] for picture, made in pictures if side in made}

    def _task(self, task: str) -> dict[str, Any]:
        found: dict[str, Any] = self._all["tasks"].setdefault(task, {"pictures": {}, "absent": {}})
        return found


def common(first: Mapping[int, Row], second: Mapping[int, Row], key: str) -> Sequence[list[Any]]:
    """The values of both sides, over the pictures that both have."""
    pictures = sorted(first.keys() & second.keys())
    return [[rows[picture][key] for picture in pictures] for rows in (first, second)]
