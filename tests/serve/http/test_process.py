"""The front as a process: what it holds in memory, and what it gives back."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.codecs.test_pool import peak
from tests.serve.codecs.test_sniff import bomb, text_bomb
from tests.serve.served import MASK, PICTURE, until

ROOT = Path(__file__).resolve().parents[3]
STEP = 0.005


class Front:
    """A running front."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.serve.fake_server", str(STEP), "1"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    @property
    def children(self) -> list[int]:
        pid = self.process.pid
        listed = Path(f"/proc/{pid}/task/{pid}/children")
        return [int(child) for child in listed.read_text().split()] if listed.exists() else []

    def peaks(self) -> list[int]:
        return [peak(pid) for pid in (self.process.pid, *self.children)]

    def held(self) -> tuple[int, int, int]:
        """Descriptors, threads, processes."""
        proc = Path(f"/proc/{self.process.pid}")
        return (
            len(list((proc / "fd").iterdir())),
            len(list((proc / "task").iterdir())),
            len(self.children),
        )

    def edit(self, client: httpx.Client, image: bytes = PICTURE) -> int:
        files = {"image": image, "mask": MASK}
        return client.post("/v1/images/edits", files=files, data={"prompt": "x"}).status_code


@pytest.fixture
def front() -> Iterator[Front]:
    one = Front()
    try:
        yield one
    finally:
        children = one.children
        one.process.send_signal(signal.SIGINT)
        assert one.process.wait(10) is not None
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_bombs_rise_neither_the_front_nor_its_processes(front: Front) -> None:
    gif = b"GIF89a" + bytes(7) + b"\x2c" * 200_000
    with httpx.Client(base_url=front.url, timeout=30) as client:
        for _ in range(3):
            assert front.edit(client) == 200
        before = front.peaks()
        for data in (bomb(13_000, 13_000), text_bomb(80 << 20), gif):
            for _ in range(3):
                assert front.edit(client, data) == 400
        rises = [now - then for now, then in zip(front.peaks(), before, strict=True)]
    assert max(rises) < 32 << 20, rises


def test_who_disconnects_leaves_nothing_behind(front: Front) -> None:
    with httpx.Client(base_url=front.url, timeout=30) as client:
        assert front.edit(client) == 200
        before = front.held()
        hasty = httpx.Timeout(30, read=0.01)
        left = 0
        for index in range(50):
            if index % 5:
                assert front.edit(client) == 200
                continue
            with httpx.Client(base_url=front.url, timeout=hasty) as leaver:
                try:
                    front.edit(leaver)
                except httpx.ReadTimeout:
                    left += 1
        assert left > 5
        settled(front.held, before)
        counted = client.get("/metrics").text
        name = "maskfx_http_requests_client_disconnected_total "
        line = next(one for one in counted.split("\n") if one.startswith(name))
        assert float(line.split()[1]) > 5


def settled(seen: Callable[[], object], wanted: object) -> None:
    """It is as it was, soon."""
    end = time.monotonic() + 10
    while seen() != wanted and time.monotonic() < end:
        time.sleep(0.05)
    assert seen() == wanted


def test_a_killed_front_takes_its_codecs_along(front: Front) -> None:
    children = front.children
    front.process.kill()
    front.process.wait()
    start = time.monotonic()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 10)
    assert time.monotonic() - start < 10
