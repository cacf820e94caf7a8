"""The comparison of server and simulator: it runs, it fits what it should, and it can fail."""

import json
from pathlib import Path

import pytest

from bench.agree.fit import courses, fitted
from bench.agree.run import ALLOWED, Calibrated, compared, main
from bench.agree.server import Batched, Ended, Moved, Note, Started, read_notes, write
from bench.simulate.traffic import Line
from maskfx.runtime.step_kinds import StepKind
from maskfx.scheduling.composition import members_of
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.load import Work
from maskfx.scheduling.step_reports import StepMember, Stepped

COSTS = FittedCosts(base=0.05, per_request=0.01, per_site=1e-4)
SETTINGS = {"scheduler": "fcfs", "router": "cost", "workers": 1, "max_num_seqs": 2, "queue": 8}


def batch_of(name: str, shared: list[Work], start: float, seed: int) -> list[Note]:
    """Requests that make all their steps together, 0.3 s after their start, 0.1 s before the end.

    What the steps take besides what the worker reports of them, a fifth, is between them.
    """
    ids = [f"{name}{k}" for k in range(len(shared))]
    pace = COSTS.step(shared)
    notes: list[Note] = [
        Started(start, "w0", id, seed + k, start, work)
        for k, (id, work) in enumerate(zip(ids, shared, strict=True))
    ]
    for step in range(1, shared[0].steps + 1):
        end = start + 0.3 + step * pace
        notes.append(Batched(end, "w0", Stepped(0.8 * pace, members_of(shared))))
        notes += [Moved(end + 0.001, "w0", id, step) for id in ids]
    return [*notes, *(Ended(end + 0.1, "w0", id) for id in ids)]


def test_costs_are_fitted_to_the_pace_of_steps_and_to_requests_alone() -> None:
    kinds = [[100], [900], [300, 500], [100, 100, 800], [1000, 900, 50]]
    crowded = [
        note
        for n, sites in enumerate(kinds)
        for note in batch_of(
            f"c{n}-",
            [Work(s, 1024 << (n + k // 2) % 3, 6) for k, s in enumerate(sites)],
            start=100.0 * n,
            seed=10 * n,
        )
    ]
    single = batch_of("alone", [Work(200, 1024, 6)], start=1000.0, seed=99)
    found = fitted(crowded, list(courses(single).values()), "made up")
    for name in ("base", "per_request", "per_site"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=0.01)
    assert found.around(Work(200, 1024, 6)) == pytest.approx(0.4, abs=0.002)
    assert found.decode_share == pytest.approx(0.25, abs=0.01)


def test_what_is_around_the_steps_is_fitted_beside_those_of_others() -> None:
    """One is decoded, for 0.2 s instead of 0.1, while another steps."""
    shared = [Work(100, 1024, 4), Work(100, 1024, 9)]
    alone = batch_of("alone", [shared[0]], start=1000.0, seed=99)
    single = list(courses(alone).values())
    assert fitted(alone, single, "made up").around_beside == 1.0
    *steps, last = batch_of("a", [shared[0]], start=0.0, seed=1)
    assert isinstance(last, Ended)
    long = batch_of("b", [shared[1]], start=0.0, seed=2)
    crowded = [*steps, Ended(last.at + 0.1, "w0", last.id), *long]
    assert fitted(crowded, single, "made up").around_beside == pytest.approx(2.0, rel=0.05)


def test_steps_are_fitted_beside_what_is_around_those_of_others() -> None:
    """Steps of one request take 1.5 times as long while another is decoded."""
    works = [Work(sites, 1024, 12) for sites in (100, 400, 900)]
    alone = batch_of("alone", [works[0]], start=1000.0, seed=99)
    crowded: list[Note] = []
    for number, work in enumerate(works):
        start, id, pace = 100.0 * number, f"c{number}", COSTS.step([work])
        at = start + 0.3
        crowded.append(Started(start, "w0", id, number, start, work))
        for step in range(1, 13):
            at += pace * (1.5 if 4 <= step <= 7 else 1.0)
            crowded.append(Batched(at, "w0", Stepped(pace, members_of([work]))))
            crowded.append(Moved(at, "w0", id, step))
        crowded.append(Ended(at + 0.1, "w0", id))
        fourth = start + 0.3 + 3 * pace
        crowded.append(Started(fourth, "w0", f"d{number}", 10 + number, fourth, work))
        crowded.append(Moved(fourth, "w0", f"d{number}", 12))
        crowded.append(Ended(fourth + 6 * pace, "w0", f"d{number}"))
    found = fitted(crowded, list(courses(alone).values()), "made up")
    assert found.steps_beside == pytest.approx(0.5, abs=0.051)
    assert found.r2 is not None
    assert found.r2 > 0.99
    for work in works:
        assert found.step([work]) == pytest.approx(COSTS.step([work]), rel=0.02)


def test_the_time_between_batches_is_no_step() -> None:
    """A worker that was idle, and a step of an unknown worker."""
    notes = [
        *batch_of("a", [Work(100, 1024, 4)], start=0.0, seed=1),
        Batched(5.0, "w0", Stepped(0.5, [StepMember(StepKind.RECORD, 1024, 1024)])),
        *batch_of("b", [Work(100, 1024, 4)], start=10.0, seed=2),
    ]
    found = fitted(notes, list(courses(notes).values()), "made up")
    assert found.step([Work(100, 1024, 4)]) == pytest.approx(COSTS.step([Work(100, 1024, 4)]))


@pytest.mark.parametrize(("times", "met"), [(1.0, True), (1.03, True), (1.1, False), (0.9, False)])
def test_it_fails_where_latencies_are_others(tmp_path: Path, times: float, met: bool) -> None:
    work = Work(100, 1024, 10)
    latency = times * (0.02 + COSTS.solo(work))
    lines = [Line(10.0 * n, 100, 1024, 10, latency=latency) for n in range(4)]
    row = compared(lines, tmp_path / "trace.jsonl", Calibrated(COSTS, front=0.02), SETTINGS)
    assert row["mean_off"] == pytest.approx(1 / times - 1)
    assert row["met"] is met


def test_notes_are_read_as_far_as_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    notes = batch_of("a", [Work(100, 1024, 2, template="t")], start=0.0, seed=1)
    with path.open("wb") as file:
        for note in notes:
            write(file, note)
        file.write(b'{"type":"mo')
    assert read_notes(path) == notes


def test_a_server_is_run_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "agree.json"
    model = "fake:seconds_per_step=0.02,seconds_per_site=0.0001"
    asked = ["--model", model, "--requests", "6", "--edits", "2", "--sides", "64", "--steps", "4"]
    code = main([*asked, "--load", "0.5", "--workers", "1", "--out", str(out)])
    found = json.loads(out.read_text())
    (row,) = found["runs"][0]["rows"]
    assert (row["requests"], row["done"]) == (6, 6)
    assert code == (0 if found["met"] else 1)
    assert found["met"] is (abs(row["mean_off"]) <= ALLOWED and abs(row["p95_off"]) <= ALLOWED)
    assert row["mean_off"] == pytest.approx(0, abs=0.4)  # loose: a busy machine's own time counts
    assert row["measured_parts"]["steps"] >= 0.08
    assert found["runs"][0]["costs"]["base"] == 0.02


@pytest.mark.slow
def test_a_calibration_finds_what_the_fake_model_states(tmp_path: Path) -> None:
    out = tmp_path / "agree.json"
    model = "fake:seconds_per_step=0.01,seconds_per_site=0.0001"
    asked = ["--model", model, "--edits", "4", "--sides", "64", "128", "--steps", "4", "8"]
    asked += ["--calibrate", "--calibration", "24", "--requests", "4", "--load", "0.5"]
    main([*asked, "--workers", "1", "--out", str(out)])
    (run,) = json.loads(out.read_text())["runs"]
    costs = FittedCosts(**run["costs"])
    for sites, whole in ((10, 64), (100, 256)):
        step = costs.step([Work(sites, whole, 1)])
        assert step == pytest.approx(0.01 + 0.0001 * sites, rel=0.25)
    assert 0 < run["front"] < 0.2
    assert 0 <= costs.around(Work(10, 64, 1)) < 0.1
