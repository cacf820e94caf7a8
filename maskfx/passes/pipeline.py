"""The compiler on one screen: the passes in order, and the function that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from maskfx.errors import CompileError
from maskfx.passes.cancel_round_trips import cancel_round_trips
from maskfx.passes.canonicalize.attention import canonicalize_attention
from maskfx.passes.canonicalize.batches import canonicalize_batches
from maskfx.passes.canonicalize.composites import canonicalize_composites
from maskfx.passes.canonicalize.convolutions import canonicalize_convolutions
from maskfx.passes.canonicalize.einsum import canonicalize_einsum
from maskfx.passes.canonicalize.joins import canonicalize_joins
from maskfx.passes.canonicalize.narrows import canonicalize_narrows
from maskfx.passes.canonicalize.norms import canonicalize_norms
from maskfx.passes.canonicalize.pads import canonicalize_pads
from maskfx.passes.canonicalize.pairs import canonicalize_pairs
from maskfx.passes.canonicalize.parts import canonicalize_parts
from maskfx.passes.canonicalize.permutes import canonicalize_permutes
from maskfx.passes.canonicalize.pools import canonicalize_pools
from maskfx.passes.canonicalize.repeats import canonicalize_repeats
from maskfx.passes.canonicalize.resizes import canonicalize_resizes
from maskfx.passes.canonicalize.rolls import canonicalize_rolls
from maskfx.passes.canonicalize.selects import canonicalize_selects
from maskfx.passes.canonicalize.sequences import canonicalize_sequences
from maskfx.passes.canonicalize.shuffles import canonicalize_shuffles
from maskfx.passes.canonicalize.sizes import canonicalize_sizes
from maskfx.passes.canonicalize.slices import canonicalize_slices
from maskfx.passes.canonicalize.softmax import canonicalize_softmax
from maskfx.passes.canonicalize.spreads import canonicalize_spreads
from maskfx.passes.canonicalize.turns import canonicalize_turns
from maskfx.passes.canonicalize.weights import canonicalize_weights
from maskfx.passes.canonicalize.writes import canonicalize_writes
from maskfx.passes.context import PassContext
from maskfx.passes.cut_keys import cut_keys
from maskfx.passes.cut_stretches import cut_stretches
from maskfx.passes.drop_guards import drop_guards
from maskfx.passes.drop_identity_ops import drop_identity_ops
from maskfx.passes.inline_regions import inline_regions
from maskfx.passes.lift_side_graphs import lift_side_graphs
from maskfx.passes.mark_lanes import mark_lanes
from maskfx.passes.mark_stages import mark_stages
from maskfx.passes.narrow.attention import narrow_attention
from maskfx.passes.narrow.choices import narrow_choices
from maskfx.passes.narrow.convolutions import narrow_convolutions
from maskfx.passes.narrow.entries import narrow_entries
from maskfx.passes.narrow.joins import narrow_joins
from maskfx.passes.narrow.linear import narrow_linear
from maskfx.passes.narrow.moves import narrow_moves
from maskfx.passes.narrow.norms import narrow_norms
from maskfx.passes.narrow.pointwise import narrow_pointwise
from maskfx.passes.narrow.reductions import narrow_reductions
from maskfx.passes.narrow.resampling import narrow_resampling
from maskfx.passes.narrow.samples import narrow_samples
from maskfx.passes.narrow.views import narrow_views
from maskfx.passes.narrow.whole import narrow_whole
from maskfx.passes.verify import CHECKERS, Fact

PassFunction = Callable[[fx.Graph, PassContext], int]


@dataclass(frozen=True)
class Pass:
    """A function over a graph, the facts that it needs and the facts that hold after it."""

    run: PassFunction
    needs: frozenset[Fact] = frozenset()
    gives: frozenset[Fact] = frozenset()

    @property
    def name(self) -> str:
        return self.run.__name__


@dataclass(frozen=True)
class PassRecord:
    """Statistics of one pass: rewrites, duration, and nodes in the graph after it."""

    name: str
    rewrites: int
    ms: float
    nodes: int


def _facts(*facts: Fact) -> frozenset[Fact]:
    return frozenset(facts)


_LIFTED = _facts(Fact.LANES_MARKED, Fact.SIDES_LIFTED)

PIPELINE: tuple[Pass, ...] = (
    # canonicalize: one spelling for each computation
    Pass(inline_regions, gives=_facts(Fact.FLAT)),
    Pass(drop_guards, needs=_facts(Fact.FLAT), gives=_facts(Fact.NO_GUARDS)),
    Pass(canonicalize_composites, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_convolutions, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_einsum, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_joins, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_narrows, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_norms, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_pads, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_permutes, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_pools, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_repeats, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_resizes, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_spreads, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_sequences, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_shuffles, needs=_facts(Fact.FLAT)),
    Pass(canonicalize_selects, needs=_facts(Fact.FLAT)),
    Pass(drop_identity_ops, needs=_facts(Fact.FLAT), gives=_facts(Fact.NO_IDENTITIES)),
    Pass(canonicalize_batches, needs=_facts(Fact.FLAT, Fact.NO_IDENTITIES)),
    Pass(canonicalize_rolls, needs=_facts(Fact.FLAT, Fact.NO_IDENTITIES)),
    Pass(canonicalize_turns, needs=_facts(Fact.FLAT, Fact.NO_IDENTITIES)),
    Pass(canonicalize_parts, needs=_facts(Fact.FLAT, Fact.NO_IDENTITIES)),
    Pass(canonicalize_softmax, needs=_facts(Fact.FLAT, Fact.NO_IDENTITIES)),
    Pass(canonicalize_weights, needs=_facts(Fact.FLAT, Fact.NO_IDENTITIES)),
    Pass(canonicalize_attention, needs=_facts(Fact.FLAT, Fact.NO_IDENTITIES)),
    Pass(canonicalize_pairs, needs=_facts(Fact.FLAT, Fact.NO_IDENTITIES)),
    Pass(canonicalize_sizes, needs=_facts(Fact.FLAT, Fact.NO_IDENTITIES)),
    Pass(canonicalize_slices, needs=_facts(Fact.FLAT, Fact.NO_IDENTITIES)),
    Pass(canonicalize_writes, needs=_facts(Fact.FLAT, Fact.NO_IDENTITIES)),
    # analyze: annotate, change nothing
    Pass(mark_stages, needs=_facts(Fact.FLAT), gives=_facts(Fact.STAGES_MARKED)),
    Pass(
        mark_lanes,
        needs=_facts(Fact.STAGES_MARKED, Fact.NO_IDENTITIES),
        gives=_facts(Fact.LANES_MARKED),
    ),
    # split: move what isn't computed on rows into separate graphs
    Pass(
        lift_side_graphs,
        needs=_facts(Fact.STAGES_MARKED, Fact.LANES_MARKED),
        gives=_facts(Fact.SIDES_LIFTED),
    ),
    # cut: row sets that a request or its plan may choose
    Pass(cut_stretches, needs=_LIFTED),
    Pass(cut_keys, needs=_LIFTED),
    # narrow: rewrite one kind of operator at a time
    Pass(narrow_entries, needs=_LIFTED),
    Pass(narrow_samples, needs=_LIFTED),
    Pass(narrow_choices, needs=_LIFTED),
    Pass(narrow_attention, needs=_LIFTED, gives=_facts(Fact.ATTENTION_NARROWED)),
    Pass(narrow_linear, needs=_LIFTED, gives=_facts(Fact.LINEAR_NARROWED)),
    Pass(
        narrow_convolutions,
        needs=_LIFTED | {Fact.LINEAR_NARROWED},
        gives=_facts(Fact.CONVOLUTIONS_NARROWED),
    ),
    Pass(narrow_whole, needs=_LIFTED),
    Pass(narrow_norms, needs=_LIFTED),
    Pass(narrow_resampling, needs=_LIFTED),
    Pass(narrow_moves, needs=_LIFTED),
    Pass(narrow_reductions, needs=_LIFTED),
    Pass(narrow_joins, needs=_LIFTED),
    Pass(narrow_views, needs=_LIFTED),
    Pass(narrow_pointwise, needs=_LIFTED, gives=_facts(Fact.POINTWISE_NARROWED)),
    # close: rows flow from inputs to outputs
    Pass(
        cancel_round_trips,
        needs=_LIFTED
        | {Fact.ATTENTION_NARROWED, Fact.CONVOLUTIONS_NARROWED, Fact.POINTWISE_NARROWED},
        gives=_facts(Fact.ROWS_FLOW),
    ),
)


def run_passes(
    graph: fx.Graph,
    ctx: PassContext,
    passes: Iterable[Pass] = PIPELINE,
    keep: Callable[[str, fx.Graph], None] | None = None,
) -> list[PassRecord]:
    """Run the passes in order; after each, clean up, check every fact that holds, and record it.

    `keep` is called with the graph after each pass that rewrote something.
    """
    held: set[Fact] = set()
    records = []
    for step in passes:
        missing = sorted(f.name for f in step.needs - held)
        if missing:
            raise CompileError(f"{step.name} needs {missing[0]}, which no earlier pass gives")
        start = time.perf_counter()
        rewrites = step.run(graph, ctx)
        if rewrites:
            graph.eliminate_dead_code()
            graph.lint()
        held |= step.gives
        for fact in sorted(held if rewrites else step.gives, key=lambda f: f.name):
            CHECKERS[fact](graph, step.name)
        ms = 1e3 * (time.perf_counter() - start)
        records.append(PassRecord(step.name, rewrites, ms, len(graph.nodes)))
        if keep is not None and rewrites:
            keep(step.name, graph)
    return records
