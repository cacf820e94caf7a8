"""The least, usual and greatest size of each dimension of exported graphs, for engines.

An engine is built for ranges of sizes and tuned for the usual ones. A caller gives the ranges of
few quantities, such as `rows=64:1024:4096`; the others follow from masks and sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt, prod

import numpy as np

from maskfx.errors import InputError
from maskfx.export.host.arrays import Bools
from maskfx.export.host.dimensions import call_size, dimension_size
from maskfx.export.host.layout import HostLayout
from maskfx.export.host.sites import Sites
from maskfx.export.host.tables import BatchTables
from maskfx.ir.json_values import Document

ROWS, REQUESTS = "rows", "requests"
Shape = tuple[int, ...]
SHARE = 0.1  # of the sites, in a usual mask


@dataclass(frozen=True)
class Range:
    """The least, usual and greatest value of a size."""

    least: int
    usual: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}:{self.usual}:{self.most}"


def read_ranges(texts: Iterable[str]) -> dict[str, Range]:
    """Return the ranges in texts such as "rows=64:1024:4096", or "requests=2" for one value."""
    found = {}
    for text in texts:
        name, _, numbers = text.partition("=")
        parts = numbers.split(":")
        values = [int(part) for part in parts if part.isascii() and part.isdigit()]
        if not name or len(values) != len(parts) or len(values) not in (1, 3):
            raise InputError(
                f"profile {text!r}: expected NAME=LEAST:USUAL:MOST or NAME=SIZE, such as "
                "rows=64:1024:4096"
            )
        least, usual, most = values if len(values) == 3 else values * 3
        if not 1 <= least <= usual <= most:
            raise InputError(f"profile {text!r}: expected 1 <= least <= usual <= most")
        found[name] = Range(least, usual, most)
    return found


@dataclass
class ShapeProfile:
    """The ranges of all dimensions of a manifest.

    Args:
        manifest: the manifest.
        given: ranges by name: "rows" (active sites of all requests at the finest level, or packed
            tokens), "requests" (batch elements), and roles of sizes ("y", "x", "tokens", "text:0").
            Sizes that aren't named are those of the call that the graphs were made from.
    """

    manifest: Document
    given: Mapping[str, Range]

    def __post_init__(self) -> None:
        known = [ROWS, REQUESTS, *(role for role in self.manifest["example"] if role != "batch")]
        for name, own in self.given.items():
            if name not in known:
                raise InputError(f"profile {name}={own}: choose one of {', '.join(known)}")
            fixed = self.manifest["sizes"].get(name)
            if fixed is not None and (own.least, own.most) != (fixed, fixed):
                raise InputError(
                    f"profile {name}={own}: the graphs compute {name}={fixed} only; leave it out"
                )
        if self.rows.most > self.requests.most * self._sites(self._sizes("most")):
            raise InputError(
                f"profile rows={self.rows}: {self.requests.most} requests have "
                f"{self.requests.most * self._sites(self._sizes('most'))} sites at most; give "
                "more requests or larger pictures"
            )

    @cached_property
    def requests(self) -> Range:
        usual = int(self.manifest["example"]["batch"])
        return self.given.get(REQUESTS, Range(1, usual, usual))

    @cached_property
    def rows(self) -> Range:
        every = self._sites(self._sizes("usual")) * self.requests.usual
        most = self._sites(self._sizes("most")) * self.requests.most
        return self.given.get(ROWS, Range(1, max(round(SHARE * every), 1), most))

    @cached_property
    def layout(self) -> HostLayout:
        return HostLayout.read(self.manifest)

    def of(self, name: str) -> Range:
        """Return the range of a dimension."""
        dimension = self.manifest["dimensions"][name]
        if dimension["kind"] in ("role", "axes"):
            ends = [self._call_size(dimension, end) for end in ("least", "usual", "most")]
            if any(size is None for size in ends):
                raise InputError(f"profile: nothing is known of the dimension {name}")
            return Range(*sorted(size for size in ends if size is not None))
        if dimension["kind"] == "number":
            value = int(self.manifest["arguments"][dimension["argument"]]["value"])
            return Range(value, value, value)
        usual = dimension_size(dimension, self._usual)
        least, most = self._bounds(dimension)
        return Range(min(least, usual), usual, max(most, usual))

    def shapes(self, dims: Sequence[int | str]) -> tuple[Shape, Shape, Shape]:
        """Return the least, usual and greatest shape of a value with these dimensions."""
        ranges = [self.of(dim) if isinstance(dim, str) else Range(dim, dim, dim) for dim in dims]
        return (
            tuple(own.least for own in ranges),
            tuple(own.usual for own in ranges),
            tuple(own.most for own in ranges),
        )

    def _bounds(self, dimension: Document) -> tuple[int, int]:
        """Return the least and greatest size that a dimension has with any masks."""
        few, many = self.requests.least, self.requests.most
        small, large = (Sites(self.layout, self._sizes(end), None) for end in ("least", "most"))
        segments = dimension.get("segments") or dimension.get("after") or ()
        every = many * sum(map(large.count, segments))
        match dimension["kind"]:
            case "requests":
                return few * dimension["times"], many * dimension["times"]
            case "rows":
                ends = [self._rows_of(name, small, large) for name in segments]
                return sum(least for least, _ in ends), sum(most for _, most in ends)
            case "keys":
                return few * sum(map(small.count, segments)), every
            case "lines":
                (name,), axis = dimension["segments"], dimension["axis"]
                return few * small.numbered(name, axis)[1], many * large.numbered(name, axis)[1]
            case "halo":
                window = self.layout.windows[dimension["window"]]
                return 0, many * large.frames * prod(large.grid(window.source))
        return 0, every

    def _rows_of(self, name: str, small: Sites, large: Sites) -> tuple[int, int]:
        """Return the least and greatest number of active rows of a segment, of all requests."""
        segment, few, many = self.layout.segments[name], self.requests.least, self.requests.most
        if not segment.is_image:
            return few * small.count(name), many * large.count(name)
        if segment.region:
            return few, many * large.count(name)
        if segment.kind == "tokens":
            return self.rows.least, self.rows.most
        return self._rows_at(segment.level, large)

    def _rows_at(self, level: int, large: Sites) -> tuple[int, int]:
        """Return the least and greatest number of active rows of a level, of all requests."""
        spec, many = self.layout.levels[level], self.requests.most
        if spec.parent is None:
            return self.rows.least, self.rows.most
        if spec.region:
            return self.requests.least, many * large.frames * prod(large.grid(level))
        least, most = self._rows_at(spec.parent, large)
        height, width = large.grid(level)
        edges = height + width if any((*spec.grow, *spec.extra)) else 0  # repeat the last sites
        edges += spec.fill[0] * width + spec.fill[1] * height if spec.fill != (1, 1) else 0
        frames = large.frames
        return (
            max(-(-least * prod(spec.times) // prod(spec.divide)), self.requests.least),
            min(most * prod(spec.times) + many * frames * edges, many * frames * height * width),
        )

    @cached_property
    def _usual(self) -> BatchTables:
        """Return the tables of the usual batch: requests with a square mask each."""
        sizes, count = self._sizes("usual"), self.requests.usual
        mask = square(sizes, max(self.rows.usual // count, 1))
        return BatchTables([Sites(self.layout, sizes, mask)], [count])

    def _sizes(self, end: str) -> dict[str, int]:
        """Return the least, usual or greatest sizes by role."""
        sizes = {}
        for role, size in self.manifest["example"].items():
            own = self.given.get(role)
            sizes[role] = size if own is None else int(getattr(own, end))
        return sizes

    def _sites(self, sizes: Mapping[str, int]) -> int:
        if "y" not in sizes:
            return sizes["tokens"]
        return sizes.get("frames", 1) * sizes["y"] * sizes["x"]

    def _call_size(self, dimension: Mapping[str, object], end: str) -> int | None:
        batch = int(getattr(self.requests, end))
        sizes = {**self._sizes(end), "batch": batch}
        return call_size(dimension, Sites(self.layout, sizes, None), batch)


def square(sizes: Mapping[str, int], count: int) -> Bools:
    """Return a mask of about this number of sites in one piece: a square, or adjacent tokens."""
    if "y" not in sizes:
        return np.arange(sizes["tokens"]) < count
    height, width, frames = sizes["y"], sizes["x"], sizes.get("frames", 1)
    count = -(-count // frames)
    tall = min(max(isqrt(count), -(-count // width)), height)
    wide = min(max(round(count / tall), 1), width)
    mask = np.zeros((height, width), dtype=bool)
    top, left = (height - tall) // 2, (width - wide) // 2
    mask[top : top + tall, left : left + wide] = True
    return np.stack([mask] * frames) if frames > 1 else mask
