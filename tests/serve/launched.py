"""A server that is really launched, as a process of its own.

`python -m tests.serve.launched '{"model": "fake", …}'` serves with these settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Served:
    """A server's process, and what it logged."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def events(self, name: str) -> list[dict[str, Any]]:
        logged = [json.loads(line) for line in tuple(self.lines) if line.startswith("{")]
        return [line for line in logged if line["event"] == name]

    def children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def workers(self) -> list[psutil.Process]:
        return [p for p in self.children() if "maskfx.serve.workers.process" in p.cmdline()]

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def wait_for(self, event: str, seconds: float = 20) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while not (found := self.events(event)):
            assert time.monotonic() < until, f"no {event}: {''.join(self.lines)}"
            assert self.process.poll() is None, "".join(self.lines)
            time.sleep(0.02)
        return found[0]


def start(module: str = "tests.serve.launched", **settings: Any) -> subprocess.Popen[str]:
    """A server on any free port, unless set otherwise; `module` is run with its settings."""
    command = [sys.executable, "-m", module, json.dumps({"port": 0} | settings)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def served(seconds: float = 20, ready: bool = True, **settings: Any) -> Iterator[Served]:
    """A server that is ready within so long, or just listens. What is left of it is killed."""
    with start(**{"model": "fake"} | settings) as process:
        server = Served(process)
        reading = threading.Thread(target=server.read, daemon=True)
        reading.start()
        try:
            server.port = server.wait_for("listening", seconds)["port"]
            with httpx.Client(base_url=server.url) as client:
                until = time.monotonic() + seconds
                while ready and client.get("/health/ready").status_code != 200:
                    assert time.monotonic() < until, "".join(server.lines)
                    time.sleep(0.02)
            yield server
        finally:
            left = server.children() if process.poll() is None else []
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for child in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()
            reading.join(5)


def main() -> int:
    from maskfx.serve.config import ServeSettings
    from maskfx.serve.launch import serve

    return serve(ServeSettings(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
