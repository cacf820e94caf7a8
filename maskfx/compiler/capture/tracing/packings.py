"""Texts without their padding under export: attention over valid tokens keeps a known length.

`x[:, mask.nonzero().flatten()]` has a length that depends on data, which the rest of a graph can't
be traced with. Where such tokens stand behind others, only attention reads them, and its result is
padded to the whole length again, the padding may as well stay: it stands last and no key of it is
read. So a selection waits until it is used, and only another use than these selects.

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.types import IntLikeType

from maskfx.compiler.capture.tracing.routed_rows import RoutedRows, RowCount, of_each_row
from maskfx.compiler.capture.tracing.waiting_values import (
    CATS,
    WaitingTensor,
    WaitingValue,
    value_of,
)

FLAT = ("flatten", "reshape", "view", "squeeze", "ravel")


class TokenValue(WaitingValue):
    """What depends on which tokens are valid."""

    @staticmethod
    def without(
        func: Callable[..., object], args: Sequence[Any], named: dict[str, Any]
    ) -> object | None:
        found = packed_by(func, args, named)
        return of_each_row(func, args, named) if found is None else found

    def __index__(self) -> int:
        return int(self.value())


class TokenPlaces(TokenValue):
    """Where a vector isn't zero: the places in a column, or in a vector."""

    def __init__(self, mask: Tensor, column: bool = False) -> None:
        self.mask, self.column = mask, column

    def value(self) -> Tensor:
        with torch._C.DisableTorchFunction():
            found = torch.nonzero(self.mask)
            return found if self.column else found.flatten()

    def flat(self) -> TokenPlaces:
        return TokenPlaces(self.mask)

    @property
    def shape(self) -> tuple[object, ...]:
        return (RowCount(self), 1) if self.column else (RowCount(self),)

    def numel(self) -> RowCount:
        return RowCount(self)

    def __getattr__(self, name: str) -> object:
        if name in FLAT:
            return lambda *args: self.flat() if flattens(name, args) else self._other(name, args)
        return getattr(self.value(), name)

    def _other(self, name: str, args: Sequence[object]) -> object:
        return getattr(self.value(), name)(*args)

    def __getitem__(self, index: Any) -> Any:
        first = isinstance(index, tuple) and index == (slice(None), 0)
        return self.flat() if self.column and first else self.value()[index]


def flattens(name: str, args: Sequence[object]) -> bool:
    """Return True if a method makes a vector of a column."""
    if name == "squeeze":
        return tuple(args) in ((1,), (-1,))
    return not args if name in ("flatten", "ravel") else tuple(args) in ((-1,), ((-1,),))


class PackedTokens(TokenValue, WaitingTensor):
    """Valid tokens along one dimension of a tensor that has the others behind them.

    Args:
        whole: the tensor, with the tokens that aren't valid last.
        dim: the dimension, counted from the first.
        valid: which tokens are valid.
        mask: the vector that was searched for places.
        source: the tensor in its own order, if it is known and the dimension is the first.
    """

    def __init__(
        self, whole: Tensor, dim: int, valid: Tensor, mask: Tensor, source: Tensor | None = None
    ) -> None:
        self.whole, self.dim, self.valid, self.mask = whole, dim, valid, mask
        self.source = source

    def value(self) -> Tensor:
        with torch._C.DisableTorchFunction():
            return self.whole.index_select(self.dim, torch.nonzero(self.valid).flatten())

    def as_rows(self) -> RoutedRows | None:
        own = self.source
        return None if own is None else RoutedRows(own, self.mask != 0, self.mask)

    def of(self, whole: Tensor, dim: int, valid: Tensor | None = None) -> PackedTokens:
        return PackedTokens(whole, dim, self.valid if valid is None else valid, self.mask)

    def dimension(self, number: object) -> bool:
        """Return True if a number names the dimension of the tokens."""
        return isinstance(number, int) and number % self.whole.dim() == self.dim

    @property
    def shape(self) -> tuple[object, ...]:
        sizes: list[object] = list(self.whole.shape)
        sizes[self.dim] = Count(self)
        return tuple(sizes)

    def size(self, dim: int | None = None) -> object:
        return self.shape if dim is None else self.shape[dim]


class Count(TokenValue):
    """How many tokens are valid."""

    def __init__(self, packed: PackedTokens) -> None:
        self.packed = packed

    def value(self) -> IntLikeType:
        return self.packed.value().shape[self.packed.dim]

    def __rsub__(self, other: Any) -> Any:
        packed = self.packed
        known = isinstance(other, int | torch.SymInt)
        if known and bool(other == packed.whole.shape[packed.dim]):
            return Missing(other, packed)
        return other - self.value()


class Missing(TokenValue):
    """How many tokens aren't valid."""

    def __init__(self, length: IntLikeType, packed: PackedTokens) -> None:
        self.length, self.packed = length, packed

    def value(self) -> IntLikeType:
        return self.length - Count(self.packed).value()


def packed_by(
    func: Callable[..., object], args: Sequence[Any], named: dict[str, Any]
) -> PackedTokens | Tensor | None:
    """Return a function's result without selecting, or None if it needs the selection."""
    if func in CATS:
        return joined(list(args[0]), args[1] if len(args) > 1 else named.get("dim", 0))
    if func is F.scaled_dot_product_attention:
        return attended(*args, **named)
    if func is F.pad and len(args) > 1 and isinstance(args[0], PackedTokens):
        return refilled(args[0], args[1], *args[2:], **named)
    return None


def joined(parts: list[Any], dim: int) -> PackedTokens | None:
    """Return tensors with packed tokens behind them."""
    last = parts[-1]
    plain = all(isinstance(part, Tensor) for part in parts[:-1])
    if not isinstance(last, PackedTokens) or not plain or not last.dimension(dim):
        return None
    lengths, device = [part.shape[dim] for part in parts[:-1]], last.valid.device
    before = [torch.ones(length, dtype=torch.bool, device=device) for length in lengths]
    whole = torch.cat([*parts[:-1], last.whole], last.dim)
    return last.of(whole, last.dim, torch.cat([*before, last.valid]))


def attended(
    query: Any, key: Any, value: Any, attn_mask: object = None, *args: Any, **named: Any
) -> PackedTokens | Tensor | None:
    """Return attention whose keys are the valid ones, for all queries."""
    both = isinstance(key, PackedTokens) and isinstance(value, PackedTokens)
    if not both or attn_mask is not None or any(args) or named.get("is_causal"):
        return None
    rows = key.whole.dim() - 2
    if key.mask is not value.mask or {key.dim, value.dim} != {rows}:
        return None
    own = query if isinstance(query, PackedTokens) else None
    if own is not None and own.dim != rows:
        return None
    kept = key.valid.view(*[1] * (rows + 1), -1)
    asked = query if own is None else own.whole
    found = F.scaled_dot_product_attention(asked, key.whole, value.whole, kept, **named)
    return found if own is None else own.of(found, rows)


def refilled(
    packed: PackedTokens, amounts: Sequence[Any], mode: str = "constant", value: float | None = None
) -> Tensor | None:
    """Return packed tokens with zeros in place of all that aren't valid."""
    places = [0] * (2 * (packed.whole.dim() - packed.dim) - 1)
    *before, last = amounts
    if not isinstance(last, Missing) or mode != "constant" or value not in (None, 0):
        return None
    if list(before) != places or last.packed.valid is not packed.valid:
        return None
    shape = [1] * packed.whole.dim()
    shape[packed.dim] = -1
    return packed.whole * packed.valid.view(shape).to(packed.whole.dtype)


class Packings(TorchFunctionMode):
    """Makes selections of the places where a vector isn't zero wait until they are used."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        named = kwargs or {}
        if func in (torch.nonzero, Tensor.nonzero) and isinstance(args[0], Tensor):
            found = places_of(args[0], *args[1:], **named)
            if found is not None:
                return found
        if func is Tensor.__getitem__ and isinstance(args[0], Tensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, TokenValue) for part in index):
                return picked(args[0], index)
        return func(*args, **named)


def places_of(mask: Tensor, as_tuple: bool = False) -> object:
    """Return the places where a vector isn't zero; None for other tensors."""
    if mask.dim() != 1:
        return None
    return (TokenPlaces(mask),) if as_tuple else TokenPlaces(mask, column=True)


def picked(source: Tensor, index: tuple[Any, ...]) -> PackedTokens | Tensor:
    """Return what places and slices pick from a tensor, all its tokens in another order."""
    chosen = [
        i for i, part in enumerate(index) if isinstance(part, TokenPlaces) and not part.column
    ]
    rest = [part for i, part in enumerate(index) if i not in chosen]
    if len(chosen) != 1 or not all(isinstance(one, slice) or one is Ellipsis for one in rest):
        return source[tuple(map(value_of, index))]
    at, mask = chosen[0], index[chosen[0]].mask
    part = source[(*index[:at], slice(None), *index[at + 1 :])]
    dim = at if Ellipsis not in index[:at] else source.dim() - len(index) + at
    if bool(mask.shape[0] != part.shape[dim]):
        return source[tuple(map(value_of, index))]
    order = torch.argsort((mask == 0).long(), stable=True)
    valid = mask.index_select(0, order) != 0
    own = part if dim == 0 else None
    return PackedTokens(part.index_select(dim, order), dim, valid, mask, own)
