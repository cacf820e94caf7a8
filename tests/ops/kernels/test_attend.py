"""Attention over two sources of keys against the plain operator, ragged, masked and packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from maskfx.ops.base import plain_of
from maskfx.ops.unpack import widen
from maskfx.runtime.cache.quantize import Format, Packed, pack
from tests.ops.kernels.tools import (
    BOUNDS,
    DEVICE,
    Draw,
    by_request,
    by_segment,
    check,
    dtypes,
    error,
    needs_kernels,
    total,
)

pytestmark = needs_kernels
PLAIN = plain_of("attend")


def kernel(q: Tensor, k: Tensor, v: Tensor, rest_k: Tensor, rest_v: Tensor, *layout: Any) -> Tensor:
    from maskfx.ops.kernels.attend import CachedOperand, attend

    return attend(q, k, v, CachedOperand(rest_k), CachedOperand(rest_v), *layout)


class Attention:
    """Random arguments: requests with rows in two segments, and cached rows."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        *,
        heads: int = 2,
        shared: int = 1,
        depth: int = 8,
        depth_v: int | None = None,
        requests: int = 3,
        most: int = 40,
    ) -> None:
        draw = self.draw = Draw(seed)
        self.queries = draw.batch(requests, 2, most)
        self.keys = [*draw.batch(requests - 1, 2, most), [3, 2]]
        self.rest = draw.batch(requests, 1, most)
        self.rest[0] = [max(self.rest[0][0], 1)]  # plain attention without keys isn't defined
        self.keys[0] = [max(self.keys[0][0], 1), self.keys[0][1]]
        for own, rest in zip(self.keys, self.rest, strict=True):
            rest[0] = max(rest[0], int(not sum(own)))
        widths = (depth, depth_v or depth)
        self.q = draw.values(total(self.queries), heads * shared, depth, dtype=dtype)
        self.fresh = [draw.values(total(self.keys), heads, w, dtype=dtype) for w in widths]
        self.cached = [draw.values(total(self.rest), heads, w, dtype=dtype) for w in widths]
        self.spans = by_segment(self.queries), by_segment(self.keys), by_request(self.rest)

    def values(self) -> tuple[Tensor, ...]:
        return self.q, *self.fresh, *self.cached, *self.spans

    def mask(self, heads: int, pairwise: bool, boolean: bool) -> tuple[Tensor, int, bool]:
        parts = []
        for own, new, old in zip(self.queries, self.keys, self.rest, strict=True):
            part = self.draw.values(heads, sum(own) if pairwise else 1, sum(new) + sum(old))
            if boolean:
                part = part > 0.5
                part[..., 0] = True  # each query has a key
            parts.append(part.flatten())
        flat = torch.cat(parts)
        return flat, heads, pairwise


@dtypes
@pytest.mark.parametrize("seed", range(3))
def test_random_batches(dtype: torch.dtype, seed: int) -> None:
    own = Attention(seed, dtype, depth=(8, 20, 16)[seed])
    check(kernel, PLAIN, *own.values(), None, 1, False, (None, 0.3, None)[seed])


def test_shared_keys_and_other_depths() -> None:
    own = Attention(4, torch.float32, heads=2, shared=3, depth=8, depth_v=12, requests=2)
    check(kernel, PLAIN, *own.values(), None, 1, False, None)


@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize(("heads", "pairwise"), [(1, False), (1, True), (4, True)])
def test_masks(heads: int, pairwise: bool, boolean: bool) -> None:
    own = Attention(5, torch.float32, heads=4, requests=2, most=20)
    flat, *layout = own.mask(heads, pairwise, boolean)
    check(kernel, PLAIN, *own.values(), flat, *layout, None)


def test_queries_without_an_allowed_key_get_zeros() -> None:
    draw = Draw(6)
    q, k = draw.values(3, 1, 8), draw.values(4, 1, 8)
    none = k[:0]
    spans = torch.tensor([[0, 3]]), torch.tensor([[0, 4]]), torch.tensor([[0, 0]])
    mask = torch.zeros(4, dtype=torch.bool, device=DEVICE)
    assert not kernel(q, k, k, none, none, *spans, mask, 1, False, None).any()
    spans = torch.tensor([[0, 3]]), torch.tensor([[0, 0]]), torch.tensor([[0, 0]])
    assert not kernel(q, none, none, none, none, *spans, None, 1, False, None).any()


def test_a_request_reads_no_other() -> None:
    own = Attention(7, torch.float32)
    clean = kernel(*own.values(), None, 1, False, None)
    for value, spans in ((own.fresh[0], own.spans[1]), (own.cached[1], own.spans[2])):
        for start, stop in spans[1].view(-1, 2).tolist():
            value[start:stop] = float("nan")
    found = kernel(*own.values(), None, 1, False, None)
    for request in (0, 2):
        for start, stop in own.spans[0][request].view(-1, 2).tolist():
            assert torch.equal(found[start:stop], clean[start:stop])


@dtypes
@pytest.mark.parametrize("format", [Format.INT8, Format.INT4])
@pytest.mark.parametrize("depth", [16, 24])
def test_packed_keys_are_widened_while_they_are_loaded(
    dtype: torch.dtype, format: Format, depth: int
) -> None:
    from maskfx.ops.kernels.attend import CachedOperand, attend

    own = Attention(8, dtype, heads=4, depth=depth, requests=2, most=20)
    packed = [pack(rows[None], format) for rows in own.cached]
    stored = []
    for rows in packed:
        assert isinstance(rows, Packed)
        assert rows.format is format
        assert rows.scale is not None
        stored.append((rows.stored[0], rows.scale[0]))
    rest = [CachedOperand(*pair) for pair in stored]
    run: Any = attend
    found = run(own.q, *own.fresh, *rest, *own.spans, None, 1, False, None)
    pairs = [item for pair in stored for item in pair]
    fresh = [own.q.float(), *(x.float() for x in own.fresh)]
    wanted = plain_of("attend_packed")(*fresh, *pairs, *own.spans, None, 1, False, None)
    assert error(found, wanted) < BOUNDS[dtype]
    # the operator reads what the cache stores
    for rows, (steps, scale) in zip(packed, stored, strict=True):
        assert isinstance(rows, Packed)
        assert torch.equal(widen(steps, scale, dtype), rows.whole()[0].flatten(1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 30))
def test_more_random_batches(seed: int) -> None:
    draw = Draw(seed)
    own = Attention(
        seed,
        draw.random.choice(list(BOUNDS)),
        heads=draw.size(1, 3),
        shared=draw.size(1, 2),
        depth=draw.size(1, 40),
        depth_v=draw.size(1, 40),
        requests=draw.size(1, 5),
        most=draw.size(2, 140),
    )
    check(kernel, PLAIN, *own.values(), None, 1, False, None)
