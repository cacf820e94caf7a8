"""Products of few rows in C against PyTorch in double precision: any sizes, threads, in a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from maskfx import ops
from maskfx.ops.native import build
from maskfx.ops.native import linear as native
from maskfx.runtime.backends import eager
from maskfx.runtime.backends.eager import Runner
from tests.ops.test_ops import numbers

LIB = build.c_functions()
pytestmark = pytest.mark.skipif(
    LIB is None or not LIB.wide(), reason="no C compiler, or no AVX-512 here"
)
aten = torch.ops.aten


@pytest.fixture(params=[1, 2, 3], ids=["one thread", "two", "three"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def drawn(count: int, depth: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    return numbers(count, depth), numbers(outputs, depth, seed=1), numbers(outputs, seed=2)


# 16 lanes of a vector, tiles of 48 rows; outputs by 8, 16 and 32, depths by 1,024
COUNTS = (0, 1, 8, 15, 16, 17, 33, 48, 49, 97, 128, 200)
SIZES = ((1, 1), (5, 3), (16, 8), (33, 40), (64, 32), (70, 71), (1024, 33), (2100, 65))


@pytest.mark.parametrize(("depth", "outputs"), SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_a_product_is_pytorchs(count: int, depth: int, outputs: int) -> None:
    rows, weight, bias = drawn(count, depth, outputs)
    for added in (bias, None):
        wanted = F.linear(rows, weight, added)
        single = [None if x is None else x.float() for x in (rows, weight, added)]
        found = ops.few_rows_linear(*single)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6 * depth)


def test_a_row_gets_the_same_beside_others() -> None:
    rows, weight, bias = (x.float() for x in drawn(100, 130, 50))
    all_rows = ops.few_rows_linear(rows, weight, bias)
    for start, stop in ((0, 1), (3, 20), (40, 100)):
        own = ops.few_rows_linear(rows[start:stop].contiguous(), weight, bias)
        assert torch.equal(own, all_rows[start:stop])


def test_rows_of_several_dimensions_keep_them() -> None:
    rows, weight, bias = (x.float() for x in drawn(24, 12, 7))
    found = ops.linear(rows.view(2, 3, 4, 12), weight, bias)
    assert found.shape == (2, 3, 4, 7)
    assert torch.equal(found.view(24, 7), ops.few_rows_linear(rows, weight, bias))


CHANGES = ["double", "strided rows", "strided weight", "half bias", "many rows"]


@pytest.mark.parametrize("change", CHANGES)
def test_other_values_are_left_to_pytorch(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight, bias = (x.float() for x in drawn(24, 12, 7))
    if change == "double":
        rows, weight, bias = rows.double(), weight.double(), bias.double()
    elif change == "strided rows":
        rows = torch.cat([rows, rows], 1)[:, ::2]
    elif change == "strided weight":
        weight = weight.t().contiguous().t()
    elif change == "many rows":
        rows = numbers(4000, 12).float()
    else:
        bias = torch.cat([bias, bias])[::2]
    called: list[object] = []
    monkeypatch.setattr(native, "wide_functions", lambda: called.append(1))
    found = ops.few_rows_linear(rows, weight, bias)
    assert not called
    torch.testing.assert_close(found, F.linear(rows, weight, bias))


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("count", [4, 8, 50, 96, 97])
def test_graphs_multiply_few_rows_in_c(
    count: int, prepack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "WORTH", 1)
    root = nn.Module()
    root.inner = nn.Linear(40, 30)
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    weight, bias = graph.get_attr("inner.weight"), graph.get_attr("inner.bias")
    graph.output((graph.call_function(aten.linear.default, (rows, weight, bias)),))
    module = fx.GraphModule(root, graph)
    served: list[int] = []
    few = native.few_rows_linear

    def watched(rows: Tensor, *more: Tensor) -> Tensor:
        served.append(len(rows))
        return few(rows, *more)

    monkeypatch.setattr("maskfx.ops.few_rows.few_rows_linear", watched)
    values = numbers(count, 40).float()
    with torch.no_grad():
        run = Runner(module, prepack)
        torch.testing.assert_close(run({"rows": values}.__getitem__)[0], root.inner(values))
        if not prepack:  # packed weights follow when they are asked to
            root.inner.weight.mul_(2)
        torch.testing.assert_close(run({"rows": values}.__getitem__)[0], root.inner(values))
    assert served == ([count] * 2 if 8 <= count <= 96 and not prepack else [])


def test_autocast_decides_the_precision() -> None:
    rows, weight, bias = (x.float() for x in drawn(24, 12, 7))
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.linear(rows, weight, bias).dtype == torch.bfloat16
    assert ops.linear(rows, weight, bias).dtype == torch.float32
