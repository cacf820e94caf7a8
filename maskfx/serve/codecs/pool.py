"""The pool of codec processes, which decode and encode images outside the event loop.

One thread per process blocks on its channel; the event loop only awaits. A process that dies or
hangs on an image fails that image's request and is replaced. Results have priority over uploads, so
that finished requests leave first.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType

import numpy as np
import structlog
from numpy.typing import NDArray

from maskfx.runtime.processes.channel import Part
from maskfx.runtime.processes.child_process import ChildProcess
from maskfx.serve.codecs import messages
from maskfx.serve.codecs.messages import Size
from maskfx.serve.codecs.sniff import sniff
from maskfx.serve.errors import ApiError
from maskfx.serve.request import Mask, Pixels

log = structlog.get_logger(__name__)

Task = messages.Decode | messages.DecodeMask | messages.Resize | messages.Encode
Answer = tuple[messages.Planes | messages.File | messages.CodecRefusal, list[bytearray]]
# memory pages are reused for the next image: allocating them takes longer than filling them
KEEP_PAGES = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # glibc's maximum
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
ENDS_WITHIN = 2.0  # seconds until an idle process ends after its channel closes
RESULTS, UPLOADS = 0, 1  # priorities; lower is first


class CodecLost(Exception):
    """Raised if the process died or hung while it ran a task."""


@dataclass(frozen=True, eq=False)
class Decoded:
    """A decoded image; `clear` marks its transparent pixels, None if there are none."""

    pixels: Pixels
    clear: Mask | None


@dataclass(frozen=True, eq=False)
class DecodedMask:
    """A decoded mask; `alpha` is True if its file has an alpha channel."""

    edit: Mask
    edits: int
    alpha: bool


@dataclass(order=True)
class QueuedTask:
    """A task in the queue; a `task` of None ends a thread."""

    urgency: int
    number: int
    task: Task | None = field(compare=False, default=None)
    parts: Sequence[Part] = field(compare=False, default=())
    answer: Future[Answer] = field(compare=False, default_factory=Future)


class Codecs:
    """A pool of `processes` codec processes, with a time limit of `seconds` per task."""

    def __init__(self, processes: int, *, seconds: float = 10.0) -> None:
        self._queue: queue.PriorityQueue[QueuedTask] = queue.PriorityQueue()
        self._numbers = count()
        self._seats = [CodecThread(self._queue, seconds) for _ in range(processes)]

    def start(self) -> None:
        for seat in self._seats:
            seat.start()

    def close(self) -> None:
        """Finish the queued tasks, then end the processes."""
        for _ in self._seats:
            self._queue.put(QueuedTask(UPLOADS + 1, next(self._numbers)))
        for seat in self._seats:
            seat.join()

    def __enter__(self) -> Codecs:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [seat.pid for seat in self._seats if seat.pid]

    async def decode(self, file: bytes, param: str, pixels: int) -> Decoded:
        """Decode an image file with EXIF orientation applied.

        Args:
            file: The file; its header is checked before it is sent to a process.
            param: The request's field, which errors name.
            pixels: Maximum width x height.
        """
        found = sniff(file, param, pixels)
        head, planes = await self._read(messages.Decode(found.format, pixels), file, param)
        return Decoded(planes[0], planes[1].view(np.bool_) if head.edits else None)

    async def decode_mask(
        self, file: bytes, param: str, pixels: int, *, luminance: bool
    ) -> DecodedMask:
        found = sniff(file, param, pixels)
        task = messages.DecodeMask(found.format, pixels, luminance)
        head, planes = await self._read(task, file, param)
        return DecodedMask(planes[0].view(np.bool_), head.edits, head.alpha)

    async def fit(self, planes: Sequence[Pixels | Mask], size: Size) -> list[NDArray[np.uint8]]:
        """Resize images and masks; masks are returned as one byte per pixel."""
        task = messages.Resize([plane.shape for plane in planes], size)
        reply, parts = await self._ask_twice(task, [_bytes(plane) for plane in planes], UPLOADS)
        assert isinstance(reply, messages.Planes), reply
        return _planes(reply, parts)

    async def encode(
        self,
        result: Pixels,
        form: str,
        quality: int | None,
        size: Size,
        into: tuple[Pixels, Mask] | None = None,
    ) -> bytes:
        """Encode a result as a file in base64.

        Args:
            result: The pixels.
            form: "png", "jpeg" or "webp".
            quality: Of jpeg and webp; None: 100.
            size: Width and height of the file; the result is resized to it.
            into: Original and mask of this size, if the result is pasted into it.
        """
        planes = [result, *(into or ())]
        task = messages.Encode(form, quality, [plane.shape for plane in planes], size)
        _, parts = await self._ask_twice(task, [_bytes(plane) for plane in planes], RESULTS)
        return bytes(parts[0])

    async def _read(
        self, task: Task, file: bytes, param: str
    ) -> tuple[messages.Planes, list[NDArray[np.uint8]]]:
        try:
            reply, parts = await self._ask(task, [file], UPLOADS)
        except CodecLost as lost:
            raise ApiError(
                "invalid_image_file", f"{param} can't be decoded: {lost}.", param=param
            ) from lost
        if isinstance(reply, messages.CodecRefusal):
            raise ApiError(reply.code, f"{param} is refused: {reply.reason}.", param=param)
        assert isinstance(reply, messages.Planes), reply
        return reply, _planes(reply, parts)

    async def _ask(self, task: Task, parts: Sequence[Part], urgency: int) -> Answer:
        waiting = QueuedTask(urgency, next(self._numbers), task, parts)
        self._queue.put(waiting)
        return await asyncio.wrap_future(waiting.answer)

    async def _ask_twice(self, task: Task, parts: Sequence[Part], urgency: int) -> Answer:
        """Run a task on pixels, with one retry: raw pixels don't crash a codec."""
        try:
            return await self._ask(task, parts, urgency)
        except CodecLost:
            return await self._ask(task, parts, urgency)


class CodecThread:
    """A thread and its codec process, which is replaced if it dies."""

    def __init__(self, tasks: queue.PriorityQueue[QueuedTask], seconds: float) -> None:
        self._tasks, self._seconds = tasks, seconds
        self._codec: Codec | None = None
        self._thread = threading.Thread(target=self._run, name="maskfx-codec", daemon=True)

    @property
    def pid(self) -> int | None:
        codec = self._codec
        return codec.child.pid if codec else None

    def start(self) -> None:
        self._codec = Codec(self._seconds)
        self._thread.start()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (waiting := self._tasks.get()).task is not None:
            if waiting.answer.set_running_or_notify_cancel():
                self._serve(waiting, waiting.task)
            del waiting  # frees its pixels before waiting for the next task
        if self._codec is not None:
            self._codec.child.close(ENDS_WITHIN)

    def _serve(self, waiting: QueuedTask, task: Task) -> None:
        try:
            waiting.answer.set_result(self._alive().ask(task, waiting.parts))
        except CodecLost as lost:
            log.warning("codec_lost", task=type(task).__name__, reason=str(lost))
            self._drop()
            waiting.answer.set_exception(lost)
        except OSError as error:
            self._drop()
            waiting.answer.set_exception(
                ApiError(
                    "out_of_resources",
                    f"No process for pictures can be started: {error.strerror}.",
                    retry_after=5.0,
                )
            )
        except Exception as fault:
            waiting.answer.set_exception(fault)

    def _alive(self) -> Codec:
        if self._codec is not None and self._codec.child.exited():
            self._drop()  # it died between two tasks: neither is the cause
        if self._codec is None:
            self._codec = Codec(self._seconds)
        return self._codec

    def _drop(self) -> None:
        if self._codec is not None:
            self._codec.child.end()
            self._codec = None


class Codec:
    """A codec process, with a time limit of `seconds` per task."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        environment = {**KEEP_PAGES, **os.environ, "OPENBLAS_NUM_THREADS": "1"}
        self.child = ChildProcess(
            "maskfx.serve.codecs.process", environment=environment, seconds=seconds
        )

    def ask(self, task: Task, parts: Sequence[Part]) -> Answer:
        asked = messages.CodecRequest(task, int(self._seconds) + 2)
        try:
            self.child.channel.send(messages.encode(asked), *parts)
            head, *got = self.child.channel.receive()
        except TimeoutError:
            raise CodecLost(f"it took longer than {self._seconds:g} s") from None
        except (EOFError, ConnectionError):
            raise CodecLost("the decoder broke on it") from None
        reply = messages.decode_reply(head)
        if isinstance(reply, messages.Broken):
            raise RuntimeError(f"a codec process failed: {reply.reason}")
        return reply, got


def _bytes(plane: Pixels | Mask) -> memoryview:
    return np.ascontiguousarray(plane).data.cast("B")


def _planes(reply: messages.Planes, parts: Sequence[bytearray]) -> list[NDArray[np.uint8]]:
    pairs = zip(reply.shapes, parts, strict=True)
    return [np.frombuffer(part, np.uint8).reshape(shape) for shape, part in pairs]
