"""Calls of a module, or of its captured graphs, with the adapters of the members of the call.

Functions are intercepted in the calling thread while a call runs, so other threads that use the
module aren't affected, and the module isn't changed: no hooks of its own, and nothing to capture
again. Layers that unpack their weights themselves are found by a hook of all modules, while a call
with updates of such layers runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from maskfx.runtime.lora.layers import AdapterSet, LayerUpdate

aten = torch.ops.aten
LINEAR = {F.linear, aten.linear.default}
CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
CONVOLUTIONS |= {aten.conv1d.default, aten.conv2d.default, aten.conv3d.default}
GROUPS = 6  # index of a convolution's argument
BIAS = 2

Place = tuple[int, int, LayerUpdate]  # the batch elements that an update is for: start, stop
Members = Sequence[tuple[int, AdapterSet | None]]  # of each member: batch elements, adapters


class NotSeparable(Exception):
    """Members with different adapters can't share this call: it mixes them, or a weight is read.

    Each of them can run alone.
    """


def adapted(members: Members) -> AbstractContextManager[object]:
    """Return a context in which layers have the updates of the members of one call.

    The batch elements of the members are next to each other, in this order. With one member, or
    the same adapters for all, any use of a weight is right. Else each layer must keep the batch
    outermost, or `NotSeparable` is raised.
    """
    sets = {None if own is None else own.key: own for _, own in members}
    if not any(sets.values()):
        return nullcontext()
    if len(sets) == 1:
        members = [(1, members[0][1])]
    return AdaptedCalls(members)


class AdaptedCalls(TorchFunctionMode):
    """Adds low-rank terms to the layers that a call uses."""

    def __init__(self, members: Members) -> None:
        super().__init__()
        self.total = sum(count for count, _ in members)
        self.several = len(members) > 1
        self.updates: dict[int, list[Place]] = {}  # by the weight that functions get
        self.packed: dict[int, list[Place]] = {}  # by the layer, whose weight they don't get
        start = 0
        for count, own in members:
            for update in () if own is None else own.layers:
                place = start, start + count, update
                if update.packed is None:
                    self.updates.setdefault(id(update.weight), []).append(place)
                else:
                    self.packed.setdefault(id(update.packed), []).append(place)
            start += count
        self._thread = threading.get_ident()
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> AdaptedCalls:
        super().__enter__()  # type: ignore[no-untyped-call]
        if self.packed:  # of all modules, so that none is changed
            self._hook = register_module_forward_hook(self._after_layer)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._hook is not None:
            self._hook.remove()
        super().__exit__(*failure)  # type: ignore[no-untyped-call]

    def _after_layer(self, layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Any:
        """Return a packed layer's result with the members' terms; None for other modules."""
        places = self.packed.get(id(layer))
        if places is None or threading.get_ident() != self._thread:
            return None
        return self._with_terms(args[0], out, places, linear_term)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        used = [v for v in tensors_in((*args, *kwargs.values())) if id(v) in self.updates]
        if not used:
            return func(*args, **kwargs)
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if len(used) == 1 and used[0] is weight and len(args) > 0:
            if func in LINEAR:
                return self._linear(func, args, kwargs)
            if func in CONVOLUTIONS and argument(args, kwargs, GROUPS, "groups", 1) == 1:
                return self._convolution(func, args, kwargs)
        found = func(*args, **kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(found)):
            return found  # a shape, a dtype
        if self.several:
            raise NotSeparable(f"{func} reads a weight that adapters of several members change")
        args, kwargs = pytree.tree_map(self._updated, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    def _updated(self, value: object) -> object:
        found = self.updates.get(id(value))
        return value if found is None else found[0][2].whole()

    def _linear(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        rows: Tensor = args[0]
        out: Tensor = func(*args, **kwargs)

        places = self.updates[id(argument(args, kwargs, 1, "weight", None))]
        return self._with_terms(rows, out, places, linear_term)

    def _convolution(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, object]
    ) -> Tensor:
        weight = argument(args, kwargs, 1, "weight", None)
        if args[0].dim() != weight.dim():
            args = (args[0][None], *args[1:])
            alone: Tensor = self._convolution(func, args, kwargs)[0]
            return alone
        rest = args[BIAS + 1 :]
        named = {k: v for k, v in kwargs.items() if k not in ("weight", "bias")}

        def term(own: Tensor, update: LayerUpdate) -> Tensor:
            down = update.down((), own).view(update.rank, *weight.shape[1:])
            up = update.up(own).t()
            narrow = func(own, down, None, *rest, **named)
            wide: Tensor = torch.tensordot(narrow, up, dims=([1], [1]))
            return wide.movedim(-1, 1)

        return self._with_terms(args[0], func(*args, **kwargs), self.updates[id(weight)], term)

    def _with_terms(
        self,
        rows: Tensor,
        out: Tensor,
        places: Sequence[Place],
        term: Callable[[Tensor, LayerUpdate], Tensor],
    ) -> Tensor:
        """Add each member's term to its part of a layer's result."""
        if not self.several:
            return out + term(rows, places[0][2])
        if not rows.dim() or rows.shape[0] % self.total:
            raise NotSeparable(f"a layer gets {rows.shape[0]} rows of {self.total} batch elements")
        each = rows.shape[0] // self.total
        out = out.clone()
        for start, stop, update in places:
            own = slice(start * each, stop * each)
            out[own] += term(rows[own], update)
        return out


def linear_term(rows: Tensor, update: LayerUpdate) -> Tensor:
    return rows @ update.down((), rows).t() @ update.up(rows)


def argument(
    args: Sequence[object], kwargs: Mapping[str, object], index: int, name: str, default: object
) -> Any:
    return args[index] if index < len(args) else kwargs.get(name, default)


def tensors_in(values: Sequence[object]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also those in lists of tensors."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))
