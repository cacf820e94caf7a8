"""Modules that stay whole: torch.export can't trace them, and they compute each token by itself.

Where the export fails inside of a submodule, the submodule and all of its class are tried on other
tokens in another order. If each token's result stays the same, they are one operator of the graph
each, which may run on any rows. A mixture of experts that routes every token is such a module,
however its code gathers the tokens of an expert.

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ParamSpec

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from maskfx import ops
from maskfx.ir.modules.lent_methods import lent
from maskfx.ir.objects import copy_tree
from maskfx.ir.values import copy_of, has_meta, same_values
from maskfx.ops.whole_modules import Whole, run_whole

log = logging.getLogger(__name__)

P = ParamSpec("P")
KNOWN = ("aten", "prim", "prims", "export", "higher_order", "maskfx")  # namespaces of operators
FEW = 4  # fewer rows than these don't show whether a module computes each by itself


@dataclass(frozen=True)
class Call:
    """One call of a submodule."""

    args: tuple[object, ...]
    named: dict[str, object]
    result: Any


@dataclass
class WholeModules:
    """The submodules of a denoiser that its capture keeps whole.

    Args:
        module: what is exported, the denoiser's twin or the denoiser itself.
        own: the denoiser, whose parts run.
    """

    module: nn.Module
    own: nn.Module
    kept: list[Whole] = field(default_factory=list)
    _tried: set[type] = field(default_factory=set)

    def add(self, error: BaseException, inputs: Mapping[str, object]) -> bool:
        """Keep those modules whole in whose code the export failed; return True if there are any.

        The innermost module is tried first, then the ones around it.
        """
        return self._add(kinds_in(error.__traceback__, self.module), inputs)

    def add_opaque(self, graph_module: nn.Module, inputs: Mapping[str, object]) -> bool:
        """Keep those modules whole whose nodes no rule can read, as `add` does.

        Their values have sizes that depend on data, or other packages define their operators.
        """
        for part in graph_module.modules():
            for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
                opaque = makes_unknown_size(node) or is_foreign(node)
                if opaque and self._add(kinds_of(node, self.module), inputs):
                    return True
        return False

    def _add(self, kinds: Sequence[type], inputs: Mapping[str, object]) -> bool:
        if has_meta(self.module, pytree.tree_leaves(inputs)):
            return False
        # one that is whole already isn't at fault: what it was given is
        self.kept = [kept for kept in self.kept if type(kept.inner) not in kinds]
        for kind in kinds:
            if kind in self._tried:
                continue
            self._tried.add(kind)
            calls = observed(self.module, kind, inputs)
            found = [w for part, call in calls.items() if (w := whole_of(part, call)) is not None]
            if found:
                log.debug("%s stays whole", kind.__name__)
                self.kept += found
                return True
        return False

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Make an export see one operator in place of each module that stays whole."""
        with contextlib.ExitStack() as stack:
            for number, kept in enumerate(self.kept):
                function = stand_in(kept, number, kept.inner.forward)
                stack.enter_context(lent(kept.inner, function))
            yield

    def put_back(self, graph_module: nn.Module) -> None:
        """Put the denoiser's modules into an exported graph, in place of their operators."""
        paths = {id(part): path for path, part in self.module.named_modules()}
        for part in graph_module.modules():
            if not isinstance(part, fx.GraphModule):
                continue
            for node in part.graph.find_nodes(op="call_function", target=ops.whole):
                values, number = node.args[:2]
                path = paths[id(self.kept[number].inner)]
                name = "whole_" + path.replace(".", "_")
                part.add_submodule(name, self.kept[number].around(self.own.get_submodule(path)))
                with part.graph.inserting_before(node):
                    held = part.graph.get_attr(name)
                    new = part.graph.call_function(run_whole, (held, values))
                new.meta = dict(node.meta)
                node.replace_all_uses_with(new)
                part.graph.erase_node(node)
            part.recompile()


def stand_in(kept: Whole, number: int, forward: Callable[P, object]) -> Callable[P, object]:
    """Return a forward that is one operator under export, and `forward` itself otherwise."""

    @functools.wraps(forward)
    def called(*args: P.args, **named: P.kwargs) -> object:
        values, spec = pytree.tree_flatten((args, named))
        if not torch.compiler.is_exporting() or spec != kept.spec:
            return forward(*args, **named)
        tensors = [v for i, v in enumerate(values) if i not in kept.constants]
        return ops.whole(tensors, number, kept.width)

    return called


def kinds_in(traceback: TracebackType | None, module: nn.Module) -> list[type]:
    """Return the classes of the submodules whose code was running, the innermost first."""
    parts = {id(part) for part in module.modules() if part is not module}
    found: list[type] = []
    while traceback is not None:
        own = traceback.tb_frame.f_locals.get("self")
        if id(own) in parts:
            found.insert(0, type(own))
        traceback = traceback.tb_next
    return list(dict.fromkeys(found))


def kinds_of(node: fx.Node, module: nn.Module) -> list[type]:
    """Return the classes of the submodules whose code made a node, the innermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    parts = dict(module.named_modules())
    found = [type(parts[path]) for path, _ in stack.values() if path and path in parts]
    return list(dict.fromkeys(reversed(found)))


def makes_unknown_size(node: fx.Node) -> bool:
    """Return True for the first node whose sizes depend on data, not for those that follow."""
    return has_unknown_size(node) and not any(map(has_unknown_size, node.all_input_nodes))


def is_foreign(node: fx.Node) -> bool:
    """Return True for an operator that another package defines, such as a quantized product."""
    return isinstance(node.target, OpOverload) and node.target.namespace not in KNOWN


def has_unknown_size(node: fx.Node) -> bool:
    """Return True if the node is a size that depends on data, or has one."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) and size.node.hint is None for size in sizes)


def observed(module: nn.Module, kind: type, inputs: Mapping[str, object]) -> dict[nn.Module, Call]:
    """Run the module, and return the last call of each submodule of this class."""
    calls: dict[nn.Module, Call] = {}

    def note(
        part: nn.Module, args: tuple[object, ...], named: dict[str, object], result: object
    ) -> None:
        calls[part] = Call(*pytree.tree_map(copy_of, (args, named, result)))

    parts = [part for part in module.modules() if type(part) is kind]
    hooks = [part.register_forward_hook(note, with_kwargs=True) for part in parts]
    try:
        with torch.no_grad():
            module(**copy_tree(dict(inputs)))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def whole_of(part: nn.Module, call: Call) -> Whole | None:
    """Return a module as it may stay whole, or None if its result mixes tokens."""
    values, spec = pytree.tree_flatten((call.args, call.named))
    tokens = [v for v in values if isinstance(v, Tensor)]
    constants = {i: v for i, v in enumerate(values) if not isinstance(v, Tensor)}
    result = call.result
    plain = (type(None), bool, int, float, str)
    if not tokens or any(type(v) not in plain for v in constants.values()):
        return None
    shape = tokens[0].shape[:-1]
    like = [*tokens, result] if isinstance(result, Tensor) else []
    if not like or len(shape) < 1 or any(v.shape[:-1] != shape or v.shape[-1] < 2 for v in like):
        return None
    dtype = tokens[0].dtype
    if not dtype.is_floating_point or result.dtype != dtype:
        return None
    widths = [v.shape[-1] for v in tokens]
    found = Whole(part, spec, constants, tokens[0].dim(), widths, result.shape[-1], 0)
    rows, wanted = several([v.flatten(0, -2) for v in tokens]), result.flatten(0, -2)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        if len(rows[0]) > len(wanted):
            wanted = found(*rows)
        some = torch.arange(len(rows[0]) - 1, -1, -2, device=result.device)
        counted = counter.get_total_flops()
        again = found(*(row.index_select(0, some) for row in rows))
    if not same_values(again, wanted.index_select(0, some)):
        return None
    found.flops = (counter.get_total_flops() - counted) // len(some)
    return found


def several(rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows; a few are followed by others, so that it shows if a result mixes them."""
    if len(rows[0]) >= FEW:
        return list(rows)
    return [torch.cat([row * (1 - 0.1 * n) for n in range(FEW)]) for row in rows]
