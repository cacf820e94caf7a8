"""The simulator: moving batches on in one go equals stepping, and its small run is whole."""

import json
from dataclasses import replace
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from bench.simulate.bound import most_in_time
from bench.simulate.run import CPU, GPU, WORKLOADS, main
from bench.simulate.serving_costs import fitted_steps, load
from bench.simulate.simulation import Served, Simulation
from bench.simulate.traffic import FITTED, MASKS, demands, gaps, ratios, read_trace
from bench.simulate.whole_pictures import (
    OWN,
    SIDES,
    Arrivals,
    Side,
    bound,
    drawn,
    highest,
    reported,
    served,
    slack,
)
from maskfx.errors import InputError
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.load import Demand, Scheduler, Work
from maskfx.scheduling.router import make_router
from maskfx.scheduling.scheduler import SCHEDULERS, FcfsScheduler, make_scheduler

COSTS = FittedCosts(base=0.05, per_request=0.01, per_site=1e-4, around_base=0.1)


def fcfs() -> Scheduler:
    return FcfsScheduler(COSTS, make_router("requests"), drop=False)


def stepwise(coming: list[Demand]) -> dict[str, float]:
    """One worker with room for all, step by step: latencies. Written without the simulator."""
    ready = {d.id: d.arrived + COSTS.around(d.work) for d in coming}
    shared = {d.id: d.work for d in coming}
    left = {d.id: d.work.steps for d in coming}
    arrived = {d.id: d.arrived for d in coming}
    found: dict[str, float] = {}
    batch: list[str] = []
    now = 0.0
    while len(found) < len(coming):
        batch += [i for i in left if ready[i] <= now + 1e-12 and i not in batch and i not in found]
        if not batch:
            now = min(ready[i] for i in left if i not in found)
            continue
        now += COSTS.step([shared[i] for i in batch])
        for id in list(batch):
            left[id] -= 1
            if not left[id]:
                batch.remove(id)
                found[id] = now - arrived[id]
    return found


def test_one_worker_does_what_stepping_by_hand_does() -> None:
    draw = np.random.default_rng(0)
    at = np.cumsum(draw.exponential(1.0, 40))
    coming = [
        Demand(str(n), Work(int(draw.integers(1, 2000)), 4096, int(draw.integers(1, 40))), float(t))
        for n, t in enumerate(at)
    ]
    served = Simulation(fcfs(), COSTS, 1, 64).run(coming)
    wanted = stepwise(coming)
    assert dict(zip(served.ids, served.latency, strict=True)) == pytest.approx(wanted)


def by_id(served: Served) -> dict[str, float]:
    return dict(zip(served.ids, served.latency, strict=True))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    ("seed", "decode_share", "expire"), [(1, 0.0, False), (2, 0.0, True), (3, 0.6, False)]
)
def test_one_event_per_change_equals_one_event_per_step(
    scheduler: str, seed: int, decode_share: float, expire: bool
) -> None:
    costs = replace_costs(
        load(CPU),
        decode_share=decode_share,
        around_beside=1 + decode_share,
        steps_beside=decode_share / 2,
    )
    workload = replace(WORKLOADS[CPU], slo=4.0, steps=(5, 12))
    runs = [
        Simulation(
            make_scheduler(scheduler, "cost", costs),
            costs,
            3,
            3,
            queue=20,
            host=5,
            plain=plain,
            expire=expire,
        ).run(demands(workload, costs, 150, 1.1, seed))
        for plain in (False, True)
    ]
    quick, plain = runs
    assert by_id(quick) == pytest.approx(by_id(plain))
    counts = ("met", "dropped", "refused", "came", "steps")
    assert [getattr(quick, n) for n in counts] == [getattr(plain, n) for n in counts]
    assert quick.came == len(quick.latency) + quick.dropped + quick.refused


def test_late_requests_end_in_the_queue_and_in_the_batch() -> None:
    """Steps of 0.1 s: one is done, one ends within its batch, one before it starts."""
    costs = FittedCosts(base=0.1, per_request=0.0, per_site=0.0)
    work = Work(100, 4096, 10)
    dues = (1.1, 0.45, 0.4)
    coming = [Demand(str(n), work, 0.0, due) for n, due in enumerate(dues)]
    router = make_router("requests")
    scheduler = FcfsScheduler(costs, router, drop=False)
    found = Simulation(scheduler, costs, 1, 2, expire=True).run(coming)
    assert (found.met, found.dropped) == (1, 2)
    assert by_id(found) == pytest.approx({"0": 1.0})
    assert found.steps == 10


def test_a_template_is_read_once_and_stays_while_there_is_room() -> None:
    costs = replace_costs(COSTS, disk_bandwidth=1e6)
    work = Work(100, 4096, 10, template="t", bytes=10**6)
    coming = [Demand(str(n), work, 1000.0 * n) for n in range(3)]
    made = Simulation(FcfsScheduler(costs, make_router("cost")), costs, 1, 1, recorded=["t"])
    alone = costs.solo(work)
    latency = by_id(made.run(coming))
    read = 1.0 + 9 * (1.0 - costs.step([work]))
    assert latency == pytest.approx({"0": alone + read, "1": alone, "2": alone})
    none = Simulation(
        FcfsScheduler(costs, make_router("cost")), costs, 1, 1, host=0, recorded=["t"]
    )
    assert min(by_id(none.run(coming)).values()) > alone + 0.9 * read


def replace_costs(costs: FittedCosts, **change: float) -> FittedCosts:
    return FittedCosts.from_json(json.dumps({**json.loads(costs.to_json()), **change}))


def test_decoding_holds_a_slot_but_no_step() -> None:
    """0.1 s around the steps, 0.06 of them after; the slot is taken meanwhile, the batch isn't."""
    costs = replace_costs(COSTS, decode_share=0.6)
    work = Work(100, 4096, 10)
    coming = [Demand("0", work, 0.0), Demand("1", work, 0.0)]
    router = make_router("requests")
    after = by_id(Simulation(FcfsScheduler(costs, router), costs, 1, 1).run(coming))
    assert after == pytest.approx({"0": costs.solo(work), "1": 2 * costs.solo(work)})
    late = Demand("1", work, 0.04 + 9.5 * costs.step([work]))  # joins when the first decodes
    moved = by_id(Simulation(FcfsScheduler(costs, router), costs, 1, 2).run([coming[0], late]))
    assert moved == pytest.approx({"0": costs.solo(work), "1": costs.solo(work)})


def test_what_is_around_the_steps_takes_longer_beside_others() -> None:
    costs = replace_costs(COSTS, decode_share=0.6, around_beside=3.0)
    first, second = Demand("0", Work(100, 4096, 10), 0.0), Demand("1", Work(100, 4096, 30), 0.0)
    alone = by_id(simulated(costs, [first]))["0"]
    assert alone == pytest.approx(costs.solo(first.work))
    both = by_id(simulated(costs, [first, second]))
    # prepared at once with no request stepping; the first is decoded while the other goes on
    steps = 10 * costs.step([first.work, second.work])
    assert both["0"] == pytest.approx(0.04 + steps + 3 * 0.06)
    assert both["1"] == pytest.approx(0.1 + steps + 20 * costs.step([second.work]))


def test_steps_take_longer_beside_what_is_around_those_of_others() -> None:
    """One is decoded for 0.6 s while the other goes on; a step that has begun isn't changed."""
    costs = replace_costs(COSTS, around_base=1.0, decode_share=0.6, steps_beside=0.5)
    first, second = Demand("0", Work(100, 4096, 10), 0.0), Demand("1", Work(100, 4096, 30), 0.0)
    found = by_id(simulated(costs, [first, second]))
    both, one = costs.step([first.work, second.work]), costs.step([second.work])
    slow = ceil(0.6 / (1.5 * one))
    assert 1 < slow < 20
    assert found["0"] == pytest.approx(1.0 + 10 * both)
    assert found["1"] == pytest.approx(1.0 + 10 * both + (20 + 0.5 * slow) * one)


def simulated(costs: FittedCosts, coming: list[Demand]) -> Served:
    return Simulation(FcfsScheduler(costs, make_router("requests")), costs, 1, 2).run(coming)


def test_costs_that_ship_say_where_they_are_from() -> None:
    for name in (CPU, GPU):
        assert len(load(name).origin) > 100
    assert (load(CPU).r2 or 0) > 0.98
    assert load(GPU).r2 is None  # it was never measured


def test_costs_are_fitted_to_the_result_that_they_name() -> None:
    path = Path(__file__).parents[2] / "bench" / "results" / "denoisers-a-two-cores.json"
    found = fitted_steps(json.loads(path.read_text()))
    assert found["per_site"] == pytest.approx(load(CPU).per_site)


def test_masks_are_drawn_where_the_real_ones_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    monkeypatch.setattr("bench.simulate.traffic.MASKS", Path("nowhere"))
    drawn = ratios("production", 4000, draw)
    assert 0.10 < drawn.mean() < 0.13
    assert 0.14 < ratios("public", 4000, draw).mean() < 0.26


@pytest.mark.skipif(not MASKS.exists(), reason="the real mask ratios aren't here")
def test_the_fitted_distributions_are_those_of_the_real_masks() -> None:
    lists = json.loads(MASKS.read_text())
    for name, (count, mean, spread) in FITTED.items():
        assert len(lists[name]) == count
        logs = np.log([ratio for ratio in lists[name] if ratio > 0])
        assert mean == pytest.approx(logs.mean(), abs=0.02)
        assert spread == pytest.approx(logs.std(), abs=0.02)


def test_bursts_keep_the_rate() -> None:
    draw = np.random.default_rng(0)
    for burst in (1.0, 2.0):
        found = gaps(40_000, 5.0, burst, draw)
        assert found.mean() == pytest.approx(0.2, rel=0.05)
        assert found.std() / found.mean() == pytest.approx(burst, rel=0.05)


@pytest.mark.slow
def test_a_small_run_writes_figures_and_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "simulate.json"
    main(["--requests", "40", "--out", str(out)])
    found = json.loads(out.read_text())
    assert {"routing", "slo", "errors", "scale"} <= set(found)
    assert all(0 <= row["in_time"] <= 1 for row in found["slo"]["curves"])
    assert all(row["p95"] >= row["p50"] > 0 for row in found["routing"]["curve"])
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_a_trace_is_replayed_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs, path = tmp_path / "costs.json", tmp_path / "trace.jsonl"
    costs.write_bytes(COSTS.to_json())
    work = Work(400, 4096, 20)
    lines = [
        {"arrival": 100.0 * n, "sites": 400, "whole": 4096, "steps": 20, "branches": 1,
         "template": None, "deadline": 100.0 * n + 50, "latency": COSTS.solo(work) * 1.1}
        for n in range(4)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    main(["--trace", str(path), "--costs", str(costs), "--workers", "1", "--slots", "2"])
    said = capsys.readouterr().out
    assert "'mean': 2.1," in said
    assert "'mean_off': -0.091" in said
    assert "'in_time': 1.0" in said


def test_a_broken_trace_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival":0,"sites":1,"whole":4,"steps":2}\n{"arrival":1,"site":1}\n')
    with pytest.raises(InputError, match=r"trace.jsonl, line 2"):
        read_trace(path)


def test_a_bound_is_what_a_single_worker_can_do() -> None:
    """Requests of a second that are due at the same time, and one that is due alone later."""
    most = most_in_time([0.0] * 5 + [10.0], [3.0] * 5 + [11.0], [1.0] * 6, [1.0] * 6, 1)
    assert most == pytest.approx(4.0, abs=0.1)
    assert most_in_time([0.0], [0.5], [0.25], [1.0], 1) == pytest.approx(0.5, abs=0.01)


def test_no_side_of_whole_pictures_exceeds_the_bound() -> None:
    setting = reported(2.4, 0.02, 1.5, "a file")
    trace = drawn(setting, 80, 1.6, Arrivals(), 5)
    shares = {name: served(side, setting, trace, 1) for name, side in SIDES.items()}
    most = bound(setting, trace, 1)
    assert shares["patches kept"] < shares[OWN] <= most < 1 + 1e-9
    assert max(shares["one by one"], shares["fixed batches"]) < shares[OWN]


def test_pictures_arrive_in_bursts_with_deadlines_of_any_multiple() -> None:
    setting = reported(2.4, 0.02, 1.5, "a file")
    tight, loose = (drawn(setting, 300, 1.0, Arrivals(deadline=d), 5) for d in (1.5, 3.0))
    for one, other in zip(tight, loose, strict=True):
        assert one.arrived == other.arrived
        assert other.due - other.arrived == pytest.approx(2 * (one.due - one.arrived))
    spreads = []
    for burst in (1.0, 3.0):
        times = [d.arrived for d in drawn(setting, 3000, 1.0, Arrivals(burst=burst), 5)]
        between = np.diff(times)
        spreads.append(between.std() / between.mean())
    assert spreads == pytest.approx([1.0, 3.0], rel=0.15)


def test_a_batch_of_all_sizes_gains_what_the_paper_reports() -> None:
    costs = reported(1.3, 0.05, 1.5, "a file").costs
    one = Side(slack, one_size=True).costs(costs)
    gains = []
    for count in range(1, 5):
        batch = [Work(side**2, side**2, 1) for side in (64, 96, 128)] * count
        gains.append(1 - costs.step(batch) / one.step(batch))
    assert np.mean(gains) == pytest.approx(0.13, abs=1e-3)
    assert costs.step([Work(128**2, 128**2, 1)]) == pytest.approx(
        1.3 * costs.step([Work(64**2, 64**2, 1)])
    )


def test_the_highest_load_is_interpolated() -> None:
    rows = [{"load": 1.0, "a": 1.0}, {"load": 2.0, "a": 0.8}, {"load": 3.0, "a": 1.0}]
    assert highest(rows, "a", 0.9) == pytest.approx(1.5)
    assert highest(rows, "a", 0.5) == 3.0
    assert highest([{"load": 1.0, "a": 0.8}], "a", 0.9) is None
