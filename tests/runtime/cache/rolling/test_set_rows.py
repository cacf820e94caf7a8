"""Rows that are read and replaced by sets of sites, in C, beside tables of places for each tap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx.ir.programs.sources import Loaded, Rest
from maskfx.ops import ChosenRows
from maskfx.ops.kernels.serves import SWITCH
from maskfx.ops.native import build
from maskfx.runtime.cache.rolling import set_rows
from maskfx.runtime.cache.rolling.rolling_cache import write_rows
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from tests.factories import masks
from tests.passes.test_cut_stretches import Layers, layer_inputs
from tests.runtime.test_stretches import anywhere

BYTES = 1 << 30
STRETCHES = 3


@pytest.fixture
def served() -> None:
    if build.c_functions() is None:
        pytest.skip("no C compiler here")


class Pooled:
    """Requests with rolling rows in one pool, whose masks differ by stretch."""

    def __init__(self, requests: int = 4) -> None:
        torch.manual_seed(0)
        self.denoiser = maskfx.compile(Layers(STRETCHES), stretches=True)
        pool = RollingPool(BYTES)
        self.caches, self.steps = [], []
        for seed in range(requests):
            inputs = layer_inputs(seed, wide=seed % 2 == 1)
            kept = self.denoiser.record(**inputs)[1]
            self.caches.append(pool.start(self.denoiser.programs[kept.program], kept))
            mask = masks.random((kept.sizes["tokens"],), seed)
            wide = anywhere(STRETCHES, mask, seed)
            step = maskfx.EditStep(inputs, mask, self.caches[-1], wide=wide, record=True)
            self.steps.append(step)
        [(self.program, self.frame, self.members)] = self.denoiser.batches(self.steps)
        inputs = self.program.interface.inputs.items()
        self.names = [name for name, source in inputs if isinstance(source, Rest | Loaded)]

    def read(self) -> dict[str, Tensor]:
        fetch = self.frame.fetch(self.members)
        return {name: fetch(name) for name in self.names}

    def write(self, some: slice = slice(None)) -> list[dict[str, Any]]:
        """Replace rows by numbers that are drawn; return what the caches hold then."""
        draw, emitted = torch.Generator().manual_seed(1), []
        for tap in self.program.interface.taps.values():
            counts = [sum(self.frame.layout.counts(segment)) for segment in tap.segments]
            emitted.append(torch.randn(sum(counts), *tap.shape, generator=draw))
        written = {n: m.written for n, m in enumerate(self.members) if m.written is not None}
        write_rows(self.frame.layout, dict(list(written.items())[some]), emitted)
        return [dict(cache.copy().rows) for cache in self.caches]


@pytest.mark.parametrize(("ahead", "together"), [(set_rows.AHEAD, [3, 6]), (2800, [2]), (1, [])])
def test_reads_what_tables_of_places_read(
    ahead: int, together: list[int], monkeypatch: pytest.MonkeyPatch, served: None
) -> None:
    """As many inputs at once as are small enough together, and the others by themselves."""
    requests = Pooled()
    calls: list[int] = []
    take = ChosenRows.take

    def counted(self: Any, buffers: Any, counts: Any) -> list[Tensor]:
        calls.append(len(buffers))
        return take(self, buffers, counts)

    monkeypatch.setattr(ChosenRows, "take", counted)
    monkeypatch.setattr(set_rows, "AHEAD", ahead)
    found = requests.read()
    monkeypatch.setenv(SWITCH, "0")
    wanted = requests.read()
    assert calls == together
    for name, rows in wanted.items():
        assert torch.equal(found[name], rows), name


@pytest.mark.parametrize("some", [slice(None), slice(0, 3)], ids=["all", "some"])
def test_replaces_what_tables_of_places_replace(
    some: slice, monkeypatch: pytest.MonkeyPatch, served: None
) -> None:
    """Also where only some members of a batch replace rows, which only tables of places know."""
    found = Pooled().write(some)
    monkeypatch.setattr(set_rows, "serves_chosen", lambda rows: False)
    wanted = Pooled().write(some)
    before, changed = Pooled().caches, 0
    for one, other, old in zip(found, wanted, before, strict=True):
        assert all(torch.equal(rows, other[tap]) for tap, rows in one.items())
        changed += not all(torch.equal(rows, one[tap]) for tap, rows in old.rows.items())  # type: ignore[arg-type]
    assert changed == len(before[some])


def test_a_step_takes_the_inputs_that_it_asks_for(served: None) -> None:
    """In any order, each once; one that is asked for alone reads nothing else ahead."""
    requests = Pooled()
    wanted = requests.read()
    names = requests.names[::-1]
    fetch = requests.frame.fetch(requests.members)
    for name in names:
        assert torch.equal(fetch(name), wanted[name]), name
    alone = requests.frame.fetch(requests.members, all_inputs=False)
    assert torch.equal(alone(names[0]), wanted[names[0]])
