"""TemplateRows: computes rows of a recording again from its inputs, in place of loading them.

The graph that records runs on all sites of the recorded inputs, as far as the rows that are wanted
depend on it: so the first blocks of a step load nothing. An edit that reads these rows gets what
the recording had there, whatever its own inputs are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from maskfx.compiler.build_program import taps_of
from maskfx.compiler.fuse import fused
from maskfx.ir.lru import LruCache
from maskfx.ir.modules.lazy_module import over_same
from maskfx.ir.nodes import ancestors
from maskfx.ir.programs.program import Program
from maskfx.runtime.backends.eager import PackedWeights, Runner
from maskfx.runtime.backends.graph_function import Run
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.member import Member
from maskfx.runtime.batch.rows import tap_parts
from maskfx.runtime.cache.computed_rows import ComputedCache
from maskfx.runtime.hardware.devices import moved
from maskfx.runtime.sites.active import ActiveSites
from maskfx.runtime.steps import DenseStep, ValidatedCall, ValidatedInputs

RUNNERS = 64  # kept: what computes the rows of some first blocks

# Sets the values of a batch's inputs that belong to requests, and the frame of a batch.
Prepare = Callable[[Program, Sequence[ValidatedCall], Sequence[Member]], Frame]


@dataclass
class TemplateRows:
    """Computes the rows that steps of one denoiser want of recordings.

    Args:
        prepare: Sets the values that members share with their calls, and returns their frame.
        packed: Packed weights, if the denoiser multiplies with them.
    """

    prepare: Prepare
    packed: PackedWeights

    def __post_init__(self) -> None:
        self._runners: LruCache[tuple[str, frozenset[str], bool], Run] = LruCache(RUNNERS)

    def compute(
        self,
        program: Program,
        calls: Sequence[ValidatedCall],
        members: Sequence[Member],
        prepack: bool,
    ) -> None:
        """Compute what the members' recordings are to compute, once for each recording.

        Args:
            program: The program.
            calls, members: A batch.
            prepack: Whether to multiply with packed weights.
        """
        for call, member in zip(calls, members, strict=True):
            cache = member.cache
            if isinstance(cache, ComputedCache) and cache.left:
                self._compute(program, call, member, cache, prepack)

    def forget(self) -> None:
        """Drop what runs graphs."""
        self._runners.clear()

    def _compute(
        self,
        program: Program,
        call: ValidatedCall,
        member: Member,
        cache: ComputedCache,
        prepack: bool,
    ) -> None:
        inputs = recorded_inputs(call, cache, member.device)
        if inputs is None:
            return
        sites = ActiveSites(program.interface.pyramid, inputs.sizes, None)
        batch = inputs.sizes["batch"]
        alone = Member(sites, batch, {}, None, False, None, member.device)
        frame = self.prepare(program, [ValidatedCall(DenseStep({}), inputs)], [alone])
        wanted = cache.left
        run = self._runners.find(
            (program.code, wanted, prepack), lambda: self._runner(program, wanted, prepack)
        )
        emitted: Sequence[Tensor] = run(frame.fetch([alone]))
        names = [tap for tap in program.interface.taps if tap in wanted]
        for name, rows in zip(names, emitted, strict=True):
            parts = tap_parts(program.interface.taps[name], rows, frame.layout, 0)
            found = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            cache.values[name].computed = found

    def _runner(self, program: Program, wanted: frozenset[str], prepack: bool) -> Run:
        module = fused(rows_alone(program, wanted), frozenset())
        return Runner(module, prepack, self.packed)


def rows_alone(program: Program, wanted: frozenset[str]) -> fx.GraphModule:
    """Return the graph that records, without what the rows of these taps don't depend on."""
    module = program.recording
    pairs = zip(program.interface.taps, taps_of(module), strict=True)
    taps = [node for name, node in pairs if name in wanted]
    needed, graph = ancestors(taps), fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in needed:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[tap] for tap in taps))
    return over_same(module, graph)


def recorded_inputs(
    call: ValidatedCall, cache: ComputedCache, device: torch.device
) -> ValidatedInputs | None:
    """Return the inputs of a call's recording; None if the call's graph isn't for their sizes."""
    leaves = call.inputs.compilation.capture.leaves
    if len(cache.given) != len(leaves) or cache.sizes != call.inputs.sizes:
        return None
    values = [moved(v, device) if isinstance(v, Tensor) else v for v in cache.given]
    return ValidatedInputs(values, call.inputs.spec, dict(cache.sizes), call.inputs.compilation)
