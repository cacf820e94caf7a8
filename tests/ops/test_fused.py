"""Fused operators in plain PyTorch, against the operators that they replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from maskfx import ops
from maskfx.ops.unpack import widen


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ROWS, OWNER = numbers(6, 4), torch.tensor([0, 1, 1, 0, 0, 1])
SPANS, REST = torch.tensor([[0, 2], [2, 6]]), torch.tensor([[0, 3], [3, 5]])
HEADS, STEPS = numbers(6, 2, 4), torch.arange(-20, 20, dtype=torch.int8).view(5, 8)
SCALES = numbers(5, 2, seed=5).abs()
LAYOUT = (SPANS, SPANS, REST, None, 1, False, None)
SAMPLES: dict[Any, tuple[Any, ...]] = {
    ops.window_product: (
        ROWS, ROWS[:1] + 1, torch.tensor([[0, 6, 7], [3, 3, 1]]), numbers(5, 12, seed=1),
        numbers(5, seed=2), "silu",
    ),
    ops.norm_activation: (ROWS, numbers(2, 2, 4, seed=1), OWNER, "silu"),
    ops.gated: (ROWS, "gelu", False, 1),
    ops.modulate: (ROWS, numbers(2, 4, seed=1), numbers(2, 4, seed=2), OWNER),
    ops.add_gated: (ROWS, ROWS + 1, numbers(2, 4, seed=1), OWNER),
    ops.attend_packed: (HEADS, HEADS + 1, HEADS - 1, STEPS, SCALES, STEPS, SCALES, *LAYOUT),
    ops.few_rows_linear: (ROWS, numbers(5, 4, seed=1), numbers(5, seed=2)),
}  # fmt: skip


def by_hand(op: Any, *own: Any) -> Tensor:
    match op:
        case ops.window_product:
            rows, halo, table, weight, bias, _ = own
            source = torch.cat([rows, halo, torch.zeros(1, 4)])
            return F.silu(source[table].flatten(1) @ weight.T + bias)
        case ops.norm_activation:
            rows, scales, owner, _ = own
            return F.silu(rows * scales[owner, 0] + scales[owner, 1])
        case ops.gated:
            return own[0][:, :2] * F.gelu(own[0][:, 2:])
        case ops.modulate:
            rows, scale, shift, owner = own
            return rows * scale[owner] + shift[owner]
        case ops.add_gated:
            base, rows, gate, owner = own
            return base + rows * gate[owner]
        case ops.few_rows_linear:
            rows, weight, bias = own
            return rows @ weight.T + bias
        case ops.attend_packed:
            q, k, v, *packed = own
            rest = [(s.view(5, 2, 4) * c[:, :, None]).view(5, 2, 4)
                    for s, c in zip(packed[:4:2], packed[1:4:2], strict=True)]  # fmt: skip
            return ops.attend(q, k, v, *rest, *packed[4:])
    raise AssertionError(op)


def test_every_operator_has_a_sample() -> None:
    assert set(SAMPLES) == set(ops.FUSED)


@pytest.mark.parametrize("op", SAMPLES, ids=str)
def test_values(op: Any) -> None:
    assert torch.allclose(op(*SAMPLES[op]), by_hand(op, *SAMPLES[op]), atol=1e-5)


@pytest.mark.parametrize("op", SAMPLES, ids=str)
def test_opcheck(op: Callable[..., Any]) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    found = torch.library.opcheck(op, SAMPLES[op], test_utils=tests)  # type: ignore[arg-type]
    assert set(found.values()) == {"SUCCESS"}


def test_the_gate_may_be_the_first_half() -> None:
    wanted = F.silu(ROWS[:, :2]) * ROWS[:, 2:]
    assert torch.allclose(ops.gated(ROWS, "silu", True, -1), wanted)
    assert torch.allclose(ops.gated(ROWS, "silu", False, 0), ROWS[:3] * F.silu(ROWS[3:]))


def test_rows_are_written_in_place() -> None:
    target = torch.zeros(5, 4, dtype=torch.float16)
    ops.put_rows(target, torch.tensor([3, 0]), ROWS[:2])
    assert torch.equal(target[[3, 0]], ROWS[:2].half())
    assert not target[[1, 2, 4]].any()
    place, zero = torch.tensor([1]), torch.tensor([0])
    about = [zero.repeat(5)], [place], [zero], [torch.zeros(1, 2)]
    for operator, arguments in (
        (ops.put_rows, (target, place, ROWS[:1])),
        (ops.put_all, ([target], [place], [ROWS[:1]])),
        (ops.replace_all, ([target], [place], [ROWS[:1]], *about)),
    ):
        found = torch.library.opcheck(operator, arguments, test_utils=("test_schema",))
        assert set(found.values()) == {"SUCCESS"}


def test_rows_of_4_bits() -> None:
    stored = torch.tensor([[0x0F, 0x79]], dtype=torch.uint8)  # steps 15 - 8, 0 - 8; 9 - 8, 7 - 8
    scale = torch.tensor([[2.0, 3.0]], dtype=torch.float16)
    assert widen(stored, scale, torch.float32).tolist() == [[14.0, -16.0, 3.0, -3.0]]
    assert widen(stored[:0], scale[:0], torch.float32).shape == (0, 4)


@pytest.mark.parametrize(
    ("op", "count"),
    [
        (ops.window_product, 2 * 2 * 5 * 12),
        (ops.attend_packed, 2 * 16 * (2 * 5 + 4 * 6)),
        (ops.few_rows_linear, 2 * 6 * 4 * 5),
    ],
    ids=str,
)
def test_flops(op: Any, count: int) -> None:
    with FlopCounterMode(display=False) as counter:
        op(*SAMPLES[op])
    assert counter.get_total_flops() == count
