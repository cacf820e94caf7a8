"""Deferred results: tensors of known shape whose values are computed later.

A denoiser call in a pipeline returns them immediately. The first use that needs values settles all
calls pending at that time, so that several (both branches of guidance, a ControlNet and the
denoiser) run in one step. Slices, sums and similar operations on a deferred tensor are deferred
too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch.utils import _pytree as pytree

# Operations of pipelines between two calls of a step: cheap, and without side effects.
CHEAP = {"slice", "select", "split", "split_with_sizes", "unbind", "cat", "stack", "add", "sub"}
CHEAP |= {"mul", "div", "neg", "view", "reshape", "squeeze", "unsqueeze", "expand", "alias"}
CHEAP |= {"detach", "zeros_like", "permute", "transpose"}


PLAIN = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})


class ValueSource(Protocol):
    """The source of a deferred tensor's values; `values` is None until the ledger is settled."""

    values: Sequence[Any] | None


@dataclass
class DeferredOperation:
    """A cheap operation on deferred tensors."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    values: Sequence[object] | None = None

    def ready(self) -> bool:
        return all(is_ready(leaf) for leaf in pytree.tree_leaves((self.args, self.kwargs)))

    def compute(self) -> None:
        if self.values is None:
            args, kwargs = force_all((self.args, self.kwargs))
            self.values = pytree.tree_leaves(self.function(*args, **kwargs))


def dispatch_keys() -> tuple[DispatchKeySet, DispatchKeySet]:
    """Return what PyTorch includes and leaves out now when it dispatches an operation."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@dataclass
class Ledger:
    """Pending calls of one run, and operations on their results, in order."""

    resolve: Callable[[list[Any]], None]
    wait: Callable[[ValueSource], None] = lambda source: None  # for a call that runs elsewhere
    calls: list[object] = field(default_factory=list)
    derived: list[DeferredOperation] = field(default_factory=list)
    shapes: dict[Hashable, Any] = field(default_factory=dict)  # of operations' results
    _keys: tuple[DispatchKeySet, DispatchKeySet] = field(default_factory=dispatch_keys)

    def settle(self) -> None:
        """Run all pending calls, then the operations on their results.

        Results that don't come with this step are left, and so are operations on them. The calls
        run as outside of the operation that needs their results: within it, PyTorch leaves out
        what an export is traced by.
        """
        calls, self.calls = self.calls, []
        derived, self.derived = self.derived, []
        if calls:
            with torch._C._ForceDispatchKeyGuard(*self._keys):
                self.resolve(calls)
        for operation in derived:
            if operation.ready():
                operation.compute()


class Deferred(Tensor):
    """A tensor whose values are computed when they are first needed."""

    like: Tensor
    ledger: Ledger
    source: ValueSource
    place: int

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, *_: object) -> Deferred:
        made: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        return made

    def __init__(
        self, like: Tensor, device: torch.device, ledger: Ledger, source: ValueSource, place: int
    ) -> None:
        self.like, self.ledger, self.source, self.place = like, ledger, source, place
        self.used = False  # whether a call or an operation holds it

    @property
    def pending(self) -> bool:
        return self.source.values is None

    def force(self) -> Tensor:
        """Return the real tensor, settling the ledger if necessary."""
        if not is_ready(self):
            self.ledger.settle()
            for source in pending_sources(self):
                self.ledger.wait(source)
        if isinstance(self.source, DeferredOperation):
            self.source.compute()
        assert self.source.values is not None, "a settled call has values"
        value: Tensor = self.source.values[self.place]
        return value

    def numpy(self, *, force: bool = False) -> Any:
        return self.force().numpy(force=force)

    def tolist(self) -> Any:
        return self.force().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Deferred({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        pending = pending_in((args, kwargs))
        if not pending or not is_cheap(func):
            if pending and (plain := changes_only(func, args)) is not None:
                return change(args[0], plain, args, kwargs)
            args, kwargs = force_all((args, kwargs))
            return func(*args, **kwargs)
        first = pending[0]
        return derive(func, args, kwargs, first.ledger, first.device)


def is_pending(value: object) -> TypeGuard[Deferred]:
    return isinstance(value, Deferred) and value.pending


def is_ready(value: object) -> bool:
    """Return True if the value is available without running another call."""
    if not is_pending(value):
        return True
    return isinstance(value.source, DeferredOperation) and value.source.ready()


def pending_in(tree: object) -> list[Deferred]:
    """Return the pending values in a structure, common ones traversed without pytree."""
    if type(tree) in PLAIN:
        return []
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in pending_in(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in pending_in(value)]
    return [leaf for leaf in pytree.tree_leaves(tree) if is_pending(leaf)]


def pending_sources(tree: object) -> list[ValueSource]:
    """Return the calls whose results the pending values in a structure are computed from."""
    found: dict[int, ValueSource] = {}
    ahead = pending_in(tree)
    while ahead:
        source = ahead.pop().source
        if isinstance(source, DeferredOperation):
            ahead += pending_in((source.args, source.kwargs))
        else:
            found[id(source)] = source
    return list(found.values())


def is_cheap(func: torch._ops.OpOverload) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return func.overloadpacket.__name__.lstrip("_") in CHEAP


def changes_only(func: torch._ops.OpOverload, args: Sequence[object]) -> Any:
    """Return the operation whose result an in-place operation writes; None if it must run now.

    It must if another value may share the memory that it writes, or a call or an operation holds
    the tensor.
    """
    target: object = args[0] if args else None
    if not is_pending(target) or target.used:
        return None
    source = target.source
    if isinstance(source, DeferredOperation) and getattr(source.function, "is_view", True):
        return None
    name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
    if not name.endswith("_") or name.strip("_") not in CHEAP:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, func._overloadname, None)


def change(
    target: Deferred,
    func: torch._ops.OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Deferred:
    """Give a deferred tensor the result of an operation on its present value."""
    before = Deferred(target.like, target.device, target.ledger, target.source, target.place)
    made = derive(func, (before, *args[1:]), kwargs, target.ledger, target.device)
    if made.shape != target.shape or made.dtype != target.dtype:
        raise RuntimeError(f"{func} can't write {tuple(made.shape)} to {tuple(target.shape)}")
    target.source, target.place = made.source, made.place
    return target


def derive(
    func: torch._ops.OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    ledger: Ledger,
    device: torch.device,
) -> Any:
    """Run an operation on shapes now, and on values when the ledger is settled."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    key = (func, spec, *map(form_of, leaves))
    shapes = ledger.shapes.get(key)
    if shapes is None:
        shapes = ledger.shapes[key] = shapes_of(func, args, kwargs)
    hold(leaves)
    operation = DeferredOperation(func, args, kwargs)
    ledger.derived.append(operation)
    return deferred_like(shapes, device, ledger, operation)


def form_of(value: object) -> Hashable:
    """Return what the shape of an operation's result may depend on in one of its arguments."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return type(value), value


def shapes_of(
    func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Run an operation on shapes."""
    shaped_args, shaped_kwargs = pytree.tree_map(shape_of, (args, kwargs))
    if "device" in shaped_kwargs:
        shaped_kwargs["device"] = torch.device("meta")
    return func(*shaped_args, **shaped_kwargs)


def hold(tree: object) -> None:
    """Mark the deferred tensors in a structure: something reads their present value later."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Deferred):
            leaf.used = True


def deferred_like(shapes: object, device: torch.device, ledger: Ledger, source: ValueSource) -> Any:
    """Return deferred tensors in the structure of `shapes`."""
    leaves, spec = pytree.tree_flatten(shapes)
    made = [
        Deferred(leaf, device, ledger, source, i) if isinstance(leaf, Tensor) else leaf
        for i, leaf in enumerate(leaves)
    ]
    return pytree.tree_unflatten(made, spec)


def shape_of(value: object) -> object:
    if isinstance(value, Deferred):
        return value.like
    return value.to("meta") if isinstance(value, Tensor) else value


def force_all(tree: Any) -> Any:
    """Replace deferred tensors by real ones, anywhere in a structure.

    Every call of a step passes through here, so common structures are traversed without pytree.
    """
    kind = type(tree)
    if kind in PLAIN:
        return tree
    if kind is Deferred:
        return tree.force()
    if kind is dict:
        return {name: force_all(value) for name, value in tree.items()}
    if kind is list or kind is tuple:
        return kind(map(force_all, tree))
    return pytree.tree_map(lambda v: v.force() if isinstance(v, Deferred) else v, tree)
