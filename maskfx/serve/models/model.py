"""The interface of a worker's model, which runs many jobs at once, and the events it emits.

`pipeline_model.py` implements it with diffusers; `fake_model.py` without torch, for server tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from maskfx.scheduling.step_reports import Stepped
from maskfx.serve.messages import Failed, Job, JobProgress, JobSpan, Ready
from maskfx.serve.request import Pictures, Pixels


@dataclass(frozen=True, eq=False)
class PreviewMade:
    """A preview of a job."""

    id: str
    attempt: int
    index: int
    pixels: Pixels


@dataclass(frozen=True, eq=False)
class Made:
    """A job's result image; `pixels` is None if the job recorded a template."""

    id: str
    attempt: int
    pixels: Pixels | None
    steps: int
    mask_ratio: float
    template: str | None = None  # the recording that was used; warm on this worker from now on
    template_bytes: dict[str, int] | None = None
    patch_share: float | None = None  # share of patches that were computed; None: none were reused


@dataclass(frozen=True)
class Lost:
    """The model's device failed: this process can't run any further job."""

    why: str


Told = Stepped | JobProgress | JobSpan | PreviewMade | Made | Failed | Lost
Tell = Callable[[Told], None]  # may be called from any thread


class Model(Protocol):
    """A model that runs jobs concurrently and reports events through a callback.

    Every job ends with exactly one Made or Failed, unless it was cancelled or the model reported
    that its device is Lost.
    """

    def ready(self) -> Ready: ...

    def start(self, job: Job, pictures: Pictures) -> None:
        """Accept a job and return immediately."""
        ...

    def cancel(self, id: str) -> None:
        """Remove a job from the batch before its next step; ignore unknown ids."""
        ...

    def aside(self) -> list[str]:
        """Return the ids of jobs that wait for an adapter, or for another one's recording."""
        ...

    def forget(self, template: str) -> None:
        """Unpin and drop a template."""
        ...

    def prefetch(self, template: str) -> None:
        """Begin to read a template from disk into memory; ignore unknown ones."""
        ...

    def register_adapter(self, name: str) -> None:
        """Look at a LoRA file again, which is new or was changed."""
        ...

    def remove_adapter(self, name: str) -> None:
        """Forget a LoRA file and its weights; ignore unknown names."""
        ...

    def cache(self) -> dict[str, int]:
        """Return counters since the start and bytes per tier, such as "hits.host", "bytes.disk"."""
        ...

    def close(self) -> None:
        """Finish the jobs in flight, then stop."""
        ...
