"""Attention in C against the plain operator in float64: ragged requests, shapes, threads."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from maskfx import ops
from maskfx.ops.base import plain_of
from maskfx.ops.native import attention, build
from tests.ops.test_ops import numbers

LIB = build.c_functions()
pytestmark = pytest.mark.skipif(
    LIB is None or not LIB.wide(), reason="no C compiler, or no AVX-512 here"
)
Rows = tuple[Tensor, ...]


@pytest.fixture(params=[1, 2, 3], ids=["one thread", "two", "three"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def segments(draw: random.Random, counts: list[int], pairs: int) -> tuple[Tensor, int]:
    """Ranges of each request's rows, the last request's first, and the number of all rows."""
    found, at = [[0] * (2 * pairs) for _ in counts], 0
    for pair in reversed(range(pairs)):
        for number in reversed(range(len(counts))):
            left = counts[number] - sum(found[number][1::2]) + sum(found[number][::2])
            size = left if pair == 0 else draw.randint(0, left)
            found[number][2 * pair : 2 * pair + 2] = at, at + size
            at += size
    return torch.tensor(found), at


def drawn(
    seed: int, *, heads: int, key_heads: int, depth: int, depth_v: int, pairs: int = 2
) -> tuple[Rows, tuple[Tensor, ...]]:
    draw = random.Random(seed)
    requests = draw.randint(1, 4)
    counts = [[draw.choice(sizes) for _ in range(requests)] for sizes in SIZES]
    spans, totals = zip(*(segments(draw, own, pairs) for own in counts), strict=True)
    shapes = (
        (totals[0], heads, depth),
        *((totals[1], key_heads, depth), (totals[1], key_heads, depth_v)),
        *((totals[2], key_heads, depth), (totals[2], key_heads, depth_v)),
    )
    return tuple(numbers(*s, seed=seed + n) for n, s in enumerate(shapes)), spans


# rows of a request: queries, fresh keys, cached keys; tiles have 32 queries, blocks 64 keys
SIZES = ((0, 1, 5, 32, 33, 270), (1, 3, 64, 65, 200), (0, 1, 8, 63, 150))
FORMS = (
    {"heads": 2, "key_heads": 2, "depth": 20, "depth_v": 20},
    {"heads": 3, "key_heads": 3, "depth": 1, "depth_v": 5},
    {"heads": 4, "key_heads": 2, "depth": 12, "depth_v": 12},
    {"heads": 6, "key_heads": 1, "depth": 64, "depth_v": 40},
)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(tuple(form.values())))
@pytest.mark.parametrize("seed", range(8))
def test_requests_attend_to_their_own_keys(form: dict[str, int], seed: int) -> None:
    rows, spans = drawn(seed, **form)
    scale, allowed = (None, 2e-6) if seed % 2 else (0.7, 2e-5)  # scores of up to 30
    wanted = plain_of("attend_part")(*rows, *spans, scale)
    single = tuple(x.float() for x in rows)
    assert attention.serving(single, spans) is not None
    found = ops.attend_part(*single, *spans, scale)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own.double(), other.double(), rtol=1e-5, atol=allowed)
    mixed = ops.attend(*single, *spans, None, 1, False, scale)
    torch.testing.assert_close(mixed, found[0], rtol=0, atol=0)


def test_scores_of_any_size_are_weighed() -> None:
    """Far apart within a block and between blocks, falling and rising."""
    (q, k, v, *rest), spans = drawn(1, **FORMS[0], pairs=1)
    for factor in (1e-6, 30.0, 1e4):
        given = q.float() * factor, k.float() * torch.linspace(3, -3, len(k))[:, None, None], v
        single = tuple(x.float() for x in (*given, *rest))
        wanted = plain_of("attend_part")(*(x.double() for x in single), *spans, None)
        found = ops.attend_part(*single, *spans, None)
        torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found[1].double(), wanted[1].double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", range(5), ids=["q", "k", "v", "cached k", "cached v"])
def test_nan_is_not_lost(place: int) -> None:
    rows, spans = drawn(7, **FORMS[0], pairs=1)
    single = [x.float() for x in rows]
    assert min(map(len, single)) > 0
    single[place][0, 0, 0] = torch.nan
    wanted = plain_of("attend")(*single, *spans, None, 1, False, None)
    found = ops.attend(*single, *spans, None, 1, False, None)
    assert wanted.isnan().any()
    assert torch.equal(found.isnan(), wanted.isnan())


def test_rows_within_wider_rows_are_read_where_they_are() -> None:
    (q, k, v, *rest), spans = drawn(2, **FORMS[0])
    wide = torch.cat([k, v], 2).float()
    parts = wide.split([k.shape[2], v.shape[2]], 2)
    single = (q.float().transpose(0, 1).contiguous().transpose(0, 1), *parts)
    single = (*single, *(x.float() for x in rest))
    assert attention.serving(single, spans) is not None
    found = ops.attend(*single, *spans, None, 1, False, None)
    wanted = ops.attend(*(x.contiguous() for x in single), *spans, None, 1, False, None)
    assert torch.equal(found, wanted)


def test_a_request_gets_the_same_beside_others() -> None:
    rows, spans = drawn(5, **FORMS[2])
    assert len(spans[0]) > 1
    single = tuple(x.float() for x in rows)
    together = ops.attend(*single, *spans, None, 1, False, None)
    for number in range(len(spans[0])):
        own = [span[number : number + 1].clone() for span in spans]
        alone = ops.attend(*single, *own, None, 1, False, None)
        for start, stop in own[0].view(-1, 2).tolist():
            assert torch.equal(together[start:stop], alone[start:stop])


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("span", [[0, 10**6], [-1, 2], [3, 2]])
def test_spans_of_rows_that_arent_there_raise(kind: int, span: list[int]) -> None:
    rows, spans = drawn(3, **FORMS[0], pairs=1)
    given = list(spans)
    given[kind] = given[kind].clone()
    given[kind][0] = torch.tensor(span)
    with pytest.raises(IndexError, match="point beyond the rows"):
        ops.attend(*(x.float() for x in rows), *given, None, 1, False, None)


def test_other_values_are_left_to_pytorch() -> None:
    rows, spans = drawn(4, **FORMS[0], pairs=1)
    single = tuple(x.float() for x in rows)
    assert attention.serving(rows, spans) is None, "double precision"
    assert attention.serving((single[0].transpose(1, 2), *single[1:]), spans) is None
    assert attention.serving(single, [span.int() for span in spans]) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert attention.serving(single, spans) is None
    assert attention.serving(single, spans) is not None


def test_without_openmp_several_threads_are_left_to_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = shutil.which("cc")
    assert compiler is not None
    lib = build.loaded(build.compiled(compiler))
    monkeypatch.setattr(build, "c_functions", lambda: lib)
    rows, spans = drawn(4, **FORMS[0], pairs=1)
    single = tuple(x.float() for x in rows)
    serves = attention.serving(single, spans) is not None
    assert serves == (torch.get_num_threads() == 1)
    torch.testing.assert_close(
        ops.attend(*single, *spans, None, 1, False, None),
        plain_of("attend")(*single, *spans, None, 1, False, None),
    )
