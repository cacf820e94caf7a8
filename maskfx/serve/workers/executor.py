"""Executors: where workers run. The supervisor decides when one is started and ended.

`LocalExecutor` starts them as child processes on this machine, `ray_executor.py` as actors of a Ray
cluster. Supervision, messages and dispatch are the same for both.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from maskfx.runtime.processes.child_process import ChildProcess
from maskfx.serve.config import ServeSettings

if TYPE_CHECKING:
    from maskfx.serve.workers.link_keys import RemoteAddress

SECRETS = ("MASKFX_API_KEY",)


@dataclass(frozen=True)
class WorkerAddress:
    """A worker's name and the addresses of its front end."""

    address: str
    name: str
    remote: RemoteAddress | None = None  # used in place of `address` if given
    node: str = ""  # of the cluster on which the worker runs

    def arguments(self) -> list[str]:
        return [self.address, self.name]


class RunningWorker(Protocol):
    """A worker that an executor started."""

    @property
    def pid(self) -> int | None:
        """The id of its process, for logs; None while it has none."""
        ...

    def waiting(self) -> bool:
        """Return True while no machine has room for it; its silence then means nothing."""
        ...

    def exited(self) -> bool:
        """Return True if it has ended. Called every tick of the front end's loop."""
        ...

    def end(self) -> int:
        """End it with everything it started, if it still runs, and return its exit code."""
        ...


class Executor(Protocol):
    """Starts workers."""

    @property
    def listen(self) -> tuple[str, int] | None:
        """The host and port where workers of other machines connect; None: there are none."""
        ...

    def start(self, place: WorkerAddress, settings: ServeSettings) -> RunningWorker:
        """Start a worker and return without waiting for it.

        It must end when the front end does. Raises OSError if it can't be started.
        """
        ...

    def expect(self, workers: int) -> None:
        """Take note of how many workers there will be, to have machines for them."""
        ...

    def close(self) -> None:
        """End what is left of the workers, and what ran them."""
        ...


@dataclass(frozen=True)
class LocalWorker:
    """A worker that is a child process."""

    process: ChildProcess

    @property
    def pid(self) -> int:
        return self.process.pid

    def waiting(self) -> bool:
        return False

    def exited(self) -> bool:
        return self.process.exited()

    def end(self) -> int:
        return self.process.end()


class LocalExecutor:
    """Starts workers as child processes. Use it from one thread, with which they end."""

    listen: tuple[str, int] | None = None

    def start(self, place: WorkerAddress, settings: ServeSettings) -> LocalWorker:
        environment = {key: x for key, x in os.environ.items() if key not in SECRETS}
        child = ChildProcess(
            "maskfx.serve.workers.process", place.arguments(), environment=environment
        )
        with contextlib.suppress(ConnectionError):  # it died, which is detected later
            child.channel.send(settings.model_dump_json(exclude={"api_key"}).encode())
        return LocalWorker(child)

    def expect(self, workers: int) -> None:
        pass  # one more process needs no other machine

    def close(self) -> None:
        pass  # ended workers leave nothing


LOCAL: Executor = LocalExecutor()
