"""Fingerprints of weights: every number counts, and only what changed is read again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from maskfx.runtime import weights
from maskfx.runtime.weights import Weights, checksum


def module(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 60), nn.Conv2d(3, 7, 3), nn.BatchNorm1d(5)).to(dtype)


def weight(of: nn.Module) -> Tensor:
    found: Tensor = of[0].weight  # type: ignore[index]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("place", [1, 777, 2999])
@torch.no_grad()
def test_each_number_counts(dtype: torch.dtype, place: int) -> None:
    own = module(dtype)
    before = Weights(own).fingerprint()
    assert Weights(module(dtype)).fingerprint() == before
    weight(own).view(-1)[place] += 1
    assert Weights(own).fingerprint() != before


@torch.no_grad()
def test_rows_in_another_order_are_other_weights() -> None:
    own = module()
    before = Weights(own).fingerprint()
    weight(own).copy_(weight(own).flip(0))
    assert Weights(own).fingerprint() != before


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(10.0)[1:],
        torch.arange(10, dtype=torch.uint8)[3:],
        torch.ones(3, 5).t(),
        torch.ones(4, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.float8_e4m3fn),
    ],
    ids=["shifted", "bytes", "transposed", "complex", "bool", "float8"],
)
def test_any_tensor_has_a_checksum(value: Tensor) -> None:
    assert checksum(value) == checksum(value.clone())


@pytest.mark.parametrize("tell", [False, True])
@torch.no_grad()
def test_only_what_changed_is_read_again(monkeypatch: pytest.MonkeyPatch, tell: bool) -> None:
    own, read = module(), list[Tensor]()
    original: Callable[[Tensor], bytes] = checksum
    monkeypatch.setattr(weights, "checksum", lambda v: read.append(v) or original(v))  # type: ignore[func-returns-value]
    watch = Weights(own)
    before = watch.fingerprint()
    read.clear()
    weight(own)[20, 30] += 1
    assert watch.change() is weights.WeightChange.VALUES
    if tell:
        watch.forget()
    assert watch.fingerprint() != before
    assert len(read) == (len(own.state_dict()) if tell else 1)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_has_a_checksum() -> None:
    one, other = (torch.quantize_per_tensor(v, 0.1, 0, torch.quint8) for v in torch.rand(2, 8))
    assert checksum(one) != checksum(other)


@torch.no_grad()
def test_a_change_through_data_is_seen_before_the_next_run() -> None:
    own = module(torch.bfloat16)
    own[0].bias[0] = float("nan")  # type: ignore[index]
    watch = Weights(own)
    assert [watch.overwritten() for _ in range(3)] == [False] * 3
    weight(own).data.mul_(2)
    assert [watch.overwritten() for _ in range(2)] == [True, False]
    own.to(torch.float32)
    assert not watch.overwritten()
    assert watch.change() is weights.WeightChange.TENSORS
    assert [watch.overwritten() for _ in range(2)] == [False] * 2
