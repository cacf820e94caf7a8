"""What windows read and how they weigh it, against torch's own resampling, padding and pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maskfx.ir.grids import full_window, window_weights
from maskfx.ir.pyramid import Window
from maskfx.passes.narrow_resampling import places_of

SIZES = [((8, 12), (16, 24)), ((9, 7), (4, 3)), ((6, 10), (6, 17)), ((12, 8), (5, 8))]
KINDS: dict[str, dict[str, Any]] = {
    "bilinear": {"mode": "bilinear"},
    "bilinear-aligned": {"mode": "bilinear", "align_corners": True},
    "bilinear-antialiased": {"mode": "bilinear", "antialias": True},
    "bicubic": {"mode": "bicubic"},
    "bicubic-aligned": {"mode": "bicubic", "align_corners": True},
    "bicubic-antialiased": {"mode": "bicubic", "antialias": True},
    "area": {"mode": "area"},
    "nearest-exact": {"mode": "nearest-exact"},
}


def read(x: Tensor, window: Window, size: tuple[int, int]) -> Tensor:
    """What a window reads from a picture of one channel: (targets, places)."""
    sites = torch.cat([x.flatten(), torch.zeros(1)])
    return sites[torch.from_numpy(full_window(window, (x.shape[0], x.shape[1]), size))]


def weights(window: Window, source: tuple[int, int], target: tuple[int, int]) -> Tensor:
    return torch.from_numpy(window_weights(window, source, target))


@pytest.mark.parametrize(("source", "target"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_resamples_as_torch_does(
    kind: str, source: tuple[int, int], target: tuple[int, int]
) -> None:
    x = torch.randn(source, generator=torch.Generator().manual_seed(0))
    ratios = [a / b for a, b in zip(source, target, strict=True)]
    mixes = not kind.startswith("nearest")
    places = (places_of(kind, ratios[0]), places_of(kind, ratios[1])) if mixes else (1, 1)
    window = Window(0, 1, places, (1, 1), (0, 0), rounding=kind)
    found = read(x, window, target)
    if window.weighted:
        found = found * weights(window, source, target)
    wanted = F.interpolate(x[None, None], size=target, **KINDS[kind])[0, 0]
    torch.testing.assert_close(found.sum(1).view(target), wanted, atol=1e-5, rtol=1e-4)


def test_uses_a_scale_that_sizes_do_not_have() -> None:
    x = torch.randn(9, 7, generator=torch.Generator().manual_seed(0))
    window = Window(0, 1, (2, 2), (1, 1), (0, 0), rounding="bilinear", scale=(2.0, 2.0))
    found = read(x, window, (4, 3)) * weights(window, (9, 7), (4, 3))
    wanted = F.interpolate(x[None, None], scale_factor=0.5, mode="bilinear")[0, 0]
    torch.testing.assert_close(found.sum(1).view(4, 3), wanted)


@pytest.mark.parametrize("edge", ["reflect", "replicate", "circular"])
def test_reads_beyond_the_border_as_torch_pads(edge: str) -> None:
    x = torch.arange(30.0).view(5, 6)
    window = Window(0, 0, (3, 3), (1, 1), (1, 2), (1, 2), edge=edge)
    padded = F.pad(x[None, None], (2, 2, 1, 1), mode=edge)
    wanted = F.unfold(padded, 3, dilation=(1, 2))[0].t()
    assert torch.equal(read(x, window, (5, 6)), wanted)


@pytest.mark.parametrize("inside", [True, False])
def test_means_count_places_as_torch_does(inside: bool) -> None:
    x = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    counts = "inside" if inside else "padded"
    window = Window(0, 1, (3, 3), (2, 2), (1, 1), counts=counts)
    pool = F.avg_pool2d(x[None, None], 3, 2, 1, ceil_mode=True, count_include_pad=not inside)
    wanted = pool[0, 0]
    size = (wanted.shape[0], wanted.shape[1])
    found = (read(x, window, size) * weights(window, (7, 9), size)).sum(1)
    torch.testing.assert_close(found.view(size), wanted)
