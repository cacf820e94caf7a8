"""A server to be measured: launched as any, with a probe of its event loop's lag.

    python -m bench.load.server '{"model": "fake", "port": 0}' lags.json

The probe asks to be woken every few milliseconds and notes how late it was; at the end, and
whenever it gets SIGUSR1, it writes what it noted since then.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

from maskfx.serve.config import ServeSettings
from maskfx.serve.frontend.frontend import Front
from maskfx.serve.launch import serve

EVERY = 0.005


class Probe:
    """Seconds by which the loop was late."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lags: list[float] = []

    async def run(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.write)
        while True:
            due = time.monotonic() + EVERY
            await asyncio.sleep(EVERY)
            self.lags.append(max(0.0, time.monotonic() - due))

    def write(self) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(self.lags))
        fresh.rename(self.path)
        self.lags.clear()


def main(settings: str, path: str) -> int:
    probe = Probe(Path(path))
    started = Front.start
    tasks: list[asyncio.Task[None]] = []

    def start(front: Front) -> None:
        tasks.append(asyncio.get_running_loop().create_task(probe.run()))
        started(front)

    setattr(Front, "start", start)  # noqa: B010
    return serve(ServeSettings(**json.loads(settings)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
