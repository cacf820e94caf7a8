"""QueuedWork: what a device had been given at a moment, for copies that need to wait for no more.

Where several threads give one stream of a GPU their work, a copy that is queued behind another
thread's step would wait for all of it. Copies of tensors that were there before have a stream of
their own, which waits for what was queued then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_thread = threading.local()


class QueuedWork:
    """What the current stream of a device has been given by now.

    Args:
        device: The device; those without streams wait for everything.
        tensors: Tensors that are complete when this work is, and don't change later.
    """

    def __init__(self, device: torch.device, tensors: Iterable[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))
            # they are held, so that no other tensor gets their memory
            held = [value for value in tensors if value.device == device]
            self._tensors = {value.untyped_storage().data_ptr(): value for value in held}

    @classmethod
    def of_thread(cls) -> QueuedWork | None:
        """Return the work within whose `current` this thread is."""
        found: QueuedWork | None = getattr(_thread, "work", None)
        return found

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the work that copies of this thread wait for."""
        before, _thread.work = self.of_thread(), self
        try:
            yield
        finally:
            _thread.work = before

    def covers(self, value: Tensor) -> bool:
        """Return True for a tensor that is complete when this work is."""
        return self._event is not None and value.untyped_storage().data_ptr() in self._tensors

    @contextmanager
    def copying(self, device: torch.device) -> Iterator[None]:
        """Let copies of such tensors that begin within wait for this work alone."""
        if self._stream is None:
            assert self._event is not None, "no tensor is covered"
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_event(self._event)
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Wait for the copies that have begun in this way."""
        if self._stream is not None:
            self._stream.synchronize()
