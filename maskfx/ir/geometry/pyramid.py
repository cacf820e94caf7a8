"""The pyramid of an image's levels: their sizes, their places, and what windows read of them.

This file knows nothing about operators or tensors at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from maskfx.ir.geometry.cuts import Cuts, piece_of, role_of
from maskfx.ir.geometry.grids import level_size, part_of
from maskfx.ir.geometry.lanes import (
    Atom,
    Batch,
    Dim,
    Experts,
    Feature,
    Frames,
    Lane,
    Part,
    Tokens,
    X,
    Y,
    atom_at,
    filled,
    fixed_count,
    grid_level,
    grid_segment,
    is_image,
    padded,
    segment_region,
)


@dataclass(frozen=True, slots=True)
class Window:
    """The geometry by which one level's sites read another's: a convolution's or a pool's.

    Args:
        source, target: the two levels.
        kernel, stride, before, dilation: the window; `before` is the padding at the top and left.
        rounding: set for a resampling, such as "nearest" or "bilinear": the ratio of the two
            levels' sizes determines the source sites, whatever the stride.
        edge: what the window reads beyond the border: "reflect", "replicate" or "circular", as
            `torch.nn.functional.pad` names them; "" for zeros.
        inserted: the distance between the source's sites in a grid with zeros between them.
        scale: of a resampling: the source's sizes over the target's, if not their quotient.
        counts: of a mean: the places that count, those "inside" the grid or the "padded" one.
        part: it begins a part of the source's size earlier too, given as in `Level.roll_part`.
        front: where one of the levels is filled up around the other: as `Level.fill_front`.
        flat: it runs along the sites row by row, from the end of a row to the next one's beginning.
        depth, early: how many frames of a video it reads, and how many of them lie before its own.
    """

    source: int
    target: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    before: tuple[int, int]
    dilation: tuple[int, int] = (1, 1)
    rounding: str = ""
    edge: str = ""
    inserted: tuple[int, int] = (1, 1)
    scale: tuple[float, ...] = ()
    counts: str = ""
    part: tuple[int, int] = (0, 0)
    front: tuple[int, int] = (0, 0)
    flat: bool = False
    depth: int = 1
    early: int = 0

    @property
    def places(self) -> int:
        """How many sites it reads, those beyond the border included."""
        return self.depth * prod(self.kernel)

    @property
    def weighted(self) -> bool:
        """Whether what the window reads is multiplied by weights that follow from sizes alone."""
        return bool(self.counts) or self.rounding not in ("", "nearest", "nearest-exact")

    @property
    def name(self) -> str:
        sizes: tuple[float | str, ...] = ()
        if not self.rounding:
            sizes = (*self.kernel, *self.stride, *self.before, *self.dilation)
            sizes += self.inserted if self.inserted != (1, 1) else ()
            for word, more in (("part", self.part), ("front", self.front)):
                sizes += (word, *more) if more != (0, 0) else ()
        elif self.kernel != (1, 1):
            sizes = (*self.kernel, *self.scale)
        words = [self.rounding, self.edge, self.counts, "flat" if self.flat else ""]
        frames = self.depth, self.early
        words += ["deep{}_{}".format(*frames)] if frames != (1, 0) else []
        parts = [self.source, self.target, *(w for w in words if w), *sizes]
        return "_".join(str(p).replace("-", "m").replace(".", "p") for p in parts)


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the image's pyramid, derived from another by size arithmetic.

    `divide`: size = (size + grow) // divide + extra of the parent; `times` for finer levels.
    `region` is set for a level that has its parent's sites, but a separate set of active ones.
    `offset`: where the first site begins among the parent's, after `times`; with a padding of four
    sites at the top it is -4.
    `roll` is set for a level whose sites are its parent's, moved down and to the right as
    `torch.roll` moves them; with a `roll_part` of n by another n-th part of the size, rounded down,
    back if it is negative. `fill`: sites are added up to a multiple, at the far edges or, with a
    `fill_front` of 2, half of them before the picture (-2: rounded up, 1: all). `turn`: its frames
    are its parent's, moved on by as many as `torch.roll` moves them.
    """

    parent: int | None = None
    grow: tuple[int, int] = (0, 0)
    divide: tuple[int, int] = (1, 1)
    extra: tuple[int, int] = (0, 0)
    times: tuple[int, int] = (1, 1)
    region: int = 0
    offset: tuple[int, int] = (0, 0)
    roll: tuple[int, int] = (0, 0)
    fill: tuple[int, int] = (1, 1)
    roll_part: tuple[int, int] = (0, 0)
    fill_front: tuple[int, int] = (0, 0)
    turn: int = 0

    def size(self, parent: tuple[int, int]) -> tuple[int, int]:
        return level_size(self, parent)

    @property
    def moves(self) -> bool:
        """Whether its sites are apart from those of a level of the same size and place."""
        return self.rolls or self.fill != (1, 1)

    @property
    def rolls(self) -> bool:
        """Whether its sites are its parent's, rolled."""
        return self.roll != (0, 0) or self.roll_part != (0, 0) or self.turn != 0

    @property
    def shifts(self) -> tuple[Shift, Shift]:
        """How far it is rolled along each axis."""
        return (self.roll[0], self.roll_part[0]), (self.roll[1], self.roll_part[1])


Shift = tuple[int, int]  # how far a roll moves: a number of sites, and `Level.roll_part`
NO_SHIFT: Shift = (0, 0)
Place = tuple[tuple[float, float], tuple[float, float]]  # of a first site, and between two


def added(one: Shift, other: Shift) -> Shift | None:
    """Return how far two rolls move together; None if that is no number and part of the size."""
    part = one[1] + other[1]
    if one[1] and other[1] and part:
        return None
    return one[0] + other[0], part


def is_near(one: Place, other: Place) -> bool:
    """Return True if sites of equal number lie at most one site apart."""
    return all(abs(one[0][i] - other[0][i]) <= max(one[1][i], other[1][i]) for i in (0, 1))


@dataclass
class Pyramid:
    """The levels of a denoiser and their sizes at capture; grows while lanes are marked.

    `others`: other sizes of the picture; with `apart`, levels are one only if they have the same
    size for these too. `frames`: the frames of a video, each with the sites of every level. `cuts`:
    where sequences of tokens are cut; their sizes, and the numbers that cuts follow from, are in
    `segments`.
    """

    batch: int
    base: tuple[int, int] | None = None
    segments: dict[str, int] = field(default_factory=dict)
    levels: list[Level] = field(default_factory=list)
    hints: list[tuple[int, int]] = field(default_factory=list)
    others: tuple[tuple[int, int], ...] = ()
    apart: bool = False
    frames: int = 1
    cuts: Cuts = field(default_factory=Cuts)

    def __post_init__(self) -> None:
        if self.base is not None and not self.levels:
            self.levels, self.hints = [Level()], [self.base]

    def size(self, atom: Atom) -> int:
        match atom:
            case Batch():
                return self.batch
            case Feature(size) | Experts(size) | Frames(size):
                return size
            case Y(level):
                return self.hints[level][0]
            case X(level):
                return self.hints[level][1]
            case Part(axis, parts, inner):
                return self.size(axis) // parts if inner else parts
            case Tokens(segments):
                return sum(self.segment_size(s) for s in segments)

    def segment_size(self, segment: str) -> int:
        level, fixed, filling = grid_level(segment), fixed_count(segment), filled(segment)
        if filling is not None:
            return -sum(map(self.segment_size, filling[1].split("+"))) % filling[0]
        padding = padded(segment)
        if padding is not None:
            return padding[0] - self.segment_size(padding[1])
        if level is not None:
            return self.frames * prod(self.hints[level])
        if piece_of(segment) is not None:
            return self.cuts.size(segment, self.roles)
        return fixed if fixed is not None else self.segments[segment.split("@")[0]]

    @property
    def roles(self) -> dict[str, int]:
        """The sizes of sequences by role."""
        return {role_of(segment): size for segment, size in self.segments.items()}

    def size_at(self, level: Level, base: tuple[int, int]) -> tuple[int, int]:
        """Return the size of a level of a picture of another size."""
        if level.parent is None:
            return base
        return level.size(self.size_at(self.levels[level.parent], base))

    def is_as_large(self, one: Level, other: Level) -> bool:
        """Return True if two levels have the same size for pictures of other sizes."""
        return all(self.size_at(one, base) == self.size_at(other, base) for base in self.others)

    def derive(self, level: Level) -> int:
        """Return the level that `level` describes; add it if none has its size and its place."""
        assert level.parent is not None
        size, moved = level.size(self.hints[level.parent]), self.moved_from(level.parent)
        if not level.moves:
            own = self.place(level)
            for known, have in enumerate(self.hints):
                alike = have == size and self.moved_from(known) == moved
                if not alike or not is_near(own, self.place(self.levels[known])):
                    continue
                if not self.apart or self.is_as_large(level, self.levels[known]):
                    return known
        elif level in self.levels:
            return self.levels.index(level)
        self.levels.append(level)
        self.hints.append(size)
        return len(self.levels) - 1

    def place(self, level: Level) -> Place:
        """Return where a level's first site begins in the picture, and how far apart sites lie."""
        if level.parent is None:
            return (0.0, 0.0), (1.0, 1.0)
        first, step = self.place(self.levels[level.parent])
        finer = [step[i] / level.times[i] for i in (0, 1)]
        begins = [first[i] + level.offset[i] * finer[i] for i in (0, 1)]
        apart = [finer[i] * level.divide[i] for i in (0, 1)]
        return (begins[0], begins[1]), (apart[0], apart[1])

    def moved_from(self, level: int) -> int | None:
        """Return the rolled or filled level that a level is or is derived from, or None."""
        found: int | None = level
        while found is not None and not self.levels[found].moves:
            found = self.levels[found].parent
        return found

    def rolled(self, level: int, shifts: tuple[Shift, Shift], turn: int = 0) -> int:
        """Return a level whose sites are moved; moving them back gives the level before."""
        own = self.levels[level]
        down, across = (added(*pair) for pair in zip(own.shifts, shifts, strict=True))
        if own.parent is not None and own.rolls and down is not None and across is not None:
            level, shifts, turn = own.parent, (down, across), (own.turn + turn) % self.frames
        if shifts == (NO_SHIFT, NO_SHIFT) and not turn:
            return level
        (y, y_part), (x, x_part) = shifts
        return self.derive(Level(parent=level, roll=(y, x), roll_part=(y_part, x_part), turn=turn))

    def is_rolled(self, level: int) -> bool:
        """Return True if the level that this one is derived from last was rolled."""
        moved = self.moved_from(level)
        return moved is not None and self.levels[moved].rolls

    def rolled_by(self, level: int) -> tuple[Shift, Shift]:
        """Return how far the level that this one is derived from last was rolled."""
        moved = self.moved_from(level)
        return (NO_SHIFT, NO_SHIFT) if moved is None else self.levels[moved].shifts

    def distance(self, level: int) -> float:
        """Return how far from the picture's a level's sites lie, its rolls included."""
        far = sum(map(abs, self.place(self.levels[level])[0]))
        moved = self.moved_from(level)
        while moved is not None:
            shifts = zip(self.levels[moved].shifts, self.hints[moved], strict=True)
            far += sum(abs(number + part_of(size, part)) for (number, part), size in shifts)
            parent = self.levels[moved].parent
            moved = None if parent is None else self.moved_from(parent)
        return far

    def resized(self, level: int, size: tuple[int, int]) -> list[int]:
        """Return the levels of a size, those first that a picture resized to it most likely has."""
        first, step = self.place(self.levels[level])
        apart = [step[i] * self.hints[level][i] / max(size[i], 1) for i in (0, 1)]
        own: Place = first, (apart[0], apart[1])
        moved = self.moved_from(level)

        def unlike(known: int) -> tuple[bool, bool]:
            near = is_near(own, self.place(self.levels[known]))
            return self.moved_from(known) != moved, not near

        return sorted((n for n, have in enumerate(self.hints) if have == size), key=unlike)

    def level_in(self, region: int, level: int) -> int:
        """Return the same level with the active sites of `region`, whatever its present region."""
        own = self.levels[level]
        level = own.parent if own.region and own.parent is not None else level
        spec = Level(parent=level, region=region)
        if spec not in self.levels:
            self.levels.append(spec)
            self.hints.append(self.hints[level])
        return self.levels.index(spec)

    def region_of(self, segment: str) -> int:
        """Return the region whose sites a segment holds; 0 is the mask's."""
        level = grid_level(segment)
        return segment_region(segment) if level is None else self.levels[level].region

    def region_in(self, segments: Sequence[str]) -> int:
        """Return the region of the image sites among these segments."""
        return next((r for s in segments if (r := self.region_of(s))), 0)

    def base_segments(self, segments: Sequence[str]) -> tuple[str, ...]:
        """Return the segments of the same sites without their region."""

        def base(name: str) -> str:
            level = grid_level(name)
            if level is None:
                return name.split("@")[0]
            spec = self.levels[level]
            return grid_segment(level if not spec.region or spec.parent is None else spec.parent)

        return tuple(map(base, segments))

    def token_atoms(self, segments: Sequence[str]) -> Dim:
        """Return the atoms of a token axis; a single grid segment becomes its two axes."""
        level = grid_level(segments[0]) if len(segments) == 1 else None
        return self.axes(level) if level is not None else (Tokens(tuple(segments)),)

    def axes(self, level: int) -> Dim:
        """Return the axes of a level's sites, in the order in which they count."""
        frames = (Frames(self.frames),) if self.frames > 1 else ()
        return *frames, self.y(level), self.x(level)

    def y(self, level: int) -> Y:
        return Y(level, frames=self.frames)

    def x(self, level: int) -> X:
        return X(level, frames=self.frames)

    def sites_shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the sites of a level of this size, frames first."""
        return (self.frames, *size) if self.frames > 1 else size


def in_region(lane: Lane, region: int, pyramid: Pyramid) -> Lane:
    """Return the lane with the same axes and the active sites of a region."""

    def segment(name: str) -> str:
        level = grid_level(name)
        if level is not None:
            return grid_segment(pyramid.level_in(region, level))
        packed = is_image(name) and padded(name) is None
        return f"{name.split('@')[0]}@{region}" if packed else name

    def atom(found: Atom) -> Atom:
        match found:
            case Y(level) | X(level) | Part(Y(level) | X(level)):
                return atom_at(found, pyramid.level_in(region, level))
            case Tokens(segments):
                return Tokens(tuple(map(segment, segments)))
        return found

    return Lane(tuple(tuple(map(atom, dim)) for dim in lane.dims))
