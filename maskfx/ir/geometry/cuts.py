"""Cuts: the places at which a sequence of tokens is cut into parts with row sets of their own.

A model that joins packed tokens piece by piece, such as a half of the picture's, a text and the
other half, needs a segment for each piece. Where each piece begins follows from the sizes of a
call. This file knows nothing about operators, lanes or tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from maskfx.ir.geometry.lanes import fixed_count, fixed_segment, is_image

PART = re.compile(r"(image|text:[^#+@]+)#(\d+)(?:@\d+)?")
NUMBER = "number:"  # a role: an integer argument that places are computed with, by its path


@dataclass(frozen=True, slots=True)
class Cut:
    """A place among the tokens of a sequence: (`times` * a size + `more`) // `over`.

    role: of the size; "" for the same place in every call.
    """

    role: str = ""
    times: int = 0
    more: int = 0
    over: int = 1

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return the place in a call of these sizes."""
        own = self.times * sizes[self.role] if self.role else 0
        return (own + self.more) // self.over


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A part of a sequence: from one cut to the next, from its beginning or to its end (None)."""

    start: Cut | None
    stop: Cut | None

    def span(self, whole: int, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return where the part starts and stops in a call of these sizes."""
        start = 0 if self.start is None else self.start.at(sizes)
        return start, whole if self.stop is None else self.stop.at(sizes)

    def constant(self, role: str) -> int | None:
        """Return its size if that is the same for every size of this role, the whole's."""
        start, stop = self.start or Cut(), self.stop or Cut(role, 1)
        alike = (start.role, start.times, start.over) == (stop.role, stop.times, stop.over)
        size, left = divmod(stop.more - start.more, stop.over)
        return size if alike and not left else None


def role_of(segment: str) -> str:
    """Return the role of the size of a whole sequence."""
    return "tokens" if segment == "image" else segment


def part_segment(segment: str, number: int) -> str:
    """Return the name of a part of a sequence."""
    return f"{segment}#{number}"


def piece_of(segment: str) -> tuple[str, int] | None:
    """Return the sequence and the number of a part of one, or None for other segments."""
    found = PART.fullmatch(segment)
    return (found[1], int(found[2])) if found else None


@dataclass
class Cuts:
    """The cuts of all sequences, each in order; grows while lanes are marked."""

    places: dict[str, tuple[Cut, ...]] = field(default_factory=dict)

    def parts(self, segment: str) -> tuple[str, ...]:
        """Return the segments of a whole sequence: its parts, or itself.

        A part of a text that has the same number of tokens in every call is a fixed segment.
        """
        count = len(self.places.get(segment, ()))
        return tuple(self._part(segment, i) for i in range(count + 1)) if count else (segment,)

    def _part(self, segment: str, number: int) -> str:
        constant = self.piece(segment, number).constant(role_of(segment))
        if constant is None or is_image(segment):
            return part_segment(segment, number)
        return fixed_segment(constant)

    def piece(self, whole: str, number: int) -> TokenRange:
        """Return which part of a sequence this is."""
        places = self.places[whole]
        start = places[number - 1] if number else None
        return TokenRange(start, places[number] if number < len(places) else None)

    def span(self, segment: str, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return where a part starts and stops in a call of these sizes."""
        whole, number = piece_of(segment) or (segment, 0)
        return self.piece(whole, number).span(sizes[role_of(whole)], sizes)

    def size(self, segment: str, sizes: Mapping[str, int]) -> int:
        """Return the size of a part in a call of these sizes."""
        start, stop = self.span(segment, sizes)
        return stop - start

    def add(self, segment: str, cut: Cut, sizes: Mapping[str, int]) -> bool:
        """Add a cut; return False if it is known or leaves too few tokens.

        Each part of the picture has two at least, or one if it has one in every call; a part of
        a text has one.
        """
        order = sorted({*self.places.get(segment, ()), cut}, key=lambda one: one.at(sizes))
        added = Cuts({**self.places, segment: tuple(order)})
        for number, part in enumerate(added.parts(segment)):
            start, stop = added.piece(segment, number).span(sizes[role_of(segment)], sizes)
            least = 2 if is_image(segment) and fixed_count(part) is None else 1
            if stop - start < least:
                return False
        known = cut in self.places.get(segment, ())
        self.places[segment] = tuple(order)
        return not known

    def numbers(self) -> set[str]:
        """Return the roles of the integer arguments that places are computed with."""
        every = {cut.role for places in self.places.values() for cut in places}
        return {role for role in every if role.startswith(NUMBER)}

    def disorder(self, sizes: Mapping[str, int]) -> str:
        """Return what is wrong with the cuts in a call of these sizes, or "".

        Each part has a token at least.
        """
        for segment, places in self.places.items():
            ends = [0, *(cut.at(sizes) for cut in places), sizes[role_of(segment)]]
            if any(stop <= start for start, stop in pairwise(ends)):
                return f"the tokens of {segment} are cut at {ends[1:-1]} of {ends[-1]}"
        return ""
