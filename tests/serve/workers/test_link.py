"""Front and worker over a real socket; here the worker's end lives in a thread."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq

from maskfx.errors import InputError
from maskfx.serve.messages import Alive, Cancel, Forget, FromWorker, Job, JobProgress, encode
from maskfx.serve.request import Request, RequestKind
from maskfx.serve.workers import link
from maskfx.serve.workers.link import LINK_LOST, FrontLink, WorkerLink, private_directory
from maskfx.serve.workers.link_keys import RemoteAddress
from maskfx.serve.workers.pixels import Part
from tests.serve.fronts import eventually, run

PIXELS = 1 << 10
Heard = list[tuple[str, FromWorker, list[bytes]]]


def listening(listen: tuple[str, int] | None = None) -> tuple[FrontLink, Heard]:
    heard: Heard = []

    def hear(worker: str, message: FromWorker, frames: Sequence[Part]) -> None:
        heard.append((worker, message, [bytes(frame) for frame in frames]))

    return FrontLink(hear, PIXELS, listen), heard


def worker(front: FrontLink, name: str = "w", remote: RemoteAddress | None = None) -> WorkerLink:
    made = WorkerLink(front.address, name, 0.05, lambda: Alive(3), remote)
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
        one.send(JobProgress("a", 1, 2, 3), [b"p"])
        await eventually(lambda: ("w", JobProgress("a", 1, 2, 3), [b"p"]) in heard)
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
            one.send(JobProgress("a", 1, k, 2000))
        steps = [k for k in range(2000)]
        await eventually(lambda: heard and isinstance(heard[-1][1], JobProgress | Alive))
        await eventually(lambda: sum(isinstance(m, JobProgress) for _, m, _ in heard) == 2000)
        assert [m.step for _, m, _ in heard if isinstance(m, JobProgress)] == steps
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
        one.send(JobProgress("a", 1, 1, 9), [bytes(most)])
        await eventually(lambda: any(len(parts) == 1 for _, _, parts in heard))
        one.send(JobProgress("a", 1, 2, 9), [bytes(most + 1)])
        await asyncio.sleep(0.5)
        one.send(JobProgress("a", 1, 3, 9))
        await eventually(lambda: ("w", JobProgress("a", 1, 3, 9), []) in heard)
        assert not [said for _, said, _ in heard if said == JobProgress("a", 1, 2, 9)]
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


# Over TCP.


def test_by_tcp_and_by_unix_socket_beside_each_other() -> None:
    async def test() -> None:
        front, heard = listening(("127.0.0.1", 0))
        assert front.remote is not None
        near, far = worker(front, "near"), worker(front, "far", front.remote)
        await eventually(lambda: {name for name, _, _ in heard} == {"near", "far"})
        assert far.connected.is_set()
        big = np.arange(3_000_000, dtype=np.uint32).astype(np.uint8)
        for name, one in (("near", near), ("far", far)):
            request = Request(id=name, kind=RequestKind.EDIT, prompt="é", seed=1)
            assert front.send(name, Job(id=name, attempt=1, request=request), [big.data])
            _, parts = await asyncio.to_thread(one.inbox.get, True, 5)
            assert bytes(parts[0]) == big.tobytes()
            one.send(JobProgress(name, 1, 2, 3), [b"p"])
        for name, one in (("near", near), ("far", far)):
            await eventually(
                partial(heard.__contains__, (name, JobProgress(name, 1, 2, 3), [b"p"]))
            )
            one.close()
        front.close()

    run(test())


@pytest.mark.parametrize("wrong", ["pair", "front"])
def test_by_tcp_only_its_own_workers_are_admitted(wrong: str) -> None:
    """Neither a worker of another front end, nor one that expects another front end."""

    async def test() -> None:
        front, heard = listening(("127.0.0.1", 0))
        other, _ = listening(("127.0.0.1", 0))
        assert front.remote is not None
        assert other.remote is not None
        public, secret = other.remote.public_key, other.remote.secret_key
        remote = {
            "pair": replace(front.remote, public_key=public, secret_key=secret),
            "front": replace(front.remote, front_key=other.remote.front_key),
        }[wrong]
        made = WorkerLink(front.remote.address, "thief", 0.05, lambda: Alive(3), remote)
        made.start()
        known = worker(front, "w", front.remote)
        await eventually(lambda: heard)
        await asyncio.sleep(0.3)
        assert {name for name, _, _ in heard} == {"w"}
        assert not front.send("thief", Cancel("x"))
        assert not made.connected.is_set()
        for one in (made, known, front, other):
            one.close()

    run(test())


def test_by_tcp_nothing_is_admitted_without_keys() -> None:
    async def test() -> None:
        front, heard = listening(("127.0.0.1", 0))
        assert front.remote is not None
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(front.remote.address)
        dealer.send(encode(Alive(1)), zmq.NOBLOCK)
        known = worker(front, "w", front.remote)
        await eventually(lambda: heard)
        await asyncio.sleep(0.3)
        assert {name for name, _, _ in heard} == {"w"}
        dealer.close()
        context.term()
        known.close()
        front.close()

    run(test())


WORKER = """
import json, sys, time
from maskfx.serve.messages import Alive
from maskfx.serve.workers.link import WorkerLink
from maskfx.serve.workers.link_keys import RemoteAddress
remote = RemoteAddress(**json.loads(sys.argv[1]))
link = WorkerLink("", "w", 0.05, lambda: Alive(1), remote)
link.start()
assert link.connected.wait(10)
print("connected", flush=True)
time.sleep(60)
"""


def test_a_worker_whose_connection_is_cut_ends_at_once() -> None:
    """What was under way on it may be lost, so its requests have to run again."""

    async def test() -> None:
        front, heard = listening(("127.0.0.1", 0))
        assert front.remote is not None
        command = [sys.executable, "-c", WORKER, json.dumps(asdict(front.remote))]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            await eventually(lambda: heard)
            front.close()
            assert await asyncio.to_thread(process.wait, 4) == LINK_LOST

    run(test())


def test_a_port_in_use_is_refused_with_what_to_do() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(InputError, match=rf"127.0.0.1:{port}.*in use.*ray.link_port"):
                listening(("127.0.0.1", port))

    run(test())
