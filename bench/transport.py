"""How long large messages take between two processes: sockets, ZeroMQ, files and mapped memory.

    python -m bench.transport

A message is sent to another process, which takes it into memory of its own and sends it back. The
sides: `socket` (a pair of Unix sockets, as to codec processes and engine helpers), `zeromq` (frames
over ipc), `file` (a new file in /dev/shm that is written and read, removed afterwards) and `mapped`
(a lasting block of /dev/shm per direction that both processes map, copied into and out of). The
last two send a few bytes by socket beside it. Per side and size: seconds of a round trip, the CPU
seconds of both processes, and those of the sending thread, which an event loop would be blocked
for. Writes transport.json to bench/results.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zmq
from numpy.typing import NDArray

from bench.harness import ROOT, Figure, alternate, figure, header, write_json
from bench.report import columns

SIZES = {
    "64 KiB": 1 << 16,  # latents of 512 x 512
    "3 MiB": 3 << 20,  # pixels of 1024 x 1024
    "12 MiB": 12 << 20,  # the same in 32 bits; pixels of 2048 x 2048
    "48 MiB": 48 << 20,  # pixels of 4096 x 4096
}
Bytes = NDArray[np.uint8]


class Transport(Protocol):
    """One end: sends bytes and receives them into memory of its own."""

    def send(self, data: Bytes) -> None: ...

    def receive(self, size: int) -> Bytes: ...

    def close(self) -> None: ...


class Sockets:
    """Bytes through a stream socket; the kernel waits for a whole part, without the GIL."""

    def __init__(self, line: socket.socket, place: Path, child: bool) -> None:
        self.line = line

    def send(self, data: Bytes) -> None:
        self.line.sendall(data.data)

    def receive(self, size: int) -> Bytes:
        room = np.empty(size, np.uint8)
        received_into(self.line, room.data)
        return room

    def close(self) -> None:
        return


class Frames:
    """Bytes as a ZeroMQ frame that isn't copied into or out of Python's memory."""

    def __init__(self, line: socket.socket, place: Path, child: bool) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        if child:
            self.socket.connect(f"ipc://{place}/zmq")
        else:
            self.socket.bind(f"ipc://{place}/zmq")

    def send(self, data: Bytes) -> None:
        self.socket.send(data.data, copy=False)

    def receive(self, size: int) -> Bytes:
        return np.frombuffer(self.socket.recv(copy=False).buffer, np.uint8)

    def close(self) -> None:
        self.socket.close()


class Files:
    """A file per round trip with room for both ways, made and removed by the parent."""

    def __init__(self, line: socket.socket, place: Path, child: bool) -> None:
        self.line, self.child, self.made = line, child, 0
        self.stem = f"/dev/shm/{place.name}"

    @property
    def name(self) -> str:
        return f"{self.stem}-{self.made}"

    def send(self, data: Bytes) -> None:
        if not self.child:
            self.made += 1
        flags = os.O_RDWR if self.child else os.O_RDWR | os.O_CREAT | os.O_EXCL
        descriptor = os.open(self.name, flags, 0o600)
        if not self.child:
            os.posix_fallocate(descriptor, 0, 2 * data.nbytes)
        done, at = 0, data.nbytes * self.child
        while done < data.nbytes:
            done += os.pwrite(descriptor, data[done:].data, at + done)
        os.close(descriptor)
        self.line.sendall(b"x")

    def receive(self, size: int) -> Bytes:
        received_into(self.line, memoryview(bytearray(1)))
        if self.child:
            self.made += 1
        room = np.empty(size, np.uint8)
        descriptor = os.open(self.name, os.O_RDONLY)
        done, at = 0, size * (not self.child)
        while done < size:
            done += os.preadv(descriptor, [room[done:].data], at + done)
        os.close(descriptor)
        if not self.child:
            os.unlink(self.name)
        return room

    def close(self) -> None:
        return


class Mapped:
    """Two lasting blocks, mapped by both ends."""

    def __init__(self, line: socket.socket, place: Path, child: bool) -> None:
        self.line, self.child = line, child
        size, names = max(SIZES.values()), [f"{place.name}-{way}" for way in "ab"]
        self.blocks = [SharedMemory(name, create=not child, size=size) for name in names]
        if child:  # the parent removes them
            for block in self.blocks:
                resource_tracker.unregister(f"/{block.name}", "shared_memory")
        views = [np.frombuffer(block.buf or b"", np.uint8) for block in self.blocks]
        self.own, self.other = reversed(views) if child else views

    def send(self, data: Bytes) -> None:
        self.own[: data.nbytes] = data
        self.line.sendall(b"x")

    def receive(self, size: int) -> Bytes:
        received_into(self.line, memoryview(bytearray(1)))
        return self.other[:size].copy()

    def close(self) -> None:
        del self.own, self.other
        for block in self.blocks:
            block.close()
            if not self.child:
                block.unlink()


KINDS: dict[str, Callable[[socket.socket, Path, bool], Transport]] = {
    "socket": Sockets,
    "zeromq": Frames,
    "file": Files,
    "mapped": Mapped,
}


def received_into(line: socket.socket, room: memoryview) -> None:
    got = 0
    while got < room.nbytes:
        count = line.recv_into(room[got:], 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError("the other end is gone")
        got += count


# The other process


def echo(kind: str, place: Path) -> None:
    """Sends back what comes, until the socket closes; first the size, last its CPU seconds."""
    line = socket.socket(fileno=0)
    end = KINDS[kind](line, place, True)
    head = memoryview(bytearray(8))
    try:
        while True:
            received_into(line, head)
            size = int.from_bytes(head, "little")
            before = time.process_time()
            end.send(end.receive(size))
            received_into(line, memoryview(bytearray(1)))  # the parent has all of it
            line.sendall(int(1e9 * (time.process_time() - before)).to_bytes(8, "little"))
    except EOFError:
        end.close()


# This process


class Side:
    """One kind of transport, with the process at its other end."""

    def __init__(self, kind: str, place: Path) -> None:
        self.line, theirs = socket.socketpair()
        with theirs:
            self.end = KINDS[kind](self.line, place, False)
            command = [sys.executable, "-m", "bench.transport", "--echo", kind, str(place)]
            self.process = subprocess.Popen(command, cwd=ROOT, stdin=theirs.fileno())
        self.cpu: list[float] = []
        self.blocked: list[float] = []
        self.seconds: list[float] = []

    def exchange(self, data: Bytes) -> None:
        """One round trip; what is measured beside it comes afterwards."""
        self.line.sendall(data.nbytes.to_bytes(8, "little"))
        start, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
        self.end.send(data)
        found = self.end.receive(data.nbytes)
        self.seconds.append(time.perf_counter() - start)
        self.blocked.append(time.thread_time() - thread)
        mine = time.process_time() - cpu
        assert found.nbytes == data.nbytes
        assert found[-1] == data[-1]
        self.line.sendall(b"x")
        theirs = memoryview(bytearray(8))
        received_into(self.line, theirs)
        self.cpu.append(mine + int.from_bytes(theirs, "little") / 1e9)

    def figures(self) -> dict[str, Figure]:
        """Of the rounds since the last call, without the first."""
        samples = {"seconds": self.seconds, "cpu": self.cpu, "thread": self.blocked}
        found = {name: figure(values[1:]) for name, values in samples.items()}
        for values in samples.values():
            values.clear()
        return found

    def close(self) -> None:
        self.line.close()
        self.process.wait(10)
        self.end.close()


def measure(rounds: int, sizes: dict[str, int]) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        places = {kind: Path(folder) / f"{kind}-{secrets.token_hex(4)}" for kind in KINDS}
        for place in places.values():
            place.mkdir()
        sides = {kind: Side(kind, place) for kind, place in places.items()}
        try:
            for label, size in sizes.items():
                data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
                runs = {
                    kind: (lambda _, side=side, data=data: side.exchange(data))
                    for kind, side in sides.items()
                }
                alternate(runs, rounds + 1)
                figures = {kind: side.figures() for kind, side in sides.items()}
                rows.append({"size": label, "bytes": size, "sides": figures})
        finally:
            for side in sides.values():
                side.close()
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["size", "side", "round trip ms", "CPU ms", "sending thread ms"]]
    for row in rows:
        for kind, found in row["sides"].items():
            times = [f"{1000 * found[n]['median']:.2f}" for n in ("seconds", "cpu", "thread")]
            lines.append([row["size"], kind, *times])
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m bench.transport", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="small messages only, to try it")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--echo", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.echo:
        echo(options.echo[0], Path(options.echo[1]))
        return 0
    sizes = dict(list(SIZES.items())[: 2 if options.quick else None])
    result = header("bench.transport", given)
    result["rows"] = measure(options.rounds, sizes)
    print(table(result["rows"]))
    write_json(options.out / "transport.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
