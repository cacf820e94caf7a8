"""Profiles of adapters: from which step on an adapter changes what a base model computes.

A profile is a JSON file beside the adapter's: for each base model, the first step at which latents
with and without the adapter differ (`maskfx adapters profile`). Earlier steps run without it, so
that a request can begin before the file is read. It counts in the scheduler's times, so that it
holds for other numbers of steps and for edits that begin in the middle.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

ENDING = ".profile.json"
VERSION = 1
COSINE = 0.99


@dataclass(frozen=True)
class Profile:
    """The start of an adapter on one base model.

    Args:
        start: First step at which it acts, of `steps`.
        steps: Steps of the profiled runs.
        first: The scheduler's time at the first step.
        time: The scheduler's time at `start`.
        cosine: Similarity below which latents count as changed.
        size: Bytes of the adapter's file; a profile of another file isn't used.
    """

    start: int
    steps: int
    first: float
    time: float
    cosine: float
    size: int

    def acts(self, time: float) -> bool:
        """Return True if the adapter acts at a time of the scheduler, which may fall or rise."""
        if not self.start:
            return True
        return time <= self.time if self.first >= self.time else time >= self.time


def profile_path(adapter: str | os.PathLike[str]) -> Path:
    return Path(adapter).with_suffix(ENDING)


def stored_profiles(adapter: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the profiles beside an adapter's file, by base model; empty if they can't be read."""
    path = profile_path(adapter)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        bases = found["bases"] if found.get("version") == VERSION else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        log.warning("%s isn't used: %s: %s", path.name, type(error).__name__, error)
        return {}
    return bases if isinstance(bases, dict) else {}


def profile_of(adapter: str | os.PathLike[str], size: int, base: str) -> Profile | None:
    """Return the profile of an adapter of this size on a base model; None if there is none."""
    try:
        found = Profile(**stored_profiles(adapter)[base])
        numbers = (found.start, found.steps, found.first, found.time, found.cosine)
        sound = all(isfinite(number) for number in numbers) and found.start >= 0
    except (KeyError, TypeError):
        return None
    return found if sound and found.size == size else None


def store_profile(adapter: str | os.PathLike[str], base: str, profile: Profile) -> Path:
    """Write a profile beside the adapter's file, and return the path."""
    path = profile_path(adapter)
    bases = stored_profiles(adapter) | {base: asdict(profile)}
    text = json.dumps({"version": VERSION, "bases": bases}, indent=2)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def first_below(cosines: Sequence[Sequence[float]], cosine: float) -> int:
    """Return the first step whose latents differ, at any seed; the number of steps if none does.

    Args:
        cosines: Per seed, the similarity of the latents after each step.
        cosine: Similarity below which latents count as changed.
    """
    steps = min(map(len, cosines))
    return next(
        (step for step in range(steps) if min(own[step] for own in cosines) < cosine), steps
    )
