"""What a worker reports of its model beside the cache: LoRAs, rounds, loads of rows, levels."""

from __future__ import annotations

import logging
from collections import Counter

import structlog

from maskfx.engine.engine import Engine
from maskfx.ir.geometry.level_shares import LevelShare
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.level_shares import level_shares
from maskfx.runtime.lora.registry import Adapters
from maskfx.scheduling.step_reports import LoadFacts
from maskfx.serve.models.pipeline_set import PipelineSet

log = logging.getLogger(__name__)
events = structlog.get_logger(__name__)  # of the server: shown on standard error


def adapter_counts(adapters: Adapters, family: PipelineSet) -> dict[str, int]:
    """Return the statistics of LoRAs by the names of `Metrics.adapter_counters`."""
    now = adapters.counts()
    costs = [own for denoiser in denoisers_of(family) for own in denoiser.in_place.all_costs()]
    found = {"hits": now.hits + now.joined, "loads": now.loads, "failures": now.failures}
    found |= {"evictions": now.evictions, "waits": now.waits, "bytes": now.nbytes}
    found |= {"load_ms": int(1e3 * now.load_seconds), "wait_ms": int(1e3 * now.wait_seconds)}
    found["in_place"] = sum(own.steps_in_place for own in costs)
    found["with_terms"] = sum(own.steps_with_terms for own in costs)
    found["writes"] = sum(own.written for own in costs)
    return {f"adapters.{name}": count for name, count in found.items()}


def denoisers_of(family: PipelineSet) -> list[CompiledDenoiser]:
    """Return the denoisers of all pipelines of a model."""
    members = [m for m in (family.editor, family.generator) if m is not None]
    found = (d for m in members for d in pipeline_state_of(m.pipe).denoisers.values())
    return list({id(denoiser): denoiser for denoiser in found}.values())


def mixed_counts(family: PipelineSet) -> dict[str, int]:
    """Return the steps of whole pictures of several sizes, by how they ran; none before the first.

    Ways are "rows", as one batch without padding, and "module", by a call of it for each size.
    """
    found = Counter[str]()
    for denoiser in denoisers_of(family):
        found.update(denoiser.dense_ways.steps)
    return {f"mixed.{way}": count for way, count in found.items()}


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


def weigh_levels(family: PipelineSet, site: int) -> tuple[LevelShare, ...]:
    """Give each denoiser the shares of its levels; return those of the one that computes most.

    They are counted at the model's usual size, in sites of this many pixels.
    """
    width, height = (max(1, side // site) for side in family.size())
    members = {id(m): m for m in (family.editor, family.generator) if m is not None}
    found: list[tuple[int, tuple[LevelShare, ...]]] = []
    for member in members.values():
        for denoiser in pipeline_state_of(member.pipe).denoisers.values():
            denoiser.level_shares = shares_of(denoiser, height, width)
            weights = sum(weight.numel() for weight in denoiser.module.parameters())
            found.append((weights, denoiser.level_shares))
    return max(found, key=lambda one: one[0], default=(0, ()))[1]


def shares_of(denoiser: CompiledDenoiser, height: int, width: int) -> tuple[LevelShare, ...]:
    """Return the shares of a denoiser's levels; () if they aren't known."""
    for program in denoiser.programs.values():
        try:
            return level_shares(program, height, width)
        except Exception:
            log.info("the FLOPs of a denoiser's levels aren't known", exc_info=True)
    return ()


def recording_counts(engine: Engine) -> dict[str, int]:
    """Return the recordings of idle time: those that wait or are under way, and how others ended.

    None before the first one.
    """
    idle = engine.idle
    counts = {"waiting": len(idle), "finished": idle.finished, "dropped": idle.dropped}
    return {f"recordings.{k}": v for k, v in counts.items()} if any(counts.values()) else {}
