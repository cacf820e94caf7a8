"""The channel between a process and its child: messages of byte strings over a Unix socket.

A message is the number of its parts, their lengths, then the parts. Both ends block in the kernel
while a large part is copied, without the GIL. Shared memory would save at most a fifth of the time
of messages beyond 12 MiB (`bench/transport.py`), and adds names and space in /dev/shm that can run
out, with SIGBUS where it is mapped.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import threading

Part = bytes | bytearray | memoryview

COUNT = struct.Struct("<I")
PARTS = 1 << 16  # limit per message
BYTES = 1 << 30  # default limit per message
PR_SET_PDEATHSIG = 1  # of Linux
WATCH_SECONDS = 1.0  # between two looks at the parent's id, which show its death in any case


class Channel:
    """One end of a channel. One message at a time in each direction.

    Args:
        line: The socket, which the channel closes.
        seconds: Limit of the time in which the other end must take or send something; None for
            none.
        most: Limit of the bytes of a received message.
    """

    def __init__(
        self, line: socket.socket, seconds: float | None = None, most: int = BYTES
    ) -> None:
        self._line, self._most = line, most
        if seconds is not None:
            self.limit(seconds)

    def limit(self, seconds: float) -> None:
        """Set the time in which the other end must take or send something from now on."""
        # the kernel's timeout: with Python's, the socket would not wait for a whole part
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, *parts: Part) -> None:
        """Send a message; raise TimeoutError or ConnectionError if it isn't taken."""
        lengths = [memoryview(part).nbytes for part in parts]
        head = COUNT.pack(len(parts)) + struct.pack(f"<{len(parts)}Q", *lengths)
        try:
            for part in (head, *parts):
                self._line.sendall(part)
        except BlockingIOError:
            raise TimeoutError("the other end reads nothing") from None

    def receive(self) -> list[bytearray]:
        """Receive a message.

        Raises EOFError if the other end closed or sent nonsense, TimeoutError if it is silent.
        """
        (count,) = COUNT.unpack(self._read(COUNT.size))
        if count > PARTS:
            raise EOFError(f"a message of {count} parts")
        lengths = struct.unpack(f"<{count}Q", self._read(8 * count))
        if sum(lengths) > self._most:
            raise EOFError(f"a message of {sum(lengths)} bytes")
        return [self._read(length) for length in lengths]

    def send_file(self, descriptor: int) -> None:
        """Send an open file; the other end receives a descriptor of its own."""
        try:
            socket.send_fds(self._line, [b"f"], [descriptor])
        except BlockingIOError:
            raise TimeoutError("the other end reads nothing") from None

    def receive_file(self) -> int:
        """Receive the descriptor of an open file; the caller closes it."""
        try:
            content, descriptors, *_ = socket.recv_fds(self._line, 1, 1)
        except BlockingIOError:
            raise TimeoutError("the other end is silent") from None
        if not content or len(descriptors) != 1:
            raise EOFError("the other end is gone")
        return descriptors[0]

    def waits(self, seconds: float) -> bool:
        """Wait until the other end has sent something or closed; return False after `seconds`."""
        poller = select.poll()
        poller.register(self._line, select.POLLIN)
        return bool(poller.poll(max(0.0, 1000 * seconds)))

    def fileno(self) -> int:
        return self._line.fileno()

    def close(self) -> None:
        self._line.close()

    def _read(self, size: int) -> bytearray:
        room = bytearray(size)
        view, done = memoryview(room), 0
        while done < size:
            try:
                count = self._line.recv_into(view[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError("the other end is silent") from None
            if not count:
                raise EOFError("the other end is gone")
            done += count
        return room


def connect_to_parent(most: int = BYTES) -> Channel:
    """Return the channel to the process that started this one as a `ChildProcess`.

    From then on, this process ends when the parent does or closes its end, also during a call, and
    on Linux also while it is stopped. Standard input, which was the channel, is empty afterwards.
    """
    end_with_parent()
    line = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    threading.Thread(target=_end_with, args=(line, os.getppid()), daemon=True).start()
    return Channel(line, most=most)


def end_with_parent() -> None:
    """Have the system end this process with the thread that started it, if it is Linux."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with(line: socket.socket, parent: int) -> None:
    """End this process when the other end of the socket closes or the parent's id changes.

    A process that the parent forked may keep the other end open.
    """
    poller = select.poll()
    poller.register(line, 0)  # a hang-up is reported in any case
    while not poller.poll(1000 * WATCH_SECONDS) and os.getppid() == parent:
        continue
    os._exit(1)
