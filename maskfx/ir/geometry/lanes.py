"""Lanes: the meaning of each axis of a value.

A *lane* states, for every dimension of a value of the captured graph, which part of it is the
batch, which are image sites or text tokens, and which are plain features. A dimension is an
ordered product of *atoms*, so that a view only regroups the same atoms and a permute only
reorders dimensions. The *row form* of a value follows from its lane: all site atoms together with
the batch become dimension 0, and the features of each dimension follow in their order.

This file knows nothing about operators, graph rewriting or tensors at run time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx
from torch.types import IntLikeType


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one call."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Plain features of one site or one request."""

    size: int


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a video, each an image; a site is a place of one frame.

    `spread`: one value is broadcast to all of them.
    """

    size: int
    spread: bool = False


@dataclass(frozen=True, slots=True)
class Y:
    """The vertical axis of the image at one pyramid level, or of each of `frames` frames.

    `spread`: one value is broadcast to all of its positions.
    """

    level: int
    spread: bool = False
    frames: int = 1


@dataclass(frozen=True, slots=True)
class X:
    """The horizontal axis of the image at one pyramid level, or of each of `frames` frames.

    `spread`: one value is broadcast to all of its positions.
    """

    level: int
    spread: bool = False
    frames: int = 1


@dataclass(frozen=True, slots=True)
class Tokens:
    """A token axis: a concatenation of segments (text, image, registers)."""

    segments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts that choose sites, each an equal number; their rows lie expert by expert."""

    size: int


@dataclass(frozen=True, slots=True)
class Part:
    """One of the two axes that an axis of the picture is cut into, as a number of equal parts.

    `inner`: the place within a part; else which of the parts it is.
    """

    axis: Y | X
    parts: int
    inner: bool


Atom = Batch | Feature | Frames | Y | X | Part | Tokens | Experts
Dim = tuple[Atom, ...]

PICTURE = (Frames, Y, X)  # the axes of sites, in the order in which sites count
SITES = (*PICTURE, Tokens, Part)


def site_order(atom: Atom) -> tuple[int, bool]:
    """Return a key that sorts axes of sites in the order in which sites count."""
    if isinstance(atom, Part):
        return SITES.index(type(atom.axis)), atom.inner
    return SITES.index(type(atom)), False


def picture_axes(atoms: Sequence[Atom]) -> list[Frames | Y | X | Part]:
    """Return the axes of a picture; one of which a value has both parts counts once, as itself."""
    found: list[Frames | Y | X | Part] = []
    for atom in atoms:
        if isinstance(atom, Part) and (pair := replace(atom, inner=not atom.inner)) in found:
            found[found.index(pair)] = atom.axis
        elif isinstance(atom, (*PICTURE, Part)):
            found.append(atom)
    return found


def grid_segment(level: int) -> str:
    """Return the name of the segment that holds a level's sites."""
    return f"grid{level}"


def grid_level(segment: str) -> int | None:
    """Return the level that a segment holds, or None."""
    return int(segment[4:]) if segment.startswith("grid") else None


def fixed_segment(count: int) -> str:
    """Return the name of a segment with the same number of rows for every request."""
    return f"fixed{count}"


def fixed_count(segment: str) -> int | None:
    """Return the number of rows per request of a fixed segment, or None."""
    return int(segment[5:]) if segment.startswith("fixed") else None


def filling_segment(multiple: int, segment: str) -> str:
    """Return the name of the segment that pads another, or several (+), to a multiple."""
    return f"fill{multiple}_{segment}"


def filled(segment: str) -> tuple[int, str] | None:
    """Return the multiple and the segments (+) that a padding segment fills up, or None."""
    multiple, _, inner = segment.removeprefix("fill").partition("_")
    return (int(multiple), inner) if segment.startswith("fill") else None


def pad_segment(total: int, segment: str) -> str:
    """Return the name of the segment that pads another, of the image, to `total` rows."""
    return f"pad{total}_{segment}"


def padded(segment: str) -> tuple[int, str] | None:
    """Return the total and the segment that a segment pads to it, or None."""
    total, _, inner = segment.removeprefix("pad").partition("_")
    return (int(total), inner) if segment.startswith("pad") else None


def chosen_segment(choice: str, expert: int | None = None) -> str:
    """Return the name of the segment of sites that experts chose, or that one of them chose."""
    return f"chosen_{choice}" if expert is None else f"{choice}:{expert}"


def each_segment(frames: int, segment: str) -> str:
    """Return the name of the segment that holds the rows of another for each frame of a video."""
    return f"each{frames}_{segment}"


def of_each(segment: str) -> tuple[int, str] | None:
    """Return the number of frames and the segment that is held for each of them, or None."""
    frames, _, inner = segment.removeprefix("each").partition("_")
    return (int(frames), inner) if segment.startswith("each") else None


def is_image(segment: str) -> bool:
    """Return True if the segment holds image sites, or padding behind them, which isn't edited."""
    return segment.startswith(("image", "grid", "pad"))


def is_text(segment: str) -> bool:
    """Return True if the segment holds tokens of the text, or what fills them up."""
    return not is_image(segment) and fixed_count(segment) is None


def segment_region(segment: str) -> int:
    """Return the region of a segment of packed image tokens; 0 is the mask's."""
    return int(segment.partition("@")[2] or 0)


class NotLaned(Exception):
    """The atoms of a value can't be traced through an operator; the message gives the reason."""


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
        """The segments of the value's row set; () for values without sites."""
        axes = picture_axes(self.atoms())
        tokens = [a for a in self.atoms() if isinstance(a, Tokens)]
        levels = [a.level for a in axes if isinstance(a, (Y, X))]
        if len(tokens) == 1 and not axes:
            return tokens[0].segments
        whole = len(set(levels)) == 1 and len(axes) == len(wanted_axes(axes))
        if whole and not self.is_half and not tokens:
            return (grid_segment(levels[0]),)
        if not axes and not tokens:
            return ()
        raise NotLaned(f"it has several site axes, or parts of them: {self}")

    @property
    def has_sites(self) -> bool:
        return any(isinstance(a, SITES) for a in self.atoms())

    @property
    def is_half(self) -> bool:
        """Whether the value has some of the image's axes and lacks others."""
        axes = picture_axes(self.atoms())
        return bool(axes) and {type(a) for a in axes} != wanted_axes(axes)

    @property
    def is_cut(self) -> bool:
        """Whether the value has one part of an axis of the image and lacks the other."""
        return any(isinstance(a, Part) for a in picture_axes(self.atoms()))

    def whole(self, level: int = 0) -> Lane:
        """Return the lane over all axes of the image, missing ones spread (broadcast).

        `level`: that of a value which has frames alone.
        """
        return filled_in(self, level) if self.is_half else self

    @property
    def kind(self) -> str:
        """rows | sample | const: the form of the value in the rewritten graph."""
        return "rows" if self.has_sites else "sample" if self.has_batch else "const"

    def features(self, dim: int) -> int:
        """Return the product of the feature sizes in one dimension."""
        return prod(a.size for a in self.dims[dim] if isinstance(a, Feature))

    def is_feature_dim(self, dim: int) -> bool:
        """Return True if this dimension holds only features (or nothing)."""
        return all(isinstance(a, Feature) for a in self.dims[dim])

    def row_dims(self) -> list[int]:
        """Return the original dimensions that appear behind dimension 0 of the row form."""
        return [i for i in range(len(self.dims)) if self.features(i) > 1]

    def row_shape(self) -> list[int]:
        """Return the sizes of the row form behind dimension 0."""
        return [self.features(i) for i in self.row_dims()]

    def row_dim(self, dim: int) -> int:
        """Return the position of an original dimension in the row form, even if it is absent."""
        dim = dim % len(self.dims)
        return 1 + sum(d < dim for d in self.row_dims())

    def __str__(self) -> str:
        return "[" + ", ".join(" ".join(map(atom_name, d)) or "1" for d in self.dims) + "]"


def at_level(lane: Lane, level: int) -> Lane:
    """Return the lane of an image at another level."""

    return Lane(tuple(tuple(atom_at(atom, level) for atom in dim) for dim in lane.dims))


def atom_at(atom: Atom, level: int) -> Atom:
    """Return an axis of the image at another level, or another axis as it is."""
    if isinstance(atom, Part):
        return replace(atom, axis=replace(atom.axis, level=level))
    return replace(atom, level=level) if isinstance(atom, (Y, X)) else atom


def wanted_axes(axes: Sequence[Frames | Y | X | Part]) -> set[type]:
    """Return the kinds of axes that a value with these ones of an image has if it has them all."""
    plain = [a.axis if isinstance(a, Part) else a for a in axes]
    frames = any(isinstance(a, Frames) or a.frames > 1 for a in plain)
    return {Frames, Y, X} if frames else {Y, X}


def filled_in(lane: Lane, level: int) -> Lane:
    """Add the missing axes of the image, in the order in which sites count."""
    axes = [a for a in lane.atoms() if isinstance(a, PICTURE)]
    level = next((a.level for a in axes if not isinstance(a, Frames)), level)
    frames = next(a.size if isinstance(a, Frames) else a.frames for a in axes)
    every = (Frames(frames, True), Y(level, True, frames), X(level, True, frames))
    have = {type(a) for a in axes}
    left = [a for a in every if type(a) in wanted_axes(axes) - have]

    def filled(dim: Dim) -> Iterator[Atom]:
        for atom in dim:
            if isinstance(atom, PICTURE):
                while left and PICTURE.index(type(left[0])) < PICTURE.index(type(atom)):
                    yield left.pop(0)
            yield atom
            if atom is axes[-1]:
                yield from left
                left.clear()

    return Lane(tuple(tuple(filled(dim)) for dim in lane.dims))


def same_dim(a: Dim | None, b: Dim) -> bool:
    """Return True if the dimensions are equal up to how features are factored."""
    if a is None:
        return False
    return a == b or merged(a) == merged(b)


def merged(dim: Dim) -> tuple[Atom, ...]:
    out: list[Atom] = []
    for atom in dim:
        if isinstance(atom, Feature) and out and isinstance(out[-1], Feature):
            out[-1] = Feature(out[-1].size * atom.size)
        else:
            out.append(atom)
    return tuple(out)


def atom_name(atom: Atom) -> str:
    match atom:
        case Batch():
            return "batch"
        case Feature(size):
            return str(size)
        case Frames(size):
            return f"{size} frames"
        case Y(level):
            return f"y{level}"
        case X(level):
            return f"x{level}"
        case Part(axis, parts, inner):
            own = atom_name(axis)
            return f"{own}/{parts}" if inner else f"{parts} of {own}"
        case Tokens(segments):
            return "+".join(segments)
        case Experts(size):
            return f"{size} experts"


# Typed access to what the analyses found out about a node.


def lane_of(node: object) -> Lane | None:
    """Return the lane of a node that holds one tensor; None if it is unknown or not a tensor."""
    lane = node.meta.get("lane") if isinstance(node, fx.Node) else None
    return lane if isinstance(lane, Lane) else None


def lanes_of(node: fx.Node) -> tuple[Lane | None, ...] | None:
    """Return the lanes of a node with several outputs."""
    lanes = node.meta.get("lane")
    return lanes if isinstance(lanes, tuple) else None


def set_lane(node: fx.Node, lane: Lane | tuple[Lane | None, ...] | None) -> None:
    node.meta["lane"] = lane


def shape_hint(value: torch.Tensor) -> list[int]:
    """Return the sizes that a captured value had at capture."""
    return [int_hint(s) for s in value.shape]


def int_hint(size: IntLikeType) -> int:
    """Return a size at capture; a symbolic size returns its hint, without adding a guard."""
    if isinstance(size, torch.SymInt):
        if has_no_hint(size):
            raise NotLaned(f"the size {size} depends on what a tensor holds")
        return int(size.node.hint)
    return int(size)


def has_no_hint(size: IntLikeType) -> bool:
    """Return True for a size that depends on what a tensor holds."""
    return isinstance(size, torch.SymInt) and size.node.hint is None


def node_shape(node: fx.Node) -> list[int]:
    """Return the sizes of a node's value at capture."""
    return shape_hint(node.meta["val"])
