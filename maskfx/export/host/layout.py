"""The parts of a manifest that a host computes with: levels, segments, windows and lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from maskfx.ir.geometry.grids import level_size
from maskfx.ir.json_values import Document

Size = tuple[int, int]  # height and width


@dataclass(frozen=True)
class HostLevel:
    """One level of the picture: its size follows from that of its parent.

    With a region, a level has its parent's sites, of which others may be active. With a roll, it
    has its parent's sites moved down and to the right. `offset` is the site of the parent, counted
    in its finer grid, at which the first site begins. With `fill`, sites are added up to a
    multiple. `roll_part`, `fill_front` and `turn` are as in `maskfx.ir.geometry.pyramid.Level`.
    """

    parent: int | None
    grow: Size
    divide: Size
    extra: Size
    times: Size
    region: int
    roll: Size = (0, 0)
    offset: Size = (0, 0)
    fill: Size = (1, 1)
    roll_part: Size = (0, 0)
    turn: int = 0
    fill_front: Size = (0, 0)

    def size(self, parent: Size) -> Size:
        return level_size(self, parent)


@dataclass(frozen=True)
class HostWindow:
    """How the sites of the target level read those of the source level."""

    source: int
    target: int
    kernel: Size
    stride: Size
    before: Size
    dilation: Size
    rounding: str
    edge: str = ""
    inserted: Size = (1, 1)
    scale: tuple[float, ...] = ()
    counts: str = ""
    part: Size = (0, 0)
    front: Size = (0, 0)
    flat: bool = False
    depth: int = 1
    early: int = 0

    @property
    def weighted(self) -> bool:
        """Whether what the window reads is multiplied by weights."""
        return bool(self.counts) or self.rounding not in ("", "nearest", "nearest-exact")


@dataclass(frozen=True)
class Segment:
    """A part of a row set. Of "grid" and "tokens" a mask selects sites, of others it selects all.

    Only the members of its kind are set: the level of a grid, the region of tokens, the role of
    texts, the count of a fixed segment, multiple and name of the segment that one fills up, or the
    number of frames and the name of the segment whose rows each of them has.
    """

    kind: str
    level: int = 0
    region: int = 0
    role: str = ""
    count: int = 0
    multiple: int = 1
    of: str = ""

    @property
    def is_image(self) -> bool:
        return self.kind in ("grid", "tokens")


SITE_AXES = ("frames", "y", "x", "tokens")  # in the order in which sites count


@dataclass(frozen=True)
class Axis:
    """A part of a dimension: the batch, features, a picture's axis, or a sequence of tokens."""

    kind: str  # batch, features, frames, y, x, tokens
    size: int = 0
    level: int = 0
    spread: bool = False  # one value for all positions
    segments: tuple[str, ...] = ()

    @property
    def has_sites(self) -> bool:
        return self.kind in SITE_AXES


@dataclass(frozen=True)
class HostLane:
    """The axes of each dimension of a full value."""

    dims: tuple[tuple[Axis, ...], ...]

    @staticmethod
    def read(document: Sequence[Sequence[Document]]) -> HostLane:
        return HostLane(tuple(tuple(Axis(**tupled(axis)) for axis in dim) for dim in document))

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for dim in self.dims for axis in dim)

    @cached_property
    def kind(self) -> str:
        """rows: has sites; sample: one entry for each request; const: one for all requests."""
        if any(axis.has_sites for axis in self.axes):
            return "rows"
        return "sample" if any(axis.kind == "batch" for axis in self.axes) else "const"

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """Return the segments of the value's row set."""
        for axis in self.axes:
            if axis.kind == "tokens":
                return axis.segments
            if axis.kind == "y":
                return (f"grid{axis.level}",)
        return ()

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Return the features of a row: of each dimension, where there is more than one."""
        sizes = (self.features(i) for i in range(len(self.dims)))
        return tuple(size for size in sizes if size > 1)

    def features(self, dim: int) -> int:
        return prod(axis.size for axis in self.dims[dim] if axis.kind == "features")

    @property
    def batch_dim(self) -> int:
        """Return the dimension that holds the batch."""
        has = [any(axis.kind == "batch" for axis in dim) for dim in self.dims]
        return has.index(True)


@dataclass(frozen=True)
class HostLayout:
    """The levels, segments and windows of a denoiser."""

    levels: tuple[HostLevel, ...]
    segments: dict[str, Segment]
    windows: dict[str, HostWindow]

    @staticmethod
    def read(manifest: Document) -> HostLayout:
        return HostLayout(
            tuple(HostLevel(**tupled(level)) for level in manifest["levels"]),
            {name: Segment(**segment) for name, segment in manifest["segments"].items()},
            {name: HostWindow(**tupled(window)) for name, window in manifest["windows"].items()},
        )

    def images(self, segments: Sequence[str]) -> tuple[str, ...]:
        """Return those of the segments of which a mask selects sites."""
        return tuple(name for name in segments if self.segments[name].is_image)


def tupled(document: Document) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in document.items()}
