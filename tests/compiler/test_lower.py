"""Lowering: each operator of maskfx has a form in standard ones, without loops over requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import maskfx
from maskfx import ops
from maskfx.compiler.build_program import recording_twin
from maskfx.compiler.lower import RULES, lower
from maskfx.export.graphs import PICKS
from maskfx.ir.geometry.lanes import Lane
from maskfx.ir.geometry.pyramid import Pyramid
from maskfx.ir.programs.program import Interface, Program, Tap
from maskfx.ir.programs.sources import (
    Given,
    Owner,
    Pairs,
    PairTable,
    Requests,
    Rest,
    RestOwner,
    RestSpans,
    Source,
    Spans,
)
from tests.export.tiny import arguments, tiny
from tests.passes.tools import error

IMAGE, TEXT = ("grid0",), ("text:a", "grid0")
OWN, REST, WORDS = (3, 1, 5), (2, 4, 0), (2, 3, 1)  # rows of three requests


def owners(*counts: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(3).repeat_interleave(torch.tensor(c)) for c in counts])


def spans_of(*counts: tuple[int, ...]) -> Tensor:
    """Starts and stops of rows that lie segment by segment."""
    flat = torch.tensor(counts).flatten().cumsum(0).view(len(counts), 3)
    starts = flat - torch.tensor(counts)
    return torch.stack([starts, flat], 2).transpose(0, 1).reshape(3, -1)


def rest_spans_of(counts: tuple[int, ...]) -> Tensor:
    return spans_of(counts)


# each vector of owners and spans that a graph may read
TABLES: dict[Source, Tensor] = {
    Spans(IMAGE): spans_of(OWN),
    Spans(TEXT): spans_of(WORDS, OWN),
    Owner(IMAGE): owners(OWN),
    Owner(TEXT): owners(WORDS, OWN),
    RestSpans(IMAGE): rest_spans_of(REST),
    RestSpans(()): torch.zeros(3, 0, dtype=torch.long),
    RestOwner(IMAGE): owners(REST),
    Requests(): torch.arange(3),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compared(op: Any, given: Mapping[str, Any], values: Mapping[Any, Tensor]) -> Program:
    """Run an operator and its lowered form on the same batch, compare, return the lowered one."""
    graph, inputs = fx.Graph(), dict[str, Source]()
    places = dict[str, Any]()
    for name, value in given.items():
        if isinstance(value, Source):
            places[name] = graph.placeholder(name)
            inputs[name] = value
    args = tuple(places.get(name, value) for name, value in given.items())
    graph.output((graph.call_function(op, args),))
    module = fx.GraphModule(nn.Module(), graph)
    taps = {"t": Tap("t", IMAGE, (2, 4), torch.float32)}
    interface = Interface(Pyramid(3), inputs, taps=taps)
    program = Program(module, recording_twin(module, []), interface, "")
    low = lower(program)
    assert not any(node.target in RULES for node in low.module.graph.nodes)
    known: dict[Any, Tensor] = {**TABLES, **values}
    wanted = module(*(known[source] for source in inputs.values()))
    found = low.module(*(known[source] for source in low.interface.inputs.values()))
    assert error(found, wanted) < 1e-5
    return low


def value(number: int) -> Given:
    return Given("step", number, Lane(()))


def test_every_operator_has_a_rule() -> None:
    twins = {ops.add_low_rank, ops.own_linear}  # of graphs that aren't exported
    assert set(RULES) | PICKS | twins >= set(ops.ALL)
    assert not set(RULES) & PICKS


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(affine: bool) -> None:
    rows, rest = 50 + draw(9, 8), draw(3, 2, 3).abs()
    rest[:, :, 0] = torch.tensor(REST)[:, None] * 4.0
    rest[2] = 0  # nothing is cached
    weight = value(2) if affine else None
    low = compared(
        ops.group_scale,
        {"rows": value(0), "rest": value(1), "spans": Spans(IMAGE), "groups": 2}
        | {"weight": weight, "bias": weight, "eps": 1e-5},
        {value(0): rows, value(1): rest, value(2): draw(8, seed=3)},
    )
    kinds = {type(source) for source in low.interface.inputs.values()}
    assert kinds == {Given, Owner, Requests}
    scales = draw(3, 2, 8)
    compared(
        ops.scale_shift,
        {"rows": value(0), "scales": value(1), "owner": Owner(IMAGE)},
        {value(0): rows, value(1): scales},
    )


@pytest.mark.parametrize("heads", [1, 2])
def test_attention(heads: int) -> None:
    batch: dict[Any, Tensor] = {
        value(0): draw(9, 2, 4),
        value(1): draw(15, heads, 4),
        value(2): draw(15, heads, 4),
    }
    rest: dict[Any, Tensor] = {Rest("t", IMAGE): draw(6, heads, 4, seed=1)}
    given: dict[str, Any] = {"q": value(0), "k": value(1), "v": value(2)}
    given |= {"rest_k": Rest("t", IMAGE), "rest_v": Rest("t", IMAGE), "q_spans": Spans(IMAGE)}
    spans = {"k_spans": Spans(TEXT), "rest_spans": RestSpans(IMAGE)}
    tail = {"bias": None, "bias_heads": 1, "pairwise": False, "scale": 0.3}
    low = compared(ops.attend, given | spans | tail, batch | rest)
    assert RestOwner(IMAGE) in low.interface.inputs.values()
    low = compared(
        ops.attend, given | spans | {"rest_spans": RestSpans(())} | tail, batch | {**rest}
    )
    assert not any(isinstance(s, Rest | RestOwner) for s in low.interface.inputs.values())


@pytest.mark.parametrize("pairwise", [False, True])
def test_attention_with_a_mask(pairwise: bool) -> None:
    keys = [w + o + r for w, o, r in zip(WORDS, OWN, REST, strict=True)]
    own = [draw(2, n if pairwise else 1, k, seed=k) for n, k in zip(OWN, keys, strict=True)]
    queries = IMAGE if pairwise else ()
    pairs = Pairs(value(9), queries, TEXT, 2)
    table = PairTable(value(9), queries, TEXT, 2, torch.float32)
    columns = owners(WORDS, OWN, REST)
    full = torch.zeros(2, 9 if pairwise else 1, len(columns))
    for number, block in enumerate(own):
        at = (owners(OWN) == number).nonzero()[:, 0] if pairwise else torch.tensor([0])
        full[:, at[:, None], (columns == number).nonzero()[:, 0]] = block
    compared(
        ops.attend,
        {"q": value(0), "k": value(1), "v": value(2)}
        | {"rest_k": Rest("t", IMAGE), "rest_v": Rest("t", IMAGE)}
        | {"q_spans": Spans(IMAGE), "k_spans": Spans(TEXT), "rest_spans": RestSpans(IMAGE)}
        | {"bias": pairs, "bias_heads": 2, "pairwise": pairwise, "scale": None},
        {
            **{value(n): draw(9 if n == 0 else 15, 2, 4, seed=n) for n in range(3)},
            Rest("t", IMAGE): draw(6, 2, 4, seed=1),
            pairs: torch.cat([block.flatten() for block in own]),
            table: full,
        },
    )


def test_attention_without_a_softmax() -> None:
    compared(
        ops.site_pair_sum,
        {"q": value(0), "k": value(1), "v": value(2)}
        | {"rest_k": Rest("t", IMAGE), "rest_v": Rest("u", IMAGE)}
        | {"q_spans": Spans(IMAGE), "k_spans": Spans(IMAGE), "rest_spans": RestSpans(IMAGE)}
        | {"steps": "mul 0.5, sub 1.0, sigmoid"},
        {
            **{value(n): draw(9, 2, 4, seed=n) for n in range(3)},
            Rest("t", IMAGE): draw(6, 2, 4, seed=4),
            Rest("u", IMAGE): draw(6, 2, 4, seed=5),
        },
    )
    compared(
        ops.pair_sum,
        {"q": value(0), "k": value(1), "v": value(2), "steps": "elu 1.0, mul 0.1"},
        {value(0): draw(9, 2, 3, 4), value(1): draw(9, 2, 5, 4), value(2): draw(9, 2, 5, 6)},
    )


@pytest.mark.parametrize("divide", [True, False])
def test_sums_over_sites(divide: bool) -> None:
    rest = torch.cat([draw(3, 4), torch.tensor(REST)[:, None].float()], 1)
    compared(
        ops.site_mean,
        {"rows": value(0), "rest": value(1), "spans": Spans(IMAGE), "divide": divide},
        {value(0): draw(9, 4), value(1): rest},
    )


def test_products_over_sites() -> None:
    given = {"a": value(0), "b": value(1), "rest_a": value(2), "rest_b": value(3)}
    values = {value(0): draw(9, 2, 3), value(1): draw(9, 2, 5)}
    values |= {value(2): draw(6, 2, 3, seed=1), value(3): draw(6, 2, 5, seed=1)}
    spans = {"spans": Spans(IMAGE), "rest_spans": RestSpans(IMAGE)}
    compared(ops.site_product, given | spans, values)
    flat = {value(0): draw(9, 3), value(1): draw(6, 3, seed=1)}
    for largest in (True, False):
        rows = {"rows": value(0), "rest": value(1)}
        compared(ops.site_extreme, rows | spans | {"largest": largest}, flat)
    compared(ops.site_logsumexp, rows | spans, flat)
    compared(
        ops.owner_product,
        {"rows": value(0), "matrices": value(1), "spans": Spans(IMAGE)},
        {value(0): draw(9, 2, 3), value(1): draw(3, 2, 3, 5)},
    )


def test_rows_picked_by_tables() -> None:
    table = torch.randint(0, 9 + 4 + 1, (7, 3), generator=torch.Generator().manual_seed(0))
    rows = {value(0): draw(9, 5), value(1): draw(4, 5, seed=1)}
    compared(
        ops.gather,
        {"rows": value(0), "halo": value(1), "table": value(2)},
        rows | {value(2): table},
    )
    compared(
        ops.enter,
        {"rows": value(0), "loaded": value(1), "table": value(2)},
        rows | {value(2): table[:, 0] % 13},
    )


def test_a_lowered_program_records_and_edits_as_the_original() -> None:
    plain, low = maskfx.compile(tiny()), maskfx.compile(tiny())
    low.mask_shape(arguments())
    for compilation in low.compilations:
        assert compilation.program is not None
        compilation.program = lower(compilation.program)
        low.programs[compilation.program.code] = compilation.program
    low._executor.forget()
    mask = torch.arange(64).view(8, 8) % 5 == 0
    outputs = []
    for denoiser in (plain, low):
        _, cache = denoiser.record(**arguments(2))
        new = arguments(2, seed=1)
        steps = [maskfx.EditStep(new, one, cache) for one in (mask, ~mask)]
        outputs.append(denoiser.edit(steps))
    assert error(outputs[1], outputs[0]) < 1e-5
    assert next(iter(low.programs)) == next(iter(plain.programs))  # recordings serve both
