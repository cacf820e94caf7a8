"""Adds workers while the queue is long, and removes idle ones that aren't needed any more."""

from __future__ import annotations

from collections.abc import Callable

from maskfx.scheduling.worker_count import WorkerCount
from maskfx.serve.config import ServeSettings
from maskfx.serve.frontend.dispatch import Dispatch
from maskfx.serve.frontend.worker_nodes import WorkerNodes
from maskfx.serve.messages import Stop
from maskfx.serve.workers.supervisor import Workers


class WorkerGrowth:
    """Keeps the number of workers as the policy wants it.

    Args:
        settings: Settings of the server.
        workers: The supervisor.
        dispatch: The requests and the ready workers.
        send: Sends a message to a worker.
        nodes: The nodes of the ready workers.
    """

    def __init__(
        self,
        settings: ServeSettings,
        workers: Workers,
        dispatch: Dispatch,
        send: Callable[[str, Stop], object],
        nodes: WorkerNodes,
    ) -> None:
        self._workers, self._dispatch, self._send, self._nodes = workers, dispatch, send, nodes
        told = settings.ray
        grows = settings.executor == "ray" and told.max_workers is not None
        most = told.max_workers if grows and told.max_workers else settings.workers
        self._count = WorkerCount(
            settings.workers, most, settings.max_num_seqs, told.grow_seconds, told.shrink_seconds
        )

    def look(self, now: float) -> None:
        """Add or remove workers; call it periodically."""
        change = self._count.change(now, len(self._dispatch), self._workers.count())
        for _ in range(change):
            self._workers.add()
        if change < 0:
            name = self._workers.unplaced() or self._idle()
            if name is not None:
                self._retire(name)

    def _idle(self) -> str | None:
        """Return the ready worker without requests that has the fewest templates in memory."""
        idle = [mate for mate in self._dispatch.pool.mates.values() if not mate.load.running]
        least = min(idle, key=lambda mate: len(mate.held), default=None)
        return None if least is None else least.name

    def _retire(self, name: str) -> None:
        self._dispatch.pool.leave(name)
        self._nodes.left(name, asked=True)
        self._send(name, Stop())
        self._workers.retire(name)
