"""The names that dashboards rely on, exactly."""

from __future__ import annotations

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from maskfx.serve.metrics import Metrics

NAMES: dict[str, tuple[type, tuple[str, ...]]] = {
    "num_requests_running": (Gauge, ()),
    "num_requests_waiting": (Gauge, ()),
    "e2e_request_latency_seconds": (Histogram, ()),
    "request_queue_time_seconds": (Histogram, ()),
    "request_success_total": (Counter, ("finished_reason",)),
    "step_latency_seconds": (Histogram, ()),
    "steps_total": (Counter, ("degree",)),
    "rounds_total": (Counter, ()),
    "rounds_late_total": (Counter, ()),
    "rank_failures_total": (Counter, ()),
    "ranks": (Gauge, ()),
    "batch_active_sites": (Histogram, ()),
    "mask_ratio": (Histogram, ()),
    "cache_hits_total": (Counter, ("tier",)),
    "cache_misses_total": (Counter, ("tier",)),
    "cache_evictions_total": (Counter, ("tier",)),
    "cache_corrupt_total": (Counter, ("tier",)),
    "cache_expired_total": (Counter, ("tier",)),
    "cache_loads_total": (Counter, ("tier",)),
    "cache_read_bytes_total": (Counter, ("tier",)),
    "cache_read_seconds_total": (Counter, ("tier",)),
    "cache_lost_total": (Counter, ("tier",)),
    "cache_failures_total": (Counter, ("tier",)),
    "cache_usage_bytes": (Gauge, ("tier",)),
    "idle_recordings": (Gauge, ()),
    "idle_recordings_finished_total": (Counter, ()),
    "idle_recordings_dropped_total": (Counter, ()),
    "adapter_usage_bytes": (Gauge, ()),
    "adapter_hits_total": (Counter, ()),
    "adapter_loads_total": (Counter, ()),
    "adapter_failures_total": (Counter, ()),
    "adapter_evictions_total": (Counter, ()),
    "adapter_waits_total": (Counter, ()),
    "adapter_in_place_steps_total": (Counter, ()),
    "adapter_low_rank_steps_total": (Counter, ()),
    "adapter_writes_total": (Counter, ()),
    "adapter_load_seconds_total": (Counter, ()),
    "adapter_wait_seconds_total": (Counter, ()),
    "net_processes": (Gauge, ()),
    "net_usage_bytes": (Gauge, ()),
    "net_hits_total": (Counter, ()),
    "net_starts_total": (Counter, ()),
    "net_evictions_total": (Counter, ()),
    "net_restarts_total": (Counter, ()),
    "net_steps_total": (Counter, ()),
    "net_computed_here_total": (Counter, ()),
    "net_link_bytes_total": (Counter, ("direction",)),
    "patch_sites_total": (Counter, ("state",)),
    "patch_stretch_sites_total": (Counter, ("stretch", "state")),
    "mixed_steps_total": (Counter, ("way",)),
    "plan_bubble_seconds": (Histogram, ()),
    "slo_attained_total": (Counter, ()),
    "workers": (Gauge, ("node",)),
    "workers_lost_total": (Counter, ("node",)),
    "worker_restarts_total": (Counter, ()),
    "http_requests_client_disconnected_total": (Counter, ()),
}


def samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_metric_has_its_name_kind_and_labels() -> None:
    metrics = Metrics()
    held = {k: v for k, v in vars(metrics).items() if isinstance(v, MetricWrapperBase)}
    assert set(held) == set(NAMES)
    for name, (kind, labels) in NAMES.items():
        metric = held[name]
        assert type(metric) is kind
        assert metric._labelnames == labels
        described = next(iter(metric.describe()))
        assert described.name == "maskfx_" + name.removesuffix("_total")


def test_text_has_every_metric_before_anything_happened() -> None:
    text = Metrics().text().decode()
    for name in NAMES:
        assert f"maskfx_{name}" in text
    for name in ("hits", "misses", "evictions", "corrupt", "expired", "loads", "lost"):
        for tier in ("device", "host", "disk"):
            assert f'maskfx_cache_{name}_total{{tier="{tier}"}} 0.0' in text


def test_counts_by_name_and_only_counters() -> None:
    metrics = Metrics()
    metrics.count("worker_restarts_total")
    metrics.count("request_success_total", finished_reason="stop")
    seen = samples(metrics)
    assert seen["maskfx_worker_restarts_total[]"] == 1
    assert seen["maskfx_request_success_total[('finished_reason', 'stop')]"] == 1
    with pytest.raises(KeyError, match="num_requests_running"):
        metrics.count("num_requests_running")
    with pytest.raises(KeyError, match="no_such"):
        metrics.count("no_such")


def test_two_servers_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.worker_restarts_total.inc()
    assert samples(other)["maskfx_worker_restarts_total[]"] == 0
