"""What a worker reports of its model beside the cache: LoRAs, rounds, and the loads of rows."""

from __future__ import annotations

import structlog

from maskfx.engine.engine import Engine
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.lora.registry import Adapters
from maskfx.serve.messages import LoadFacts
from maskfx.serve.models.pipeline_set import PipelineSet

events = structlog.get_logger(__name__)  # of the server: shown on standard error


def adapter_counts(adapters: Adapters) -> dict[str, int]:
    """Return the statistics of LoRAs by the names of `Metrics.adapter_counters`."""
    now = adapters.counts()
    found = {"hits": now.hits + now.joined, "loads": now.loads, "failures": now.failures}
    found |= {"evictions": now.evictions, "waits": now.waits, "bytes": now.nbytes}
    found |= {"load_ms": int(1e3 * now.load_seconds), "wait_ms": int(1e3 * now.wait_seconds)}
    return {f"adapters.{name}": count for name, count in found.items()}


def round_counts(engine: Engine) -> dict[str, int]:
    """Return the statistics of rounds by the names of `Metrics.round_counters`."""
    assert engine.rounds is not None, "an engine without rounds"
    counts = engine.rounds.counts
    failures = sum(group.failures for group in engine.runner.rank_groups())
    found = {"made": counts.rounds, "late": counts.late, "failures": failures}
    return {f"rounds.{name}": n for name, n in {**found, "ranks": engine.rank_count}.items()}


def load_facts(family: PipelineSet) -> LoadFacts | None:
    """Return what the warm-up's plans measured of loads, for the router; log how rows are loaded.

    Of several denoisers, the one that loads most counts.
    """
    found: list[tuple[float, LoadFacts]] = []
    for name, denoiser in pipeline_state_of(family.main.pipe).denoisers.items():
        events.info("cached_rows", denoiser=name, loaded=denoiser.loads)
        trade = denoiser.planner.trade() if denoiser.planner is not None else None
        if trade is not None:
            facts = LoadFacts(trade.bandwidth, trade.loaded, trade.avoidable, trade.per_byte)
            found.append((trade.nbytes, facts))
    return max(found, key=lambda one: one[0], default=(0.0, None))[1]
