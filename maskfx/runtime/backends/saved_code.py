"""Code of a graph in files, which one process compiles with Inductor and others run.

Weights are inputs of the code and named in its files, so processes over the same weights share the
code, it follows changes of their numbers, and to load it takes no compile.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from maskfx import ops
from maskfx.compiler.order_exchanges import exchanges_in, order_exchanges
from maskfx.compiler.pieces import Piece, cut
from maskfx.ir.programs.program import Program
from maskfx.ops.packed import packed_weights
from maskfx.runtime.backends.eager import PackedWeights, packed_once, packs
from maskfx.runtime.backends.graph_function import Fetch, Run, find
from maskfx.runtime.backends.pieces import PieceRunner, at_inputs

LISTED = "pieces"  # the file that lists the pieces; it is written last


@dataclass(frozen=True)
class SavedPiece:
    """A piece of a graph.

    Args:
        values, inputs, results: See `Piece`.
        weights: The names of the weights that it reads, in the module of the whole graph.
        packed: The names of those that it multiplies with in the layout of the matrix library.
        constants: Tensors that it reads beside these.
        file: The name of the file with its code.
    """

    values: tuple[str, ...]
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    weights: tuple[str, ...]
    packed: tuple[str, ...]
    constants: tuple[Tensor, ...]
    file: str


def save_code(
    folder: Path,
    program: Program,
    module: fx.GraphModule,
    inputs: Sequence[Tensor],
    waited: Collection[str] = (),
    prepack: bool = False,
) -> None:
    """Compile a graph of a program, and write its code to a folder.

    Args:
        folder: The folder, which is made.
        program: The program.
        module: The graph.
        inputs: An example of each input of the program.
        waited: Inputs that may arrive while the graph runs; see `compile_rows`.
        prepack: Whether to multiply with packed weights.
    """
    from maskfx.runtime.backends import inductor

    folder.mkdir(parents=True)
    with inductor.configured(inputs, freezing=False):
        exported = inductor.exported_rows(program, module, inputs)
        if len(exchanges_in(exported.graph)) != len(exchanges_in(module.graph)):
            raise RuntimeError("torch.export drops exchanges of the graph")
        pieces = cut(exported, at_inputs(exported, waited), inductor.sizes_behind(exported))
        saved = [
            save_piece(folder, str(n), piece, module, prepack) for n, piece in enumerate(pieces)
        ]
    (folder / LISTED).write_bytes(pickle.dumps(saved))


def save_piece(
    folder: Path, file: str, piece: Piece, module: nn.Module, prepack: bool
) -> SavedPiece:
    """Compile a piece of a graph and write its code."""
    from maskfx.runtime.backends import inductor

    order_exchanges(piece.module.graph)
    packed = pack_products(piece.module, module) if prepack else ()
    reads = piece.module.graph.find_nodes(op="get_attr")
    tensors = {str(node.target): find(piece.module, str(node.target)).detach() for node in reads}
    weights = [name for name, value in tensors.items() if has(module, name, value)]
    constants = [name for name in tensors if name not in weights]
    given = [node.meta["val"] for node in inductor.placeholders(piece.module)]
    mode, fakes = inductor.fresh_fakes(given)
    names = [*weights, *constants]
    fakes += [mode.from_tensor(tensors[name], static_shapes=True) for name in names]
    graph = with_inputs(piece.module.graph, names)
    artifact = inductor.compiled(fx.GraphModule(nn.Module(), graph), mode, fakes, donated=True)
    artifact.save(path=str(folder / file))
    own = tuple(tensors[name] for name in constants)
    ends = piece.values, piece.inputs, piece.results
    return SavedPiece(*ends, tuple(weights), packed, own, file)


def pack_products(piece: fx.GraphModule, module: nn.Module) -> tuple[str, ...]:
    """Let products read packed weights, by their places among the names that this returns."""
    places: dict[str, int] = {}
    for node in piece.graph.nodes:
        if node.target not in PRODUCTS:
            continue
        product, place, arguments = PRODUCTS[node.target]
        name = str(node.args[place].target)
        origin = find(piece, name) if node.args[place].op == "get_attr" else None
        if origin is None or not packs(origin) or not has(module, name, origin):
            continue
        given = [*node.args, *[None] * (arguments - len(node.args))]
        node.args = (*given, places.setdefault(name, len(places)))
        node.target = product
    return tuple(places)


# operator -> the same with a packed weight, the weight's place, and the number of arguments
PRODUCTS: dict[object, tuple[Any, int, int]] = {
    torch.ops.aten.linear.default: (ops.packed_linear, 1, 3),
    ops.window_product: (ops.packed_window, 3, 6),
}


def has(module: nn.Module, name: str, value: Tensor) -> bool:
    """Return True if a module has this tensor under this name."""
    try:
        found = find(module, name)
    except AttributeError:
        return False
    return isinstance(found, Tensor) and found.data_ptr() == value.data_ptr()


def with_inputs(graph: fx.Graph, weights: Sequence[str]) -> fx.Graph:
    """Return a graph whose last inputs are its weights, in this order."""
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.find_nodes(op="placeholder"):
        copies[node] = made.node_copy(node)
    given = {name: made.placeholder(f"weight_{n}") for n, name in enumerate(weights)}
    for node in graph.nodes:
        if node.op == "get_attr":
            copies[node] = given[str(node.target)]
        elif node.op != "placeholder":
            copies[node] = made.node_copy(node, copies.__getitem__)
    return made


def load_code(known: PackedWeights, folder: Path, module: nn.Module) -> Run:
    """Return what runs a graph by the code in a folder.

    Args:
        known: Packed weights, which the code shares with the graph's operators.
        folder: The folder.
        module: The graph's module, with its weights.
    """
    pieces: list[SavedPiece] = pickle.loads((folder / LISTED).read_bytes())
    return PieceRunner(pieces, partial(load_piece, known, folder, module))


def load_piece(known: PackedWeights, folder: Path, module: nn.Module, piece: SavedPiece) -> Run:
    from torch._inductor.standalone_compile import CompiledArtifact

    artifact = CompiledArtifact.load(path=str(folder / piece.file))
    names = [*piece.values, *piece.inputs]
    weights = [find(module, name) for name in piece.weights]
    packed = [packed_once(known, find(module, name)) for name in piece.packed]

    def run(fetch: Fetch) -> object:
        with torch.no_grad(), packed_weights(packed):
            return artifact(*map(fetch, names), *weights, *piece.constants)

    return run
