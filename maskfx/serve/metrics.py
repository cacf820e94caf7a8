"""Prometheus metrics of the server, one attribute per metric.

An attribute has its metric's name without `maskfx_`. The code where an event happens counts it;
this file knows only names, labels and buckets, and sums the counters of workers' caches, which
restart from zero when a worker restarts.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "maskfx_"
TIERS = ("device", "host", "disk")

# A step takes milliseconds on a device and seconds on a CPU; a request takes up to minutes.
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_SECONDS = (0.001, 0.005, 0.02, *REQUEST_SECONDS)
BUBBLE_SECONDS = (0.0, 0.0001, 0.0005, *STEP_SECONDS)
SITES = tuple(float(4**power) for power in range(2, 11))  # 16 … 1 Mi
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


class Metrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._add_requests()
        self._add_steps()
        self._add_caches()
        self._add_recordings()
        self._add_adapters()
        self._add_nets()
        self._add_workers()

    def _add_requests(self) -> None:
        self.num_requests_running = self._gauge("num_requests_running", "Requests in a batch.")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self.e2e_request_latency_seconds = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", REQUEST_SECONDS
        )
        self.request_queue_time_seconds = self._histogram(
            "request_queue_time_seconds", "From arrival to the first start.", QUEUE_SECONDS
        )
        self.request_success_total = self._counter(
            "request_success_total", "Requests that ended, by how.", "finished_reason"
        )
        self.slo_attained_total = self._counter(
            "slo_attained_total", "Requests with a deadline that were in time."
        )

    def _add_steps(self) -> None:
        self.step_latency_seconds = self._histogram(
            "step_latency_seconds", "One step of a batch.", STEP_SECONDS
        )
        self.steps_total = self._counter(
            "steps_total", "Steps, by the number of ranks that computed them.", "degree"
        )
        self.mixed_steps_total = self._counter(
            "mixed_steps_total", "Steps of whole pictures of several sizes, by how they ran.", "way"
        )
        self.rounds_total = self._counter(
            "rounds_total", "Decisions about which requests step on which ranks."
        )
        self.rounds_late_total = self._counter(
            "rounds_late_total", "Requests that were predicted to miss their deadline."
        )
        self.rank_failures_total = self._counter(
            "rank_failures_total", "Steps that ran again because a rank failed."
        )
        self.ranks = self._gauge("ranks", "Processes that share the steps of workers' requests.")
        self.batch_active_sites = self._histogram(
            "batch_active_sites", "Sites that a step computed, all members together.", SITES
        )
        self.mask_ratio = self._histogram(
            "mask_ratio", "Share of a picture's sites that was computed.", RATIOS
        )
        self.plan_bubble_seconds = self._histogram(
            "plan_bubble_seconds", "Time of a step that waited for loading.", BUBBLE_SECONDS
        )
        self.patch_sites_total = self._counter(
            "patch_sites_total",
            "Sites of requests that reuse patches: computed, or kept from earlier steps.",
            "state",
        )
        self.patch_stretch_sites_total = self._counter(
            "patch_stretch_sites_total",
            "The same of each stretch of blocks, in steps that chose patches; 32: and later ones.",
            "stretch",
            "state",
        )

    def _add_caches(self) -> None:
        self.cache_hits_total = self._counter("cache_hits_total", "Entries found.", "tier")
        self.cache_misses_total = self._counter("cache_misses_total", "Entries not found.", "tier")
        self.cache_evictions_total = self._counter(
            "cache_evictions_total", "Entries removed for room.", "tier"
        )
        self.cache_corrupt_total = self._counter(
            "cache_corrupt_total", "Entries that weren't what was written.", "tier"
        )
        self.cache_expired_total = self._counter(
            "cache_expired_total", "Entries removed at the end of their time to live.", "tier"
        )
        self.cache_loads_total = self._counter(
            "cache_loads_total", "Entries read into memory.", "tier"
        )
        self.cache_lost_total = self._counter(
            "cache_lost_total", "Entries removed that couldn't be written.", "tier"
        )
        self.cache_read_bytes_total = self._counter(
            "cache_read_bytes_total", "Bytes of entries that were read.", "tier"
        )
        self.cache_read_seconds_total = self._counter(
            "cache_read_seconds_total", "Seconds in which reads ran.", "tier"
        )
        self.cache_failures_total = self._counter(
            "cache_failures_total", "Reads and writes of entries that failed.", "tier"
        )
        self.cache_usage_bytes = self._gauge("cache_usage_bytes", "Bytes held.", "tier")
        self._create_tier_series()

    def _add_recordings(self) -> None:
        self.idle_recordings = self._gauge(
            "idle_recordings", "Templates that wait to be recorded while no request runs, or are."
        )
        self.idle_recordings_finished_total = self._counter(
            "idle_recordings_finished_total", "Templates that were recorded while no request ran."
        )
        self.idle_recordings_dropped_total = self._counter(
            "idle_recordings_dropped_total", "Such recordings that ended without a template."
        )

    def _add_adapters(self) -> None:
        self.adapter_usage_bytes = self._gauge("adapter_usage_bytes", "LoRAs in memory.")
        self.adapter_hits_total = self._counter(
            "adapter_hits_total", "LoRAs that a request found in memory, or being loaded."
        )
        self.adapter_loads_total = self._counter("adapter_loads_total", "LoRA files loaded.")
        self.adapter_failures_total = self._counter(
            "adapter_failures_total", "LoRA files that could not be loaded."
        )
        self.adapter_evictions_total = self._counter(
            "adapter_evictions_total", "LoRAs removed from memory for room."
        )
        self.adapter_waits_total = self._counter(
            "adapter_waits_total", "Requests that waited for a LoRA."
        )
        self.adapter_in_place_steps_total = self._counter(
            "adapter_in_place_steps_total", "Steps whose members shared LoRAs in the weights."
        )
        self.adapter_low_rank_steps_total = self._counter(
            "adapter_low_rank_steps_total", "Steps whose members shared LoRAs as low-rank terms."
        )
        self.adapter_writes_total = self._counter(
            "adapter_writes_total", "Sets of LoRAs written into the weights."
        )
        self.adapter_load_seconds_total = self._counter(
            "adapter_load_seconds_total", "Time of loading LoRA files."
        )
        self.adapter_wait_seconds_total = self._counter(
            "adapter_wait_seconds_total", "Time for which requests waited for LoRAs."
        )

    def _add_nets(self) -> None:
        self.net_processes = self._gauge("net_processes", "Processes of nets.")
        self.net_usage_bytes = self._gauge(
            "net_usage_bytes", "Weights that the processes of nets compute with."
        )
        self.net_hits_total = self._counter(
            "net_hits_total", "Nets that a request found with their processes running."
        )
        self.net_starts_total = self._counter("net_starts_total", "Processes of nets started.")
        self.net_evictions_total = self._counter(
            "net_evictions_total", "Nets whose processes ended for room."
        )
        self.net_restarts_total = self._counter(
            "net_restarts_total", "Processes of nets replaced after a failure."
        )
        self.net_steps_total = self._counter("net_steps_total", "Batch steps of nets.")
        self.net_computed_here_total = self._counter(
            "net_computed_here_total", "Steps of nets computed in the worker's process."
        )
        self.net_link_bytes_total = self._counter(
            "net_link_bytes_total", "Bytes sent to processes of nets, and received.", "direction"
        )

    def _add_workers(self) -> None:
        self.workers = self._gauge("workers", "Ready workers.", "node")
        self.workers_lost_total = self._counter(
            "workers_lost_total", "Workers that ended unasked.", "node"
        )
        self.worker_restarts_total = self._counter(
            "worker_restarts_total", "Workers replaced after their death."
        )
        self.http_requests_client_disconnected_total = self._counter(
            "http_requests_client_disconnected_total", "Clients that left before their answer."
        )

    def count(self, metric: str, **labels: str) -> None:
        """Increment a counter, by its attribute's name."""
        counter = getattr(self, metric, None)
        if not isinstance(counter, Counter):
            raise KeyError(f"there is no counter {metric!r} in {type(self).__name__}")
        (counter.labels(**labels) if labels else counter).inc()

    def cache_counters(self) -> dict[str, Counter]:
        """Return the counters of caches, by the names that workers send."""
        return {
            "hits": self.cache_hits_total,
            "misses": self.cache_misses_total,
            "evictions": self.cache_evictions_total,
            "corrupt": self.cache_corrupt_total,
            "expired": self.cache_expired_total,
            "loads": self.cache_loads_total,
            "lost": self.cache_lost_total,
            "read_bytes": self.cache_read_bytes_total,
            "read_us": self.cache_read_seconds_total,
            "failures": self.cache_failures_total,
        }

    def adapter_counters(self) -> dict[str, tuple[Counter, float]]:
        """Return the counters of LoRAs by the names that workers send, and their units."""
        return {
            "hits": (self.adapter_hits_total, 1),
            "loads": (self.adapter_loads_total, 1),
            "failures": (self.adapter_failures_total, 1),
            "evictions": (self.adapter_evictions_total, 1),
            "waits": (self.adapter_waits_total, 1),
            "load_ms": (self.adapter_load_seconds_total, 1e-3),
            "wait_ms": (self.adapter_wait_seconds_total, 1e-3),
            "in_place": (self.adapter_in_place_steps_total, 1),
            "with_terms": (self.adapter_low_rank_steps_total, 1),
            "writes": (self.adapter_writes_total, 1),
        }

    def net_counters(self) -> dict[str, Counter]:
        """Return the counters of nets by the names that workers send."""
        return {
            "hits": self.net_hits_total,
            "starts": self.net_starts_total,
            "evictions": self.net_evictions_total,
            "restarts": self.net_restarts_total,
            "steps": self.net_steps_total,
            "computed_here": self.net_computed_here_total,
            "sent": self.net_link_bytes_total.labels(direction="sent"),
            "received": self.net_link_bytes_total.labels(direction="received"),
        }

    def round_counters(self) -> dict[str, Counter]:
        """Return the counters of rounds by the names that workers send."""
        return {
            "made": self.rounds_total,
            "late": self.rounds_late_total,
            "failures": self.rank_failures_total,
        }

    def recording_counters(self) -> dict[str, Counter]:
        """Return the counters of idle recordings by the names that workers send."""
        return {
            "finished": self.idle_recordings_finished_total,
            "dropped": self.idle_recordings_dropped_total,
        }

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _create_tier_series(self) -> None:
        """Create the series of each tier with zero: a rate needs a first value."""
        for tier in TIERS:
            for counter in self.cache_counters().values():
                counter.labels(tier=tier)
            self.cache_usage_bytes.labels(tier=tier)

    def _gauge(self, name: str, says: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, says, labels, registry=self.registry)

    def _counter(self, name: str, says: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, says, labels, registry=self.registry)

    def _histogram(self, name: str, says: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, says, registry=self.registry, buckets=buckets)


# labels of a worker's counters without a tier
ANY = "host"
WITHOUT = dict.fromkeys(("loads", "lost", "failures", "read_bytes", "read_us"), "disk")
UNITS = {"read_us": 1e-6}  # others: 1
ADAPTERS = "adapters"  # what counters of LoRAs begin with
NETS = "nets"  # what counters of nets begin with
ROUNDS = "rounds"  # what counters of rounds begin with
MIXED = "mixed"  # what counters of steps of whole pictures of several sizes begin with
RECORDINGS = "recordings"  # what counters of idle recordings begin with
SHARED = "disk"  # all workers report the same bytes of this tier


class CacheCounts:
    """Sums workers' counters since their start into the server's counters.

    Args:
        metrics: Has the server's counters.
        observe_reads: Gets the bytes of templates that were read from disk, and the seconds.
    """

    def __init__(
        self, metrics: Metrics, observe_reads: Callable[[int, float], None] | None = None
    ) -> None:
        self._observe_reads = observe_reads
        self._said: dict[str, dict[str, int]] = {}
        self._bytes = metrics.cache_usage_bytes
        self._counters = metrics.cache_counters()
        self._adapter_bytes = metrics.adapter_usage_bytes
        self._adapter_counters = metrics.adapter_counters()
        self._mixed = metrics.mixed_steps_total
        self._patches = metrics.patch_sites_total
        self._stretches = metrics.patch_stretch_sites_total
        self._net_counters = metrics.net_counters()
        self._net_gauges = {"processes": metrics.net_processes, "nbytes": metrics.net_usage_bytes}
        self._ranks = metrics.ranks
        self._round_counters = metrics.round_counters()
        self._recordings = metrics.idle_recordings
        self._recording_counters = metrics.recording_counters()

    def heard(self, worker: str, said: dict[str, int]) -> None:
        before = self._said.get(worker, {})
        if said == before:
            return
        self._said[worker] = said
        for key, value in said.items():
            what, _, tier = key.partition(".")
            more = value - before.get(key, 0)
            if what == ADAPTERS and tier in self._adapter_counters and more > 0:
                counter, unit = self._adapter_counters[tier]
                counter.inc(more * unit)
            if what == NETS and tier in self._net_counters and more > 0:
                self._net_counters[tier].inc(more)
            if what == ROUNDS and tier in self._round_counters and more > 0:
                self._round_counters[tier].inc(more)
            if what == RECORDINGS and tier in self._recording_counters and more > 0:
                self._recording_counters[tier].inc(more)
            if what == MIXED and more > 0:
                self._mixed.labels(way=tier).inc(more)
            if what == "patches" and more > 0:
                self._patches.labels(state=tier).inc(more)
            if what == "stretches" and more > 0:
                number, _, state = tier.partition(".")
                self._stretches.labels(stretch=number, state=state).inc(more)
            if what in self._counters and more > 0:
                counter = self._counters[what].labels(tier=tier or WITHOUT.get(what, ANY))
                counter.inc(more * UNITS.get(what, 1))
        reads = ("read_bytes", "read_us")
        read, spent = (said.get(name, 0) - before.get(name, 0) for name in reads)
        if self._observe_reads is not None and read > 0 and spent > 0:
            self._observe_reads(read, spent * UNITS["read_us"])
        self._weigh()

    def ranks(self) -> int:
        """Return the number of ranks that can compute, of all workers; 0 without any."""
        return sum(said.get(f"{ROUNDS}.ranks", 0) for said in self._said.values())

    def recordings(self) -> int:
        """Return the number of recordings that wait for idle time, of all workers."""
        return sum(said.get(f"{RECORDINGS}.waiting", 0) for said in self._said.values())

    def lost(self, worker: str) -> None:
        """Remove a worker that ended; the recordings that waited there are dropped."""
        said = self._said.pop(worker, None)
        if said is not None:
            self._recording_counters["dropped"].inc(said.get(f"{RECORDINGS}.waiting", 0))
            self._weigh()

    def _weigh(self) -> None:
        for tier in TIERS:
            held = [said.get(f"bytes.{tier}", 0) for said in self._said.values()]
            total = max(held, default=0) if tier == SHARED else sum(held)
            self._bytes.labels(tier=tier).set(total)
        found = (said.get(f"{ADAPTERS}.bytes", 0) for said in self._said.values())
        self._adapter_bytes.set(sum(found))
        self._recordings.set(self.recordings())
        for name, gauge in self._net_gauges.items():
            gauge.set(sum(said.get(f"{NETS}.{name}", 0) for said in self._said.values()))
        self._ranks.set(self.ranks())
