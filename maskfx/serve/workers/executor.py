"""Executors: where workers run. The supervisor decides when one is started and ended.

`LocalExecutor` starts them as child processes on this machine. One for a cluster implements
`Executor` and has its workers connect to the address that it is given; supervision, messages and
dispatch stay the same.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Protocol

from maskfx.runtime.processes.child_process import ChildProcess
from maskfx.serve.config import ServeSettings

SECRETS = ("MASKFX_API_KEY",)


@dataclass(frozen=True)
class WorkerAddress:
    """A worker's name and the address of its front end."""

    address: str
    name: str

    def arguments(self) -> list[str]:
        return [self.address, self.name]


class RunningWorker(Protocol):
    """A worker that an executor started."""

    @property
    def pid(self) -> int:
        """The id of its process, for logs."""
        ...

    def exited(self) -> bool:
        """Return True if it has ended. Called every tick of the front end's loop."""
        ...

    def end(self) -> int:
        """End it with everything it started, if it still runs, and return its exit code."""
        ...


class Executor(Protocol):
    """Starts workers."""

    def start(self, place: WorkerAddress, settings: ServeSettings) -> RunningWorker:
        """Start a worker and return without waiting for it.

        It must end when the front end does. Raises OSError if it can't be started.
        """
        ...


class LocalExecutor:
    """Starts workers as child processes. Use it from one thread, with which they end."""

    def start(self, place: WorkerAddress, settings: ServeSettings) -> ChildProcess:
        environment = {key: x for key, x in os.environ.items() if key not in SECRETS}
        child = ChildProcess(
            "maskfx.serve.workers.process", place.arguments(), environment=environment
        )
        with contextlib.suppress(ConnectionError):  # it died, which is detected later
            child.channel.send(settings.model_dump_json(exclude={"api_key"}).encode())
        return child
