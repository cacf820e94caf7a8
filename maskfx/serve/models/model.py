"""What a worker runs: something that makes pictures of many jobs at once.

`pipeline_model.py` has the real one, `fake_model.py` one without torch, for tests of the server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from maskfx.serve.messages import Failed, Job, JobSpan, Progress, Ready, Stepped
from maskfx.serve.request import Mask, Pixels


@dataclass(frozen=True, eq=False)
class JobPictures:
    """The pixels that belong to a job."""

    images: tuple[Pixels, ...] = ()
    mask: Mask | None = None
    control: Pixels | None = None


@dataclass(frozen=True, eq=False)
class PreviewMade:
    """A preview of a job."""

    id: str
    attempt: int
    index: int
    pixels: Pixels


@dataclass(frozen=True, eq=False)
class Made:
    """A job's picture; none where a template was recorded."""

    id: str
    attempt: int
    pixels: Pixels | None
    steps: int
    mask_ratio: float
    template: str | None = None  # the recording that served, warm here from now on
    template_bytes: dict[str, int] | None = None


@dataclass(frozen=True)
class Lost:
    """The model's device failed: this process can make no picture any more."""

    why: str


Told = Stepped | Progress | JobSpan | PreviewMade | Made | Failed | Lost
Tell = Callable[[Told], None]  # from any thread


class Model(Protocol):
    """Every job is answered by exactly one Made or Failed, unless it was cancelled, or the model
    tells that its device is Lost."""

    def ready(self) -> Ready: ...

    def start(self, job: Job, pictures: JobPictures) -> None:
        """Take a job; returns at once."""
        ...

    def cancel(self, id: str) -> None:
        """Out of the batch before its next step. Of unknown jobs: nothing."""
        ...

    def forget(self, template: str) -> None:
        """Unpin and drop a template."""
        ...

    def cache(self) -> dict[str, int]:
        """Counters and bytes per tier since the start: "hits.host", "misses", "bytes.disk"…"""
        ...

    def close(self) -> None:
        """Finish what is under way, then stop."""
        ...
