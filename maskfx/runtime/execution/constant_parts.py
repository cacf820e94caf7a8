"""ConstantParts: results of a module's parts that are equal in all steps of a request, kept.

A part of a module may read an argument and nothing else: the layers that embed a ControlNet's
picture, a projection of the text. As long as a request's calls bring the same tensor, the part's
result is that of the call before. No names of parts or of arguments are known here. Programs need
none of this: what belongs to the request is in their side graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from maskfx.ir.modules.lent_methods import lent
from maskfx.ir.modules.part_hooks import acts
from maskfx.ir.values import same_values

LARGEST = 64 << 20  # bytes of a result that is kept
MOST = 256 << 20  # bytes of all results; further ones are computed in each step

FIXED = (
    *(int, float, complex, str, bytes, type(None), type),
    *(FunctionType, BuiltinFunctionType, torch.dtype, torch.device),
)
# attributes of every module, for its parts, weights and hooks, and the `forward` of this file
MACHINERY = frozenset({*vars(nn.Module()), "forward"}) - {"training"}

Origins = Mapping[int, Sequence[Tensor]]  # the requests' tensors of an argument, by its id


@dataclass(frozen=True, eq=False)
class KeptResult:
    """A part's result for one request.

    Args:
        value: The result.
        version: Its version: a module that writes into it makes it useless.
        state: State of the part's weights and attributes.
    """

    value: Tensor
    version: int
    state: Hashable


class ConstantParts:
    """Keeps results of parts for as long as the tensors exist that they were computed from.

    A part is found where it gets an argument of the module's call and no other tensor. Its result
    is kept from the second call on that brings the tensor. Before it replaces a computation, both
    are compared once for each part; a part that differs isn't kept any more.

    Args:
        module: The module. Its parts have another `forward` while a call runs in this thread.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.reused = 0  # results that weren't computed again
        self._found: dict[Hashable, list[nn.Module]] = {}  # by the structure of the arguments
        self._proved: set[int] = set()
        self._refused: set[int] = set()
        self._kept: Any = WeakIdKeyDictionary()  # argument -> results by the part's id

    @property
    def nbytes(self) -> int:
        """The bytes of all kept results."""
        return sum(one.value.nbytes for held in self._kept.values() for one in held.values())

    def forget(self) -> None:
        """Drop all that is known; the module may compute something else now."""
        self._found.clear()
        self._proved.clear()
        self._refused.clear()
        self._kept = WeakIdKeyDictionary()

    @contextmanager
    def over(
        self, kind: Hashable, origins: Origins, adapted: Collection[int] = ()
    ) -> Iterator[None]:
        """Replace computations of parts within the context, in which the module is called once.

        Args:
            kind: Equal for calls whose parts get the same arguments.
            origins: The tensors of each request that the arguments are joined from, along the
                batch, by the arguments' ids.
            adapted: Ids of the weights that adapters change: parts with them are computed.
        """
        if self.module.training or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            yield
        elif kind not in self._found:
            with self._finding(kind, origins):
                yield
        else:
            seen = {place for place, own in origins.items() if all(t in self._kept for t in own)}
            for tensor in chain.from_iterable(origins.values()):
                self._kept.setdefault(tensor, {})
            parts = self._found[kind] if seen else []
            with self._replaced(parts, {place: origins[place] for place in seen}, adapted):
                yield

    @contextmanager
    def _finding(self, kind: Hashable, origins: Origins) -> Iterator[None]:
        found: dict[int, nn.Module] = {}
        thread = threading.get_ident()
        inside = {id(part) for part in self.module.modules()}

        def note(part: nn.Module, args: Any) -> None:
            here = threading.get_ident() == thread and id(part) in inside
            one = len(args) == 1 and isinstance(args[0], Tensor)
            if here and one and id(args[0]) in origins and fits(part):
                found.setdefault(id(part), part)

        hook = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()
        inner = {id(p) for one in found.values() for p in one.modules() if p is not one}
        self._found[kind] = [part for place, part in found.items() if place not in inner]

    @contextmanager
    def _replaced(
        self, parts: Sequence[nn.Module], origins: Origins, adapted: Collection[int]
    ) -> Iterator[None]:
        thread = threading.get_ident()
        with ExitStack() as stack:
            for part in parts:
                changed = adapted and any(id(weight) in adapted for weight in part.parameters())
                if id(part) not in self._refused and not changed and "forward" not in vars(part):
                    run = partial(self._run, part, part.forward, thread, origins)
                    stack.enter_context(lent(part, run))
            yield

    def _run(
        self,
        part: nn.Module,
        forward: Callable[..., Any],
        thread: int,
        origins: Origins,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return a part's result: the kept one, or a computed one, which is kept."""
        sources = origins.get(id(args[0])) if len(args) == 1 and not kwargs else None
        if sources is None or threading.get_ident() != thread or id(part) in self._refused:
            return forward(*args, **kwargs)
        state = state_of(part) if fits(part) else None
        if state is None:
            return forward(*args)
        kept = [self._find(part, source, state) for source in sources]
        if any(one is None for one in kept):
            result = forward(*args)
            self._keep(part, args[0], sources, result, state)
            return result
        found = kept[0] if len(kept) == 1 else torch.cat([one for one in kept if one is not None])
        if id(part) not in self._proved:
            result = forward(*args)
            proved = self._proved if same_values([found], [result]) else self._refused
            proved.add(id(part))
            return result
        self.reused += 1
        return found

    def _find(self, part: nn.Module, source: Tensor, state: Hashable) -> Tensor | None:
        known: KeptResult | None = self._kept[source].get((id(part), source._version))
        if known is None or known.state != state:
            return None
        if known.value._version != known.version:
            self._refused.add(id(part))
            return None
        return known.value

    def _keep(
        self,
        part: nn.Module,
        argument: Tensor,
        sources: Sequence[Tensor],
        result: object,
        state: Hashable,
    ) -> None:
        total = argument.shape[0] if argument.dim() else 0
        if (
            not isinstance(result, Tensor)
            or result.nbytes > LARGEST
            or result.untyped_storage().data_ptr() == argument.untyped_storage().data_ptr()
            or len(sources) > 1
            and (not total or not result.dim() or result.shape[0] % total)
        ):
            self._refused.add(id(part))
            return
        parts: Sequence[Tensor] = [result]
        if len(sources) > 1:
            each = result.shape[0] // total
            sizes = [source.shape[0] * each for source in sources]
            parts = [own.clone() for own in result.split(sizes)]
        if self.nbytes + result.nbytes > MOST:
            return
        for source, own in zip(sources, parts, strict=True):
            kept = KeptResult(own, own._version, state)
            self._kept[source] = {
                **{k: v for k, v in self._kept[source].items() if k[1] == source._version},
                (id(part), source._version): kept,
            }


def fits(part: nn.Module) -> bool:
    """Return True for a part whose result may be kept: with weights, and without hooks."""
    if next(part.parameters(), None) is None:
        return False
    return not any(
        one._forward_hooks or one._forward_pre_hooks or acts(one) or one._compiled_call_impl
        for one in part.modules()
    )


def state_of(part: nn.Module) -> Hashable | None:
    """Return what changes whenever a part's weights or attributes do; None if it isn't known.

    Attributes count by value: numbers, texts, functions and containers of these. An object of any
    other kind may change without notice.
    """
    weights = [*part.parameters(), *part.buffers()]
    tensors = tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights)
    try:
        return tensors, tuple(map(attributes_of, part.modules()))
    except TypeError:
        return None


def attributes_of(layer: nn.Module) -> Hashable:
    own = {name: value for name, value in vars(layer).items() if name not in MACHINERY}
    return id(layer), fixed(own)


def fixed(value: object) -> Hashable:
    """Return a value that equals another one only if both are made alike; TypeError if unknown."""
    if isinstance(value, Mapping):
        return dict, *((key, fixed(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return type(value), *map(fixed, value)
    if isinstance(value, set | frozenset):
        return set, frozenset(map(fixed, value))
    if isinstance(value, FIXED):
        return type(value), value
    raise TypeError(f"{type(value).__name__} may change without notice")
