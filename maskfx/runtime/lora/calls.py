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
from dataclasses import dataclass
from operator import itemgetter
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
NORMS = {F.layer_norm: (2, 3), F.group_norm: (2, 3), F.rms_norm: (2, None)}
WEIGHT, BIAS = 1, 2  # indices of the arguments of layers
GROUPS = 6  # of a convolution

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
    if not any(own is not None and own.layers for own in sets.values()):
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
        return self._with_terms(args[0], out, places, packed_term)

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
        layer = LayerCall.of(func, args, kwargs)
        if layer is not None and layer.takes(used) and self._serves(layer):
            return self._layer(layer)
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

    def _serves(self, layer: LayerCall) -> bool:
        """Return True unless a low-rank term can't be added to the layer's result."""
        terms = [u for *_, u in self.updates.get(id(layer.weight), ()) if u.terms]
        return not terms or layer.term is not None

    def _layer(self, layer: LayerCall) -> Tensor:
        """Return a layer's result with the members' updates.

        Members with full differences are computed with parameters of their own.
        """
        weights, biases = (self.updates.get(id(own), ()) for own in (layer.weight, layer.bias))
        changed: dict[tuple[int, int], list[Tensor | None]] = {}
        for index, places in enumerate((weights, biases)):
            for start, stop, update in places:
                if update.differences:
                    pair = changed.setdefault((start, stop), [None, None])
                    pair[index] = update.with_differences()
        low_rank = [place for place in weights if place[2].terms]
        out = self._changed(layer, changed)
        in_place = out.is_contiguous() and out.dtype == layer.rows.dtype
        if low_rank and layer.term is linear_term and in_place:
            self._add_linear(layer.rows, out, low_rank)
        elif low_rank:
            assert layer.term is not None, "checked before"
            out = self._with_terms(layer.rows, out, low_rank, layer.term)
        return out[0] if layer.single else out

    def _add_linear(self, rows: Tensor, out: Tensor, places: Sequence[Place]) -> None:
        """Add the members' terms to a linear layer's result, which nothing else has."""
        each = self._each(rows) if self.several else 0
        for start, stop, update in places:
            own, into = rows, out
            if self.several:
                own, into = (value[start * each : stop * each] for value in (rows, out))
            down, up = update.matrices(own)
            narrow = own.reshape(-1, own.shape[-1]) @ down
            into.view(-1, into.shape[-1]).addmm_(narrow, up)

    def _changed(
        self, layer: LayerCall, changed: Mapping[tuple[int, int], Sequence[Tensor | None]]
    ) -> Tensor:
        """Return a layer's result, of these members with parameters of their own."""
        if not changed:
            return layer.run(layer.rows)
        if not self.several:
            [pair] = changed.values()
            return layer.run(layer.rows, *pair)
        each, parts, done = self._each(layer.rows), list[Tensor](), 0
        for (start, stop), pair in (*sorted(changed.items(), key=itemgetter(0)), (self._end, ())):
            if done < start:
                parts.append(layer.run(layer.rows[done * each : start * each]))
            if start < stop:
                parts.append(layer.run(layer.rows[start * each : stop * each], *pair))
            done = stop
        out = torch.cat(parts)
        if out.shape[0] != layer.rows.shape[0]:
            raise NotSeparable(f"{layer.func} changes the number of rows")
        return out

    @property
    def _end(self) -> tuple[int, int]:
        return self.total, self.total

    def _each(self, rows: Tensor) -> int:
        """Return the number of rows of each batch element."""
        if not rows.dim() or rows.shape[0] % self.total:
            raise NotSeparable(f"a layer gets {rows.shape[0]} rows of {self.total} batch elements")
        return rows.shape[0] // self.total

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
        each = self._each(rows)
        out = out.clone()
        for start, stop, update in places:
            own = slice(start * each, stop * each)
            out[own] += term(rows[own], update)
        return out


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A call of a linear layer, a convolution or a normalisation, with the batch outermost.

    `run` computes other rows, with another weight or bias if they are given. `term` returns the
    low-rank term of rows by an update; None where none can be added. `single` is True for a picture
    without a batch, whose rows here have one.
    """

    func: Callable[..., Any]
    rows: Tensor
    weight: object
    bias: object
    run: Callable[..., Tensor]
    term: Callable[[Tensor, LayerUpdate], Tensor] | None
    single: bool = False

    @classmethod
    def of(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> LayerCall | None:
        """Return the call; None for other functions."""
        convolution = func in CONVOLUTIONS
        if not args or not (func in LINEAR or convolution or func in NORMS):
            return None
        at: tuple[int, int | None] = NORMS.get(func, (WEIGHT, BIAS))
        given = {"weight": at[0]} if at[1] is None else {"weight": at[0], "bias": at[1]}
        found = {name: argument(args, kwargs, place, name, None) for name, place in given.items()}
        weight, bias, rows = found["weight"], found.get("bias"), args[0]
        single = convolution and rows.dim() != weight.dim()

        def run(own: Tensor, *others: Tensor | None) -> Tensor:
            values, named = [own, *args[1:]], dict(kwargs)
            for (name, place), other in zip(given.items(), others, strict=False):
                if other is not None and place < len(values):
                    values[place] = other
                elif other is not None:
                    named[name] = other
            result: Tensor = func(*values, **named)
            return result

        def convolved(own: Tensor, update: LayerUpdate) -> Tensor:
            named = {k: v for k, v in kwargs.items() if k not in ("weight", "bias")}
            down = update.down((), own).view(update.rank, *weight.shape[1:])
            narrow = func(own, down, None, *args[BIAS + 1 :], **named)
            wide: Tensor = torch.tensordot(narrow, update.up(own).t(), dims=([1], [1]))
            return wide.movedim(-1, 1)

        term: Callable[[Tensor, LayerUpdate], Tensor] | None = None
        if func in LINEAR:
            term = linear_term
        elif convolution and argument(args, kwargs, GROUPS, "groups", 1) == 1:
            term = convolved
        return cls(func, rows[None] if single else rows, weight, bias, run, term, single)

    def takes(self, used: Sequence[Tensor]) -> bool:
        """Return True if changed parameters are this layer's weight and bias alone."""
        return all(value is self.weight or value is self.bias for value in used)


def packed_term(rows: Tensor, update: LayerUpdate) -> Tensor:
    """Return what updates add to the result of a layer whose weight is packed."""
    found = linear_term(rows, update) if update.terms else None
    if update.differences:
        other = rows @ update.difference(rows).t()
        found = other if found is None else found + other
    assert found is not None, "an update changes something"
    return found


def linear_term(rows: Tensor, update: LayerUpdate) -> Tensor:
    down, up = update.matrices(rows)
    return rows @ down @ up


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
