"""What windows read and how they weigh it, against torch's own resampling, padding and pools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maskfx.ir.geometry.grids import full_window, mask_at, window_weights
from maskfx.ir.geometry.pyramid import Level, Pyramid, Window, added
from maskfx.passes.narrow.resampling import places_of

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


# What moves by a part of the size.


@pytest.mark.parametrize("size", [(8, 12), (9, 7)])
@pytest.mark.parametrize("part", [(2, 0), (-2, 3), (0, -4)])
def test_rolls_by_a_part_of_the_size(size: tuple[int, int], part: tuple[int, int]) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    shifts = [p and (n // abs(p)) * (1 if p > 0 else -1) for n, p in zip(size, part, strict=True)]
    wanted = torch.roll(x, [shifts[0] + 1, shifts[1]], (0, 1))
    window = Window(0, 1, (1, 1), (1, 1), (1, 0), edge="circular", part=part)
    assert torch.equal(read(x, window, size).view(size), wanted)
    level = Level(0, roll=(1, 0), roll_part=part)
    moved = mask_at((x > 0).numpy(), level, size)
    assert torch.equal(torch.from_numpy(moved), wanted > 0)


@pytest.mark.parametrize("size", [(8, 12), (9, 13), (11, 10)])
@pytest.mark.parametrize("front", [(0, 1), (2, -2), (-2, 2)])
def test_fills_up_around_the_picture(size: tuple[int, int], front: tuple[int, int]) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    level = Level(0, fill=(4, 5), fill_front=front)
    full, ends = level.size(size), list[int]()
    for n, whole, kind in zip(size, full, front, strict=True):
        more = whole - n
        before = {0: 0, 1: more, 2: more // 2, -2: (more + 1) // 2}[kind]
        ends = [before, more - before, *ends]
    wanted = F.pad(x[None], ends, mode="constant")[0]
    there = Window(0, 1, (1, 1), (1, 1), (0, 0), front=front)
    assert torch.equal(read(x, there, full).view(full), wanted)
    back = Window(1, 0, (1, 1), (1, 1), (0, 0), front=front)
    assert torch.equal(read(wanted, back, size).view(size), x)
    edge = F.pad((x > 0).float()[None, None], ends, mode="replicate")[0, 0]
    found = mask_at((x > 0).numpy(), level, full)
    assert torch.equal(torch.from_numpy(found), edge > 0)


@pytest.mark.parametrize(
    ("divide", "sites"), [((1, 1), (7, 9)), ((2, 2), (3, 4)), ((3, 2), (2, 4))]
)
def test_sites_beyond_the_last_one_count_as_this_one(
    divide: tuple[int, int], sites: tuple[int, int]
) -> None:
    """A window without padding, or whose size is rounded down, has fewer sites than it covers."""
    level = Level(0, divide=divide)
    for y in range(8):
        for x in range(10):
            mask = np.zeros((8, 10), dtype=bool)
            mask[y, x] = True
            found = np.argwhere(mask_at(mask, level, sites)).tolist()
            covered = y // divide[0], x // divide[1]
            wanted = [min(covered[i], sites[i] - 1) for i in (0, 1)]
            assert found == [wanted]


def test_runs_from_row_to_row() -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    window = Window(0, 0, (1, 3), (1, 1), (0, 1), flat=True)
    wanted = F.unfold(F.pad(x.view(1, 1, 1, 20), (1, 1)), (1, 3))[0].T
    assert torch.equal(read(x, window, (4, 5)), wanted)


def test_rolls_add_up_and_cancel() -> None:
    assert added((3, 0), (-3, 2)) == (0, 2)
    assert added((0, 2), (1, -2)) == (1, 0)
    assert added((0, 2), (0, 3)) is None
    pyramid = Pyramid(1, (8, 12))
    there = pyramid.rolled(0, ((0, 2), (1, 0)))
    assert pyramid.rolled(there, ((0, -2), (-1, 0))) == 0
    again = pyramid.rolled(there, ((0, 2), (0, 0)))  # half of an odd size twice isn't all of it
    assert pyramid.levels[again].parent == there
    assert pyramid.rolled(again, ((0, -2), (0, 0))) == there
