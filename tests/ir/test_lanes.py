"""Lanes: regrouping atoms, the row form, and the sizes of a pyramid's levels."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from maskfx.ir.geometry.lanes import (
    Atom,
    Batch,
    Feature,
    Lane,
    NotLaned,
    Part,
    Tokens,
    X,
    Y,
    filled,
    filling_segment,
    fixed_count,
    fixed_segment,
    grid_level,
    grid_segment,
    is_image,
)
from maskfx.ir.geometry.pyramid import Level, Pyramid
from maskfx.ir.geometry.regroup import regroup

B, Y0, X0 = Batch(), Y(0), X(0)
F4, F6 = Feature(4), Feature(6)


def pyramid() -> Pyramid:
    return Pyramid(batch=3, base=(10, 14), segments={"image": 20, "text:0": 5})


def dims(atoms: list[Atom], sizes: list[int], within: Pyramid | None = None) -> str:
    return str(Lane(regroup(atoms, sizes, within or pyramid())))


# regroup


def test_regroup_merges() -> None:
    assert dims([B, F4, Y0, X0], [3, 4, 140]) == "[batch, 4, y0 x0]"
    assert dims([B, F4, F6], [3, 24]) == "[batch, 4 6]"
    assert dims([B, F4, F6], [12, 6]) == "[batch 4, 6]"


def test_regroup_splits_features() -> None:
    assert dims([B, Feature(24)], [3, 4, 6]) == "[batch, 4, 6]"
    assert dims([B, Feature(24), Y0, X0], [3, 2, 12, 140]) == "[batch, 2, 12, y0 x0]"
    assert dims([B, Feature(12), Feature(4)], [3, 6, 8]) == "[batch, 6, 2 4]"


def test_regroup_ignores_ones() -> None:
    assert dims([B, Feature(1), F4], [1, 3, 1, 4, 1]) == "[1, batch, 1, 4, 1]"
    assert dims([Feature(1)], []) == "[]"
    assert dims([], [1, 1]) == "[1, 1]"


def test_regroup_keeps_tokens() -> None:
    both = Tokens(("text:0", "image"))
    assert dims([B, both, F4], [3, 25, 2, 2]) == "[batch, text:0+image, 2, 2]"
    assert dims([B, both, F4], [75, 4]) == "[batch text:0+image, 4]"


def test_regroup_patchifies() -> None:
    within = pyramid()
    assert dims([B, F4, Y0, X0], [3, 4, 5, 2, 7, 2], within) == "[batch, 4, y1, 2, x1, 2]"
    assert within.hints == [(10, 14), (5, 7)]
    assert within.levels[1] == Level(parent=0, divide=(2, 2))


def test_regroup_unpatchifies() -> None:
    within = pyramid()
    regroup([B, F4, Y0, X0], [3, 4, 5, 2, 7, 2], within)
    back = dims([B, F4, Y(1), Feature(2), X(1), Feature(2)], [3, 4, 10, 14], within)
    assert back == "[batch, 4, y0, x0]"
    assert len(within.levels) == 2


def test_regroup_unpatchifies_tokens() -> None:
    within = pyramid()
    regroup([B, F4, Y0, X0], [3, 4, 5, 2, 7, 2], within)
    patches: list[Atom] = [B, Y(1), Feature(2), X(1), Feature(2), F4]
    assert dims(patches, [3, 140, 4], within) == "[batch, y0 x0, 4]"
    windows: list[Atom] = [B, Y(1), Feature(4), X(1), Feature(2), F4]
    assert dims(windows, [3, 280, 4], within) == "[batch, y1 4 x1 2, 4]"


def test_regroup_unpatchifies_to_a_level_that_was_not_there() -> None:
    within = Pyramid(batch=3, base=(5, 7))
    back = dims([B, F4, Y0, Feature(2), X0, Feature(2)], [3, 4, 10, 14], within)
    assert back == "[batch, 4, y1, x1]"
    assert within.hints[1] == (10, 14)


@pytest.mark.parametrize(
    ("atoms", "sizes", "words"),
    [
        ([B, F4, F6], [3, 16, 2], "cuts across"),
        ([B, F4], [3, 4, 2], "no axes are left"),
        ([B, F4], [3], "drops"),
        ([B, F4], [12, 2], "no axes are left"),
        ([Tokens(("image",)), F4], [4, 5, 4], "image is split"),
        ([B, F4], [1, 3, 5], "cuts across"),
    ],
)
def test_regroup_refuses(atoms: list[Atom], sizes: list[int], words: str) -> None:
    with pytest.raises(NotLaned, match=words):
        regroup(atoms, sizes, pyramid())


def test_regroup_refuses_huge_patches() -> None:
    within = Pyramid(batch=3, base=(34, 34))
    with pytest.raises(NotLaned, match="split into 2 x 17"):
        regroup([Y0, X0], [2, 17, 34], within)


def test_regroup_cuts_an_axis_into_parts() -> None:
    """Windows of sites that lie apart: which part comes first, the place in it second."""
    fixed = (False, True, False, True, False, True)
    parts = regroup([B, Y0, X0, F4], [3, 2, 5, 2, 7, 4], pyramid(), fixed)
    assert str(Lane(parts)) == "[batch, 2 of y0, y0/2, 2 of x0, x0/2, 4]"
    turned = Lane(tuple(parts[i] for i in (0, 2, 4, 1, 3, 5)))
    assert turned.segments == ("grid0",)
    assert not turned.is_half
    assert not turned.is_cut
    windows = regroup(turned.atoms(), [105, 4, 4], pyramid(), (False, True, True))
    assert str(Lane(windows)) == "[batch y0/2 x0/2, 2 of y0 2 of x0, 4]"
    assert Lane(windows).row_shape() == [4]
    assert dims([a for dim in parts for a in dim], [3, 140, 4]) == "[batch, y0 x0, 4]"


def test_a_part_alone_is_no_row_set() -> None:
    which, place = (Part(Y0, 2, inner) for inner in (False, True))
    for some in (((B,), (which,), (X0,)), ((B,), (place,), (Part(X0, 2, True),))):
        assert Lane(some).is_cut
        assert Lane(some).is_half
        with pytest.raises(NotLaned, match="several site axes"):
            _ = Lane(some).segments


def test_regroup_takes_huge_patches_for_parts_at_a_fixed_size() -> None:
    wide = Pyramid(batch=1, base=(40, 34))
    parts = regroup([Y0, X0], [2, 20, 2, 17], wide, [True] * 4)
    assert str(Lane(parts)) == "[2 of y0, y0/2, 2 of x0, x0/2]"


@st.composite
def groupings(draw: st.DrawFn) -> tuple[list[Atom], list[int]]:
    """Atoms, and the sizes of some grouping of their finest factors."""
    atoms: list[Atom] = [B]
    for _ in range(draw(st.integers(0, 3))):
        atoms.append(Feature(draw(st.integers(1, 12))))
    atoms.insert(draw(st.integers(0, len(atoms))), Y0)
    atoms.insert(atoms.index(Y0) + 1, X0)
    atoms += [Feature(draw(st.integers(2, 12)))] if draw(st.booleans()) else []
    parts: list[int] = []
    for atom in atoms:
        size = pyramid().size(atom)
        if isinstance(atom, Feature):
            factors = [n for n in range(1, size + 1) if size % n == 0]
            first = draw(st.sampled_from(factors))
            parts += [first, size // first]
        else:
            parts.append(size)
    sizes: list[int] = []
    while parts:
        count = draw(st.integers(1, len(parts)))
        sizes.append(prod(parts[:count]))
        del parts[:count]
    return atoms, sizes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(groupings())
def test_there_and_back_is_the_identity(case: tuple[list[Atom], list[int]]) -> None:
    atoms, sizes = case
    within = pyramid()
    lane = Lane(tuple((a,) if within.size(a) != 1 else () for a in atoms))
    there = Lane(regroup(atoms, sizes, within))
    assert [prod(map(within.size, d)) for d in there.dims] == sizes
    back = Lane(regroup(there.atoms(), [within.size(a) for a in atoms], within))
    assert merge(back) == merge(lane)
    assert there.kind == back.kind == "rows"
    assert prod(there.row_shape()) == prod(lane.row_shape())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 6))
def test_patches_there_and_back(h: int, w: int, patch: int, channels: int) -> None:
    within = Pyramid(batch=2, base=(h * patch, w * patch))
    atoms: list[Atom] = [B, Feature(channels), Y0, X0]
    there = regroup(atoms, [2, channels, h, patch, w, patch], within)
    flat = [a for d in there for a in d]
    back = regroup(flat, [2, channels, h * patch, w * patch], within)
    sizes = [prod(map(within.size, d)) for d in back]
    assert sizes == [2, channels, h * patch, w * patch]
    if h > 1 and w > 1:
        wanted = regroup(atoms, sizes, within)
        assert back == wanted


def merge(lane: Lane) -> list[tuple[object, ...]]:
    """Dimensions with their features multiplied."""
    out: list[tuple[object, ...]] = []
    for dim in lane.dims:
        others = tuple(a for a in dim if not isinstance(a, Feature))
        out.append((*others, prod(a.size for a in dim if isinstance(a, Feature))))
    return out


# The row form.


def test_row_shape_and_row_dim() -> None:
    lane = Lane(((B,), (F4,), (Y0,), (X0,), (F6,)))
    assert lane.row_shape() == [4, 6]
    assert lane.row_dims() == [1, 4]
    assert [lane.row_dim(i) for i in range(5)] == [1, 1, 2, 2, 2]
    assert lane.row_dim(-1) == 2


def test_row_shape_joins_the_features_of_a_dimension() -> None:
    lane = Lane(((B, Feature(2)), (Y0, X0), (Feature(3), Feature(5)), ()))
    assert lane.row_shape() == [2, 15]
    assert lane.features(0) == 2
    assert lane.features(1) == 1
    assert [lane.row_dim(i) for i in range(4)] == [1, 2, 2, 3]


def test_kinds() -> None:
    assert Lane(((B,), (Tokens(("image",)),), (F4,))).kind == "rows"
    assert Lane(((B,), (F4,))).kind == "sample"
    assert Lane(((F4,),)).kind == "const"
    assert Lane(()).kind == "const"


def test_segments() -> None:
    assert Lane(((B,), (Y(2), X(2)), (F4,))).segments == ("grid2",)
    assert Lane(((B,), (Tokens(("text:0", "image")),))).segments == ("text:0", "image")
    assert Lane(((B,),)).segments == ()
    for several in (((Y0,), (F4,)), ((Y0, X(1)),), ((Y0, X0), (Tokens(("image",)),))):
        with pytest.raises(NotLaned, match="several site axes"):
            _ = Lane(several).segments


def test_segment_names() -> None:
    assert grid_level(grid_segment(3)) == 3
    assert fixed_count(fixed_segment(7)) == 7
    assert grid_level("image") is fixed_count("grid3") is None
    assert filled(filling_segment(32, "text:0")) == (32, "text:0")
    assert filled("grid3") is filled("fixed7") is None
    assert grid_level(filling_segment(8, "grid3")) is None
    assert not is_image(filling_segment(8, "grid3"))
    sizes = pyramid().segment_size
    assert sizes(filling_segment(32, "grid0")) == 20  # after 140 rows
    assert sizes(filling_segment(5, "text:0")) == 0
    names = ("image", "grid0", "text:0", "fixed4")
    assert [is_image(s) for s in names] == [True, True, False, False]


# Levels.


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (8, 13), (2, 5)])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [(3, 1, 1, 1), (3, 2, 1, 1), (1, 2, 0, 1), (2, 2, 1, 1), (3, 1, 2, 2), (5, 3, 2, 1)],
)
def test_levels_have_the_sizes_of_convolutions(
    size: tuple[int, int], kernel: int, stride: int, padding: int, dilation: int
) -> None:
    grow = 2 * padding - dilation * (kernel - 1) - 1
    level = Level(parent=0, grow=(grow, grow), divide=(stride, stride), extra=(1, 1))
    x = torch.zeros(1, 1, *size)
    out = F.conv2d(x, torch.zeros(1, 1, kernel, kernel), None, stride, padding, dilation)
    assert level.size(size) == tuple(out.shape[2:])


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (8, 13)])
def test_levels_of_upsampling(size: tuple[int, int]) -> None:
    out = F.interpolate(torch.zeros(1, 1, *size), scale_factor=(2, 3), mode="nearest")
    assert Level(parent=0, times=(2, 3)).size(size) == tuple(out.shape[2:])


def test_a_filled_level_is_a_level_of_its_own() -> None:
    """It is as large as the picture here, and larger elsewhere; so is what is derived from it."""
    within = Pyramid(1, (16, 24))
    filled = within.derive(Level(parent=0, fill=(8, 8)))
    assert within.hints[filled] == within.hints[0]
    assert within.size_at(within.levels[filled], (17, 8)) == (24, 8)
    quarter = within.derive(Level(parent=0, divide=(4, 4)))
    own = within.derive(Level(parent=filled, divide=(4, 4)))
    assert len({0, filled, quarter, own}) == 4
    assert within.derive(Level(parent=own, times=(4, 4))) == filled
    assert within.resized(own, (16, 24)) == [filled, 0]


def test_levels_are_kept_apart_by_their_sizes_for_other_pictures() -> None:
    half, again = Level(parent=0, divide=(2, 2)), Level(parent=1, times=(2, 2))
    within = Pyramid(1, (16, 24), others=((17, 9),))
    assert (within.derive(half), within.derive(again)) == (1, 0)
    within.apart = True
    assert (within.derive(half), within.derive(again)) == (1, 2)


def test_rolls_add_up() -> None:
    within = Pyramid(1, (16, 24))
    first = within.rolled(0, ((5, 0), (-3, 0)))
    assert within.levels[within.rolled(first, ((-2, 0), (0, 0)))] == Level(parent=0, roll=(3, -3))
    assert within.rolled(first, ((-5, 0), (3, 0))) == 0
    assert within.distance(first) == 8
    coarse = within.derive(Level(parent=first, divide=(4, 4)))
    assert within.rolled_by(coarse) == ((5, 0), (-3, 0))
    assert within.rolled_by(0) == ((0, 0), (0, 0))


def test_a_pyramid_reuses_a_level_of_the_same_size() -> None:
    within = pyramid()
    half = Level(parent=0, grow=(1, 1), divide=(2, 2))
    assert within.derive(half) == within.derive(half) == 1
    assert within.derive(Level(parent=1, times=(2, 2))) == 0
    assert within.resized(0, (5, 7)) == [1]
    assert within.resized(0, (6, 7)) == []
    assert within.segment_size("grid1") == 35
    assert within.size(Tokens(("text:0", "image", "fixed4"))) == 29
    assert within.token_atoms(["grid1"]) == (Y(1), X(1))
    assert within.token_atoms(["image"]) == (Tokens(("image",)),)
