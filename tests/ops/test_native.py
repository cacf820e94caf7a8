"""Group norms in C against the plain operators in float64, and what happens without a compiler."""

import logging
from collections.abc import Iterator
from pathlib import Path

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
