"""Sites and frames: window tables, parents, subsites and halos against brute force."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maskfx.ir.geometry.grids import full_window
from maskfx.ir.geometry.pyramid import Level, Pyramid, Window
from maskfx.ir.programs.program import Interface
from maskfx.ir.programs.sources import Neighbours, Owner, Parents, RestSpans, Spans, Subsites
from maskfx.runtime.batch.frame import Frame
from maskfx.runtime.batch.layout import Layout
from maskfx.runtime.sites.active import ActiveSites, ActiveSitesCache
from maskfx.runtime.sites.mask import Mask
from tests.factories import masks

SIZES = [(6, 8), (7, 9), (1, 5), (5, 1), (2, 3)]
WINDOWS = {
    "3x3": Window(0, 0, (3, 3), (1, 1), (1, 1)),
    "1x1 strided": Window(0, 1, (1, 1), (2, 2), (0, 0)),
    "strided": Window(0, 1, (3, 3), (2, 2), (1, 1)),
    "3x1": Window(0, 0, (3, 1), (1, 1), (1, 0)),
    "dilated": Window(0, 0, (3, 3), (1, 1), (2, 2), (2, 2)),
    "asymmetric": Window(0, 1, (3, 3), (2, 2), (0, 0)),
}
AFTER = {"asymmetric": (1, 1)}  # the padding behind, where it isn't the one before


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def level_of(window: Window, after: tuple[int, int]) -> Level:
    grow = tuple(
        window.before[i] + after[i] - window.dilation[i] * (window.kernel[i] - 1) - 1
        for i in (0, 1)
    )
    return Level(parent=0, grow=(grow[0], grow[1]), divide=window.stride, extra=(1, 1))


def pyramid_of(name: str) -> Pyramid:
    window = WINDOWS[name]
    levels = [Level()]
    if window.target:
        levels.append(level_of(window, AFTER.get(name, window.before)))
    return Pyramid(batch=2, base=(64, 64), levels=levels, hints=[])


def sites_of(name: str, size: tuple[int, int], mask: Tensor | None) -> ActiveSites:
    sizes = {"y": size[0], "x": size[1]}
    return ActiveSites(pyramid_of(name), sizes, None if mask is None else Mask(mask))


def unfolded(value: Tensor, name: str) -> Tensor:
    """(targets, channels, places) of a (channels, h, w) value, by F.unfold."""
    window, (y, x) = WINDOWS[name], WINDOWS[name].before
    after_y, after_x = AFTER.get(name, window.before)
    padded = F.pad(value[None], (x, after_x, y, after_y))
    wide = F.unfold(padded, window.kernel, window.dilation, 0, window.stride)[0]
    return wide.view(len(value), -1, wide.shape[-1]).permute(2, 0, 1)


windows = pytest.mark.parametrize("name", WINDOWS)
sizes = pytest.mark.parametrize("size", SIZES, ids=str)
kinds = pytest.mark.parametrize("kind", ["random", "dense_random", "one_site", "border"])


def possible(name: str, size: tuple[int, int]) -> bool:
    return min(sites_of(name, size, None).grid(WINDOWS[name].target)) > 0


# Windows


@windows
@sizes
def test_a_full_window_is_an_unfold(name: str, size: tuple[int, int]) -> None:
    if not possible(name, size):
        pytest.skip("the window is larger than the picture")
    value, window = numbers(3, *size), WINDOWS[name]
    sites = sites_of(name, size, None)
    table, halo = sites.window(window)
    rows = torch.cat([value.flatten(1).T, torch.zeros(1, 3).double()])
    assert torch.equal(rows[table].transpose(1, 2), unfolded(value, name))
    assert len(halo) == 0
    whole = full_window(window, size, sites.grid(window.target))
    assert torch.equal(table, torch.from_numpy(whole))


@windows
@sizes
@kinds
def test_a_masked_window_reads_active_rows_the_halo_and_zeros(
    name: str, size: tuple[int, int], kind: str
) -> None:
    if not possible(name, size):
        pytest.skip("the window is larger than the picture")
    value, window = numbers(3, *size), WINDOWS[name]
    sites = sites_of(name, size, masks.MASKS[kind](size, 3))
    table, halo = sites.window(window)
    rows, active = value.flatten(1).T, sites.active("grid0")
    source = torch.cat([rows[active], rows[halo], torch.zeros(1, 3).double()])
    targets = sites.active(f"grid{window.target}")
    assert torch.equal(source[table].transpose(1, 2), unfolded(value, name)[targets])
    # the halo: exactly the inactive sites that are read
    places = torch.from_numpy(full_window(window, size, sites.grid(window.target)))
    read = set(places[targets].flatten().tolist()) - {math.prod(size)}
    assert halo.tolist() == sorted(read - set(active.tolist()))


@windows
@pytest.mark.parametrize("size", [(6, 8), (7, 9)], ids=str)
def test_a_masked_window_is_a_convolution(name: str, size: tuple[int, int]) -> None:
    window, weight = WINDOWS[name], numbers(5, 3, *WINDOWS[name].kernel, seed=1)
    value, (y, x) = numbers(3, *size), WINDOWS[name].before
    after_y, after_x = AFTER.get(name, window.before)
    padded = F.pad(value[None], (x, after_x, y, after_y))
    dense = F.conv2d(padded, weight, None, window.stride, 0, window.dilation)[0]
    sites = sites_of(name, size, masks.random(size, 5))
    table, halo = sites.window(window)
    rows = value.flatten(1).T
    source = torch.cat([rows[sites.active("grid0")], rows[halo], torch.zeros(1, 3).double()])
    found = source[table].flatten(1) @ weight.permute(2, 3, 1, 0).reshape(-1, 5)
    wanted = dense.flatten(1).T[sites.active(f"grid{window.target}")]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


# Levels


def chain(*times: int) -> Pyramid:
    """Halved by strided convolutions, then doubled."""
    half = [Level(parent=i, grow=(1, 1), divide=(2, 2)) for i in range(times[0])]
    return Pyramid(batch=1, base=(64, 64), levels=[Level(), *half], hints=[])


@sizes
@kinds
def test_a_coarser_site_is_active_if_any_site_it_covers_is(
    size: tuple[int, int], kind: str
) -> None:
    mask = masks.MASKS[kind](size, 1)
    sites = ActiveSites(chain(3), {"y": size[0], "x": size[1]}, Mask(mask))
    for level in (1, 2, 3):
        h, w = -(-size[0] // 2**level), -(-size[1] // 2**level)
        assert sites.grid(level) == (h, w)
        wanted = {(y >> level) * w + (x >> level) for y, x in mask.nonzero().tolist()}
        assert sites.active(f"grid{level}").tolist() == sorted(wanted)
        assert sites.active_count(f"grid{level}") == len(wanted)
        rest = sites.rest(f"grid{level}").tolist()
        assert sorted([*rest, *wanted]) == list(range(h * w))


@sizes
@kinds
def test_parents_are_those_of_nearest_upsampling(size: tuple[int, int], kind: str) -> None:
    mask = Mask(masks.MASKS[kind](size, 2))
    for sites in (ActiveSites(chain(1), {"y": size[0], "x": size[1]}, m) for m in (mask, None)):
        h, w = sites.grid(1)
        coarse = torch.arange(h * w, dtype=torch.float32).view(1, 1, h, w)
        fine = F.interpolate(coarse, size=size, mode="nearest").flatten().long()
        found = sites.active("grid1")[sites.parents(1, 0)]
        assert torch.equal(found, fine[sites.active("grid0")])


@pytest.mark.parametrize("patch", [2, 3])
@kinds
def test_subsites_are_those_of_pixel_shuffle(patch: int, kind: str) -> None:
    size = (2 * patch, 3 * patch)
    levels = [Level(), Level(parent=0, divide=(patch, patch))]
    pyramid = Pyramid(batch=1, base=(64, 64), levels=levels, hints=[])
    mask = Mask(masks.MASKS[kind](size, 2))
    for sites in (ActiveSites(pyramid, {"y": size[0], "x": size[1]}, m) for m in (mask, None)):
        coarse = sites.active("grid1")
        # every coarse row holds the numbers of its sites, (row, patch, patch)
        numbered = torch.arange(math.prod(size)).view(2, patch, 3, patch).permute(0, 2, 1, 3)
        rows = numbered.reshape(6, -1)[coarse]
        found = rows.flatten()[sites.subsites(1, 0, patch)]
        assert torch.equal(found, sites.active("grid0"))


def test_tokens_and_text() -> None:
    mask = torch.tensor([False, True, True, False])
    sites = ActiveSites(Pyramid(batch=1), {"tokens": 4, "text:0": 3}, Mask(mask))
    assert sites.active("image").tolist() == [1, 2]
    assert sites.rest("image").tolist() == [0, 3]
    assert sites.active("text:0").tolist() == [0, 1, 2]
    assert sites.active("fixed2").tolist() == [0, 1]
    assert sites.active("fill8_text:0").tolist() == [0, 1, 2, 3, 4]
    assert sites.active("fill2_image").tolist() == []
    assert sites.rest("text:0").tolist() == []
    full = ActiveSites(Pyramid(batch=1), {"tokens": 4, "text:0": 3}, None)
    assert full.full
    assert full.active("image").tolist() == [0, 1, 2, 3]


def test_sites_of_the_same_mask_are_shared() -> None:
    memo, pyramid = ActiveSitesCache(limit=2), chain(1)
    size = {"y": 6, "x": 8}
    first = memo.get("p", pyramid, size, square())
    assert memo.get("p", pyramid, size, square()) is first
    assert memo.get("q", pyramid, size, square()) is not first
    assert memo.get("p", pyramid, size, None) is not first
    assert memo.get("p", pyramid, size, square()) is not first, "it was evicted"


def square() -> Mask:
    return Mask(masks.square((6, 8), 0))


# Frames


MASKED = [((6, 8), "random", 1), ((7, 9), None, 2), ((6, 8), "one_site", 1)]


def executor(pyramid: Pyramid) -> tuple[list[ActiveSites], list[int]]:
    """Requests of several sizes, one of them full and with two owners."""
    found, owners = [], []
    for size, kind, batch in MASKED:
        mask = None if kind is None else Mask(masks.MASKS[kind](size, 4))
        sizes_of = {"y": size[0], "x": size[1], "text:0": 3 + batch}
        found.append(ActiveSites(pyramid, sizes_of, mask))
        owners.append(batch)
    return found, owners


def frame_of(pyramid: Pyramid, **inputs: Any) -> tuple[Frame, list[ActiveSites]]:
    sites, owners = executor(pyramid)
    return Frame(Interface(pyramid, inputs), Layout(tuple(sites), tuple(owners))), sites


def each_owner(sites: list[ActiveSites]) -> list[ActiveSites]:
    return [s for s, (_, _, batch) in zip(sites, MASKED, strict=True) for _ in range(batch)]


def table(frame: Frame, source: Any) -> Tensor:
    found: Tensor = frame.layout.table(source)
    return found


def test_owners_and_spans_tile_the_rows() -> None:
    frame, sites = frame_of(chain(1))
    segments = ("text:0", "grid0")
    owner, spans = table(frame, Owner(segments)), table(frame, Spans(segments))
    counts = [[s.active_count(name) for s in each_owner(sites)] for name in segments]
    assert len(owner) == sum(map(sum, counts))
    assert spans.shape == (4, 4)
    covered = torch.full_like(owner, -1)
    for i, row in enumerate(spans.tolist()):
        for k in (0, 1):
            assert row[2 * k + 1] - row[2 * k] == counts[k][i]
            assert (covered[row[2 * k] : row[2 * k + 1]] == -1).all()
            covered[row[2 * k] : row[2 * k + 1]] = i
    assert torch.equal(covered, owner)
    # segment by segment
    assert max(spans[:, 1]) == min(spans[:, 2])


def test_rest_spans_lie_owner_by_owner() -> None:
    frame, sites = frame_of(chain(1))
    found = table(frame, RestSpans(("grid1", "grid0"))).tolist()
    start = 0
    for row, own in zip(found, each_owner(sites), strict=True):
        for k, name in enumerate(("grid1", "grid0")):
            assert row[2 * k] == start
            start += len(own.rest(name))
            assert row[2 * k + 1] == start


@pytest.mark.parametrize("name", ["3x3", "strided", "asymmetric"])
def test_neighbours_of_a_ragged_batch(name: str) -> None:
    window = WINDOWS[name]
    frame, sites = frame_of(pyramid_of(name))
    found = table(frame, Neighbours(window))
    values = [numbers(3, *s.grid(0), seed=i) for i, s in enumerate(each_owner(sites))]
    rows = [v.flatten(1).T for v in values]
    own = each_owner(sites)
    active = torch.cat([r[s.active("grid0")] for r, s in zip(rows, own, strict=True)])
    halo = torch.cat([r[s.window(window)[1]] for r, s in zip(rows, own, strict=True)])
    source = torch.cat([active, halo, torch.zeros(1, 3).double()])
    wanted = torch.cat(
        [
            unfolded(v, name)[s.active(f"grid{window.target}")]
            for v, s in zip(values, own, strict=True)
        ]
    )
    assert torch.equal(source[found].transpose(1, 2), wanted)


def test_parents_and_subsites_of_a_ragged_batch() -> None:
    frame, sites = frame_of(chain(1))
    own, found = each_owner(sites), table(frame, Parents(1, 0))
    coarse = [100 * i + s.active("grid1") for i, s in enumerate(own)]
    wanted = [c[s.parents(1, 0)] for c, s in zip(coarse, own, strict=True)]
    assert torch.equal(torch.cat(coarse)[found], torch.cat(wanted))
    levels = [Level(), Level(parent=0, grow=(1, 1), divide=(2, 2))]
    frame, sites = frame_of(Pyramid(batch=1, base=(64, 64), levels=levels, hints=[]))
    own, found = each_owner(sites), table(frame, Subsites(1, 0, 2))
    rows = [1000 * i + torch.arange(4 * s.active_count("grid1")) for i, s in enumerate(own)]
    wanted = [r[s.subsites(1, 0, 2)] for r, s in zip(rows, own, strict=True)]
    assert torch.equal(torch.cat(rows)[found], torch.cat(wanted))


def test_a_frame_builds_its_tables_once() -> None:
    inputs = {"owner": Owner(("grid0",)), "near": Neighbours(WINDOWS["3x3"])}
    frame, _ = frame_of(pyramid_of("3x3"), **inputs)
    first, second = frame.inputs([]), frame.inputs([])
    assert len(first) == 2
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_the_same_composition_of_a_batch_shares_a_frame() -> None:
    import maskfx

    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, sample: Tensor) -> Tensor:
            return self.layer(sample)

    denoiser = maskfx.compile(Tiny())
    make = [{"sample": numbers(1, 2, 6, w, seed=w).float()} for w in (8, 10)]
    kept = [denoiser.record(**inputs)[1] for inputs in make]
    drawn = [masks.random((6, w), 1) for w in (8, 10)]

    def edit(order: list[int]) -> None:
        steps = [maskfx.EditStep(make[i], drawn[i].clone(), kept[i]) for i in order]
        denoiser.edit(steps)

    edit([0, 1])
    frames = denoiser._executor.frames.items()
    edit([0, 1])
    assert denoiser._executor.frames.items() == frames
    edit([1, 0])  # members are sorted
    assert denoiser._executor.frames.items() == frames
    edit([0])
    assert len(denoiser._executor.frames) == len(frames) + 1


# Regions: sites of their own at every level.


def test_regions_have_their_own_sites_at_every_level() -> None:
    pyramid = Pyramid(1, (6, 8))
    coarse = pyramid.derive(Level(parent=0, divide=(2, 2)))
    fine = {r: pyramid.level_in(r, 0) for r in (1, 2, 3)}
    small = {r: pyramid.level_in(r, coarse) for r in (1, 2, 3)}
    assert pyramid.level_in(2, small[1]) == small[2], "a region of a region's level is the level's"
    mask, wide = masks.one_site((6, 8), 0), masks.stroke((6, 8), 1) | masks.one_site((6, 8), 0)
    sites = ActiveSites(pyramid, {"y": 6, "x": 8}, Mask(mask), {1: Mask(wide), 3: Mask(wide)})
    for region, wanted in ((1, wide), (2, mask), (3, wide)):
        for level, at in ((fine[region], wanted), (small[region], pooled(wanted))):
            assert sites.active(f"grid{level}").tolist() == at.flatten().nonzero()[:, 0].tolist()
    assert sites.active(f"grid{fine[1]}") is sites.active(f"grid{fine[3]}"), "kept once"
    assert sites.active(f"grid{fine[2]}") is sites.active("grid0")
    window = Window(fine[1], fine[1], (3, 3), (1, 1), (1, 1))
    same = Window(fine[3], fine[3], (3, 3), (1, 1), (1, 1))
    narrow = Window(fine[2], fine[2], (3, 3), (1, 1), (1, 1))
    assert sites.window(window)[0] is sites.window(same)[0]
    assert len(sites.window(narrow)[0]) == 1 < len(sites.window(window)[0])
    table, loaded = sites.enter("grid0", f"grid{fine[1]}")
    assert len(table) == int(wide.sum())
    assert loaded.tolist() == (wide & ~mask).flatten().nonzero()[:, 0].tolist()
    assert not len(sites.enter(f"grid{fine[1]}", "grid0")[1]), "narrowing loads nothing"


def pooled(mask: Tensor) -> Tensor:
    return F.max_pool2d(mask[None].float(), 2)[0] > 0
