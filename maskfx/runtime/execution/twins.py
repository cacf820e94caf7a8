"""Twins: finds or makes the twin of a program that serves a batch with adapters."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from maskfx.compiler.compile import Compilation
from maskfx.compiler.low_rank_twins import (
    LowRankTwin,
    inner_weights,
    make_twin,
    originals,
    place_of,
    reads,
    weight_names,
)
from maskfx.ir.lru import LruCache
from maskfx.ir.programs.program import Program
from maskfx.runtime.lora.layers import AdapterSet, restricted
from maskfx.runtime.lora.stacks import NamedSet

TWINS = 4  # kept per program, each for the layers that some adapters change
NAMED = 64  # sets of adapters whose layers were found in a graph


Changed = tuple[frozenset[str], frozenset[str]]  # names: low-rank updates, full differences


class AdaptedBatch(NamedTuple):
    """Members that run together: their numbers, and the program that computes them."""

    numbers: list[int]
    program: Program


class Terms(NamedTuple):
    """What makes a twin: the code of its program, and the parameters that have terms."""

    code: str
    changed: Changed


class Twins:
    """The twins of the programs of one denoiser.

    A layer that no adapter of a batch changes costs nothing, because there is a twin for each set
    of changed layers. Adapters are mostly trained on the same few sets; where there are more than
    `TWINS`, one twin has terms on all of them, and these cost little where no row has one. Where
    twins are compiled, one that has more terms than needed serves before another is made.

    Args:
        compiles: whether graphs are compiled by Inductor.
    """

    def __init__(self, compiles: bool) -> None:
        self.compiles = compiles
        self.made = 0
        self.dropped: list[str] = []  # codes of twins that were replaced
        self._twins: dict[str, dict[Changed, LowRankTwin]] = {}
        self._originals: dict[str, dict[str, Tensor]] = {}
        self._named: LruCache[Hashable, NamedSet] = LruCache(NAMED)
        self._shared: LruCache[Hashable, bool] = LruCache(NAMED)
        self._joined: set[str] = set()  # programs with one twin for all layers seen
        self._base: dict[str, str] = {}  # code of a twin -> code of its program

    def named(self, program: Program, own: AdapterSet | None) -> NamedSet | None:
        """Return a set by the names of weights in the program's graph."""
        if own is None:
            return None

        def make() -> NamedSet:
            names = weight_names(program)  # now: weights may have moved since the last set came
            layers = {
                name: update
                for update in own.layers
                for name in names.get(place_of(update.weight), ())
            }
            return NamedSet(own, layers, restricted(own, inner_weights(program)))

        return self._named.find((program.code, own.key), make)

    def of_twin(self, program: Program) -> Mapping[str, Tensor]:
        """Return the weights of the graph of a twin by name; nothing for other programs."""
        code = self._base.get(program.code)
        return {} if code is None else self._originals[code]

    def terms_of(self, twin: str) -> Terms | None:
        """Return what makes the twin of this code elsewhere too; None for other programs."""
        code = self._base.get(twin)
        if code is None:
            return None
        twins = self._twins[code].items()
        return Terms(code, next(own for own, made in twins if made.program.code == twin))

    def with_terms(self, program: Program, changed: Changed) -> Program:
        """Return the twin with terms on exactly these parameters (`terms_of`)."""
        known = self._twins.setdefault(program.code, {})
        while changed not in known and len(known) >= TWINS:
            self.dropped.append(known.pop(next(iter(known))).program.code)
        if program.code not in self._originals:
            self._originals[program.code] = originals(program)
        return (known.get(changed) or self._made(program, changed)).program

    def drop(self, gone: Collection[int]) -> None:
        """Release the sets with updates of these ids (of their `Layers`)."""
        for key, own in self._named.items():
            if own.own.has(gone):
                self._named.remove(key)

    def batches(
        self,
        program: Program,
        compilations: Sequence[Compilation],
        sets: Sequence[NamedSet | None],
    ) -> list[AdaptedBatch]:
        """Split members into batches, each with the program that computes it.

        It is one batch, unless adapters change what a batch has one value of: a weight that isn't
        only multiplied with rows, or something made of weights alone. Then members with different
        adapters there run one after another.
        """
        numbers = list(range(len(sets)))
        if not any(sets):
            return [AdaptedBatch(numbers, program)]
        if program.code not in self._originals:
            self._originals[program.code] = originals(program)
        twin = self._of(program, sets)
        groups: dict[Hashable, list[int]] = {}
        for number, own, compilation in zip(numbers, sets, compilations, strict=True):
            key = None
            if own is not None and self._changes_shared(twin, compilation, own):
                key = own.own.key
            groups.setdefault(key, []).append(number)
        if len(groups) == 1:
            return [AdaptedBatch(numbers, twin.program)]
        return [
            AdaptedBatch(
                own,
                self._of(program, [sets[n] for n in own]).program
                if any(sets[n] for n in own)
                else program,
            )
            for own in groups.values()
        ]

    def forget(self) -> None:
        """Drop all twins; the programs they were made from are gone."""
        self._twins.clear()
        self._originals.clear()
        self._named.clear()
        self._shared.clear()
        self._joined.clear()
        self._base.clear()

    def _changes_shared(self, twin: LowRankTwin, compilation: Compilation, own: NamedSet) -> bool:
        if own.inside is not None or not twin.whole.isdisjoint(own.layers):
            return True

        def found() -> bool:
            places = [place_of(update.weight) for update in own.own.layers]
            sides = (compilation.request, compilation.dense)
            return any(reads(side, places) for side in sides if side is not None)

        return self._shared.find((id(compilation), own.own.key), found)

    def _of(self, program: Program, sets: Collection[NamedSet | None]) -> LowRankTwin:
        """Return a twin with terms on the layers that these sets change."""
        changed = changed_by(sets)
        weights, own = changed
        if not weights and not own:  # all of them are in side graphs
            return LowRankTwin(program, weights, own, weights)
        known = self._twins.setdefault(program.code, {})
        if changed in known:
            return known[changed]
        joins = self.compiles or program.code in self._joined or len(known) >= TWINS
        covering = [twin for twin in known.values() if twin.covers(weights, own)]
        if covering and joins:
            return min(covering, key=lambda twin: len(twin.weights) + len(twin.own))
        if joins:
            self._joined.add(program.code)
            weights = weights.union(*(twin.weights for twin in known.values()))
            own = own.union(*(twin.own for twin in known.values()))
            self.dropped += [twin.program.code for twin in known.values()]
            known.clear()
        return self._made(program, (weights, own))

    def _made(self, program: Program, changed: Changed) -> LowRankTwin:
        with torch.no_grad():
            self._twins[program.code][changed] = twin = make_twin(program, *changed)
        self.made += 1
        self._base[twin.program.code] = program.code
        return twin


def changed_by(sets: Collection[NamedSet | None]) -> Changed:
    """Return the weights with low-rank updates, and the parameters with full differences.

    A parameter with both is one with a full difference.
    """
    found = [(name, set_) for set_ in sets if set_ is not None for name in set_.layers]
    whole = frozenset(name for name, set_ in found if set_.changes_whole(name))
    low_rank = frozenset(name for name, set_ in found if not set_.changes_whole(name))
    return low_rank, whole
