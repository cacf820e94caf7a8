"""explain() counts the exchanges of a step that is split over ranks, or states why none is."""

from __future__ import annotations

import pytest

from maskfx.compiler.rank_twins import split_program
from maskfx.ir.programs.head_sources import WAYS
from tests.distributed import tiny


def test_counts_exchanges_between_ranks() -> None:
    denoiser = tiny.compiled()
    program = next(iter(denoiser.programs.values()))
    counts = []
    for way in WAYS:
        split = split_program(program, way)
        assert not isinstance(split, str)
        counts.append(len(split.exchanges))
    line = (
        f"A step that is split over ranks has {counts[0]} exchanges, {counts[1]} exchanges with "
        f"keys by rank, {counts[2]} exchanges with divided heads, one that records {counts[0]} "
        "exchanges."
    )
    assert line in denoiser.explain()
    assert "Heads that ranks may divide: 2 in an attention;" in denoiser.explain()
    gathered = "keys are gathered in 1 of the attentions: its keys are those of a text."
    assert gathered in denoiser.explain()


def test_states_why_a_step_cant_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maskfx.runtime.explain.split_program", lambda *_: "sites are data")
    denoiser = tiny.compiled()
    assert "A step can't be split over ranks: sites are data." in denoiser.explain()
