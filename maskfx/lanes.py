"""Lanes: what each axis of a value means.

A *lane* says, for every dimension of a value of the captured graph, which part of it is the
batch, which are image sites or text tokens, and which are plain features. A dimension is an
ordered product of atoms, so that a view is only a regrouping of the same atoms and a permute only
reorders dimensions. The row form of a value follows from its lane: every site atom together with
the batch becomes dimension 0, and the features of each dimension follow in their order.

This file knows nothing about operators, graphs' rewriting or tensors at run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one call."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Plain numbers of one site or one request."""

    size: int


@dataclass(frozen=True, slots=True)
class Y:
    """Rows of the picture at one level of its pyramid; `spread`: one value serves them all."""

    level: int
    spread: bool = False


@dataclass(frozen=True, slots=True)
class X:
    """Columns of the picture at one level of its pyramid; `spread`: one value serves them all."""

    level: int
    spread: bool = False


@dataclass(frozen=True, slots=True)
class Tokens:
    """A token axis: segments one after another (text, image, registers)."""

    segments: tuple[str, ...]


Atom = Batch | Feature | Y | X | Tokens
Dim = tuple[Atom, ...]


def grid_segment(level: int) -> str:
    """The name of the segment that holds a level's sites."""
    return f"grid{level}"


def grid_level(segment: str) -> int | None:
    """The level that a segment holds, or None."""
    return int(segment[4:]) if segment.startswith("grid") else None


def fixed_segment(count: int) -> str:
    """The name of a segment with the same number of rows for every request."""
    return f"fixed{count}"


def fixed_count(segment: str) -> int | None:
    """The number of rows per request of a fixed segment, or None."""
    return int(segment[5:]) if segment.startswith("fixed") else None


def filling_segment(multiple: int, segment: str) -> str:
    """The name of a segment that fills another up to a multiple of so many rows."""
    return f"fill{multiple}_{segment}"


def filled(segment: str) -> tuple[int, str] | None:
    """The multiple and the segment that a segment fills up, or None."""
    multiple, _, inner = segment.removeprefix("fill").partition("_")
    return (int(multiple), inner) if segment.startswith("fill") else None


def is_image(segment: str) -> bool:
    """Does the segment hold image sites, which a mask can narrow?"""
    return segment.startswith(("image", "grid"))


def segment_region(segment: str) -> int:
    """The region of a segment of packed image tokens; 0 is that of the mask."""
    return int(segment[6:]) if segment.startswith("image@") else 0


class NotLaned(Exception):
    """The atoms of a value can't be followed through an operator; the text says why."""


@dataclass(frozen=True, slots=True)
class Lane:
    """The meaning of each dimension of one value."""

    dims: tuple[Dim, ...]

    def atoms(self) -> list[Atom]:
        return [a for dim in self.dims for a in dim]

    @property
    def has_batch(self) -> bool:
        return any(isinstance(a, Batch) for a in self.atoms())

    @property
    def segments(self) -> tuple[str, ...]:
        """The row set: () for values without sites."""
        ys = [a for a in self.atoms() if isinstance(a, Y)]
        xs = [a for a in self.atoms() if isinstance(a, X)]
        tokens = [a for a in self.atoms() if isinstance(a, Tokens)]
        if len(tokens) == 1 and not ys and not xs:
            return tokens[0].segments
        if len(ys) == 1 and len(xs) == 1 and ys[0].level == xs[0].level and not tokens:
            return (grid_segment(ys[0].level),)
        if not ys and not xs and not tokens:
            return ()
        raise NotLaned(f"it has several site axes: {self}")

    @property
    def has_sites(self) -> bool:
        return any(isinstance(a, (Y, X, Tokens)) for a in self.atoms())

    @property
    def is_half(self) -> bool:
        """Is there a value for each row of the picture alone, or for each column?"""
        return any(isinstance(a, Y) for a in self.atoms()) != any(
            isinstance(a, X) for a in self.atoms()
        )

    def whole(self) -> Lane:
        """All sites of the picture, half a lane's values spread along the other axis."""
        return Lane(tuple(tuple(map_whole(dim)) for dim in self.dims)) if self.is_half else self

    @property
    def kind(self) -> str:
        """rows | sample | const: how the value travels in the rewritten graph."""
        return "rows" if self.has_sites else "sample" if self.has_batch else "const"

    def features(self, dim: int) -> int:
        """The features in one dimension, multiplied."""
        return prod(a.size for a in self.dims[dim] if isinstance(a, Feature))

    def is_feature_dim(self, dim: int) -> bool:
        """Only features (or nothing) in this dimension."""
        return all(isinstance(a, Feature) for a in self.dims[dim])

    def row_dims(self) -> list[int]:
        """The original dimensions that show up behind dimension 0 of the row form."""
        return [i for i in range(len(self.dims)) if self.features(i) > 1]

    def row_shape(self) -> list[int]:
        """The row form's sizes behind dimension 0."""
        return [self.features(i) for i in self.row_dims()]

    def row_dim(self, dim: int) -> int:
        """Where an original dimension lies in the row form, or would lie if it had features."""
        dim = dim % len(self.dims)
        return 1 + sum(d < dim for d in self.row_dims())

    def __str__(self) -> str:
        return "[" + ", ".join(" ".join(map(atom_name, d)) or "1" for d in self.dims) + "]"


def map_whole(dim: Dim) -> Iterator[Atom]:
    """Rows before columns, as the sites of a picture are counted."""
    for atom in dim:
        if isinstance(atom, X):
            yield Y(atom.level, spread=True)
        yield atom
        if isinstance(atom, Y):
            yield X(atom.level, spread=True)


def atom_name(atom: Atom) -> str:
    match atom:
        case Batch():
            return "batch"
        case Feature(size):
            return str(size)
        case Y(level):
            return f"y{level}"
        case X(level):
            return f"x{level}"
        case Tokens(segments):
            return "+".join(segments)


@dataclass(frozen=True, slots=True)
class Window:
    """How one level's sites read another's: a convolution's or a pool's geometry.

    `rounding` is set for a resampling ("nearest" or "nearest-exact"): the source lies where the
    ratio of the two levels' sizes puts it, whatever the stride.
    """

    source: int
    target: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    before: tuple[int, int]
    dilation: tuple[int, int] = (1, 1)
    rounding: str = ""

    @property
    def name(self) -> str:
        if self.rounding:
            return f"{self.source}_{self.target}_{self.rounding.replace('-', '_')}"
        sizes = (*self.kernel, *self.stride, *self.before, *self.dilation)
        return f"{self.source}_{self.target}_" + "_".join(str(s).replace("-", "m") for s in sizes)


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the picture's pyramid, derived from another by size arithmetic.

    `divide`: size = (size + grow) // divide + extra of the parent; `times` for finer levels.
    `region` is set for a level that has its parent's sites, but active ones of its own.
    """

    parent: int | None = None
    grow: tuple[int, int] = (0, 0)
    divide: tuple[int, int] = (1, 1)
    extra: tuple[int, int] = (0, 0)
    times: tuple[int, int] = (1, 1)
    region: int = 0

    def size(self, parent: tuple[int, int]) -> tuple[int, int]:
        def one(i: int) -> int:
            return (parent[i] * self.times[i] + self.grow[i]) // self.divide[i] + self.extra[i]

        return one(0), one(1)


@dataclass
class Pyramid:
    """The levels of a denoiser and the sizes they had at capture; grows while lanes are marked."""

    batch: int
    base: tuple[int, int] | None = None
    segments: dict[str, int] = field(default_factory=dict)
    levels: list[Level] = field(default_factory=list)
    hints: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.base is not None and not self.levels:
            self.levels, self.hints = [Level()], [self.base]

    def size(self, atom: Atom) -> int:
        match atom:
            case Batch():
                return self.batch
            case Feature(size):
                return size
            case Y(level):
                return self.hints[level][0]
            case X(level):
                return self.hints[level][1]
            case Tokens(segments):
                return sum(self.segment_size(s) for s in segments)

    def segment_size(self, segment: str) -> int:
        level, fixed, filling = grid_level(segment), fixed_count(segment), filled(segment)
        if filling is not None:
            return -self.segment_size(filling[1]) % filling[0]
        if level is not None:
            return prod(self.hints[level])
        return fixed if fixed is not None else self.segments[segment]

    def level_of(self, size: tuple[int, int]) -> int | None:
        """The level that has this size, if there is one."""
        return self.hints.index(size) if size in self.hints else None

    def derive(self, level: Level) -> int:
        """The level that `level` describes; it is added if no level has its size."""
        assert level.parent is not None
        size = level.size(self.hints[level.parent])
        found = self.level_of(size)
        if found is None:
            self.levels.append(level)
            self.hints.append(size)
            found = len(self.levels) - 1
        return found

    def level_in(self, region: int, level: int) -> int:
        """The same level with the active sites of a region, whatever region's it has now."""
        own = self.levels[level]
        level = own.parent if own.region and own.parent is not None else level
        spec = Level(parent=level, region=region)
        if spec not in self.levels:
            self.levels.append(spec)
            self.hints.append(self.hints[level])
        return self.levels.index(spec)

    def region_of(self, segment: str) -> int:
        """The region whose sites a segment holds; 0 is that of the mask."""
        level = grid_level(segment)
        return segment_region(segment) if level is None else self.levels[level].region

    def region_in(self, segments: Sequence[str]) -> int:
        """The region of the image sites among these segments."""
        return next((r for s in segments if (r := self.region_of(s))), 0)

    def base_segments(self, segments: Sequence[str]) -> tuple[str, ...]:
        """The same sites without their region."""

        def base(name: str) -> str:
            level = grid_level(name)
            if level is None:
                return name.split("@")[0]
            spec = self.levels[level]
            return grid_segment(level if not spec.region or spec.parent is None else spec.parent)

        return tuple(map(base, segments))

    def token_atoms(self, segments: Sequence[str]) -> Dim:
        """A token axis; a single grid segment is spelled as its two axes."""
        level = grid_level(segments[0]) if len(segments) == 1 else None
        return (Y(level), X(level)) if level is not None else (Tokens(tuple(segments)),)


def regroup(atoms: Iterable[Atom], sizes: Sequence[int], pyramid: Pyramid) -> tuple[Dim, ...]:
    """The dimensions of a view: the same atoms in the same order, grouped anew.

    Features split where needed. A site axis may split into a coarser level's axis and features
    (patchify), and such a pair merges back into the finer level's axis (unpatchify).
    """
    left = [a for a in atoms if pyramid.size(a) != 1]
    dims: list[Dim] = []
    for size in sizes:
        dim: list[Atom] = []
        need = size
        while need > 1:
            if not left:
                raise NotLaned(f"no axes are left for a view to {list(sizes)}")
            atom = left.pop(0)
            have = pyramid.size(atom)
            if need % have == 0:
                dim.append(atom)
                need //= have
            elif have % need == 0:
                first, second = split_atom(atom, need, pyramid)
                dim.append(first)
                left.insert(0, second)
                need = 1
            else:
                raise NotLaned(f"a view to {list(sizes)} cuts across {atom_name(atom)}")
        dims.append(tuple(dim))
    if any(pyramid.size(a) != 1 for a in left):
        raise NotLaned(f"a view to {list(sizes)} drops {[atom_name(a) for a in left]}")
    return merge_patches(tuple(dims), pyramid)


def split_atom(atom: Atom, first: int, pyramid: Pyramid) -> tuple[Atom, Atom]:
    """An atom as a product of two, the first of the given size."""
    if isinstance(atom, Feature):
        return Feature(first), Feature(atom.size // first)
    if isinstance(atom, (Y, X)):
        patch = pyramid.size(atom) // first
        if patch > 16:
            raise NotLaned(f"{atom_name(atom)} is split into {first} x {patch}")
        coarse = pyramid.derive(Level(parent=atom.level, divide=(patch, patch)))
        return type(atom)(coarse), Feature(patch)
    raise NotLaned(f"{atom_name(atom)} is split into {first} x {pyramid.size(atom) // first}")


def merge_patches(dims: tuple[Dim, ...], pyramid: Pyramid) -> tuple[Dim, ...]:
    """(y1 p) and (x1 p) together are the finer level's y0 and x0, if there is such a level."""
    ys = [(i, d) for i, d in enumerate(dims) if len(d) == 2 and isinstance(d[0], Y)]
    xs = [(i, d) for i, d in enumerate(dims) if len(d) == 2 and isinstance(d[0], X)]
    if len(ys) != 1 or len(xs) != 1:
        return dims
    (iy, dy), (ix, dx) = ys[0], xs[0]
    if not (isinstance(dy[1], Feature) and isinstance(dx[1], Feature) and dy[1] == dx[1]):
        return dims
    assert isinstance(dy[0], Y)
    coarse, patch = dy[0].level, dy[1].size
    fine = pyramid.derive(Level(parent=coarse, times=(patch, patch)))
    out = list(dims)
    out[iy], out[ix] = (Y(fine),), (X(fine),)
    return tuple(out)


def in_region(lane: Lane, region: int, pyramid: Pyramid) -> Lane:
    """The same axes, with the active sites of a region."""

    def segment(name: str) -> str:
        level = grid_level(name)
        if level is not None:
            return grid_segment(pyramid.level_in(region, level))
        return f"image@{region}" if is_image(name) else name

    def atom(found: Atom) -> Atom:
        match found:
            case Y(level, spread) | X(level, spread):
                return type(found)(pyramid.level_in(region, level), spread)
            case Tokens(segments):
                return Tokens(tuple(map(segment, segments)))
        return found

    return Lane(tuple(tuple(map(atom, dim)) for dim in lane.dims))


# Typed access to what the analyses found out about a node.


def lane_of(node: Any) -> Lane | None:
    """The lane of a node that holds one tensor; None if it is unknown or no tensor."""
    lane = node.meta.get("lane") if isinstance(node, fx.Node) else None
    return lane if isinstance(lane, Lane) else None


def lanes_of(node: fx.Node) -> tuple[Lane | None, ...] | None:
    """The lanes of a node with several outputs."""
    lanes = node.meta.get("lane")
    return lanes if isinstance(lanes, tuple) else None


def set_lane(node: fx.Node, lane: Lane | tuple[Lane | None, ...] | None) -> None:
    node.meta["lane"] = lane


def shape_hint(value: torch.Tensor) -> list[int]:
    """The sizes that a captured value had at capture."""
    return [int_hint(s) for s in value.shape]


def int_hint(size: Any) -> int:
    """A size at capture: symbolic sizes give their hint, without adding a guard."""
    if isinstance(size, torch.SymInt):
        if size.node.hint is None:
            raise NotLaned(f"the size {size} depends on what a tensor holds")
        return int(size.node.hint)
    return int(size)


def node_shape(node: fx.Node) -> list[int]:
    """The sizes of a node's value at capture."""
    return shape_hint(node.meta["val"])


def module_path(node: fx.Node) -> str:
    """Where in the module tree a node came from."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(v[0]) for v in stack.values() if v and v[0]]
    paths = [p for p in paths if not p.startswith("_empty")]
    return paths[-1] if paths else ""
