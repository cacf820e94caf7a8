"""Workers' cache counters, added up over their lives."""

from __future__ import annotations

from maskfx.serve.metrics import CacheCounts, Metrics


def value(metrics: Metrics, name: str, tier: str) -> float | None:
    return metrics.registry.get_sample_value(f"maskfx_cache_{name}", {"tier": tier})


def test_counters_add_up_over_workers_and_their_restarts() -> None:
    metrics = Metrics()
    counts = CacheCounts(metrics)
    counts.heard("a", {"hits.host": 3, "misses": 1})
    counts.heard("b", {"hits.host": 2})
    counts.heard("a", {"hits.host": 5, "misses": 1})
    assert value(metrics, "hits_total", "host") == 7
    assert value(metrics, "misses_total", "host") == 1
    counts.lost("a")
    counts.heard("a.2", {"hits.host": 1})
    assert value(metrics, "hits_total", "host") == 8


def test_bytes_are_those_of_the_living_and_disk_is_shared() -> None:
    metrics = Metrics()
    counts = CacheCounts(metrics)
    counts.heard("a", {"bytes.host": 10, "bytes.disk": 100})
    counts.heard("b", {"bytes.host": 5, "bytes.disk": 110})
    assert value(metrics, "usage_bytes", "host") == 15
    assert value(metrics, "usage_bytes", "disk") == 110
    counts.lost("b")
    assert value(metrics, "usage_bytes", "host") == 10
    assert value(metrics, "usage_bytes", "disk") == 100


def test_every_event_of_a_cache_is_counted() -> None:
    metrics = Metrics()
    counts = CacheCounts(metrics)
    for times in (1, 3):
        counts.heard("a", {"expired": times, "loads": 2 * times, "lost": 3 * times})
        counts.heard("b", {"failures": 4 * times})
    assert value(metrics, "expired_total", "host") == 3
    assert value(metrics, "loads_total", "disk") == 6
    assert value(metrics, "lost_total", "disk") == 9
    assert value(metrics, "failures_total", "disk") == 12


def test_reads_from_disk_are_counted_and_told_by_their_time() -> None:
    metrics, told = Metrics(), list[tuple[int, float]]()
    counts = CacheCounts(metrics, lambda nbytes, seconds: told.append((nbytes, seconds)))
    counts.heard("a", {"read_bytes": 1000, "read_us": 500_000})
    counts.heard("a", {"read_bytes": 1000, "read_us": 500_000, "misses": 1})
    counts.heard("b", {"read_bytes": 0, "read_us": 0})
    counts.heard("a", {"read_bytes": 4000, "read_us": 2_500_000, "misses": 1})
    assert told == [(1000, 0.5), (3000, 2.0)]
    assert value(metrics, "read_bytes_total", "disk") == 4000
    assert value(metrics, "read_seconds_total", "disk") == 2.5


def test_what_nobody_knows_is_left_out() -> None:
    metrics = Metrics()
    CacheCounts(metrics).heard("a", {"evictions.disk": 2, "novelty.host": 9})
    assert value(metrics, "evictions_total", "disk") == 2


def test_computed_and_kept_sites_of_patches_are_counted() -> None:
    metrics = Metrics()
    counts = CacheCounts(metrics)
    for computed, kept in ((3, 1), (5, 9)):
        counts.heard("a", {"patches.computed": computed, "patches.kept": kept})
    found = [
        metrics.registry.get_sample_value("maskfx_patch_sites_total", {"state": state})
        for state in ("computed", "kept")
    ]
    assert found == [5, 9]


def test_sites_of_patches_are_counted_by_stretch() -> None:
    metrics = Metrics()
    counts = CacheCounts(metrics)
    for times in (1, 3):
        counts.heard("a", {"stretches.2.computed": 4 * times, "stretches.2.kept": times})
        counts.heard("b", {"stretches.2.computed": 5, "stretches.32.kept": 7})
    name = "maskfx_patch_stretch_sites_total"
    found = {
        (stretch, state): metrics.registry.get_sample_value(
            name, {"stretch": stretch, "state": state}
        )
        for stretch, state in (("2", "computed"), ("2", "kept"), ("32", "kept"))
    }
    assert found == {("2", "computed"): 17, ("2", "kept"): 3, ("32", "kept"): 7}


def test_nets_are_counted_and_their_processes_are_those_of_the_living() -> None:
    metrics = Metrics()
    counts = CacheCounts(metrics)

    def value_of(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"maskfx_net_{name}", labels)

    counts.heard("a", {"nets.starts": 1, "nets.sent": 10, "nets.processes": 1, "nets.nbytes": 7})
    counts.heard("b", {"nets.starts": 2, "nets.received": 4, "nets.processes": 2, "nets.nbytes": 5})
    counts.heard("a", {"nets.starts": 3, "nets.sent": 15, "nets.processes": 1, "nets.nbytes": 7})
    assert value_of("starts_total") == 5
    assert value_of("link_bytes_total", direction="sent") == 15
    assert value_of("link_bytes_total", direction="received") == 4
    assert (value_of("processes"), value_of("usage_bytes")) == (3, 12)
    counts.lost("b")
    assert (value_of("processes"), value_of("usage_bytes")) == (1, 7)


def test_recordings_of_a_lost_worker_are_dropped() -> None:
    metrics = Metrics()
    counts = CacheCounts(metrics)

    def now() -> list[float | None]:
        names = ("", "_finished_total", "_dropped_total")
        found = (f"maskfx_idle_recordings{name}" for name in names)
        return [metrics.registry.get_sample_value(name) for name in found]

    counts.heard("a", {"recordings.waiting": 3, "recordings.finished": 1, "recordings.dropped": 2})
    counts.heard("b", {"recordings.waiting": 1})
    assert now() == [4, 1, 2]
    counts.lost("a")
    assert now() == [1, 1, 5]
    counts.heard("a.2", {"recordings.finished": 1})
    assert now() == [1, 2, 5]


def test_steps_of_several_sizes_are_counted_by_how_they_ran() -> None:
    metrics = Metrics()
    counts = CacheCounts(metrics)
    counts.heard("a", {"mixed.rows": 2, "mixed.module": 5})
    counts.heard("a", {"mixed.rows": 3, "mixed.module": 5})
    counts.heard("b", {"mixed.rows": 4})
    found = {
        way: metrics.registry.get_sample_value("maskfx_mixed_steps_total", {"way": way})
        for way in ("rows", "module")
    }
    assert found == {"rows": 7, "module": 5}
