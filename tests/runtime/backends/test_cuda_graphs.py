"""Padded pieces one after another equal the unpadded whole; captures run again in the same memory.

CUDA graphs themselves need a GPU; here a recorder that calls the function again takes their place.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx import Loader
from maskfx.compiler.pieces import cut
from maskfx.ir.programs.sources import Neighbours, Owner, Spans
from maskfx.runtime.backends import cuda_graphs
from maskfx.runtime.backends.cuda_graphs import CapturedPiece, recorder_on
from maskfx.runtime.batch.padding import PaddedFrame, padded_size
from tests.factories import masks
from tests.factories.zoo import ZOO, Size
from tests.passes.test_fuse_kernels import Blocks
from tests.passes.tools import shared, timed

KINDS = ("random", "one_site", "border", "full", "stroke")


def steps_of(denoiser: Any, seed: int, wide: bool = False, kinds: Any = KINDS) -> list[Any]:
    """Edits of two pictures, each with masks of several kinds."""
    out = []
    for own, kind in enumerate(kinds):
        inputs = timed(seed + own, wide=wide and bool(own % 2))
        _, kept = denoiser.record(**timed(seed + own, wide=wide and bool(own % 2)))
        mask = masks.MASKS[kind](tuple(inputs["sample"].shape[2:]), seed + own)
        changed = {**inputs, "sample": inputs["sample"] + 0.1}
        out.append(maskfx.EditStep(changed, mask, kept, any_step=True))
    return out


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for one, two in zip(found, wanted, strict=True):
        one, two = (x[0] if isinstance(x, tuple) else x for x in (one, two))
        assert torch.allclose(one, two, atol=1e-5, rtol=1e-4), (one - two).abs().max()


class RerunRecorder:
    """A recorder without a device: calls the function again and copies its results."""

    def __init__(self) -> None:
        self.captures = 0
        self.pools: list[object] = []

    def pool(self) -> object:
        return object()

    def capture(
        self, run: Callable[[], list[Tensor]], pool: object = None
    ) -> tuple[list[Tensor], Callable[[], None]]:
        self.pools.append(pool)
        self.captures += 1
        results = [value.clone() for value in run()]

        def again() -> None:
            for kept, new in zip(results, run(), strict=True):
                kept.copy_(new)

        return results, again


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> RerunRecorder:
    """A recorder in the place of CUDA's."""
    found = RerunRecorder()
    monkeypatch.setattr(cuda_graphs, "recorder_on", lambda device: found)
    return found


def test_sizes() -> None:
    assert [padded_size(n) for n in (0, 1, 16, 17, 33, 64, 65, 100, 129, 1000)] == [
        0, 16, 16, 20, 40, 64, 80, 112, 160, 1024,
    ]  # fmt: skip
    for count in range(1, 3000, 7):
        assert count <= padded_size(count) <= max(16, count * 1.25 + 1)
        assert padded_size(padded_size(count)) == padded_size(count)
    assert len({padded_size(n) for n in range(1, 5000)}) < 40


def test_padded_pieces_equal_the_whole() -> None:
    plain, pieces = (maskfx.compile(shared(Blocks), cuda_graphs=on) for on in (False, True))
    steps = steps_of(plain, 0, wide=True)
    assert_same(pieces.edit(steps), plain.edit(steps))
    for step in steps:  # alone too
        assert_same(pieces.edit([step]), plain.edit([step]))
    executor = pieces._executor
    assert len(executor.graphs.replays.paddings)
    executor.frames.clear()
    gc.collect()
    assert not len(executor.graphs.replays.paddings), "paddings keep no frame"


def test_captured_pieces_equal_the_whole(recorder: RerunRecorder) -> None:
    plain, pieces = (maskfx.compile(shared(Blocks), cuda_graphs=on) for on in (False, True))
    counts = []
    for seed in (0, 10, 20, 30):  # other masks and values, and the same sizes again
        steps = steps_of(plain, seed, kinds=("random", "random"))
        assert_same(pieces.edit(steps), plain.edit(steps))
        counts.append(recorder.captures)
    assert counts[0] == 0
    assert counts[1] > 0
    steps = steps_of(plain, 50, kinds=("random", "random"))
    before = recorder.captures
    for _ in range(3):
        assert_same(pieces.edit(steps), plain.edit(steps))
    after = recorder.captures
    assert_same(pieces.edit(steps), plain.edit(steps))
    assert recorder.captures == after  # all pieces have a capture for these sizes
    assert after - before <= 12


def test_pieces_wait_for_loads(recorder: RerunRecorder) -> None:
    plain = maskfx.compile(shared(Blocks))
    pieces = maskfx.compile(shared(Blocks), cuda_graphs=True, loader=Loader())
    steps = steps_of(plain, 3)
    for _ in range(3):
        assert_same(pieces.edit(steps), plain.edit(steps))
    assert recorder.captures


def test_no_row_of_the_batch_reads_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of padding that are NaN change nothing."""
    plain, pieces = (maskfx.compile(shared(Blocks), cuda_graphs=on) for on in (False, True))
    steps = steps_of(plain, 5)
    poisoned: list[str] = []

    def poison(self: PaddedFrame, rows: Tensor, segments: Any, value: int = 0) -> Tensor:
        if not rows.is_floating_point():
            return padded_rows(self, rows, segments, value)
        poisoned.append("rows")
        return padded_rows(self, rows, segments, float("nan"))

    padded_rows: Any = PaddedFrame._rows
    monkeypatch.setattr(PaddedFrame, "_rows", poison)
    assert_same(pieces.edit(steps), plain.edit(steps))
    assert poisoned


def test_tables_point_where_rows_are() -> None:
    denoiser = maskfx.compile(shared(Blocks))
    steps = steps_of(denoiser, 7)
    denoiser.edit(steps)
    frame = denoiser._executor.frames.items()[-1][1]
    padded, program = PaddedFrame(frame), next(iter(denoiser.programs.values()))
    for name, source in program.interface.inputs.items():
        if not isinstance(source, Owner | Spans | Neighbours):
            continue
        table = (
            frame.fetch([])(name) if isinstance(source, Spans) else frame._table_of(name, source)
        )
        wide = padded.pad(name, lambda name, table=table: table)  # type: ignore[misc]
        if isinstance(source, Owner):
            assert wide[: len(table)].equal(table) or len(source.segments) > 1
            assert set(wide[len(table) :].tolist()) <= {padded.requests}
        if isinstance(source, Spans):
            assert not wide[len(table) :].any()
        if isinstance(source, Neighbours):
            assert len(wide) == padded_size(len(table))
            assert (wide[len(table) :] == wide.max()).all()


def test_results_stay_where_they_were_captured() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(torch.add, (x, y)),))
    (piece,) = cut(torch.fx.GraphModule({}, graph), lambda node: False)
    recorder = RerunRecorder()
    run = CapturedPiece(piece, recorder, ())
    places = set()
    for seed in range(4):
        given = {name: torch.full((3,), float(seed)) for name in ("x", "y")}
        (found,) = run(given.__getitem__)
        assert found.tolist() == [2.0 * seed] * 3
        if seed:
            places.add(found.data_ptr())
    assert len(places) == 1
    assert recorder.captures == 1
    run({name: torch.ones(4) for name in ("x", "y")}.__getitem__)
    assert recorder.captures == 1  # other sizes are captured the second time


def test_a_piece_that_cant_be_captured_runs_as_before(caplog: pytest.LogCaptureFixture) -> None:
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.neg, (graph.placeholder("x"),)),))
    (piece,) = cut(torch.fx.GraphModule({}, graph), lambda node: False)

    class Failing:
        def pool(self) -> object:
            return object()

        def capture(self, run: Any, pool: object = None) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    run = CapturedPiece(piece, Failing(), ())
    for seed in range(3):
        (found,) = run({"x": torch.ones(2) * seed}.__getitem__)
        assert found.tolist() == [-seed, -seed]
    assert caplog.text.count("isn't captured") == 1


def test_the_captures_of_a_piece_are_bounded() -> None:
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.neg, (graph.placeholder("x"),)),))
    (piece,) = cut(torch.fx.GraphModule({}, graph), lambda node: False)
    run = CapturedPiece(piece, RerunRecorder(), ())
    for size in range(1, 20):
        for _ in range(2):
            run({"x": torch.ones(size)}.__getitem__)
    assert len(run._kept) == cuda_graphs.BUCKETS


def test_a_cpu_captures_nothing() -> None:
    assert recorder_on(torch.device("cpu")) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["FluxTransformer2DModel", "SD3Transformer2DModel-sd35", "UNet2DConditionModel-sdxl",
     "PixArtTransformer2DModel", "SanaTransformer2DModel"],
)  # fmt: skip
def test_families(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of several sizes and masks, fused and captured, against the plain graph."""
    case = ZOO[name]
    module, recorder = case.build(), RerunRecorder()
    monkeypatch.setattr(cuda_graphs, "recorder_on", lambda device: recorder)
    plain, pieces = (maskfx.compile(module, cuda_graphs=on) for on in (False, True))
    steps = []
    sizes: list[Size] = [case.sizes[0], case.sizes[1], case.sizes[0]]
    for seed, size in enumerate(sizes):
        _, kept = plain.record(**case.inputs(size, seed))
        mask = masks.MASKS[KINDS[seed]](case.mask_shape(size), seed)
        steps.append(maskfx.EditStep(case.inputs(size, seed + 5), mask, kept, any_step=True))
    wanted = plain.edit(steps)
    for _ in range(3):
        assert_same(pieces.edit(steps), wanted)
    assert recorder.captures > 3
