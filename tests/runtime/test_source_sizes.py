"""The sizes and dtypes of a program's inputs are those of the tensors that a frame provides."""

import random

import pytest
import torch

import maskfx
from maskfx.compiler.source_dtypes import dtype_of
from maskfx.ir.geometry.lanes import Lane, Tokens
from maskfx.ir.geometry.pyramid import Window
from maskfx.ir.programs.source_sizes import PerRequest, Rows, row_set, sizes_of
from maskfx.ir.programs.sources import (
    Calls,
    CallSpans,
    Enter,
    Given,
    Neighbours,
    Owner,
    Parents,
    Requests,
    Source,
    Spans,
    Subsites,
    Table,
)
from maskfx.runtime.batch.flops import number_of
from tests.factories.masks import random as random_mask
from tests.factories.zoo import ZOO
from tests.runtime.test_oracle import denoiser_of

TEXT = ("text",)
WINDOW = Window(1, 2, (3, 5), (1, 1), (1, 2), (1, 1))


def check(name: str, seed: int) -> set[type[Source]]:
    """Compare one edit's inputs with what is stated of their sources; return the kinds of these."""
    case, denoiser, draw = ZOO[name], denoiser_of(name), random.Random(seed)
    size = draw.choice(case.sizes)
    inputs = case.inputs(size, seed)
    _, recorded = denoiser.record(**inputs)
    mask = random_mask(case.mask_shape(size), seed, draw.uniform(0.05, 0.6))
    [(program, frame, [member])] = denoiser.prepared([maskfx.EditStep(inputs, mask, recorded)])
    taps, kinds = program.interface.taps, set()
    nodes = program.module.graph.find_nodes(op="placeholder")
    sources = program.interface.inputs.values()
    for node, source, value in zip(nodes, sources, frame.inputs([member]), strict=True):
        sizes = sizes_of(source, taps, value.shape)
        found = tuple(number_of(one, member.sites, member.batch) for one in sizes)
        assert found == tuple(value.shape), source
        assert dtype_of(source, taps, node.meta.get("val", value)) == value.dtype, source
        assert row_set(source) == (sizes[0].segments if isinstance(sizes[0], Rows) else ())
        kinds.add(type(source))
    return kinds


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "SanaTransformer2DModel"])
def test_sizes_are_those_of_an_edit(name: str) -> None:
    assert Given in check(name, 0) | check(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["UNet2DConditionModel-sd15", "ControlNetModel", "SD3Transformer2DModel-sd35"]
)
@pytest.mark.parametrize("seed", range(3))
def test_sizes_are_those_of_an_edit_of_any_size(name: str, seed: int) -> None:
    assert Given in check(name, seed)


@pytest.mark.parametrize(
    ("source", "rows", "sizes"),
    [
        (Owner(TEXT), TEXT, (Rows(TEXT),)),
        (Spans(TEXT), (), (PerRequest(), 2)),
        (Requests(), (), (PerRequest(),)),
        (Calls(), (), (PerRequest(),)),
        (CallSpans(), (), (PerRequest(), 2)),
        (Enter(("grid0",), TEXT), TEXT, (Rows(TEXT),)),
        (Parents(1, 2), ("grid2",), (Rows(("grid2",)),)),
        (Subsites(1, 2, 2), ("grid2",), (Rows(("grid2",)),)),
        (Neighbours(WINDOW), ("grid2",), (Rows(("grid2",)), 15)),
        (Given("step", 0, Lane(((Tokens(TEXT),),))), TEXT, (Rows(TEXT),)),
    ],
)
def test_sizes_of_tables(source: Source, rows: tuple[str, ...], sizes: tuple[object, ...]) -> None:
    assert row_set(source) == rows
    assert sizes_of(source, {}) == sizes
    if isinstance(source, Table):
        assert dtype_of(source, {}, None) == torch.int64
    else:
        assert dtype_of(source, {}, torch.zeros(2)) == torch.float32
        with pytest.raises(AssertionError, match="an input without a tensor"):
            dtype_of(source, {}, None)
