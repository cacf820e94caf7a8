"""Products of windows in blocks give the numbers of one product."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import maskfx
from maskfx import ops
from maskfx.compiler.fuse import fused
from maskfx.ops import windows
from maskfx.runtime.backends.eager import Runner

aten = torch.ops.aten
PLACES, CHANNELS = 9, 12


def convolution(outputs: int = 5) -> fx.GraphModule:
    root = nn.Module()
    root.inner = nn.Linear(PLACES * CHANNELS, outputs)
    graph = fx.Graph()
    rows, halo, table = (graph.placeholder(name) for name in ("rows", "halo", "table"))
    gathered = graph.call_function(ops.gather, (rows, halo, table))
    weight, bias = graph.get_attr("inner.weight"), graph.get_attr("inner.bias")
    out = graph.call_function(aten.linear.default, (gathered, weight, bias))
    graph.output((out,))
    return fx.GraphModule(root, graph)


def inputs(count: int = 50) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(count, CHANNELS, generator=generator),
        "halo": torch.randn(7, CHANNELS, generator=generator),
        "table": torch.randint(0, count + 8, (count, PLACES), generator=generator),
    }


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("size", [1, 7, 49, 50, 1000])
def test_blocks_of_any_size_give_the_same(
    monkeypatch: pytest.MonkeyPatch, prepack: bool, size: int
) -> None:
    module, values = convolution(outputs=1024 if prepack else 5), inputs()
    monkeypatch.setattr(windows, "block_size", lambda rows, table: size)
    runner = Runner(fused(module, pointwise=False), prepack)
    [found] = runner(values.__getitem__)
    torch.testing.assert_close(found, module(*values.values())[0])
    assert bool(runner._packed) is prepack


def test_gathered_rows_stay_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    values = inputs()
    monkeypatch.setattr(windows, "BYTES", 10 * PLACES * CHANNELS * 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    taken: list[Any] = []
    real = torch.index_select

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        taken.append(kwargs["out"])
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "index_select", watched)
    [found] = Runner(fused(convolution(), pointwise=False))(values.__getitem__)
    assert [len(one) for one in taken] == [10 * PLACES] * 5
    assert len({one.data_ptr() for one in taken}) == 1
    assert found.shape == (50, 5)


def test_a_product_without_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "block_size", lambda rows, table: 7)
    values, weight = inputs(), torch.randn(4, PLACES * CHANNELS)
    wanted = F.linear(ops.gather(*values.values()), weight)
    found = ops.window_product(*values.values(), weight, None, "silu")
    torch.testing.assert_close(found, F.silu(wanted))


def test_convolutions_of_an_edit_run_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 3, padding=1))
    model, picture = maskfx.compile(module), torch.randn(2, 4, 16, 16)
    monkeypatch.setattr(windows, "block_size", lambda rows, table: 5)
    blocks = windows.blocks
    seen: list[int] = []

    def counted(*args: Any) -> Any:
        seen.append(args[3])
        return blocks(*args)

    monkeypatch.setattr(windows, "blocks", counted)
    wanted, cache = model.record(input=picture)
    mask = torch.zeros(16, 16, dtype=torch.bool)
    mask[3:9, 4:12] = True
    [found] = model.edit([maskfx.EditStep({"input": picture}, mask, cache)])
    assert len(seen) >= 2
    torch.testing.assert_close(found, wanted)
