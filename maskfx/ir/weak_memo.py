"""Keeps what was made from tensors for as long as the tensors exist."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Generic, TypeVar
from weakref import ref

from torch import Tensor

from maskfx.ir.lru import LruCache

Made = TypeVar("Made")


class LastMade(Generic[Made]):
    """Holds what was made last, until one of the tensors that it was made from is released."""

    def __init__(self) -> None:
        self._known: tuple[list[ref[Tensor]], Made] | None = None

    def of(self, tensors: Sequence[Tensor], make: Callable[[], Made]) -> Made:
        """Return what was made from these tensors, or make it; it must not hold them."""
        known = self._known
        if known is None or any(r() is not t for r, t in zip(known[0], tensors, strict=True)):
            forget = partial(_forget, ref(self))
            known = self._known = [ref(tensor, forget) for tensor in tensors], make()
        return known[1]

    def clear(self) -> None:
        self._known = None


def _forget(own: ref[LastMade[Made]], _: object) -> None:
    found = own()  # weak, so that no cycle keeps what was made
    if found is not None:
        found.clear()


class WeakMemo(LruCache[Hashable, tuple[list["ref[Tensor]"], Made]]):
    """Holds what was made from tensors, until one of them is released or changed in place.

    What is made must not hold the tensors: a view holds its base, `view.detach()` only the memory.
    """

    def made_of(
        self, tensors: Sequence[Tensor], make: Callable[[], Made], key: Hashable = None
    ) -> Made:
        """Return what was made from these tensors, or make it.

        Args:
            tensors: What it depends on. In-place changes of inference tensors can't be detected, so
                that nothing is kept if there is one.
            make: Makes it.
            key: All else that it depends on.
        """
        if any(tensor.is_inference() for tensor in tensors):
            return make()
        whole = key, tuple((id(tensor), tensor._version) for tensor in tensors)
        known = self.get(whole)
        if known is None or any(r() is not t for r, t in zip(known[0], tensors, strict=True)):
            forget = partial(_remove, ref(self), whole)
            known = self.put(whole, ([ref(tensor, forget) for tensor in tensors], make()))
        return known[1]


def _remove(own: ref[WeakMemo[Made]], key: Hashable, _: object) -> None:
    found = own()
    if found is not None:
        found.remove(key)
