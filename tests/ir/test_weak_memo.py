"""What is made from tensors is released with them."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor

from maskfx.ir.weak_memo import LastMade, WeakMemo


def test_what_was_made_is_kept_while_all_its_tensors_exist() -> None:
    memo: WeakMemo[Tensor] = WeakMemo(8)
    both = [torch.ones(2), torch.ones(2)]

    def made(key: object = None) -> Tensor:
        return memo.made_of(both, lambda: both[0] + both[1], key)

    first = made()
    assert made() is first
    assert made("another") is not first
    both[0].add_(1)
    assert torch.equal(made(), torch.full((2,), 3.0))
    assert len(memo) == 3
    both.pop()
    assert len(memo) == 0


def test_what_depends_on_inference_tensors_is_made_again() -> None:
    memo: WeakMemo[object] = WeakMemo(8)
    with torch.inference_mode():
        value = torch.ones(2)
    assert memo.made_of([value], object) is not memo.made_of([value], object)


def test_what_was_made_last_is_released_with_its_tensor() -> None:
    last: LastMade[Tensor] = LastMade()
    values = [torch.ones(2), torch.zeros(2)]
    first = last.of(values[:1], lambda: values[0].neg())
    assert last.of(values[:1], lambda: values[0].neg()) is first
    second = ref(last.of(values[1:], lambda: values[1] + 1))
    assert second() is not None
    values.pop()
    assert second() is None
