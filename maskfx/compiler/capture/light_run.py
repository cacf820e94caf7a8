"""A light run: a module runs without its large products with parameters, and what follows of them.

In their place stand zeros that take no memory. Such a run takes a small part of the time of a full
one. Python reads the same in it, unless it reads what follows of a product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from maskfx.ir.values import copy_of

aten = torch.ops.aten
WEIGHTED = {aten.convolution.default: (0, 1), aten.addmm.default: (1, 2), aten.mm.default: (0, 1)}
SMALL = 1 << 20  # products of fewer multiplications than this are computed
CONTAINERS = (dict, list, set)


class LightProducts(TorchDispatchMode):
    """Replaces large products with parameters, and what is computed of them, by zeros."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {storage_of(p) for p in module.parameters()}
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view and (self._is_large(func, args) or self._follows(args, kwargs)):
            with contextlib.suppress(NotImplementedError, RuntimeError):
                return self._zeros_of(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_large(self, func: Any, args: tuple[Any, ...]) -> bool:
        if func not in WEIGHTED:
            return False
        given, weight = (args[i] for i in WEIGHTED[func])
        # at least: a convolution has as many products with each weight as its input has sites
        features = weight.shape[1 if func is aten.convolution.default else 0]
        multiplied = given.numel() // max(1, features) * weight.numel()
        return storage_of(weight) in self._weights and multiplied >= SMALL

    def _follows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if an operator reads zeros that stand for something else."""
        stored = {storage_of(zero) for zero in self._zeros.values()}
        values = pytree.tree_leaves((args, kwargs))
        return any(isinstance(v, Tensor) and storage_of(v) in stored for v in values)

    def _zeros_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return zeros in the shape of an operator's results.

        An operator that writes to one of its arguments runs instead, unless that is zeros already.
        """
        if func._schema.is_mutable:
            if self._follows(args[:1], {}):
                return args[0]
            raise NotImplementedError
        device = next(v.device for v in pytree.tree_leaves(args) if isinstance(v, Tensor))

        def shape_only(value: Any) -> Any:
            return value.to("meta") if isinstance(value, Tensor) else value

        def zeros(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            key = value.dtype, device
            if key not in self._zeros:
                self._zeros[key] = torch.zeros((), dtype=value.dtype, device=device)
            return self._zeros[key].expand(value.shape)

        shapes, options = pytree.tree_map(shape_only, (args, kwargs))
        return pytree.tree_map(zeros, func(*shapes, **options))


class Convolved(LightProducts):
    """Counts what convolutions wider than one site read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.elements: int = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is aten.convolution.default and max(args[1].shape[2:], default=1) > 1:
            self.elements += args[0].numel()
        return super().__torch_dispatch__(func, types, args, kwargs)


def convolved_elements(module: nn.Module, inputs: dict[str, Any]) -> int:
    """Return how many numbers convolutions wider than one site read in a call.

    A recording of the call keeps about as many. 0 if a light run fails.
    """
    if not may_run_lightly(module):
        return 0
    counter = Convolved(module)
    try:
        with torch.no_grad(), keeping_nothing(module), counter:
            module(**pytree.tree_map(copy_of, inputs))
    except Exception:  # whatever it is, a full run raises it too, or doesn't
        return 0
    return counter.elements


def may_run_lightly(module: nn.Module) -> bool:
    """Return True if no hooks run before or after the parts of a module."""
    return not any(
        part._forward_hooks or part._forward_pre_hooks or hasattr(part, "_hf_hook")
        for part in module.modules()
    )


def storage_of(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


@contextlib.contextmanager
def keeping_nothing(module: nn.Module) -> Iterator[list[str]]:
    """Take from a module and its parts the tensors that they keep of a run.

    These are in attributes, or in dicts, lists and sets that are attributes. The list then names
    those attributes, and the buffers that were written.
    """
    parts = list(module.modules())
    before = [{name: held(value) for name, value in vars(part).items()} for part in parts]
    buffers = {name: (value, value._version) for name, value in module.named_buffers()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        for part, old in zip(parts, before, strict=True):
            changed.extend(restore(vars(part), old))
        changed.extend(n for n, (value, version) in buffers.items() if value._version != version)


Held = tuple[Any, Any]  # a value, and a copy of a container


def held(value: Any) -> Held:
    return value, value.copy() if isinstance(value, CONTAINERS) else None


def restore(now: dict[str, Any], old: dict[str, Held]) -> list[str]:
    """Undo changes of attributes that brought tensors in; return their names."""
    changed = []
    for name, value in list(now.items()):
        before, contents = old.get(name, (None, None))
        if value is not before:
            known: set[int] = set()
        elif contents is not None:
            known = {id(one) for one in contents_of(contents)}
        else:
            continue
        if not any(isinstance(one, Tensor) and id(one) not in known for one in contents_of(value)):
            continue
        changed.append(name)
        if name not in old:
            del now[name]
            continue
        now[name] = before
        if contents is not None:
            before.clear()
            before.extend(contents) if isinstance(before, list) else before.update(contents)
    return changed


def contents_of(value: Any) -> list[Any]:
    """Return the objects in a container, also in tuples there, or the value itself."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (*CONTAINERS, tuple)):
        return [one for item in value for one in contents_of(item)]
    return [value]
