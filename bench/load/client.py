"""A server under load, from outside: its process, and calls that cost their sender little.

One connection per call, HTTP/1.1 by hand: a full client takes more of the two cores than the
server that is measured.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
from PIL import Image

from bench.harness import ROOT
from maskfx.serve.request import Mask, Pixels

BOUNDARY = "maskfx-load"


@dataclass(frozen=True)
class Answer:
    """What came back, and when."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    def picture(self) -> Pixels:
        data = json.loads(self.body)["data"][0]["b64_json"]
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


@dataclass
class Target:
    """A server that runs for a part of the benchmark."""

    process: subprocess.Popen[str]
    port: int
    written: Path  # by what was launched: of load_server, the lags
    log: list[str] = field(default_factory=list)

    async def call(self, request: bytes, leave_after: float | None = None) -> Answer | None:
        """None if the client left before the answer was there."""
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            await writer.drain()
            if leave_after is None:
                return await read(reader, began)
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(read(reader, began), leave_after)
            return None
        finally:
            writer.close()

    async def metric(self, name: str) -> float:
        """Its sum over all labels."""
        answer = await self.call(get("/metrics"))
        assert answer is not None
        lines = answer.body.decode().splitlines()
        values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"maskfx_{name}")]
        return sum(map(float, values))

    def workers(self) -> list[psutil.Process]:
        children: list[psutil.Process] = self.processes()[1:]
        return [child for child in children if "maskfx.serve.workers.process" in child.cmdline()]

    def processes(self) -> list[psutil.Process]:
        front = psutil.Process(self.process.pid)
        return [front, *front.children(recursive=True)]

    def holds(self) -> dict[str, int]:
        """Memory, descriptors and threads of all its processes."""
        every = self.processes()
        return {
            "rss_bytes": sum(p.memory_info().rss for p in every),
            "front_rss_bytes": every[0].memory_info().rss,
            "descriptors": sum(p.num_fds() for p in every),
            "threads": sum(p.num_threads() for p in every),
            "processes": len(every),
        }

    async def lags(self) -> list[float]:
        """How late its event loop was, since the last question."""
        self.written.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        while not self.written.exists():
            await asyncio.sleep(0.02)
        found: list[float] = json.loads(self.written.read_text())
        return found

    def read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            del self.log[:-1000]


async def read(reader: asyncio.StreamReader, began: float) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = await reader.read()
    return Answer(int(head[0].split()[1]), headers, body, time.monotonic() - began)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()


def post(path: str, body: bytes, kind: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def generation(prompt: str = "a cat", **fields: Any) -> bytes:
    body = json.dumps({"prompt": prompt} | fields).encode()
    return post("/v1/images/generations", body, "application/json")


def edit(side: int, prompt: str = "a cat", edited: Mask | None = None, **fields: Any) -> bytes:
    """An edit of a photo-like picture; a quarter of it, or what is given."""
    noise = np.random.default_rng(0).integers(0, 24, (side, side, 3))
    slope = np.linspace(0, 200, side, dtype=np.int64)[:, None, None]
    picture = (slope + noise).astype(np.uint8)
    mask = np.full((side, side, 4), 255, np.uint8)
    if edited is None:
        mask[side // 4 : side // 2, side // 4 : 3 * side // 4, 3] = 0
    else:
        mask[edited, 3] = 0
    parts = [
        named(name, str(value).encode()) for name, value in {"prompt": prompt, **fields}.items()
    ]
    parts += [named("image", png(picture), "image.png"), named("mask", png(mask), "mask.png")]
    body = b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()
    return post("/v1/images/edits", body, f"multipart/form-data; boundary={BOUNDARY}")


def named(name: str, value: bytes, file: str | None = None) -> bytes:
    kind = f'; filename="{file}"\r\ncontent-type: image/png' if file else ""
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{kind}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def png(picture: Pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "png", compress_level=1)
    return file.getvalue()


@contextlib.contextmanager
def target(module: str = "bench.load.server", **settings: Any) -> Iterator[Target]:
    """A server whose workers are ready; at the end it is asked to drain, and waited for.

    module: what launches it, given the settings and a path to write to.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "written.json"
        text = json.dumps({"port": 0, "log_level": "info"} | settings)
        process = subprocess.Popen(
            [sys.executable, "-m", module, text, str(written)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        server = Target(process, 0, written)
        threading.Thread(target=server.read_log, daemon=True).start()
        try:
            server.port = wait_until_ready(server, settings.get("workers", 1))
            yield server
            process.terminate()
            process.wait(30)
        finally:
            if process.poll() is None:
                for one in server.processes():
                    one.kill()
            process.wait()


def wait_until_ready(server: Target, workers: int, seconds: float = 600) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        events = [json.loads(line) for line in tuple(server.log) if line.startswith("{")]
        ready = {event["worker"] for event in events if event["event"] == "worker_ready"}
        if len(ready) >= workers:
            return int(next(e["port"] for e in events if e["event"] == "listening"))
        if server.process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError("the server didn't start:\n" + "".join(server.log))
