"""Attention that reads packed keys, in graphs and in edits of recordings in 8 and 4 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import maskfx
from maskfx import ops
from maskfx.passes.read_packed_keys import read_packed_keys
from maskfx.runtime.cache.quantize import Encoding, Format
from maskfx.runtime.cache.step_cache import StepCache
from tests.factories import masks
from tests.factories.zoo import ZOO
from tests.passes.tools import code_of, operators

NAME = "SD3Transformer2DModel-sd35"
PACKED = ("rest_k", "rest_v")


def attention(names: tuple[str, ...] = PACKED) -> fx.Graph:
    graph = fx.Graph()
    q, k, v, *rest, spans = (graph.placeholder(n) for n in ("q", "k", "v", *names, "spans"))
    if len(rest) < 2:
        rest.append(graph.call_function(torch.ops.aten.neg.default, (rest[0],)))
    layout = (spans, spans, spans, None, 1, False, None)
    graph.output(graph.call_function(ops.attend, (q, k, v, *rest, *layout)))
    return graph


def test_steps_and_scales_are_inputs() -> None:
    graph = attention()
    assert read_packed_keys(graph, PACKED) == 1
    assert operators(graph) == {"attend_packed": 1}
    node = graph.find_nodes(op="call_function", target=ops.attend_packed)[0]
    assert [str(n.target) for n in node.args[3:7]] == [
        "rest_k__steps", "rest_k__scales", "rest_v__steps", "rest_v__scales",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("graph", "packed"),
    [(attention(), ()), (attention(), ("rest_k",)), (attention(("rest_k",)), ("rest_k",))],
)
def test_keeps_attention_that_is_packed_in_part(graph: fx.Graph, packed: Any) -> None:
    code = code_of(graph)
    assert read_packed_keys(graph, packed) == 0
    assert code_of(graph) == code


def test_second_run_rewrites_nothing() -> None:
    graph = attention()
    read_packed_keys(graph, PACKED)
    assert read_packed_keys(graph, PACKED) == 0


@pytest.mark.slow
def test_edits_of_packed_recordings_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit as with rows that are widened first, alone and beside other members."""
    case = ZOO[NAME]
    denoiser = maskfx.compile(case.build())
    caches: dict[str, StepCache] = {}
    inputs = case.inputs(case.sizes[0], 0)
    _, kept = denoiser.record(**inputs)
    caches["full"] = kept
    for format in (Format.INT8, Format.INT4):
        caches[format.value] = kept.packed(Encoding(rows=format))
    shape = case.mask_shape(case.sizes[0])

    def edits(*names: str) -> list[maskfx.EditStep]:
        return [
            maskfx.EditStep(
                case.inputs(case.sizes[0], 5 + number),
                masks.MASKS["random"](shape, number),
                caches[name],
                any_step=True,
            )
            for number, name in enumerate(names)
        ]

    batches = [("int8",), ("int4", "int4"), ("int8", "int4"), ("int8", "full")]
    wanted = [denoiser.edit(edits(*names)) for names in batches]
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    read: list[torch.dtype] = []
    packed = ops.attend_packed

    def watched(*args: Any) -> Any:
        read.append(args[3].dtype)
        return packed(*args)

    monkeypatch.setattr(ops, "attend_packed", watched)
    denoiser._executor.graphs.runners.clear()
    kinds = [{torch.int8}, {torch.uint8}, set(), set()]
    for names, expected, kind in zip(batches, wanted, kinds, strict=True):
        read.clear()
        for (one,), (two,) in zip(denoiser.edit(edits(*names)), expected, strict=True):
            assert torch.equal(one, two)
        assert set(read) == kind, names
