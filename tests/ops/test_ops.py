"""The operators of compiled graphs, each against an explicit reference on ragged batches.

A batch is a list of requests, a request a list of segments of rows; rows lie segment by
segment, requests side by side. References are loops over requests in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from maskfx import ops
from maskfx.ops import attention, low_rank

# Rows of each request in each segment: an empty piece, an empty request, one of a single row.
RAGGED = [[3, 5], [0, 4], [0, 0], [2, 1]]
ONE = [[7]]
EVEN = [[4, 4], [4, 4]]
BATCHES = [RAGGED, ONE, EVEN]
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}

dtypes = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=["float32", "float64", "bfloat16"])
batches = pytest.mark.parametrize("batch", BATCHES, ids=["ragged", "one", "even"])


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def spans_of(batch: Sequence[Sequence[int]]) -> Tensor:
    """Segment by segment: all requests' rows of the first, then of the second, ..."""
    out = [[0] * (2 * len(batch[0])) for _ in batch]
    start = 0
    for segment in range(len(batch[0])):
        for request, counts in enumerate(batch):
            out[request][2 * segment : 2 * segment + 2] = [start, start + counts[segment]]
            start += counts[segment]
    return torch.tensor(out)


def rest_spans_of(batch: Sequence[Sequence[int]]) -> Tensor:
    """Request by request: all segments of the first, then of the second, ..."""
    out, start = [], 0
    for counts in batch:
        row = []
        for count in counts:
            row += [start, start + count]
            start += count
        out.append(row)
    return torch.tensor(out)


def total(batch: Sequence[Sequence[int]]) -> int:
    return sum(map(sum, batch))


def index(spans: Tensor, request: int) -> list[int]:
    """The rows of one request, spelled out."""
    row = spans[request].tolist()
    pairs = zip(row[::2], row[1::2], strict=True)
    return [i for start, stop in pairs for i in range(start, stop)]


def owner_of(spans: Tensor, rows: int) -> Tensor:
    owner = torch.full((rows,), -1)
    for request in range(len(spans)):
        owner[index(spans, request)] = request
    return owner


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == wanted.shape
    assert found.is_contiguous()
    bound = TOLERANCES[dtype] * max(1.0, wanted.abs().max().item() if wanted.numel() else 1.0)
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=bound)


# gather


@dtypes
def test_gather(dtype: torch.dtype) -> None:
    rows, halo = numbers(5, 3, dtype=dtype), numbers(2, 3, dtype=dtype, seed=1)
    table = torch.tensor([[0, 4, 7], [5, 6, 7], [2, 2, 5]])  # 5 and 6 are the halo, 7 is zero
    found = ops.gather(rows, halo, table)
    source = [*rows, *halo, torch.zeros(3, dtype=dtype)]
    wanted = torch.stack([torch.cat([source[j] for j in places]) for places in table.tolist()])
    assert found.dtype == dtype
    assert torch.equal(found, wanted)
    assert found.is_contiguous()


def test_gather_without_halo() -> None:
    rows, none = numbers(5, 3), numbers(0, 3)
    found = ops.gather(rows, none, torch.tensor([[0, 5]]))
    assert torch.equal(found[0], torch.cat([rows[0], torch.zeros(3).double()]))


def test_enter() -> None:
    rows, loaded = numbers(3, 2, 2), numbers(2, 2, 2, seed=1)
    found = ops.enter(rows, loaded, torch.tensor([4, 0, 2, 3]))
    assert torch.equal(found, torch.stack([loaded[1], rows[0], rows[2], loaded[0]]))
    assert torch.equal(ops.enter(rows, loaded[:0], torch.tensor([2, 1])), rows[[2, 1]])


def test_gather_without_targets() -> None:
    rows = numbers(5, 3)
    assert ops.gather(rows, rows[:0], torch.empty(0, 9, dtype=torch.long)).shape == (0, 27)


# group_scale and scale_shift


def statistics(rest: Sequence[Tensor], groups: int, dtype: torch.dtype) -> Tensor:
    """(requests, groups, 3): count, mean and summed squared deviation."""
    out = torch.zeros(len(rest), groups, 3, dtype=torch.float64)
    for i, rows in enumerate(rest):
        grouped = rows.double().reshape(len(rows), groups, -1)
        if not len(rows):
            continue
        mean = grouped.mean((0, 2))
        out[i, :, 0] = grouped.shape[0] * grouped.shape[2]
        out[i, :, 1] = mean
        out[i, :, 2] = (grouped - mean[None, :, None]).square().sum((0, 2))
    return out.to(torch.float64 if dtype == torch.float64 else torch.float32)


def normalised(rows: Tensor, rest: Tensor, groups: int, eps: float) -> Tensor:
    """The rows of one request, normalised together with the rest of it."""
    everything = torch.cat([rows, rest]).double()
    grouped = everything.reshape(len(everything), groups, -1)
    mean = grouped.mean((0, 2), keepdim=True)
    var = (grouped - mean).square().mean((0, 2), keepdim=True)
    return ((grouped - mean) / (var + eps).sqrt()).reshape(everything.shape)[: len(rows)]


@dtypes
@batches
@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(dtype: torch.dtype, batch: list[list[int]], groups: int, affine: bool) -> None:
    rows = numbers(total(batch), 6, dtype=dtype) * 2 + 1
    spans = spans_of(batch)
    rest = [numbers(4 + i, 6, dtype=dtype, seed=i + 1) for i in range(len(batch))]
    weight = numbers(6, dtype=dtype, seed=8) if affine else None
    bias = numbers(6, dtype=dtype, seed=9) if affine else None
    wide = statistics(rest, groups, dtype)
    scales = ops.group_scale(rows, wide, spans, groups, weight, bias, 1e-5)
    owner = owner_of(spans, len(rows))
    found = ops.scale_shift(rows, scales, owner)
    assert scales.dtype == wide.dtype
    assert found.dtype == dtype
    wanted = torch.zeros(rows.shape, dtype=torch.float64)
    for i, other in enumerate(rest):
        mine = index(spans, i)
        wanted[mine] = normalised(rows[mine], other, groups, 1e-5)
    if weight is not None and bias is not None:
        wanted = wanted * weight.double() + bias.double()
    assert_near(found, wanted, dtype)


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_group_norm_without_rest(eps: float) -> None:
    """A recording: the statistics are the rows' own."""
    rows = numbers(7, 6)
    rest = torch.zeros(1, 2, 3, dtype=torch.float64)
    scales = ops.group_scale(rows, rest, spans_of([[7]]), 2, None, None, eps)
    wanted = normalised(rows, rows[:0], 2, eps)
    assert_near(ops.scale_shift(rows, scales, torch.zeros(7).long()), wanted, torch.float64)


@pytest.mark.parametrize("where", ["rows", "rest", "both"])
def test_group_statistics_far_from_zero(where: str) -> None:
    """mean / std = 300, as in a real VAE: no large squares may be subtracted."""
    rows = numbers(20, 8, dtype=torch.float32) + (300 if where != "rest" else 0)
    rest = numbers(200, 8, dtype=torch.float32, seed=1) + (300 if where != "rows" else 0)
    scales = ops.group_scale(
        rows, statistics([rest], 2, torch.float32), spans_of([[20]]), 2, None, None, 1e-6
    )
    own = rows.double() * scales[0, 0].double() + scales[0, 1].double()
    wanted = normalised(rows, rest, 2, 1e-6)
    spread = torch.cat([rows, rest]).double().std()
    scale_wanted = 1 / torch.cat([rows, rest]).double().view(-1, 2, 4).std((0, 2), correction=0)
    gap = (scales[0, 0].double().view(2, 4) / scale_wanted[:, None] - 1).abs().max()
    assert gap < 1e-5, (gap, spread)
    # the shift is -300 in float32: its own rounding is all that may be lost
    assert (own - wanted).abs().max() < 300 * 2**-23


@dtypes
@pytest.mark.parametrize("far", [0, 300])
def test_group_norm_of_each_line(dtype: torch.dtype, far: int) -> None:
    """Rows and cached rows of three lines lie mixed; one line has no cached rows, one no rows."""
    rows, rest = numbers(9, 6, dtype=dtype) + far, numbers(5, 6, dtype=dtype, seed=1) + far
    owner = torch.tensor([0, 2, 0, 0, 2, 2, 0, 2, 2])
    rest_owner = torch.tensor([1, 0, 1, 0, 1])
    weight, bias = numbers(6, dtype=dtype, seed=8), numbers(6, dtype=dtype, seed=9)
    moments, kept = ops.site_moments(rows, 3), ops.site_moments(rest, 3)
    scales = ops.line_scale(moments, kept, owner, rest_owner, 3, 6, weight, bias, 1e-5)
    found = ops.scale_shift(rows, scales, owner)
    wanted = torch.zeros(rows.shape, dtype=torch.float64)
    for line in (0, 2):
        mine, others = owner == line, rest_owner == line
        wanted[mine] = normalised(rows[mine], rest[others], 3, 1e-5)
    wanted = wanted * weight.double() + bias.double()
    assert found.dtype == dtype
    if far and dtype != torch.float64:  # the rounding of 300 itself, times the scale
        lost = 6000 * torch.finfo(moments.dtype).eps + wanted.abs().max() * torch.finfo(dtype).eps
        assert (found.double() - wanted).abs().max() < lost
    else:
        assert_near(found, wanted, dtype)


@dtypes
@batches
def test_scale_shift(dtype: torch.dtype, batch: list[list[int]]) -> None:
    rows, spans = numbers(total(batch), 4, dtype=dtype), spans_of(batch)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales = numbers(len(batch), 2, 4, dtype=wide, seed=1)
    owner = owner_of(spans, len(rows))
    wanted = torch.stack(
        [r.double() * scales[o, 0] + scales[o, 1] for r, o in zip(rows, owner, strict=True)]
    )
    assert_near(ops.scale_shift(rows, scales, owner), wanted, dtype)


# attend


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None
) -> Tensor:
    """(rows, heads, depth) in float64; key heads repeat for groups of query heads."""
    q, k, v = q.double(), k.double(), v.double()
    each = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for head in range(q.shape[1]):
        keys, values = k[:, head // each], v[:, head // each]
        score = q[:, head] @ keys.T * (scale or 1 / math.sqrt(q.shape[2]))
        if bias is not None:
            score = score + bias[head % len(bias)]
        score = (score - score.max(1, keepdim=True).values).exp()
        out[:, head] = score / score.sum(1, keepdim=True) @ values
    return out


class Case:
    """Queries, keys and values of a batch; keys of the text and image, cached ones of the rest."""

    def __init__(
        self,
        queries: list[list[int]],
        keys: list[list[int]],
        rest: list[list[int]],
        dtype: torch.dtype = torch.float64,
        heads: int = 4,
        key_heads: int = 4,
        depth: int = 8,
        depth_v: int = 8,
    ) -> None:
        self.dtype = dtype
        self.q = numbers(total(queries), heads, depth, dtype=dtype, seed=1)
        self.k = numbers(total(keys), key_heads, depth, dtype=dtype, seed=2)
        self.v = numbers(total(keys), key_heads, depth_v, dtype=dtype, seed=3)
        self.rest_k = numbers(total(rest), key_heads, depth, dtype=dtype, seed=4)
        self.rest_v = numbers(total(rest), key_heads, depth_v, dtype=dtype, seed=5)
        self.spans = spans_of(queries), spans_of(keys), rest_spans_of(rest)

    def arguments(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.rest_k, self.rest_v, *self.spans]

    def run(
        self,
        biases: Sequence[Tensor] | None = None,
        pairwise: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """`biases`: for each request (heads, queries or 1, keys)."""
        bias, heads = None, 1
        if biases is not None:
            heads = biases[0].shape[0]
            bias = torch.cat([b.reshape(-1) for b in biases]).to(self.dtype)
        return ops.attend(*self.arguments(), bias, heads, pairwise, scale)

    def wanted(self, biases: Sequence[Tensor] | None = None, scale: float | None = None) -> Tensor:
        out = torch.zeros(*self.q.shape[:2], self.v.shape[2], dtype=torch.float64)
        q_spans, k_spans, rest_spans = self.spans
        for i in range(len(q_spans)):
            rows, own, kept = index(q_spans, i), index(k_spans, i), index(rest_spans, i)
            keys = torch.cat([self.k[own], self.rest_k[kept]])
            values = torch.cat([self.v[own], self.rest_v[kept]])
            bias = None if biases is None else biases[i].double()
            if rows:
                out[rows] = softmax_attention(self.q[rows], keys, values, bias, scale)
        return out


QUERIES = [[3, 5], [0, 4], [0, 0], [2, 1]]
KEYS = [[3, 5], [0, 4], [2, 3], [2, 1]]
REST = [[6], [0], [4], [3]]


@dtypes
@pytest.mark.parametrize("rest", [REST, [[0]] * 4], ids=["rest", "full"])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_attend(dtype: torch.dtype, rest: list[list[int]], scale: float | None) -> None:
    case = Case(QUERIES, KEYS, rest, dtype)
    found = case.run(scale=scale)
    assert found.dtype == dtype
    assert_near(found, case.wanted(scale=scale), dtype)


@dtypes
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (6, 1), (1, 1)])
def test_attend_with_grouped_heads(dtype: torch.dtype, heads: int, key_heads: int) -> None:
    case = Case(QUERIES, KEYS, REST, dtype, heads, key_heads)
    assert_near(case.run(), case.wanted(), dtype)


@dtypes
def test_attend_with_values_of_another_depth(dtype: torch.dtype) -> None:
    case = Case(QUERIES, KEYS, REST, dtype, depth=8, depth_v=5)
    assert_near(case.run(), case.wanted(), dtype)


def keys_of(case: Case) -> list[int]:
    return [len(index(case.spans[1], i)) + len(index(case.spans[2], i)) for i in range(4)]


@dtypes
@pytest.mark.parametrize("heads", [1, 4], ids=["shared", "per head"])
def test_attend_with_a_bias_per_pair(dtype: torch.dtype, heads: int) -> None:
    case = Case(QUERIES, KEYS, REST, dtype)
    counts = zip(map(sum, QUERIES), keys_of(case), strict=True)
    biases = [numbers(heads, q, k, dtype=dtype, seed=20 + q) for q, k in counts]
    assert_near(case.run(biases, pairwise=True), case.wanted(biases), dtype)


@dtypes
@pytest.mark.parametrize("heads", [1, 4], ids=["shared", "per head"])
def test_attend_with_a_bias_per_key(dtype: torch.dtype, heads: int) -> None:
    queries = [[3, 5], [0, 4], [0, 1], [2, 1]]
    case = Case(queries, KEYS, REST, dtype)
    biases = [numbers(heads, 1, k, dtype=dtype, seed=20 + k) for k in keys_of(case)]
    assert_near(case.run(biases), case.wanted(biases), dtype)


def test_attend_with_a_bias_per_key_and_a_request_without_queries() -> None:
    case = Case(QUERIES, KEYS, REST)
    biases = [numbers(1, 1, k, seed=20 + k) for k in keys_of(case)]
    assert_near(case.run(biases), case.wanted(biases), torch.float64)


def test_attend_with_a_bias_that_hides_keys() -> None:
    case = Case([[3], [2]], [[4], [4]], [[2], [3]])
    biases = [torch.zeros(1, 1, 6).double(), torch.zeros(1, 1, 7).double()]
    biases[0][..., 4:] = -math.inf
    before = case.run(biases)
    assert_near(before, case.wanted(biases), torch.float64)
    case.rest_k[:2], case.rest_v[:2] = 9.0, 9.0
    assert torch.equal(case.run(biases), before)


@pytest.mark.parametrize("kept", [6, 1100], ids=["side by side", "merged"])
@pytest.mark.parametrize("pairwise", [None, True, False], ids=["no bias", "per pair", "per key"])
def test_attend_serves_requests_that_are_alike_together(
    monkeypatch: pytest.MonkeyPatch, pairwise: bool | None, kept: int
) -> None:
    """Two of three have as many rows each, in two segments: a call for them, one for the third."""
    counts, rest = [[3, 5], [3, 5], [2, 1]], [[kept], [kept], [3]]
    case = Case(counts, counts, rest)
    biases = None
    if pairwise is not None:
        rows = [
            (sum(n) if pairwise else 1, sum(n) + m[0]) for n, m in zip(counts, rest, strict=True)
        ]
        biases = [numbers(4, *shape, seed=20 + i) for i, shape in enumerate(rows)]
    batches: list[int] = []

    def counted(whose: Any) -> Any:
        def call(query: Tensor, *args: Any, **kwargs: Any) -> Any:
            batches.append(len(query))
            return whose(query, *args, **kwargs)

        return call

    for place, name in ((F, "scaled_dot_product_attention"), (attention, "_flash")):
        monkeypatch.setattr(place, name, counted(getattr(place, name)))
    found = case.run(biases, pairwise=bool(pairwise))
    assert_near(found, case.wanted(biases), torch.float64)
    merged = kept > 6 and pairwise is None
    assert batches == ([2, 2, 1] if merged else [2, 1])


def test_attend_over_large_scores() -> None:
    """Two partial attentions are merged without overflow."""
    case = Case(QUERIES, KEYS, [[1100], [0], [1200], [1100]], torch.float32)
    case.q *= 50
    case.rest_k *= 3
    assert_near(case.run(), case.wanted(), torch.float32)


# site_mean, site_product, owner_product


@dtypes
@batches
@pytest.mark.parametrize("divide", [True, False], ids=["mean", "sum"])
def test_site_mean(dtype: torch.dtype, batch: list[list[int]], divide: bool) -> None:
    rows, spans = numbers(total(batch), 4, dtype=dtype), spans_of(batch)
    sums, count = numbers(len(batch), 4, dtype=dtype, seed=1), torch.arange(len(batch)) + 2
    rest = torch.cat([sums, count[:, None].to(dtype)], 1)
    wanted = torch.zeros(len(batch), 4, dtype=torch.float64)
    for i in range(len(batch)):
        mine = rows[index(spans, i)].double()
        wanted[i] = (mine.sum(0) + sums[i].double()) / ((len(mine) + count[i]) if divide else 1)
    found = ops.site_mean(rows, rest, spans, divide)
    assert found.dtype == dtype
    assert_near(found, wanted, dtype)


@dtypes
@batches
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
def test_site_extreme(dtype: torch.dtype, batch: list[list[int]], largest: bool) -> None:
    counts = [[2 * i, 1] if total([own]) else [0, 0] for i, own in enumerate(batch)]
    rows, rest = numbers(total(batch), 4, dtype=dtype), numbers(total(counts), 4, dtype=dtype)
    spans, rest_spans = spans_of(batch), rest_spans_of(counts)
    wanted = torch.zeros(len(batch), 4, dtype=torch.float64)
    for i in range(len(batch)):
        own = torch.cat([rows[index(spans, i)], rest[index(rest_spans, i)]]).double()
        if len(own):
            wanted[i] = own.amax(0) if largest else own.amin(0)
    assert_near(ops.site_extreme(rows, rest, spans, rest_spans, largest), wanted, dtype)


@dtypes
@batches
def test_site_product(dtype: torch.dtype, batch: list[list[int]]) -> None:
    rest = [[2 * i, 1] for i in range(len(batch))]
    a = numbers(total(batch), 2, 3, dtype=dtype)
    b = numbers(total(batch), 2, 5, dtype=dtype, seed=1)
    rest_a = numbers(total(rest), 2, 3, dtype=dtype, seed=2)
    rest_b = numbers(total(rest), 2, 5, dtype=dtype, seed=3)
    spans, rest_spans = spans_of(batch), rest_spans_of(rest)
    wanted = torch.zeros(len(batch), 2, 3, 5, dtype=torch.float64)
    for i in range(len(batch)):
        for x, y, where in ((a, b, spans), (rest_a, rest_b, rest_spans)):
            for j in index(where, i):
                wanted[i] += x[j].double()[:, :, None] * y[j].double()[:, None, :]
    assert_near(ops.site_product(a, b, rest_a, rest_b, spans, rest_spans), wanted, dtype)


@dtypes
@batches
def test_owner_product(dtype: torch.dtype, batch: list[list[int]]) -> None:
    rows, spans = numbers(total(batch), 2, 3, dtype=dtype), spans_of(batch)
    matrices = numbers(len(batch), 2, 3, 5, dtype=dtype, seed=1)
    owner = owner_of(spans, len(rows))
    pairs = zip(rows.double(), owner, strict=True)
    wanted = torch.stack([(r[:, None] @ matrices[o].double())[:, 0] for r, o in pairs])
    assert_near(ops.owner_product(rows, matrices, spans), wanted, dtype)


# pick_tokens, choose, chosen, by_expert, expert_product


def test_pick_tokens_numbers_a_request_over_its_segments() -> None:
    spans, rows = spans_of([[2, 3], [1, 0]]), numbers(6, 3)
    out = spans_of([[1, 1], [2, 0]])
    found = ops.pick_tokens(rows, torch.tensor([4, 0, 0, 1]), spans, out)
    assert torch.equal(found, rows[[5, 2, 2, 1]])  # request 0 has rows 0, 1, 3, 4, 5


def test_choose_takes_the_highest_scores_of_each_request() -> None:
    spans, scores = spans_of([[4], [3]]), numbers(7, 2)
    found = ops.choose(scores, scores[:0], spans, rest_spans_of([[0], [0]]), 2)
    for start, stop in ((0, 4), (4, 7)):
        for expert in range(2):
            own = scores[start:stop, expert]
            assert torch.equal(found[start:stop, expert] > 0, own >= own.sort().values[-2])


def test_choose_keeps_what_was_chosen_where_sites_are_inactive() -> None:
    spans, scores = spans_of([[2], [3], [2]]), numbers(7, 2)
    kept = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]]).double()
    found = ops.choose(scores, kept, spans, rest_spans_of([[5], [0], [1]]), 3)
    assert torch.equal(found[:2], kept[:2])
    assert torch.equal(found[2:5], torch.ones(3, 2).double())
    assert torch.equal(found[5:], kept[2:])


@pytest.mark.parametrize("steps", ["", "sigmoid", "mul 0.5, sub 1.0, relu, pow 2.0, tanh"])
def test_pair_sums_are_those_of_each_request(steps: str) -> None:
    case = Case(QUERIES, KEYS, REST, torch.float64, depth=8, depth_v=5)
    q, k, v, rest_k, rest_v, *spans = case.arguments()
    found = ops.site_pair_sum(*case.arguments(), steps)
    wanted = torch.zeros_like(found)
    for i in range(4):
        own, new, old = (index(table, i) for table in spans)
        keys, values = (
            torch.cat([x[new], y[old]]).transpose(0, 1) for x, y in ((k, rest_k), (v, rest_v))
        )
        scores = q[own].transpose(0, 1) @ keys.mT
        if steps == "sigmoid":
            scores = 1 / (1 + torch.exp(-scores))
        elif steps:
            scores = torch.tanh((scores / 2 - 1).clamp(min=0) ** 2)
        wanted[own] = (scores @ values).transpose(0, 1)
    assert torch.allclose(found, wanted, atol=1e-9)
    alone = ops.pair_sum(q[None, :, 0], k[None, :, 0], v[None, :, 0], steps)
    assert alone.shape == (1, len(q), 5)


def test_a_log_sum_exp_holds_the_rest() -> None:
    rows, rest = 50 * numbers(6, 4).float(), 50 * numbers(5, 4, seed=1).float()
    spans, kept = spans_of([[2, 3], [1, 0]]), rest_spans_of([[2], [3]])
    found = ops.site_logsumexp(rows.half(), rest.half(), spans, kept)
    assert found.dtype == torch.float32
    for i in (0, 1):
        every = torch.cat([rows.half()[index(spans, i)], rest.half()[index(kept, i)]]).float()
        assert torch.allclose(found[i], every.logsumexp(0))


def test_chosen_lists_rows_expert_by_expert() -> None:
    choice = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    rows, experts, ends = ops.chosen(choice, 1.5)
    assert rows.tolist() == [0, 1, 1, 2]
    assert experts.tolist() == [0, 0, 2, 2]
    assert ends.tolist() == [2, 2, 4]


@dtypes
def test_experts_multiply_their_own_rows(dtype: torch.dtype) -> None:
    rows, weights = numbers(5, 3, dtype=dtype), numbers(3, 3, 4, dtype=dtype, seed=1)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    parts = ops.by_expert(rows, ends)
    assert [len(part) for part in parts] == [2, 0, 3]
    wanted = torch.cat([p.double() @ w.double() for p, w in zip(parts, weights, strict=True)])
    assert_near(ops.expert_product(rows, weights, ends), wanted, dtype)


# All of them.


def samples() -> dict[Any, tuple[Any, ...]]:
    """Arguments of every operator for a ragged batch of two requests."""
    batch = [[2, 3], [1, 0]]
    spans, rows = spans_of(batch), numbers(6, 4, dtype=torch.float32)
    rest = [[2], [3]]
    case = Case(batch, batch, rest, torch.float32)
    heads, kept = numbers(6, 2, 3).float(), numbers(5, 2, 3, seed=1).float()
    stats = statistics([rows[:2], rows[2:]], 2, torch.float32)
    owner, ones = owner_of(spans, 6), (numbers(5, 4, seed=2) > 0).float()
    moments, kept_owner = ops.site_moments(rows, 2), torch.tensor([0, 0, 1, 1, 1])
    return {
        ops.gather: (rows, rows[:2] + 1, torch.tensor([[0, 7, 8], [6, 1, 2]])),
        ops.enter: (rows, rows[:2] + 1, torch.tensor([0, 1, 6, 2, 7, 7])),
        ops.group_scale: (rows, stats, spans, 2, rows[0].clone(), None, 1e-5),
        ops.scale_shift: (rows, numbers(2, 2, 4, seed=1).float(), owner),
        ops.site_moments: (rows, 2),
        ops.line_scale: (moments, moments[:5] + 1, owner, kept_owner, 2, 4, None, None, 1e-5),
        ops.attend: (*case.arguments(), None, 1, False, None),
        ops.site_mean: (rows, numbers(2, 5, seed=1).float().abs(), spans, True),
        ops.site_extreme: (rows, rows[:5] + 1, spans, rest_spans_of(rest), True),
        ops.site_logsumexp: (rows, rows[:5] + 1, spans, rest_spans_of(rest)),
        ops.pair_sum: (heads, heads + 1, heads - 1, "mul 0.5, sigmoid"),
        ops.site_pair_sum: (*case.arguments(), "relu, pow 2.0"),
        ops.site_product: (heads, heads + 1, kept, kept + 1, spans, rest_spans_of(rest)),
        ops.owner_product: (heads, numbers(2, 2, 3, 5).float(), spans),
        ops.pick_tokens: (rows, torch.tensor([1, 0, 0, 3, 3, 2]), spans, spans),
        ops.choose: (rows, ones, spans, rest_spans_of([[1], [0]]), 2),
        ops.chosen: (torch.cat([ones, 1 - ones]), 2.0),
        ops.by_expert: (rows, torch.tensor([2, 2, 5, 6], dtype=torch.int32)),
        ops.expert_product: (
            rows,
            numbers(2, 4, 5, seed=1).float(),
            torch.tensor([2, 6], dtype=torch.int32),
        ),
        ops.add_low_rank: low_rank_sample(),
        ops.own_linear: own_sample(),
    }


def low_rank_sample() -> tuple[Tensor, ...]:
    """The first request has ranks 0 and 1, in both of its segments, the second 2 to 4."""
    base, rows = numbers(6, 3, seed=1).float(), numbers(6, 4).float()
    down, up = numbers(5, 4, seed=2).float(), numbers(5, 3, seed=3).float()
    return base, rows, down, up, torch.tensor([[0, 2, 0, 2], [2, 3, 2, 5], [3, 6, 0, 2]])


def own_sample() -> tuple[Tensor, ...]:
    """The first request has its own bias in both segments, the second its own weight."""
    rows, weight, bias = numbers(6, 4).float(), numbers(3, 4, seed=1).float(), numbers(3).float()
    weights, biases = numbers(1, 3, 4, seed=2).float(), numbers(1, 3, seed=3).float()
    groups = torch.tensor([[0, 2, 1, 0], [2, 3, 0, 1], [3, 6, 1, 0]])
    return rows, weight, bias, weights, biases, groups


def test_every_operator_has_a_sample() -> None:
    assert set(samples()) == set(ops.ALL)


@pytest.mark.parametrize("op", ops.ALL, ids=str)
def test_opcheck(op: Any) -> None:
    """Not aot_dispatch: the operators are made for inference and have no derivative."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    found = torch.library.opcheck(op, samples()[op], test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", ops.ALL, ids=str)
def test_arguments_stay_as_they_are(op: Any) -> None:
    arguments = samples()[op]
    before = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    out = pytree.tree_leaves(op(*arguments))
    for a, b in zip(arguments, before, strict=True):
        if isinstance(a, Tensor):
            assert torch.equal(a, b)
            assert a.data_ptr() not in [found.data_ptr() for found in out]


def poisoned(op: Any) -> tuple[tuple[Any, ...], Tensor | None]:
    """The second request's own values as NaN; which rows of the result are the first's."""
    arguments = samples()[op]
    spans, nan = spans_of([[2, 3], [1, 0]]), float("nan")
    second, first = index(spans, 1), index(spans, 0)
    match op:
        case ops.gather | ops.enter:
            arguments[0][3] = nan
            return arguments, None
        case ops.group_scale | ops.scale_shift | ops.site_mean:
            arguments[0][second] = nan
            arguments[1][1] = nan
        case ops.attend | ops.site_pair_sum:
            for value in arguments[:3]:
                value[second] = nan
            for value in arguments[3:5]:
                value[2:] = nan
        case ops.site_product:
            for value in arguments[:2]:
                value[second] = nan
            for value in arguments[2:4]:
                value[2:] = nan
        case ops.site_extreme | ops.site_logsumexp | ops.line_scale:
            arguments[0][second] = nan
            arguments[1][2:] = nan
        case ops.site_moments:
            arguments[0][second] = nan
        case ops.owner_product:
            arguments[0][second] = nan
            arguments[1][1] = nan
        case ops.pick_tokens:
            arguments[0][second] = nan
        case ops.add_low_rank:
            arguments[1][second] = nan
            arguments[2][2:] = nan
        case ops.own_linear:
            arguments[0][second] = nan
            arguments[3][0] = nan
    by_row = op in (ops.scale_shift, ops.attend, ops.owner_product, ops.pick_tokens)
    by_row = by_row or op in (ops.add_low_rank, ops.own_linear, ops.site_pair_sum, ops.site_moments)
    return arguments, torch.tensor(first if by_row else [0])


# no request's own rows
OF_EXPERTS = (ops.choose, ops.chosen, ops.by_expert, ops.expert_product, ops.pair_sum)


@pytest.mark.parametrize("op", [op for op in ops.ALL if op not in OF_EXPERTS], ids=str)
def test_nan_stays_with_its_request(op: Any) -> None:
    clean = op(*samples()[op])
    arguments, first = poisoned(op)
    found = op(*arguments)
    if first is None:  # no window reads the poisoned row
        assert torch.equal(found, clean)
        return
    assert found.isnan().any()
    assert torch.equal(found[first], clean[first])


def test_an_operator_is_deterministic() -> None:
    for op, arguments in samples().items():
        one, two = (pytree.tree_leaves(op(*arguments)) for _ in range(2))
        assert all(map(torch.equal, one, two))


def test_low_rank_terms_are_those_of_each_row() -> None:
    base, rows, down, up, groups = low_rank_sample()
    wanted = base.clone()
    for start, stop, low, high in groups.tolist():
        wanted[start:stop] += rows[start:stop] @ down[low:high].T @ up[low:high]
    assert torch.allclose(ops.add_low_rank(base, rows, down, up, groups), wanted, atol=1e-5)
    assert not torch.allclose(wanted[2:3], base[2:3])
    # features between rows and inputs, rows without ranks at either end, and no ranks at all
    wide = [torch.stack([value, 2 * value], 1) for value in (base, rows)]
    found = ops.add_low_rank(*wide, down, up, groups[1:2])
    assert torch.allclose(found[2:3, 1], 2 * wanted[2:3], atol=1e-5)
    for own in ([0, 1], [3, 4, 5]):
        assert torch.equal(found[own], wide[0][own])
    none = ops.add_low_rank(base, rows, down[:0], up[:0], groups[:0])
    assert torch.equal(none, base)


def test_requests_have_weights_and_biases_of_their_own() -> None:
    rows, weight, bias, weights, biases, groups = own_sample()
    common = torch.nn.functional.linear(rows, weight, bias)
    found = ops.own_linear(rows, weight, bias, weights, biases, groups)
    assert torch.allclose(found[2:3], rows[2:3] @ weights[0].T + bias)
    for own in ([0, 1], [3, 4, 5]):
        assert torch.allclose(found[own], common[own] - bias + biases[0], atol=1e-5)
    # features between rows and inputs, rows of requests without any, and none at all
    wide = torch.stack([rows, 2 * rows], 1)
    few = ops.own_linear(wide, weight, None, weights, biases[:0], groups[1:2])
    assert torch.allclose(few[2, 1], 2 * rows[2] @ weights[0].T, atol=1e-5)
    assert torch.allclose(few[3, 0], rows[3] @ weight.T, atol=1e-5)
    assert torch.equal(ops.own_linear(rows, weight, bias, weights, biases, groups[:0]), common)


def test_grouped_products_equal_products_in_turn() -> None:
    base, rows = numbers(20, 8, seed=1).float(), numbers(20, 16).float()
    down, up = numbers(12, 16, seed=2).float(), numbers(12, 8, seed=3).float()
    for table in (
        [[0, 5, 0, 4], [5, 20, 8, 12]],
        [[3, 5, 8, 12], [5, 6, 0, 4], [9, 15, 4, 8]],
        [[0, 5, 0, 1], [5, 6, 1, 8], [9, 15, 8, 12]],  # mixed ranks
        [[0, 0, 0, 4], [0, 5, 4, 4], [7, 7, 4, 6], [7, 12, 4, 6]],  # groups without rows or ranks
        [[4, 4, 0, 4]],
        [],
    ):
        turns, grouped = torch.empty(20, 8), torch.empty(20, 8)
        low_rank.add_in_turn(turns, base, rows, down, up, table)
        low_rank.add_grouped(grouped, base, rows, down, up, table)
        assert torch.allclose(turns, grouped, atol=1e-4)


# FLOPs


def flops(op: Any, arguments: tuple[Any, ...]) -> int:
    with FlopCounterMode(display=False) as counter:
        op(*arguments)
    return int(counter.get_total_flops())


def test_flops_of_attend() -> None:
    case = Case(QUERIES, KEYS, REST, torch.float32, depth=8, depth_v=5)
    products = sum(
        len(index(case.spans[0], i)) * (len(index(case.spans[1], i)) + len(index(case.spans[2], i)))
        for i in range(4)
    )
    assert flops(ops.attend, (*case.arguments(), None, 1, False, None)) == 2 * products * 4 * 13
    assert ops.attend_flops(3, 7, 4, 8, 5) == 2 * 3 * 7 * 4 * 13


def test_experts_of_the_meta_device_have_the_expected_rows() -> None:
    choice, weights = torch.empty(10, 4, device="meta"), torch.empty(4, 3, 5, device="meta")
    rows, experts, ends = ops.chosen(choice, 1.5)
    assert (rows.shape, experts.shape, ends.shape) == ((15,), (15,), (4,))
    parts = ops.by_expert(torch.empty(15, 3, device="meta"), ends)
    assert [len(part) for part in parts] == [4, 4, 4, 3]
    arguments = (torch.empty(15, 3, device="meta"), weights, ends)
    assert flops(ops.expert_product, arguments) == 2 * 15 * 3 * 5


def test_flops_of_products() -> None:
    arguments = samples()
    assert flops(ops.site_product, arguments[ops.site_product]) == 2 * (6 + 5) * 2 * 3 * 3
    assert flops(ops.owner_product, arguments[ops.owner_product]) == 2 * 6 * 2 * 3 * 5
    assert flops(ops.pair_sum, arguments[ops.pair_sum]) == 6 * ops.attend_flops(2, 2, 1, 3, 3)
    given = arguments[ops.site_pair_sum]
    assert flops(ops.site_pair_sum, given) == flops(ops.attend, (*given[:-1], None, 1, False, None))
    assert flops(ops.expert_product, arguments[ops.expert_product]) == 2 * 6 * 4 * 5
    assert flops(ops.add_low_rank, arguments[ops.add_low_rank]) == 2 * (2 * 2 + 1 * 3 + 3 * 2) * (
        4 + 3
    )


@pytest.mark.parametrize(
    "op", [ops.gather, ops.group_scale, ops.scale_shift, ops.site_mean], ids=str
)
def test_only_products_count(op: Any) -> None:
    assert flops(op, samples()[op]) == 0
