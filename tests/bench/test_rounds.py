"""The simulator of rounds: its costs are the printed ones, its baseline a plain queue."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.rounds import scale
from bench.rounds.real import FixedDegree
from bench.rounds.run import main
from bench.rounds.simulation import Machine, RoundSimulation, simulate_fixed, simulate_rounds
from bench.rounds.workloads import (
    MINUTE,
    STEPS,
    TABLE_STEPS,
    TFLOP,
    Arrivals,
    both,
    both_costs,
    both_rate,
    dense,
    edit_costs,
    edit_deadline,
    edit_rate,
    edits,
    few_steps,
    flux_costs,
    images,
    part,
)
from maskfx.scheduling.load import Demand
from maskfx.scheduling.rounds.placement import Devices
from maskfx.scheduling.rounds.round_plan import (
    DeviceGroup,
    LatePolicy,
    Round,
    RoundRequest,
    RoundSettings,
)
from maskfx.scheduling.rounds.round_policy import RankedGroup, RoundCall, StepLoad
from maskfx.scheduling.rounds.rounds import RoundScheduler

EXACT = Machine(overhead=0.0, error=0.0)


def test_the_work_of_a_step_is_what_the_paper_prints() -> None:
    for side, work in TFLOP.items():
        wanted = MINUTE * work / TFLOP[2048] / TABLE_STEPS
        assert flux_costs().step(1, [dense(side)]) == pytest.approx(wanted, rel=2e-3)


def test_a_fixed_group_serves_its_queue_in_order() -> None:
    """One group of eight: each request starts when the one before ends."""
    demands = [Demand(str(n), dense(2048), 0.1 * n, 1e9) for n in range(3)]
    one = STEPS * flux_costs().step(8, [dense(2048)])
    outcome = simulate_fixed(flux_costs(), 8, 8, "fcfs", demands, EXACT, drop=False)
    assert [outcome.ended[str(n)] for n in range(3)] == pytest.approx([one, 2 * one, 3 * one])
    short = [*demands[:2], Demand("short", dense(256), 0.2, 1e9)]
    first = simulate_fixed(flux_costs(), 8, 8, "srtf", short, EXACT, drop=False)
    assert first.ended["short"] < first.ended["1"]


def test_a_fixed_group_drops_what_is_late_only_where_asked() -> None:
    demands = [Demand(str(n), dense(2048), 0.0, 6.0) for n in range(2)]
    kept = simulate_fixed(flux_costs(), 8, 8, "edf", demands, EXACT, drop=False)
    dropped = simulate_fixed(flux_costs(), 8, 8, "edf", demands, EXACT, drop=True)
    assert (len(kept.ended), len(kept.dropped)) == (2, 0)
    assert (len(dropped.ended), len(dropped.dropped)) == (1, 1)
    assert kept.in_time(demands) == dropped.in_time(demands) == 0.5


def test_requests_end_at_their_deadline_where_the_machine_ends_them() -> None:
    """The third one starts when the second one is ended, by groups and by rounds."""
    ends = Machine(overhead=0.0, error=0.0, ends_late=True)
    one = STEPS * flux_costs().step(8, [dense(2048)])
    due = 1.5 * one
    demands = [Demand(str(n), dense(2048), 0.0, due if n < 2 else 1e9) for n in range(3)]
    fixed = simulate_fixed(flux_costs(), 8, 8, "fcfs", demands, ends, drop=False)
    assert (set(fixed.ended), fixed.dropped) == ({"0", "2"}, {"1"})
    assert fixed.ended["2"] == pytest.approx(due + one)
    late = RoundSettings(late=LatePolicy.LAST)
    rounds = simulate_rounds(RoundScheduler(flux_costs(), 8, late), demands, ends)
    assert len(rounds.dropped) == 1
    assert set(rounds.ended) | rounds.dropped == {"0", "1", "2"}


def test_a_fixed_degree_takes_requests_in_order_for_the_blocks_that_are_free() -> None:
    calls = [RoundCall(n, StepLoad(4, 4), 5 - n, 5, 10.0 - n) for n in range(4)]
    policy = FixedDegree(2)
    assert policy.decide(0.0, calls, (0, 1, 3), 4).groups == (RankedGroup((0, 1), {3: 2}),)
    groups = policy.decide(0.0, calls, range(4), 4).groups
    assert groups == (RankedGroup((0, 1), {3: 2}), RankedGroup((2, 3), {2: 3}))


def test_every_request_ends_or_is_dropped_and_rounds_beat_fixed_groups() -> None:
    demands = images(Arrivals("uniform", scale=1.2), 60, seed=3)
    outcome = simulate_rounds(RoundScheduler(flux_costs(), 8), demands, Machine())
    assert {*outcome.ended, *outcome.dropped} == {d.id for d in demands}
    assert not outcome.dropped & set(outcome.ended)
    fixed = [
        simulate_fixed(flux_costs(), 8, k, "fcfs", demands, Machine(), drop=False).in_time(demands)
        for k in (1, 2, 4, 8)
    ]
    assert outcome.in_time(demands) > max(fixed)


def test_a_late_comer_starts_within_the_round_where_a_device_is_free() -> None:
    """One device has the long request; the other is free until a small one comes."""
    settings = RoundSettings(scale_up=False, length=20.0, margin=0.0)
    long, small = Demand("long", dense(2048), 0.0, 1e9), Demand("small", dense(256), 1.0, 1e9)
    ends = {}
    for at_borders in (True, False):
        scheduler = RoundScheduler(flux_costs(), 2, settings)
        outcome = simulate_rounds(scheduler, [long, small], EXACT, at_borders=at_borders)
        ends[at_borders] = outcome.ended["small"]
        assert outcome.within == (0 if at_borders else 1)
    alone = STEPS * flux_costs().step(1, [dense(256)])
    assert ends[False] == pytest.approx(1.0 + alone)
    assert ends[True] > 15


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_on_many_devices_rounds_are_not_below_fixed_groups(scale: float) -> None:
    """Large pictures need whole blocks, and begin when one is free, whatever the others do."""
    asked = few_steps(images(Arrivals("uniform", per_minute=8 * 230, scale=scale), 500, 11), 4)
    rounds = simulate_rounds(RoundScheduler(flux_costs(), 64), asked, Machine())
    fixed = [
        simulate_fixed(flux_costs(), 64, k, order, asked, Machine(), drop=True).in_time(asked)
        for k in (1, 2, 4, 8)
        for order in ("fcfs", "edf", "srtf")
    ]
    assert 0.9 < max(fixed) <= rounds.in_time(asked)
    assert {*rounds.ended, *rounds.dropped} == {d.id for d in asked}


def test_the_load_of_edits_is_the_share_of_busy_devices() -> None:
    costs = edit_costs()
    arrivals = Arrivals("edits", edit_rate(costs, 8, 0.6), 1e6)
    demands = edits(arrivals, costs, 3000, seed=1)
    outcome = simulate_fixed(costs, 8, 1, "fcfs", demands, EXACT, drop=False)
    assert outcome.busy / (8 * demands[-1].arrived) == pytest.approx(0.6, rel=0.05)


def test_an_edit_costs_its_share_of_a_whole_picture_by_the_same_denoiser() -> None:
    """Beside the base, which both share; what it loads takes longer only where little is masked."""
    costs = both_costs()
    base = costs.one.base
    assert costs.step(1, [part(2048, 1.0)]) == costs.step(1, [dense(2048)])
    for ratio in (0.5, 0.25):
        wanted = base + ratio * (costs.step(1, [dense(2048)]) - base)
        assert costs.step(1, [part(2048, ratio)]) == pytest.approx(wanted)
    small = part(2048, 0.02)
    assert small.bytes == (16384 - 328) * 57 * 2 * 3072 * 2  # blocks, k and v, width, bf16
    assert costs.step(1, [small]) == pytest.approx(small.bytes / 50e9)
    assert costs.step(4, [small]) == pytest.approx(small.bytes / 50e9 / 4)
    whole, edit = (costs.step(1, [work]) for work in (dense(1024), part(1024, 0.2)))
    assert edit_deadline(costs, 1024) / 3.0 == pytest.approx(edit / whole)


def test_pictures_and_edits_come_in_their_shares_with_the_same_work_per_minute() -> None:
    costs, work = both_costs(), []
    for edited in (0.0, 0.7):
        rate = both_rate(costs, edited)
        asked = both(Arrivals(per_minute=rate, edited=edited), costs, 3000, seed=1)
        masked = [d for d in asked if d.work.sites < d.work.whole]
        assert len(masked) / len(asked) == pytest.approx(edited, abs=0.03)
        assert all(d.work.bytes > 0 for d in masked)
        seconds = sum(costs.step(1, [d.work]) for d in asked)
        work.append(seconds / asked[-1].arrived)
    assert work[0] == pytest.approx(work[1], rel=0.08)
    outcome = simulate_rounds(RoundScheduler(costs, 8), asked[:60], Machine())
    assert {*outcome.ended, *outcome.dropped} == {d.id for d in asked[:60]}


def test_with_fewer_steps_a_request_has_as_much_time_for_each() -> None:
    asked = images(Arrivals("uniform", scale=1.2), 20, seed=3)
    for before, after in zip(asked, few_steps(asked, 4), strict=True):
        assert (after.work.steps, after.work.sites) == (4, before.work.sites)
        assert (after.due - after.arrived) / 4 == pytest.approx((before.due - before.arrived) / 28)


def test_a_group_on_devices_that_another_one_has_stops_the_simulation() -> None:
    class Careless:
        devices = 2

        def decide(self, now: float, requests: Sequence[RoundRequest]) -> Round:
            groups = [DeviceGroup(Devices(0, 1), {r.id: r.left}, 1.0) for r in requests]
            return Round(now, tuple(groups))

    asked = [Demand(str(n), dense(256), 0.0, 9.0) for n in range(2)]
    assert RoundSimulation(Careless(), asked[:1], EXACT).run().ended == {"0": 1.0}
    with pytest.raises(AssertionError, match="two groups"):
        RoundSimulation(Careless(), asked, EXACT).run()


def test_a_small_run_at_scale_has_the_times_of_all_decisions(tmp_path: Path) -> None:
    given = ["--sizes", "8", "--devices", "16", "--many", "200", "--scales", "1.5"]
    scale.main([*given, "--out", str(tmp_path / "scale.json")])
    result = json.loads((tmp_path / "scale.json").read_text())
    (few,), (row,) = result["by_devices"], result["many"]
    assert few["border"]["decisions"] >= few["rounds"] > 0
    assert few["within"]["decisions"] > 0
    spent = few["border"], few["within"]
    seconds = sum(part["decisions"] * part["mean_ms"] for part in spent)
    assert few["decisions_ms_per_request"] == pytest.approx(seconds / few["requests"])
    assert row["points_above_best"] == pytest.approx(
        100 * (row["in_time"] - max(max(shares.values()) for shares in row["fixed"].values()))
    )


def test_a_small_run_is_whole(tmp_path: Path) -> None:
    main(["--parts", "homogeneous", "--requests", "4", "--out", str(tmp_path / "rounds.json")])
    result = json.loads((tmp_path / "rounds.json").read_text())
    assert len(result["homogeneous"]) == 4
    for row in result["homogeneous"]:
        assert 0 <= row["rounds"] <= 1
        assert row["best_fixed"] >= row["best_fcfs"]
        assert 0 <= row["paper"] <= 1
        assert row["paper_favoured"] == max(row["paper_favoured_by_granularity"].values())
    for name in ("best", "paper", "paper_favoured"):
        assert result["summary"][f"points_above_{name}"]["of"] == 4
