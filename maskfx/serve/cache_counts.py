"""What workers say of their caches, added up: a worker that starts again counts from nought."""

from __future__ import annotations

from maskfx.serve.metrics import TIERS, Metrics

ANY = "host"  # where a worker names no tier
SHARED = "disk"  # all workers see the same bytes


class CacheCounts:
    """Turns workers' counters since their start into the server's."""

    def __init__(self, metrics: Metrics) -> None:
        self._said: dict[str, dict[str, int]] = {}
        self._bytes = metrics.cache_usage_bytes
        self._counters = {
            "hits": metrics.cache_hits_total,
            "misses": metrics.cache_misses_total,
            "evictions": metrics.cache_evictions_total,
            "corrupt": metrics.cache_corrupt_total,
        }

    def heard(self, worker: str, said: dict[str, int]) -> None:
        before = self._said.get(worker, {})
        if said == before:
            return
        self._said[worker] = said
        for key, value in said.items():
            what, _, tier = key.partition(".")
            more = value - before.get(key, 0)
            if what in self._counters and more > 0:
                self._counters[what].labels(tier=tier or ANY).inc(more)
        self._weigh()

    def lost(self, worker: str) -> None:
        if self._said.pop(worker, None) is not None:
            self._weigh()

    def _weigh(self) -> None:
        for tier in TIERS:
            held = [said.get(f"bytes.{tier}", 0) for said in self._said.values()]
            total = max(held, default=0) if tier == SHARED else sum(held)
            self._bytes.labels(tier=tier).set(total)
