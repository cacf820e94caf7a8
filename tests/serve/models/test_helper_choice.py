"""Whether encoders and VAE get a helper process: by a setting, or by the times of edits."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch

from maskfx.engine.processes.helper_processes import HelperProcesses
from maskfx.engine.processes.placement import InRequestThreads
from maskfx.serve.models import helper_choice
from maskfx.serve.models.helper_choice import FILE, HelperTimes, helper_pays, unsuited
from maskfx.serve.models.model_parts import PROGRAMS
from tests.factories.served import Served, build, edit, job

NAME = "StableDiffusionInpaintPipeline"
FAST, SLOW = HelperTimes(threads=1.0, helper=0.5), HelperTimes(threads=1.0, helper=0.96)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the programs of the first model, so that no other one captures."""
    return tmp_path_factory.mktemp("cache")


def serving(folder: Path, **settings: Any) -> Served:
    return Served(build(NAME), max_num_seqs=2, cache_dir=folder, **settings)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    made = serving(folder)
    yield made
    made.model.close()


@pytest.fixture(autouse=True)
def several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def pays(served: Served, folder: Path | None = None) -> bool:
    return helper_pays(served.model.family, served.model._engine, 2, folder)


def test_a_setting_decides(served: Served, folder: Path) -> None:
    assert isinstance(served.model.engine._outside, InRequestThreads)  # off
    before = children()
    other = serving(folder, helpers="on")
    try:
        assert isinstance(other.model.engine._outside, HelperProcesses)
        assert children() - before
        apart = [one.made(job(seed=3), edit(1)).pixels for one in (served, other)]
        assert np.abs(apart[0].astype(int) - apart[1]).max() <= 1  # type: ignore[union-attr]
    finally:
        other.model.close()
    assert children() <= before


@pytest.mark.parametrize("times", [FAST, SLOW])
def test_auto_is_what_was_faster_by_enough(
    served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch, times: HelperTimes
) -> None:
    monkeypatch.setattr(helper_choice, "measured", lambda *_: times)
    other = serving(folder, helpers="auto")
    try:
        wanted = HelperProcesses if times.helps else InRequestThreads
        assert type(other.model.engine._outside) is wanted
        assert other.made(job(), edit(1)).pixels is not None
    finally:
        other.model.close()
        (folder / PROGRAMS / FILE).unlink()


def test_times_are_kept_for_the_next_start(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, asked = [FAST, SLOW, FAST], list[int]()

    def measure(*_: object) -> HelperTimes:
        asked.append(1)
        return found[len(asked) - 1]

    monkeypatch.setattr(helper_choice, "measured", measure)
    folder = tmp_path / "programs"
    assert pays(served, folder)
    assert pays(served, folder)
    assert len(asked) == 1
    assert [path.name for path in folder.iterdir()] == [FILE]
    for damage in (b"{", b'{"a": 3}'):
        (folder / FILE).write_bytes(damage)
        pays(served, folder)
    assert len(asked) == 3
    assert pays(served, folder)
    assert list(json.loads((folder / FILE).read_text()).values()) == [
        {"threads": 1.0, "helper": 0.5}
    ]
    found.append(FAST)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # another machine
    assert pays(served, folder)
    assert len(asked) == 4


def test_a_measurement_that_fails_is_no_reason_not_to_serve(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> HelperTimes:
        raise RuntimeError("no process can be started")

    monkeypatch.setattr(helper_choice, "measured", broken)
    assert not pays(served)


def test_what_no_helper_can_speed_up_is_not_measured(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(helper_choice, "measured", None)
    with caplog.at_level(logging.INFO):
        assert not helper_pays(served.model.family, served.model._engine, 1, None)
    assert "one request runs at a time" in caplog.text
    assert unsuited(served.model.family, 2) is None
    monkeypatch.setattr(helper_choice, "on_cpu", lambda _: False)
    assert "on a device" in (unsuited(served.model.family, 2) or "")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert unsuited(served.model.family, 2) == "there is one core"


@pytest.mark.slow
def test_both_kinds_are_measured_and_leave_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_choice, "SECONDS", 0.0)
    before, held = children(), served.model.cache()["bytes.host"]
    times = helper_choice.measured(served.model.family, served.model._engine)
    assert times.threads > 0
    assert times.helper > 0
    assert children() <= before
    assert served.model.cache()["bytes.host"] == held, "no template is recorded"
