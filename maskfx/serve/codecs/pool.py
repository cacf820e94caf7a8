"""The pool of codec processes: pictures become pixels and back, away from the event loop.

A thread per process blocks on its socket; the loop only awaits. A process that dies or hangs on
a picture costs that picture's request and is replaced. Results go before uploads, so that what is
finished leaves first. Pixels cross by socket: at 12 MB a copy takes a few milliseconds with no
lock held, and neither names nor room in /dev/shm can run out.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType

import numpy as np
import structlog
from numpy.typing import NDArray

import maskfx
from maskfx.serve.codecs import messages
from maskfx.serve.codecs.messages import Part, Size
from maskfx.serve.codecs.sniff import sniff
from maskfx.serve.errors import ApiError
from maskfx.serve.request import Mask, Pixels

log = structlog.get_logger(__name__)

Task = messages.Decode | messages.DecodeMask | messages.Resize | messages.Encode
Answer = tuple[messages.Planes | messages.File | messages.CodecRefusal, list[bytearray]]
PACKAGES = Path(maskfx.__file__).resolve().parent.parent
# pages that a picture took stay for the next one: getting them takes longer than filling them
KEEP_PAGES = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # glibc's most
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
ENDS_WITHIN = 2.0  # seconds, of an idle process when its socket closes
RESULTS, UPLOADS = 0, 1  # what goes first


class CodecLost(Exception):
    """The process died or hung with a task in hand."""


@dataclass(frozen=True, eq=False)
class Decoded:
    """A picture; `clear` where its alpha channel has transparent pixels."""

    pixels: Pixels
    clear: Mask | None


@dataclass(frozen=True, eq=False)
class DecodedMask:
    """A mask; `alpha`: whether its file has an alpha channel at all."""

    edit: Mask
    edits: int
    alpha: bool


@dataclass(order=True)
class QueuedTask:
    """A task in the queue; no task at all ends a thread."""

    urgency: int
    number: int
    task: Task | None = field(compare=False, default=None)
    parts: Sequence[Part] = field(compare=False, default=())
    answer: Future[Answer] = field(compare=False, default_factory=Future)


class Codecs:
    """So many processes, each of which may take so many seconds for a picture."""

    def __init__(self, processes: int, *, seconds: float = 10.0) -> None:
        self._queue: queue.PriorityQueue[QueuedTask] = queue.PriorityQueue()
        self._numbers = count()
        self._seats = [CodecThread(self._queue, seconds) for _ in range(processes)]

    def start(self) -> None:
        for seat in self._seats:
            seat.start()

    def close(self) -> None:
        """Ends the processes; what is still asked is answered first."""
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
        """An upright picture. Its header is checked before a process sees it."""
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
        """Pictures and masks at another size; masks come back as one byte a pixel."""
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
        """A file in base64, at this size, pasted into an original of this size if there is one."""
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
        """For pixels, which no process dies of by themselves."""
        try:
            return await self._ask(task, parts, urgency)
        except CodecLost:
            return await self._ask(task, parts, urgency)


class CodecThread:
    """A thread and its process, which is another one after a loss."""

    def __init__(self, tasks: queue.PriorityQueue[QueuedTask], seconds: float) -> None:
        self._tasks, self._seconds = tasks, seconds
        self._codec: Codec | None = None
        self._thread = threading.Thread(target=self._run, name="maskfx-codec", daemon=True)

    @property
    def pid(self) -> int | None:
        codec = self._codec
        return codec.process.pid if codec else None

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
            del waiting  # or its pixels stay until the next one comes
        if self._codec is not None:
            self._codec.close()

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
        if self._codec is not None and self._codec.process.poll() is not None:
            self._drop()  # it died between two pictures: neither is to blame
        if self._codec is None:
            self._codec = Codec(self._seconds)
        return self._codec

    def _drop(self) -> None:
        if self._codec is not None:
            self._codec.kill()
            self._codec = None


class Codec:
    """One process and the socket to it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._line, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "maskfx.serve.codecs.process"],
                    stdin=theirs.fileno(),
                    env=environment(),
                )
            except BaseException:
                self._line.close()
                raise
        # the kernel's own timeout: a socket with Python's would not wait for a whole part
        patience = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)

    def ask(self, task: Task, parts: Sequence[Part]) -> Answer:
        asked = messages.CodecRequest(task, [len(part) for part in parts], int(self._seconds) + 2)
        try:
            messages.send(self._line, messages.encode(asked), parts)
            answered = messages.decode_answered(messages.receive_head(self._line))
            got = [messages.receive(self._line, size) for size in answered.parts]
        except (TimeoutError, BlockingIOError):
            raise CodecLost(f"it took longer than {self._seconds:g} s") from None
        except (EOFError, ConnectionError):
            raise CodecLost("the decoder broke on it") from None
        if isinstance(answered.reply, messages.Broken):
            raise RuntimeError(f"a codec process failed: {answered.reply.reason}")
        return answered.reply, got

    def kill(self) -> None:
        self._line.close()
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self._line.close()
        try:
            self.process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self.kill()


def environment() -> dict[str, str]:
    """Of a process that finds this package, and needs a single thread."""
    paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
    return {**KEEP_PAGES, **os.environ, **own}


def _bytes(plane: Pixels | Mask) -> memoryview:
    return np.ascontiguousarray(plane).data.cast("B")


def _planes(reply: messages.Planes, parts: Sequence[bytearray]) -> list[NDArray[np.uint8]]:
    pairs = zip(reply.shapes, parts, strict=True)
    return [np.frombuffer(part, np.uint8).reshape(shape) for shape, part in pairs]
