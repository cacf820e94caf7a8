"""The implementations that operators choose on CUDA, and how they fall back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maskfx.ops.base import plain_of
from maskfx.ops.kernels import cuda, serves, varlen
from maskfx.ops.native import cpu
from tests.ops.kernels.tools import (
    DEVICE,
    Draw,
    by_request,
    by_segment,
    error,
    needs_kernels,
    total,
)


@pytest.mark.parametrize("name", cuda.IMPLEMENTATIONS)
def test_each_is_registered(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"maskfx::{name}", "CUDA")
    own = torch._C._dispatch_has_kernel_for_dispatch_key(f"maskfx::{name}", "CPU")
    assert own is (name in cpu.IMPLEMENTATIONS)


def arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments of each implementation, for two requests."""
    draw, batch = Draw(1), [[2, 3], [1, 0]]
    spans, rows = by_segment(batch), draw.values(6, 16)
    owner = torch.tensor([0, 0, 1, 0, 0, 0], device=DEVICE)
    heads, kept = rows.view(6, 2, 8), draw.values(5, 2, 8)
    layout = spans, spans, by_request([[2], [3]]), None, 1, False, None
    steps = torch.randint(-127, 128, (5, 16), dtype=torch.int8).to(DEVICE)
    scale = draw.values(5, 2).abs() / 100
    return {
        "window_product": (rows, rows[:2], draw.index(36, 9).view(4, 9), draw.values(8, 144),
                           None, "silu"),
        "gather": (rows, rows[:2], draw.index(36, 9).view(4, 9)),
        "enter": (rows, rows[:2], draw.index(7, 8)),
        "group_scale": (rows, draw.values(2, 4, 3).abs() + 1, spans, 4, None, None, 1e-5),
        "norm_activation": (rows, draw.values(2, 2, 16), owner, "silu"),
        "scale_shift": (rows, draw.values(2, 2, 16), owner),
        "gated": (rows, "gelu", False, -1),
        "modulate": (rows, draw.values(2, 16), draw.values(2, 16), owner),
        "add_gated": (rows, rows + 1, draw.values(2, 16), owner),
        "add_low_rank": (rows, rows, draw.values(4, 16), draw.values(4, 16),
                         torch.tensor([[0, 2, 0, 3], [3, 5, 3, 4]])),
        "attend": (heads, heads + 1, heads - 1, kept, kept + 1, *layout),
        "attend_packed": (heads, heads + 1, heads - 1, steps, scale, steps, scale, *layout),
    }  # fmt: skip


def test_all_have_arguments() -> None:
    assert {*arguments(), "put_rows"} == set(cuda.IMPLEMENTATIONS)


@pytest.mark.parametrize("name", arguments())
def test_without_kernels_the_plain_operator_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(serves.SWITCH, "off")
    own = arguments()[name]
    assert torch.equal(cuda.IMPLEMENTATIONS[name](*own), plain_of(name)(*own))


@needs_kernels
@pytest.mark.parametrize("name", arguments())
def test_kernels_serve_these_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the plain operator, so a kernel that fails isn't hidden by it."""
    own = arguments()[name]
    wanted = plain_of(name)(*own)
    monkeypatch.setattr(cuda, "plain_of", lambda name: pytest.fail(f"{name} falls back"))
    assert error(cuda.IMPLEMENTATIONS[name](*own), wanted) < 1e-5


@needs_kernels
@pytest.mark.parametrize("name", arguments())
def test_double_precision_is_left_to_the_plain_operator(name: str) -> None:
    own = [a.double() if isinstance(a, Tensor) and a.dtype == torch.float32 else a
           for a in arguments()[name]]  # fmt: skip
    assert torch.equal(cuda.IMPLEMENTATIONS[name](*own), plain_of(name)(*own))


def test_a_kernel_that_fails_is_left_alone_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serves, "_failed", set())
    tried: list[int] = []

    def kernel() -> Tensor:
        tried.append(1)
        raise RuntimeError("no such instruction")

    for _ in range(2):
        assert serves.attempt(("attend", torch.float32), kernel) is None
    assert len(tried) == 1
    assert "no such instruction" in caplog.text
    assert serves.attempt(("attend", torch.float16), lambda: 3) == 3


def test_lack_of_memory_is_no_fault_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serves, "_failed", set())

    def kernel() -> Tensor:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        serves.attempt(("attend",), kernel)
    assert serves.attempt(("attend",), lambda: 3) == 3


# Attention over sequences.


def by_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: Tensor,
    k_ends: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """What PyTorch's kernel computes, which runs on CUDA only."""
    out = q.new_zeros(len(q), q.shape[1], v.shape[2])
    assert (longest_q, longest_k) == (int(q_ends.diff().max()), int(k_ends.diff().max()))
    starts, key_starts = q_ends.tolist(), k_ends.tolist()
    for i in range(len(starts) - 1):
        own, keys = slice(*starts[i : i + 2]), slice(*key_starts[i : i + 2])
        if own.stop > own.start and keys.stop > keys.start:
            query, key, value = (x.transpose(0, 1) for x in (q[own], k[keys], v[keys]))
            out[own] = F.scaled_dot_product_attention(
                query, key, value, scale=scale, enable_gqa=enable_gqa
            ).transpose(0, 1)
    return out


def sequences(
    queries: Sequence[Sequence[int]], keys: Sequence[Sequence[int]], rest: Sequence[Sequence[int]]
) -> tuple[Tensor, ...]:
    draw = Draw(9)
    q = draw.values(total(queries), 4, 8)
    k, v = (draw.values(total(keys), 2, 8) for _ in range(2))
    rest_k, rest_v = (draw.values(total(rest), 2, 8) for _ in range(2))
    return q, k, v, rest_k, rest_v, by_segment(queries), by_segment(keys), by_request(rest)


@pytest.mark.parametrize(
    ("queries", "keys", "rest"),
    [
        ([[5], [3], [1]], [[4], [2], [6]], [[0], [0], [0]]),
        ([[5, 2], [0, 3]], [[4, 1], [2, 2]], [[0], [0]]),
        ([[5], [3]], [[4], [2]], [[3], [0]]),
        ([[2, 1], [0, 0], [1, 4]], [[0, 3], [1, 1], [2, 0]], [[2], [7], [1]]),
        ([[6]], [[6]], [[0]]),
    ],
)
def test_attention_over_sequences(queries: Any, keys: Any, rest: Any) -> None:
    own = sequences(queries, keys, rest)
    attend: Any = varlen.attend
    found = attend(*own, None, product=by_loop)
    assert error(found, plain_of("attend")(*own, None, 1, False, None)) < 1e-5


def test_pytorch_has_attention_over_sequences() -> None:
    assert varlen.torch_product() is not None
    assert not varlen.serves(*(torch.zeros(2, 2, 8) for _ in range(3)))  # on a CPU
