"""The ready workers of each node of a cluster, for `/health` and `/metrics`."""

from __future__ import annotations

from collections import Counter

from maskfx.serve.metrics import Metrics

HERE = "local"  # label of this machine, if there is no cluster


class WorkerNodes:
    """The nodes of the ready workers, by short id."""

    def __init__(self, metrics: Metrics) -> None:
        self._nodes: dict[str, str] = {}  # by worker
        self._ready, self._lost = metrics.workers, metrics.workers_lost_total

    def joined(self, worker: str, node: str) -> None:
        self._nodes[worker] = node or HERE
        self._count(self._nodes[worker])

    def left(self, worker: str, *, asked: bool = False) -> None:
        """Remove a worker that ended; no effect if it wasn't ready, or was removed before."""
        node = self._nodes.pop(worker, None)
        if node is None:
            return
        if not asked:
            self._lost.labels(node=node).inc()
        self._count(node)

    def counts(self) -> dict[str, int]:
        """Return the number of workers by node; empty without a cluster."""
        counted = Counter(self._nodes.values())
        del counted[HERE]
        return dict(counted)

    def _count(self, node: str) -> None:
        ready = list(self._nodes.values()).count(node)
        self._lost.labels(node=node)  # a rate needs a first value
        if ready:
            self._ready.labels(node=node).set(ready)
        else:
            self._ready.remove(node)  # nodes come and go
