"""Trace spans of a job on the worker, sent as each one ends."""

from __future__ import annotations

import time

from maskfx.engine.ticket import AnsweredStep
from maskfx.serve.messages import JobSpan
from maskfx.serve.models.model import Tell


class JobSpans:
    """Step callback that sends the spans of one job.

    The time before the first step of a run is reported as "encode".
    """

    def __init__(self, id: str, attempt: int, began: float, tell: Tell) -> None:
        """Create the spans of one attempt; `began` is its arrival by the monotonic clock."""
        self._id, self._attempt, self._tell = id, attempt, tell
        self._since = began
        self._recording: bool | None = None  # of the last step

    def __call__(self, step: AnsweredStep) -> None:
        # both clocks are monotonic, but perf_counter may have a different origin
        shift = time.monotonic() - time.perf_counter()
        if step.recording is not self._recording:
            self._spell("encode", self._since, step.asked + shift)
        self._recording, self._since = step.recording, step.ended + shift
        name = "record" if step.recording else "step"
        self._spell(name, step.began + shift, self._since, step.number)

    def decoded(self) -> None:
        """Send the "decode" span; call it once the image is decoded."""
        self._spell("decode", self._since, time.monotonic())

    def _spell(self, name: str, began: float, ended: float, number: int | None = None) -> None:
        self._tell(JobSpan(self._id, self._attempt, name, began, ended, number))
