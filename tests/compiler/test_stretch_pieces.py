"""A piece per stretch: each reads only inputs whose sites are chosen by then."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import maskfx
from maskfx.compiler.stretch_pieces import segments_read, stretch_pieces, stretches_of
from maskfx.ir.geometry.lanes import is_image, padded
from maskfx.ir.programs.program import Program
from maskfx.runtime.backends.eager import Runner
from maskfx.runtime.backends.pieces import PieceRunner
from maskfx.runtime.cache.rolling.patch_changes import boundary_taps
from tests.passes.test_cut_stretches import Hourglass, Layers, layer_inputs
from tests.passes.tools import picture

Made = tuple[nn.Module, dict[str, Any]]
KINDS: dict[str, Any] = {
    "transformer": lambda: (Layers(4), layer_inputs()),
    "convolutions": lambda: (Hourglass(), picture()),
}


@cache
def compiled(kind: str, plans: bool = False) -> tuple[maskfx.CompiledDenoiser, dict[str, Any]]:
    torch.manual_seed(0)
    module, inputs = KINDS[kind]()
    made = maskfx.compile(module.eval(), stretches=True, plans=plans, example_inputs=inputs)
    return made, inputs


def program_of(kind: str, plans: bool = False) -> Program:
    return next(iter(compiled(kind, plans)[0].programs.values()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plans", [False, True])
def test_a_piece_reads_no_site_of_a_later_stretch(kind: str, plans: bool) -> None:
    program = program_of(kind, plans)
    interface, pieces = program.interface, stretch_pieces(program.recording, program.interface)
    stretches = len(compiled(kind, plans)[0].stretches)
    assert len(pieces) == stretches > 2
    for number, piece in enumerate(pieces, 1):
        for name in piece.inputs:
            for segment in filter(is_image, segments_read(interface.inputs[name])):
                if padded(segment) is None:
                    assert (interface.stretch_of((segment,)) or stretches) <= number, name


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stretch_begins_with_is_made_before_it(kind: str) -> None:
    program = program_of(kind)
    pieces = stretch_pieces(program.recording, program.interface)
    output: Any = program.recording.graph.output_node().args[0]
    names = dict(zip(program.interface.taps, (n.name for n in output[1]), strict=True))
    found = {tap: stretch for tap, stretch in boundary_taps(program.interface).items() if stretch}
    assert found
    for tap, stretch in found.items():
        assert any(names[tap] in piece.results for piece in pieces[: stretch - 1])


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_compute_what_the_graph_does(kind: str) -> None:
    denoiser, inputs = compiled(kind)
    program = program_of(kind)
    [(_, frame, members)] = denoiser.prepared([maskfx.DenseStep(inputs)])
    given = dict(zip(program.interface.inputs, frame.inputs(members), strict=True))
    pieces = stretch_pieces(program.recording, program.interface)
    order: list[int] = []
    outputs, taps = PieceRunner(pieces, lambda piece: Runner(piece.module))(
        given.__getitem__, lambda number, values: order.append(number)
    )
    wanted, same = program.recording(*given.values())
    assert all(map(torch.equal, [*outputs, *taps], [*wanted, *same]))
    assert order == list(range(len(pieces)))


def test_what_no_stretch_chooses_runs_where_it_is_read() -> None:
    """The positions' cosine depends on no sites of a stretch before its own."""
    program = program_of("transformer")
    own = stretches_of(program.recording.graph, program.interface)
    for node, stretch in own.items():
        before = [own[n] for n in node.all_input_nodes if n in own]
        assert all(number <= stretch for number in before)
        after = [own[user] for user in node.users if user in own]
        assert not after or stretch <= min(after)
    assert set(own.values()) == set(range(1, len(compiled("transformer")[0].stretches) + 1))
