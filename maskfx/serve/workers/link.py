"""The link between front end and workers: ZeroMQ over a Unix socket in a private directory.

Workers of other machines connect by TCP, with keys (`link_keys.py`). Such a connection is made
once: when it is lost, messages may be lost with it, so the worker ends and its requests run again.

Owns the encoding and decoding of messages; invalid ones are logged and dropped. Knows nothing of
the meaning of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import msgspec
import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from maskfx.errors import InputError
from maskfx.serve.messages import (
    CHANNELS,
    Alive,
    FromWorker,
    Ping,
    Stop,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from maskfx.serve.workers.link_keys import FrontKeys, RemoteAddress
from maskfx.serve.workers.lock_file import PREFIX, LockFile, new_name, orphaned
from maskfx.serve.workers.pixels import Part

LOCK = "lock"
LONGEST = 100  # characters; the path of a Unix socket has 107 at most
BESIDE_PIXELS = 64 << 20  # bytes that a part may have in any case
AT_ONCE = 64  # messages received before yielding to other tasks of the event loop
GONE_SECONDS = 6.0  # of silence, after which a worker assumes that the front end is gone
LOOK_SECONDS = 0.5  # between a worker's looks at its socket, at most
LINK_LOST = 77  # exit code: the connection over TCP was closed

log = structlog.get_logger(__name__)
Hear = Callable[[str, FromWorker, Sequence[Part]], None]


class FrontLink:
    """The front end's side: sends to workers by name and receives from all of them.

    Belongs to one event loop; `hear` is called with each received message.

    Args:
        `hear`: Receives the worker's name, the message, and the parts that follow it.
        pixels: Maximum pixels of an image; a worker that sends a much larger part is disconnected.
        listen: Host and port for workers of other machines; without it there can be none.
    """

    def __init__(self, hear: Hear, pixels: int, listen: tuple[str, int] | None = None) -> None:
        self._hear = hear
        self._directory, self._lock = private_directory()
        self.address = f"ipc://{self._directory / 'front'}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a worker that is gone is an error
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # unlimited; slots bound the messages in flight
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, BESIDE_PIXELS + CHANNELS * pixels)
        self._socket.bind(self.address)
        self._keys = None if listen is None else FrontKeys(self._context)
        self.remote = None if listen is None else self._listen_at(*listen)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self.listen)
        self._due = False

    def send(self, worker: str, message: ToWorker, parts: Sequence[Part] = ()) -> bool:
        """Send a message; return False if the worker is unreachable."""
        try:
            whole = [worker.encode(), encode(message), *parts]
            self._socket.send_multipart(whole, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            log.debug("worker_unreachable", worker=worker, error=str(error))
            return False
        finally:
            self._listen_soon()  # sending may consume the socket's edge-triggered read event
        return True

    def listen(self) -> None:
        """Receive pending messages, at most `AT_ONCE` before yielding to the event loop."""
        self._due = False
        for _ in range(AT_ONCE):
            try:
                name, *parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            worker = bytes(name.buffer).decode(errors="replace")
            try:
                message = decode_from_worker(parts[0].buffer)
            except (msgspec.MsgspecError, IndexError) as error:
                log.warning("message_dropped", worker=worker, error=str(error))
                continue
            self._hear(worker, message, [part.buffer for part in parts[1:]])
        self._listen_soon()

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._close()

    def _close(self) -> None:
        self._socket.close()
        if self._keys is not None:
            self._keys.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._lock.close()

    def _listen_at(self, host: str, port: int) -> RemoteAddress:
        """Listen by TCP too; InputError if that isn't possible."""
        assert self._keys is not None, "made before"
        self._keys.secure(self._socket)  # the Unix socket, bound before, stays without keys
        try:
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._close()
            why = f"workers can't connect to {host}:{port}: {str(error).lower()}"
            message = f"{why}; set ray.link_host to an address of this machine, ray.link_port to 0"
            raise InputError(message) from None
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return self._keys.remote(bound.rstrip("\0"))

    def _listen_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._listen_if_open)

    def _listen_if_open(self) -> None:
        if not self._socket.closed:
            self.listen()


def private_directory() -> tuple[Path, LockFile]:
    """Create a locked directory for one socket; remove those of dead front ends."""
    base = Path(tempfile.gettempdir())
    if len(str(base / new_name() / "front")) > LONGEST:
        base = Path("/tmp")
    for lock in base.glob(f"{PREFIX}*/{LOCK}"):
        if orphaned(lock):
            shutil.rmtree(lock.parent, ignore_errors=True)
    directory = base / new_name()
    directory.mkdir(mode=0o700)
    return directory, LockFile(directory / LOCK)


class WorkerLink:
    """The worker's side: a thread that owns the socket and sends heartbeats, also while loading.

    It ends the process when the front end is gone, since there is no receiver for the results.

    Args:
        address: Address of the front end's socket.
        name: The worker's name.
        heartbeat: Seconds between two heartbeats.
        alive: Returns the heartbeat message; called by the link's thread.
        remote: The front end's address by TCP; without it, `address` is used.
    """

    def __init__(
        self,
        address: str,
        name: str,
        heartbeat: float,
        alive: Callable[[], Alive],
        remote: RemoteAddress | None = None,
    ) -> None:
        self.inbox: SimpleQueue[tuple[ToWorker, list[Part]]] = SimpleQueue()
        self.loading = True
        self._address, self._name, self._remote = address, name, remote
        self.connected = threading.Event()  # with accepted keys
        if remote is None:
            self.connected.set()  # a Unix socket has none
        self._heartbeat, self._alive = heartbeat, alive
        self._outbox: deque[list[Part]] = deque()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: FromWorker, parts: Sequence[Part] = ()) -> None:
        """Queue a message; may be called from any thread."""
        self._outbox.append([encode(message), *parts])
        self._ring()

    def close(self) -> None:
        """Send the queued messages, then end the thread."""
        self._ending = True
        self._ring()
        self._thread.join()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread as well
            os.write(self._wake, b"x")

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._name.encode())
        socket.setsockopt(zmq.LINGER, 2000)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if self._remote is None:
            socket.connect(self._address)
            self._serve(socket, None)
        else:
            self._remote.secure(socket)
            ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            monitor = socket.get_monitor_socket(ends)
            socket.connect(self._remote.address)
            self._serve(socket, monitor)
            socket.disable_monitor()
            monitor.close(linger=0)
        socket.close()
        context.term()

    def _serve(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        if monitor is not None:
            poller.register(monitor, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        heard = looked = time.monotonic()
        shown = 0.0
        pause = min(LOOK_SECONDS, self._heartbeat)
        while not self._ending or (self._outbox and self.connected.is_set()):
            if self.connected.is_set() and time.monotonic() - shown >= self._heartbeat:
                shown = time.monotonic()
                socket.send(encode(self._alive()))
            poller.poll(round(1000 * pause))
            self._silence_bell()
            if monitor is not None:
                self._watch(monitor)
            # a socket without a peer would block: after refused keys there is none for good
            while self._outbox and self.connected.is_set():
                socket.send_multipart(self._outbox.popleft(), copy=False)
            now = time.monotonic()
            waking = now - looked > LOOK_SECONDS + pause  # this process was suspended itself
            if self._receive(socket) or waking or not self.connected.is_set():
                heard = now
            looked = now
            if now - heard > GONE_SECONDS:
                os._exit(1)

    def _silence_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)

    def _watch(self, monitor: zmq.Socket[bytes]) -> None:
        """Note that the connection was made; end the process if it was lost."""
        while monitor.poll(0):
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected.set()
            elif self.connected.is_set():
                log.warning("link_lost", worker=self._name)
                os._exit(LINK_LOST)

    def _receive(self, socket: zmq.Socket[bytes]) -> bool:
        """Receive all pending messages; return True if there were any."""
        heard = False
        while True:
            try:
                first, *rest = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return heard
            heard = True
            try:
                message = decode_to_worker(first.buffer)
            except msgspec.MsgspecError as error:
                log.warning("message_dropped", error=str(error))
                continue
            if isinstance(message, Stop) and self.loading:
                os._exit(0)  # loading can't be interrupted
            if not isinstance(message, Ping):
                self.inbox.put((message, [part.buffer for part in rest]))
