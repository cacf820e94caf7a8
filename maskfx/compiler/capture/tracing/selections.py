"""Boolean selection under export: parts of a text that are put together again keep their length.

`x[mask]` has a length that depends on data, which the rest of a graph can't be traced with. Where
`cat` joins all that some masks select and all that they leave out, the result is a reordering: its
length is fixed, and its order follows from the masks. So a selection waits until it is used, and
only another use than such a `cat` selects.

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from maskfx.compiler.capture.tracing.routed_rows import RoutedRows, of_each_row
from maskfx.compiler.capture.tracing.waiting_values import CATS, WaitingTensor, value_of

NEGATIONS = (
    *(torch.logical_not, torch.bitwise_not, Tensor.logical_not, Tensor.bitwise_not),
    Tensor.__invert__,
)


class Selection(WaitingTensor):
    """What a mask selects of the first axis of a tensor; selected at its first use.

    Args:
        source: the tensor.
        mask: the boolean mask over its first axis.
        select: returns what the mask selects.
        negated: by id, masks and what they are the negation of.
        origin: the tensor whose part it stands for; another than the source if it holds zeros.
    """

    def __init__(
        self,
        source: Tensor,
        mask: Tensor,
        select: Callable[[Tensor, Tensor], Tensor],
        negated: dict[int, tuple[Tensor, Tensor]],
        origin: Tensor | None = None,
    ) -> None:
        self.source, self.mask, self.select, self.negated = source, mask, select, negated
        self.origin = source if origin is None else origin

    def zeros(self) -> Selection:
        """Return as many zeros."""
        blank = torch.zeros_like(self.source)
        return Selection(blank, self.mask, self.select, self.negated, self.origin)

    def value(self) -> Tensor:
        return self.select(self.source, self.mask)

    @staticmethod
    def without(
        func: Callable[..., object], args: Sequence[Any], named: dict[str, Any]
    ) -> object | None:
        if func is torch.zeros_like and not named:
            zeros: Selection = args[0].zeros()
            return zeros
        if func in CATS:
            parts, dim = args[0], args[1] if len(args) > 1 else named.get("dim", 0)
            return reordered(list(parts)) if dim == 0 else None
        return of_each_row(func, args, named)

    def as_rows(self) -> RoutedRows | None:
        same = self.origin is self.source
        return RoutedRows(self.source, self.mask, self.mask) if same else None


def select(source: Tensor, mask: Tensor) -> Tensor:
    """Return what a mask selects, at once."""
    with torch._C.DisableTorchFunction():
        found: Tensor = Tensor.__getitem__(source, mask)
        return found


def reordered(parts: list[Any]) -> Tensor | None:
    """Return the parts as a reordering of what they were selected from, or None if they aren't."""
    sources: list[Tensor] = []
    origins: list[Tensor] = []
    keys: list[Any] = []
    for number, part in enumerate(parts):
        if not isinstance(part, Selection):
            sources.append(part)
            keys.append(number)
            continue
        if any(part.origin is origin for origin in origins):
            continue
        mates = [
            i for i, p in enumerate(parts) if isinstance(p, Selection) and p.origin is part.origin
        ]
        if len(mates) != 2 or not opposite(part, parts[mates[1]]):
            return None
        origins.append(part.origin)
        sources.append(united(part, parts[mates[1]]))
        keys.append(torch.where(part.mask, mates[0], mates[1]))
    if any(source.dim() != sources[0].dim() for source in sources):
        return None
    spelled = [
        key if isinstance(key, Tensor) else source.new_full(source.shape[:1], key, dtype=torch.long)
        for key, source in zip(keys, sources, strict=True)
    ]
    order = torch.argsort(torch.cat(spelled), stable=True)
    return torch.index_select(torch.cat(sources), 0, order)


def united(one: Selection, other: Selection) -> Tensor:
    """Return a tensor of which both are parts."""
    if one.source is other.source:
        return one.source
    mask = one.mask.reshape(-1, *[1] * (one.source.dim() - 1))
    return torch.where(mask, one.source, other.source)


def opposite(one: Selection, other: Selection) -> bool:
    """Return True if each mask selects what the other leaves out."""
    for a, b in ((one.mask, other.mask), (other.mask, one.mask)):
        known = one.negated.get(id(a))
        if known is not None and known[1] is b:
            return True
    return False


class Selections(TorchFunctionMode):
    """Makes boolean selections of a first axis wait until they are used.

    `torch.Tensor` itself isn't changed: a `__getitem__` that was set on it once leaves traces.
    """

    def __init__(self) -> None:
        super().__init__()
        self._negated: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a mask, and its opposite

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        named = kwargs or {}
        if func is Tensor.__getitem__:
            source, index = args
            if isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() == 1:
                return Selection(source, index, select, self._negated)
            return func(source, value_of(index))
        found = func(*args, **named)
        if func in NEGATIONS and isinstance(args[0], Tensor):
            self._negated[id(found)] = found, args[0]
        return found
