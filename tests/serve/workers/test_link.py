"""Front and worker over a real socket; here the worker's end lives in a thread."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import zmq

from maskfx.serve.messages import Alive, Cancel, Forget, FromWorker, Job, Progress, encode
from maskfx.serve.request import Request, RequestKind
from maskfx.serve.workers import link
from maskfx.serve.workers.link import FrontLink, WorkerLink, private_directory
from maskfx.serve.workers.pixels import Part
from tests.serve.fronts import eventually, run

PIXELS = 1 << 10
Heard = list[tuple[str, FromWorker, list[bytes]]]


def listening() -> tuple[FrontLink, Heard]:
    heard: Heard = []

    def hear(worker: str, message: FromWorker, frames: Sequence[Part]) -> None:
        heard.append((worker, message, [bytes(frame) for frame in frames]))

    return FrontLink(hear, PIXELS), heard


def worker(front: FrontLink, name: str = "w") -> WorkerLink:
    made = WorkerLink(front.address, name, 0.05, lambda: Alive(3))
    made.loading = False
    made.start()
    return made


def test_messages_and_frames_go_both_ways() -> None:
    async def test() -> None:
        front, heard = listening()
        one = worker(front)
        await eventually(lambda: heard)  # its heartbeat
        assert heard[0] == ("w", Alive(3), [])
        big = np.zeros((1000, 1000), np.uint8)
        request = Request(id="a", kind=RequestKind.EDIT, prompt="é", seed=2**63)
        job = Job(id="a", attempt=1, request=request)
        assert front.send("w", job, [big.reshape(-1).data, b"x"])
        message, frames = await asyncio.to_thread(one.inbox.get, True, 5)
        assert message == job
        assert [len(frame) for frame in frames] == [1_000_000, 1]
        one.send(Progress("a", 1, 2, 3), [b"p"])
        await eventually(lambda: ("w", Progress("a", 1, 2, 3), [b"p"]) in heard)
        one.close()
        front.close()
        assert not Path(front.address.removeprefix("ipc://")).parent.exists()

    run(test())


def test_order_is_kept_and_nothing_is_lost_in_a_burst() -> None:
    async def test() -> None:
        front, heard = listening()
        one = worker(front)
        await eventually(lambda: heard)
        for k in range(2000):
            front.send("w", Cancel(str(k)))
            one.send(Progress("a", 1, k, 2000))
        steps = [k for k in range(2000)]
        await eventually(lambda: heard and isinstance(heard[-1][1], Progress | Alive))
        await eventually(lambda: sum(isinstance(m, Progress) for _, m, _ in heard) == 2000)
        assert [m.step for _, m, _ in heard if isinstance(m, Progress)] == steps
        cancels = [one.inbox.get(timeout=5)[0] for _ in range(2000)]
        assert cancels == [Cancel(str(k)) for k in range(2000)]
        one.close()
        front.close()

    run(test())


def test_who_isnt_there_cant_be_told() -> None:
    async def test() -> None:
        front, _ = listening()
        assert not front.send("nobody", Forget("t"))
        front.close()

    run(test())


@pytest.mark.parametrize("junk", [b"", b"\xc1", b"{}", encode(Cancel("x")), b"\x80" * 99])
def test_malformed_messages_are_dropped(junk: bytes) -> None:
    async def test() -> None:
        front, heard = listening()
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, b"d")
        dealer.connect(front.address)
        dealer.send(junk)
        dealer.send(encode(Alive(1)))
        await eventually(lambda: heard)
        assert heard == [("d", Alive(1), [])]
        dealer.close()
        context.term()
        front.close()

    run(test())


def test_a_part_that_no_picture_needs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is disconnected, comes again, and goes on."""

    async def test() -> None:
        monkeypatch.setattr(link, "BESIDE_PIXELS", 1 << 20)
        front, heard = listening()
        one = worker(front)
        await eventually(lambda: heard)
        most = (1 << 20) + 3 * PIXELS
        one.send(Progress("a", 1, 1, 9), [bytes(most)])
        await eventually(lambda: any(len(parts) == 1 for _, _, parts in heard))
        one.send(Progress("a", 1, 2, 9), [bytes(most + 1)])
        await asyncio.sleep(0.5)
        one.send(Progress("a", 1, 3, 9))
        await eventually(lambda: ("w", Progress("a", 1, 3, 9), []) in heard)
        assert not [said for _, said, _ in heard if said == Progress("a", 1, 2, 9)]
        assert front.send("w", Cancel("x"))
        assert (await asyncio.to_thread(one.inbox.get, True, 5))[0] == Cancel("x")
        one.close()
        front.close()

    run(test())


def test_a_worker_drops_what_isnt_for_workers() -> None:
    async def test() -> None:
        front, heard = listening()
        one = worker(front)
        await eventually(lambda: heard)
        for junk in (b"", b"\xc1", encode(Alive(1))):
            front._socket.send_multipart([b"w", junk])
        front.send("w", Cancel("last"))
        assert one.inbox.get(timeout=5)[0] == Cancel("last")
        one.close()
        front.close()

    run(test())


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose name leaves room for a socket's; pytest's own may be too long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def test_the_sockets_directory_is_private_and_those_of_the_dead_go(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    code = "import os, tempfile; from maskfx.serve.workers import link\n"
    code += "tempfile.tempdir = os.sys.argv[1];"
    code += "kept = link.private_directory(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(short)], check=False, timeout=30)
    (dead,) = short.iterdir()
    directory, lock = private_directory()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not dead.exists()
    other, other_lock = private_directory()
    assert directory.exists()
    lock.close()
    other_lock.close()
    assert other.exists()


def test_a_long_temporary_directory_is_avoided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    directory, lock = private_directory()
    assert len(str(directory / "front")) <= link.LONGEST
    lock.close()
    directory.rmdir()
