"""PieceRunner: runs the pieces of a graph one after another, each with code of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, fx

from maskfx.runtime.backends.eager import first_uses
from maskfx.runtime.backends.graph_function import Fetch, Run

Before = Callable[[int, Mapping[str, Tensor]], None]
LEAST = 3  # products per piece, at least: shorter ones start more often than they overlap loads
PRODUCTS = (
    *("linear", "mm", "addmm", "bmm", "convolution", "window_product"),
    *("attend", "attend_packed", "mean_attend"),
)


class PieceEnds(Protocol):
    """What a piece of a graph takes and returns; see `maskfx.compiler.pieces.Piece`."""

    @property
    def values(self) -> tuple[str, ...]: ...

    @property
    def inputs(self) -> tuple[str, ...]: ...

    @property
    def results(self) -> tuple[str, ...]: ...


Ends = TypeVar("Ends", bound=PieceEnds)


class PieceRunner(Generic[Ends]):
    """Runs one graph; calling it with `fetch` returns what the whole graph would return.

    Args:
        pieces: the pieces in order.
        compile_piece: returns the code of one piece, which fetches its inputs and the values of
            earlier pieces by name.
    """

    def __init__(self, pieces: Sequence[Ends], compile_piece: Callable[[Ends], Run]) -> None:
        self.pieces = list(pieces)
        self._runs = [compile_piece(piece) for piece in pieces]
        self._last = {name: i for i, piece in enumerate(pieces) for name in piece.values}

    def __call__(self, fetch: Fetch, before: Before = lambda number, values: None) -> Any:
        """Run the pieces; call `before` with each one's number and the values of earlier ones."""
        values: dict[str, Tensor] = {}
        result: Any = None
        for number, (piece, run) in enumerate(zip(self.pieces, self._runs, strict=True)):

            def read(name: str, number: int = number) -> Tensor:
                if name not in values:
                    return fetch(name)
                return values.pop(name) if self._last[name] == number else values[name]

            before(number, values)
            result = run(read)
            if number < len(self.pieces) - 1:
                values.update(zip(piece.results, result, strict=True))
        return result


def at_inputs(
    module: fx.GraphModule, waited: Collection[str], least: int = LEAST
) -> Callable[[fx.Node], bool]:
    """Return where `cut` begins pieces: at the first operators that read the inputs waited for.

    A piece that would have fewer than `least` products goes on instead.
    """
    starts, waited = set[fx.Node](), set(waited)
    products = least  # the first wait begins a piece, however little there is before it
    for node, names in first_uses(module.graph):
        if not waited.isdisjoint(names) and products >= least:
            starts.add(node)
            products = 0
        products += is_product(node)
    return starts.__contains__


def is_product(node: fx.Node) -> bool:
    """Return True for the operators that take most of a graph's time."""
    name = str(node.target).split(".")
    return node.op == "call_function" and not set(name).isdisjoint(PRODUCTS)
