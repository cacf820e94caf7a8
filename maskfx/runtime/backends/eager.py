"""Runner: runs a rewritten graph as a Python function that fetches each input when it reads it.

Rows of the cache are picked right before their first use and freed after their last, so that a step
holds one layer's cached rows at a time. Weights are bound once; a weight that is replaced by
another tensor needs a new runner, one that changes in place doesn't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from maskfx import ops
from maskfx.ops.packed import packed_product, packed_window_product
from maskfx.runtime.backends.graph_function import Call, Fetch, find, graph_function

aten, mkldnn = torch.ops.aten, torch.ops.mkldnn


class PackedWeight:
    """A weight in the layout of the CPU's matrix library, which graphs multiply with."""

    def __init__(self, origin: Tensor) -> None:
        self.value, self._version = reordered(origin), version_of(origin)

    def follow(self, origin: Tensor) -> None:
        """Pack the weight again if it was changed in place."""
        if self._version != version_of(origin):
            self.value, self._version = reordered(origin), version_of(origin)


PackedWeights = MutableMapping[Tensor, PackedWeight]


def version_of(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def reordered(weight: Tensor) -> Tensor:
    found: Tensor = mkldnn._reorder_linear_weight(weight.detach(), USUAL_ROWS)
    return found


class Runner:
    """Runs one graph; calling it with `fetch` returns what the graph's module would return.

    Args:
        module: the graph.
        prepack: whether to multiply with packed weights.
        packed: packed weights, which several graphs over the same weights share.
    """

    def __init__(
        self, module: fx.GraphModule, prepack: bool = False, packed: PackedWeights | None = None
    ) -> None:
        self._packed = WeakIdKeyDictionary() if packed is None else packed
        rewritten = self._packed_call if prepack else self._plain_call
        self._function = graph_function(module, partial(rewritten, module))

    def __call__(self, fetch: Fetch) -> Any:
        return self._function(fetch)

    def _packed_call(self, module: fx.GraphModule, node: fx.Node) -> Call | None:
        """Return the product with a weight in the layout of the CPU's matrix library."""
        origin = weight_of(module, node)
        if origin is None:
            return None
        product, place = PACKED[node.target]
        before, after = node.args[:place], node.args[place + 1 :]
        return product, (*before, packed_once(self._packed, origin), *after)

    def _plain_call(self, module: fx.GraphModule, node: fx.Node) -> Call | None:
        """Return a product that is quicker if rows are few."""
        if node.target != aten.linear.default or weight_of(module, node) is None:
            return None
        return ops.linear, node.args


def weight_of(module: fx.GraphModule, node: fx.Node) -> Tensor | None:
    """Return the weight of a product, if it is the module's and worth another implementation."""
    if node.target not in PACKED:
        return None
    weight = node.args[PACKED[node.target][1]]
    assert isinstance(weight, fx.Node)
    origin = find(module, str(weight.target)) if weight.op == "get_attr" else None
    return origin if origin is not None and packs(origin) else None


def packed_once(known: PackedWeights, origin: Tensor) -> PackedWeight:
    """Return the packed weight, which is packed unless it is known."""
    if origin not in known:
        known[origin] = PackedWeight(origin)
    return known[origin]


# operator -> the same with a packed weight, and the weight's place among the arguments
PACKED: dict[object, tuple[Callable[..., Tensor], int]] = {
    aten.linear.default: (packed_product, 1),
    ops.window_product: (packed_window_product, 3),
}
USUAL_ROWS = 256  # the layout suits products of about this number of rows
WORTH = 100_000  # numbers; other products start later, which smaller ones don't make up for


def packs(weight: Tensor) -> bool:
    """Return True if the CPU's matrix library can pack this weight and it is large enough."""
    kinds = (torch.float32, torch.bfloat16)
    return (
        weight.device.type == "cpu"
        and weight.dtype in kinds
        and weight.dim() == 2
        and weight.numel() >= WORTH
        and torch.backends.mkldnn.is_available()
    )


def packed_bytes(module: nn.Module) -> int:
    """Return the bytes that the packed weights of a module take, at most.

    Weights of convolutions are matrices where graphs multiply with them.
    """
    return sum(
        weight.nbytes
        for weight in module.parameters()
        if weight.dim() > 1 and packs(weight.detach().flatten(1))
    )


def first_uses(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[str]]]:
    """Yield every operator in order, with the inputs that it is the first to read."""
    seen: set[str] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        asked = [str(n.target) for n in node.all_input_nodes if n.op == "placeholder"]
        yield node, [name for name in asked if name not in seen]
        seen.update(asked)
