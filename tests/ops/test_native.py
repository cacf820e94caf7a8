"""Group norms in C against the plain operators in float64, and what happens without a compiler."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from maskfx import ops
from maskfx.ops.base import plain_of
from maskfx.ops.native import build, cpu
from tests.ops.test_ops import BATCHES, RAGGED, numbers, spans_of

batches = pytest.mark.parametrize("batch", BATCHES, ids=["ragged", "one", "even"])
GROUPS, CHANNELS, EPS = 3, 12, 1e-5


@pytest.fixture
def served() -> None:
    if build.c_functions() is None:
        pytest.skip("no C compiler here")


@pytest.fixture
def looked_up_anew() -> Iterator[None]:
    build.c_functions.cache_clear()
    yield
    build.c_functions.cache_clear()


def norm_arguments(batch: list[list[int]], far: float = 0.0) -> tuple[Tensor, ...]:
    rows = numbers(sum(map(sum, batch)), CHANNELS) + far
    shape = len(batch), GROUPS
    count = torch.full(shape, 5.0)
    rest = torch.stack([count, numbers(*shape, seed=1) + far, numbers(*shape, seed=2).abs()], 2)
    return rows, rest, numbers(CHANNELS, seed=3), numbers(CHANNELS, seed=4)


@batches
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("far", [0.0, 100.0])
def test_group_scale_is_the_plain_operators(
    batch: list[list[int]], affine: bool, far: float, served: None
) -> None:
    rows, rest, *more = norm_arguments(batch, far)
    weight, bias = more if affine else (None, None)
    spans = spans_of(batch)
    wanted = plain_of("group_scale")(rows, rest, spans, GROUPS, weight, bias, EPS)
    single = [None if v is None else v.float() for v in (rows, rest, weight, bias)]
    assert cpu.chosen(*(v for v in single if v is not None)) is not None
    found = ops.group_scale(single[0], single[1], spans, GROUPS, *single[2:], EPS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5 * max(far, 1.0))


def test_group_scale_without_rows_or_rest_divides_by_no_zero(served: None) -> None:
    rest = torch.zeros(1, GROUPS, 3)
    found = ops.group_scale(
        torch.empty(0, CHANNELS), rest, torch.tensor([[0, 0]]), GROUPS, None, None, EPS
    )
    assert torch.isfinite(found).all()


def test_scale_shift_takes_each_owners_numbers(served: None) -> None:
    rows, scales = numbers(9, CHANNELS).float(), numbers(3, 2, CHANNELS, seed=1).float()
    owner = torch.tensor([0, 2, 2, 1, 0, 0, 1, 2, 1])
    wanted = rows * scales[owner, 0] + scales[owner, 1]
    torch.testing.assert_close(ops.scale_shift(rows, scales, owner), wanted)
    torch.testing.assert_close(
        ops.scale_shift(rows, scales[:1], torch.zeros_like(owner)),
        rows * scales[0, 0] + scales[0, 1],
    )
    with pytest.raises(IndexError, match="beyond the 3 scales"):
        ops.scale_shift(rows, scales, owner + 1)


@pytest.mark.parametrize("span", [[0, 4], [-1, 2], [3, 2]])
def test_spans_of_rows_that_are_not_there_are_refused(span: list[int], served: None) -> None:
    rest = torch.zeros(1, GROUPS, 3)
    with pytest.raises(IndexError, match="beyond the 3 rows"):
        ops.group_scale(
            torch.ones(3, CHANNELS), rest, torch.tensor([span]), GROUPS, None, None, EPS
        )


def test_owners_of_other_rows_are_no_owners(served: None) -> None:
    scales = numbers(2, 2, CHANNELS).float()
    with pytest.raises(RuntimeError, match="size of tensor"):
        ops.scale_shift(torch.ones(9, CHANNELS), scales, torch.tensor([0, 1]))


def test_what_c_does_not_serve_runs_plainly(served: None) -> None:
    rows, rest, weight, bias = norm_arguments(RAGGED)
    assert cpu.chosen(rows.t()) is None  # rows that don't lie one after the other
    for kind in (torch.float64, torch.bfloat16):
        values = [value.to(kind) for value in (rows, weight, bias)]
        arguments = (rest.to(torch.float32), spans_of(RAGGED), GROUPS, *values[1:], EPS)
        wanted = plain_of("group_scale")(values[0], *arguments)
        assert torch.equal(ops.group_scale(values[0], *arguments), wanted)
    across = numbers(CHANNELS, 9).t().float()
    scales, owner = numbers(1, 2, CHANNELS).float(), torch.zeros(9, dtype=torch.int64)
    wanted = plain_of("scale_shift")(across, scales, owner)
    assert torch.equal(ops.scale_shift(across, scales, owner), wanted)


def test_large_values_are_left_to_several_threads(
    monkeypatch: pytest.MonkeyPatch, served: None
) -> None:
    large = torch.empty(cpu.MOST + 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert cpu.chosen(large) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cpu.chosen(large) is not None


@pytest.mark.usefixtures("looked_up_anew")
def test_without_a_compiler_the_plain_operators_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.INFO):
        assert cpu.chosen(torch.empty(3)) is None
    assert "no C compiler" in caplog.text
    rows, scales = torch.ones(2, 3), torch.full((1, 2, 3), 2.0)
    found = ops.scale_shift(rows, scales, torch.zeros(2, dtype=torch.int64))
    assert torch.equal(found, torch.full((2, 3), 4.0))


@pytest.mark.usefixtures("looked_up_anew")
def test_a_compiler_that_fails_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO):
        assert build.c_functions() is None
        assert build.c_functions() is None
    assert caplog.text.count("can't compile rows.c") == 1
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.usefixtures("looked_up_anew", "served")
def test_compiled_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MASKFX_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.c_functions.cache_clear()
    assert build.c_functions() is not None
    [kept] = (tmp_path / "maskfx").iterdir()
    before = kept.stat().st_mtime_ns
    build.c_functions.cache_clear()
    assert build.c_functions() is not None
    assert [path.stat().st_mtime_ns for path in (tmp_path / "maskfx").iterdir()] == [before]


@pytest.mark.usefixtures("served")
def test_the_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKFX_KERNELS", "0")
    assert cpu.chosen(torch.empty(3)) is None


PLACES = torch.tensor([4, 0, 7, 2])
KINDS = [(5,), (2, 3), ()]


@pytest.mark.parametrize("shape", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_put_all_is_the_plain_operator(
    shape: tuple[int, ...], dtype: torch.dtype, served: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = [(10 * numbers(8, *shape, seed=n)).to(dtype) for n in range(3)]
    rows = [(9 * numbers(4, *shape, seed=9 - n)).to(dtype) for n in range(3)]
    places = [PLACES, PLACES, PLACES.flip(0)]
    wanted = [target.clone() for target in targets]
    plain_of("put_all")(wanted, places, rows)
    refuse_plain(monkeypatch)
    ops.put_all(targets, places, rows)
    for found, own in zip(targets, wanted, strict=True):
        assert torch.equal(found, own)


TABLE = torch.tensor([0, 1, 0, 0, 1, 0, 0, 2])
SIZES, FIRSTS = torch.tensor([2, 0, 1, 1]), torch.tensor([1, 0, 2, -1])


@pytest.mark.parametrize("shape", KINDS)
def test_replace_all_is_the_plain_operator(
    shape: tuple[int, ...], served: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = [numbers(8, *shape, seed=n).float() for n in range(2)]
    rows = [numbers(4, *shape, seed=4 + n).float() for n in range(2)]
    sums = [numbers(5, 2, seed=2).float(), numbers(5, 2, seed=3).float()]
    begun = [own.clone() for own in sums]
    wanted, wanted_sums = ([v.clone() for v in values] for values in (targets, sums))
    places, about = [PLACES, PLACES.flip(0)], ([TABLE] * 2, [SIZES] * 2, [FIRSTS] * 2)
    plain_of("replace_all")(wanted, places, rows, *about, wanted_sums)
    changed = (wanted_sums[0] != begun[0]).any(1).tolist()
    assert changed == [False, True, True, False, True]  # the last row's request isn't watched
    refuse_plain(monkeypatch)
    ops.replace_all(targets, places, rows, *about, sums)
    for n in range(2):
        assert torch.equal(targets[n], wanted[n])
        torch.testing.assert_close(sums[n], wanted_sums[n])


@pytest.mark.parametrize(
    ("places", "sizes", "firsts"),
    [
        (PLACES + 1, SIZES, FIRSTS),
        (PLACES - 5, SIZES, FIRSTS),
        (PLACES, SIZES, FIRSTS + 1),
        (PLACES, SIZES + 1, FIRSTS),
        (PLACES, SIZES // 2, FIRSTS),
    ],
)
def test_nothing_is_written_to_places_and_patches_that_are_not_there(
    places: Tensor, sizes: Tensor, firsts: Tensor, served: None
) -> None:
    """Neither to the buffer with the wrong places nor to the ones before it."""
    targets, sums = torch.zeros(2, 8, 2), torch.zeros(2, 5, 2)
    both, rows = [PLACES, places], list(torch.ones(2, 4, 2))
    with pytest.raises(IndexError, match="beyond the rows of 2 buffers or the 5 patches"):
        ops.replace_all(
            list(targets), both, rows, [TABLE] * 2, [SIZES, sizes], [FIRSTS, firsts], list(sums)
        )
    if places is not PLACES:
        with pytest.raises(IndexError, match="beyond the rows of 2 buffers"):
            ops.put_all(list(targets), both, rows)
    assert not targets.any()
    assert not sums.any()


def test_rows_that_c_does_not_serve_are_put_by_the_plain_operators(served: None) -> None:
    target, rows = torch.zeros(3, 8, 2)[:, ::2], torch.ones(2, 4, 2)  # not contiguous
    ops.put_all([target], [torch.tensor([0, 2])], [rows])
    assert target.sum((1, 2)).tolist() == [8, 0, 8]
    half, sums = torch.zeros(3, 4, dtype=torch.float16), torch.zeros(1, 2)
    one, zeros = torch.tensor([1]), torch.zeros(3, dtype=torch.long)
    new = torch.ones(1, 4).half()
    ops.replace_all([half], [one], [new], [zeros], [one], [zeros[:1]], [sums])
    assert half.sum(1).tolist() == [0, 4, 0]
    assert sums.tolist() == [[1, 0]]


def test_no_buffer_and_no_rows_are_no_work(served: None) -> None:
    ops.put_all([], [], [])
    target, none = torch.ones(3, 2), torch.empty(0, dtype=torch.long)
    ops.put_all([target], [none], [torch.empty(0, 2)])
    assert target.eq(1).all()


def refuse_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> None:
        raise AssertionError(f"{name}: the plain operator runs")

    monkeypatch.setattr(cpu, "plain_of", refused)


def test_chosen_rows_are_read_and_replaced(served: None) -> None:
    """By buffer, those of one set without another; rows have other places in the buffers."""
    flags = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool().numpy()
    places = np.array([3, 0, 5, 1])
    sets = np.array([0, 2, 1]), np.array([1, 0, 3])
    chosen = ops.ChosenRows(flags, places, *sets)
    buffers = [numbers(6, 3, seed=seed).float() for seed in range(3)]
    there = [torch.tensor([3, 1]), torch.tensor([5]), torch.tensor([0])]
    assert chosen.counts().tolist() == [len(own) for own in there]
    found = chosen.take(buffers, chosen.counts().tolist())
    for buffer, own, rows in zip(buffers, there, found, strict=True):
        assert torch.equal(rows, buffer[own])
    new = [rows + 1 for rows in found]
    wanted = [b.index_copy(0, i, n) for b, i, n in zip(buffers, there, new, strict=True)]
    chosen.put(buffers, new)
    assert all(map(torch.equal, buffers, wanted))
    with pytest.raises(IndexError, match="other places or numbers of rows"):
        chosen.put(buffers, [rows[:1] for rows in new])
    with pytest.raises(IndexError, match="other places or numbers of rows"):
        chosen.put([buffer[:5] for buffer in buffers], new)
