"""Rounds: what holds for every decision, and what becomes of requests over many rounds."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskfx.errors import InputError
from maskfx.scheduling.cost_model import FittedCosts
from maskfx.scheduling.degree_costs import DegreeCost, DegreeCosts, from_efficiency
from maskfx.scheduling.load import Work
from maskfx.scheduling.rounds.allocation import StepTimes
from maskfx.scheduling.rounds.at_border import round_length
from maskfx.scheduling.rounds.block_state import BlockState
from maskfx.scheduling.rounds.outlook import (
    RemainingRequest,
    best_schedule,
    fastest_first,
    narrow_first,
    schedules,
)
from maskfx.scheduling.rounds.placement import BLOCK, Devices
from maskfx.scheduling.rounds.profile_memo import ProfileMemo
from maskfx.scheduling.rounds.round_plan import (
    DeviceGroup,
    LatePolicy,
    Round,
    RoundRequest,
    RoundSettings,
)
from maskfx.scheduling.rounds.rounds import RoundScheduler
from maskfx.scheduling.rounds.urgency import Pending, Rank, admit, by_urgency

ONE = FittedCosts(base=0.01, per_request=0.0, per_site=1e-4)
COSTS = DegreeCosts(
    one=ONE,
    by_degree={
        2: DegreeCost(fixed=0.004, slowdown=1.05),
        3: DegreeCost(fixed=0.005, slowdown=1.07),
        4: DegreeCost(fixed=0.006, slowdown=1.1),
        8: DegreeCost(fixed=0.008, slowdown=1.2),
    },
)
EXACT = RoundSettings(margin=0.0)


def work(sites: int, steps: int = 10) -> Work:
    return Work(sites=sites, whole=max(sites, 1000), steps=steps)


def request(id: str, sites: int, due: float = inf, steps: int = 10, **rest: float) -> RoundRequest:
    return RoundRequest(id, work(sites, steps), steps, rest.get("arrived", 0.0), due)


def least(asked: RoundRequest, devices: int) -> float:
    """The seconds of a request alone at its fastest degree."""
    degrees = [k for k in RoundSettings().degrees if k <= devices]
    return asked.left * min(COSTS.step(k, [asked.work]) for k in degrees)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[RoundRequest], int, RoundSettings]:
    devices = draw(st.sampled_from((1, 2, 3, 5, 6, 8, 12, 16)))
    degrees = draw(st.sampled_from(((1,), (1, 2, 4, 8), (1, 2, 3, 4, 8), (1, 4))))
    found = []
    for number in range(draw(st.integers(0, 14))):
        steps = draw(st.integers(1, 20))
        left = draw(st.integers(1, steps))
        due = draw(st.one_of(st.just(inf), st.floats(0.01, 20.0)))
        found.append(
            RoundRequest(str(number), work(draw(st.integers(1, 4000)), steps), left, 0.0, due)
        )
    return (
        found,
        devices,
        RoundSettings(
            degrees=degrees,
            length=draw(st.one_of(st.none(), st.floats(0.01, 1.0))),
            late=draw(st.sampled_from(LatePolicy)),
            scale_up=draw(st.booleans()),
            batch=draw(st.integers(1, 4)),
            patience=draw(st.floats(0.5, 20.0)),
        ),
    )


def check(
    decided: Round, asked: Sequence[RoundRequest], devices: int, rules: RoundSettings
) -> None:
    by_id = {r.id: r for r in asked}
    taken = [n for group in decided.groups for n in group.devices.numbers]
    assert len(taken) == len(set(taken)), "a device is in two groups"
    assert all(0 <= n < devices for n in taken)
    ids = [id for group in decided.groups for id in group.steps]
    assert len(ids) == len(set(ids)), "a request is in two groups"
    assert not set(ids) & set(decided.drops)
    assert set(decided.drops) <= set(decided.late)
    for group in decided.groups:
        start, size = group.devices
        assert size in rules.degrees
        assert start % (4 if size == 3 else size) == 0
        assert len(group.steps) <= rules.batch
        assert all(1 <= steps <= by_id[id].left for id, steps in group.steps.items())
        works = [by_id[id].work for id in group.steps]
        seconds = max(group.steps.values()) * COSTS.step(size, works)
        assert group.seconds == pytest.approx(seconds)
        assert group.seconds <= decided.length * (1 + 1e-6)
    assert decided.groups or len(decided.drops) == len(asked), "devices idle, requests wait"


@settings(max_examples=150, deadline=None)
@given(situations())
def test_every_decision_can_be_carried_out(
    case: tuple[list[RoundRequest], int, RoundSettings],
) -> None:
    asked, devices, rules = case
    scheduler = RoundScheduler(COSTS, devices, rules)
    decided = scheduler.decide(0.0, asked)
    check(decided, asked, devices, rules)
    homes = {id: group.devices for group in decided.groups for id in group.steps}
    made = {id: n for group in decided.groups for id, n in group.steps.items()}
    after = [
        replace(r, left=r.left - made.get(r.id, 0), home=homes.get(r.id))
        for r in asked
        if r.id not in decided.drops and r.left > made.get(r.id, 0)
    ]
    check(scheduler.decide(decided.length, after), after, devices, rules)


@pytest.mark.parametrize("devices", [8, 128])
def test_a_decision_about_many_requests_can_be_carried_out(devices: int) -> None:
    """Of more requests than are compared, the start of a schedule is taken."""
    draw = random.Random(devices)
    asked = [
        request(str(n), draw.randint(1, 4000), due=draw.uniform(0.5, 400 / devices))
        for n in range(150)
    ]
    scheduler = RoundScheduler(COSTS, devices)
    decided = scheduler.decide(0.0, asked)
    check(decided, asked, devices, RoundSettings())
    homes = {id: group.devices for group in decided.groups for id in group.steps}
    after = [replace(r, home=homes.get(r.id)) for r in asked if r.id not in decided.drops]
    check(scheduler.decide(0.01, after), after, devices, RoundSettings())


def state_of(devices: int, taken: Iterable[Devices], border: float) -> BlockState:
    """Groups without requests on some devices, until a border."""
    state = BlockState(devices)
    state.begin(0.0, [DeviceGroup(at, {}, border) for at in taken])
    return state


def check_use(
    decided: Round, asked: Sequence[RoundRequest], state: BlockState, rules: RoundSettings
) -> None:
    """What holds of a decision about devices of which others are busy; the state is that before."""
    assert all(state.free.fits(group.devices) for group in decided.groups)
    borders = dict(state.borders)
    for group in decided.groups:
        border = borders.get(group.devices.start // BLOCK, inf)
        assert decided.start + group.seconds <= border
    state.begin(decided.start, decided.groups)
    named = {id for group in decided.groups for id in group.steps} | set(decided.drops)
    waiting = [r for r in asked if r.id not in named]
    resting = {r.home.start // BLOCK for r in waiting if r.home} & borders.keys()
    free = [r for r in waiting if not r.home or r.home.start // BLOCK not in resting]
    assert not state.open or not free, "devices idle, requests wait"
    shortest = min((COSTS.step(1, [r.work]) for r in free), default=inf)
    for block in state.partial & borders.keys():
        left = (borders[block] - decided.start) * (1 - rules.margin)
        assert shortest > left * (1 - 1e-9), "a step fits on an idle device until the border"


@settings(max_examples=200, deadline=None)
@given(situations(), st.data())
def test_where_others_are_busy_groups_use_free_devices_and_end_by_the_border(
    case: tuple[list[RoundRequest], int, RoundSettings], data: st.DataObject
) -> None:
    asked, devices, rules = case
    taken = data.draw(st.sets(st.integers(0, devices - 1), max_size=devices))
    border = data.draw(st.floats(0.01, 2.0))
    state = state_of(devices, [Devices(n, 1) for n in taken], border)
    decided = RoundScheduler(COSTS, devices, rules).decide(0.0, asked, state)
    assert state.free.count == devices - len(taken)  # as it was given
    if decided.groups:
        check(decided, asked, devices, rules)
    check_use(decided, asked, state, rules)


def test_a_last_block_too_small_for_a_step_within_the_round_gets_one_all_the_same() -> None:
    rules = RoundSettings(
        length=0.0117, late=LatePolicy.DROP, patience=1.0, scale_up=False, batch=1
    )
    asked = [request("a", 61, steps=1), request("b", 108, steps=1)]
    assert COSTS.step(8, [asked[1].work]) < 0.0117 < COSTS.step(4, [asked[1].work])
    decided = RoundScheduler(COSTS, 12, rules).decide(0.0, asked)
    assert {id for group in decided.groups for id in group.steps} == {"a", "b"}
    assert {group.devices.start // BLOCK for group in decided.groups} == {0, 1}


@pytest.mark.parametrize(("seed", "devices"), [(1, 8), (2, 12), (3, 16), (4, 64)])
def test_over_many_rounds_no_request_is_lost_or_made_twice(seed: int, devices: int) -> None:
    """Requests arrive at random; each decision uses the devices that it can."""
    draw, now = random.Random(seed), 0.0
    coming = []
    for number in range(150):
        now += draw.expovariate(devices / 2.5)
        due = now + draw.choice((inf, draw.uniform(0.2, 8.0)))
        coming.append(request(str(number), draw.randint(1, 4000), due=due, arrived=now))
    rules = RoundSettings(late=draw.choice(list(LatePolicy)), batch=draw.choice((1, 4)))
    scheduler, state = RoundScheduler(COSTS, devices, rules), BlockState(devices)
    running: list[tuple[float, DeviceGroup]] = []
    active: dict[str, RoundRequest] = {}
    ended: list[str] = []
    dropped: list[str] = []
    while coming or active or running:
        ends = [end for end, _ in running] + [r.arrived for r in coming[:1]]
        assert ends, "requests wait, and nothing runs"
        now = min(ends)
        while coming and coming[0].arrived <= now:
            new = coming.pop(0)
            active[new.id] = new
        for entry in [entry for entry in running if entry[0] <= now]:
            running.remove(entry)
            state.end(entry[1].devices)
        busy = {id for _, group in running for id in group.steps}
        asked = [replace(r, home=state.home(id)) for id, r in active.items() if id not in busy]
        if not asked:
            continue
        decided = scheduler.decide(now, asked, state)
        check_use(decided, asked, state, rules)
        for id in decided.drops:
            dropped.append(id)
            del active[id]
        for group in decided.groups:
            running.append((now + group.seconds * draw.uniform(0.99, 1.01), group))
            for id, steps in group.steps.items():
                assert id not in busy
                active[id] = replace(active[id], left=active[id].left - steps)
                if not active[id].left:
                    ended.append(id)
                    del active[id]
    assert sorted([*ended, *dropped], key=int) == [str(n) for n in range(150)]


def test_a_request_without_a_step_until_the_border_waits_for_it() -> None:
    scheduler = RoundScheduler(COSTS, 8)
    small, large = request("small", 100, due=9.0), request("large", 16000, due=99.0)
    border = 0.9 * min(COSTS.step(k, [large.work]) for k in (1, 2, 4, 8))
    assert border > COSTS.step(1, [small.work])
    busy = [Devices(0, 1)]
    decided = scheduler.decide(0.0, [small, large], state_of(8, busy, border))
    assert [set(group.steps) for group in decided.groups] == [{"small"}]
    late = request("late", 16000, due=0.5)
    longer = scheduler.decide(0.0, [large, late], state_of(8, busy, 3 * border))
    assert [set(group.steps) for group in longer.groups] == [{"large"}]
    assert longer.drops == ("late",)


def test_a_group_grows_onto_free_devices_beside_it_until_the_border() -> None:
    (group,) = (
        RoundScheduler(COSTS, 8)
        .decide(0.0, [request("a", 4000, due=9.0)], state_of(8, [Devices(0, 4)], 2.0))
        .groups
    )
    assert group.devices == Devices(4, 4)


def test_a_block_begins_a_round_whatever_the_others_do() -> None:
    """The border of the block at work limits no step on the other one."""
    scheduler = RoundScheduler(COSTS, 16)
    large = request("large", 16000, due=99.0)
    soon = 0.5 * COSTS.step(8, [large.work])
    (group,) = scheduler.decide(0.0, [large], state_of(16, [Devices(0, 8)], soon)).groups
    assert group.devices == Devices(8, 8)
    assert group.seconds > 2 * soon


def test_a_request_rests_on_its_block_until_the_border() -> None:
    """Also where another block is free; then it is without devices, and goes there."""
    scheduler, state = RoundScheduler(COSTS, 16), BlockState(16)
    asked, other = request("a", 4000, due=99.0), DeviceGroup(Devices(0, 4), {"b": 1}, 1.0)
    own = DeviceGroup(Devices(4, 4), {"a": 1}, 0.99)
    state.begin(0.0, [other, own])
    state.end(own.devices)
    rests = replace(asked, home=state.home("a"), left=9)
    assert scheduler.decide(0.99, [rests], state).groups == ()
    state.end(other.devices)
    assert state.home("a") == Devices(4, 4)
    assert scheduler.decide(1.0, [rests], state).groups[0].steps["a"] > 1


def test_a_running_request_keeps_its_devices_where_a_new_one_can_wait_for_others() -> None:
    """Both need all devices of a block. The new one waits if another border is soon enough."""
    running = replace(request("runs", 8000, steps=20), home=Devices(0, 8))
    seconds = least(running, 8)
    running = replace(running, due=1.05 * seconds)
    small = request("new", 7000, steps=4)
    new = replace(small, due=least(small, 8) + 0.5 * seconds)
    scheduler = RoundScheduler(COSTS, 16, EXACT)
    for border, kept in ((0.2 * seconds, "runs"), (0.9 * seconds, "new")):
        state = state_of(16, [Devices(8, 8)], border)
        (group,) = scheduler.decide(0.0, [running, new], state).groups
        assert set(group.steps) == {kept}


def test_busy_devices_are_planned_with_when_their_requests_are_done() -> None:
    state = BlockState(24)
    groups = [
        DeviceGroup(Devices(0, 2), {"a": 1}, 1.0, further=3.0),
        DeviceGroup(Devices(8, 4), {"b": 1}, 2.0),
    ]
    state.begin(0.0, groups)
    assert state.later(0.0, 99) == [2.0] * 4 + [4.0] * 2
    assert state.later(3.0, 3) == pytest.approx([3.0] * 4)
    assert state.borders == {0: 1.0, 1: 2.0}
    assert (state.open, state.partial) == ([2], {0, 1})
    state.end(Devices(0, 2))
    assert (state.open, state.partial, state.later(0.0, 99)) == ([0, 2], {1}, [2.0] * 4)
    assert state.home("a") == Devices(0, 2)
    state.begin(1.0, [])
    assert (state.home("a"), state.home("b")) == (None, Devices(8, 4))


def run(
    scheduler: RoundScheduler, asked: Sequence[RoundRequest], rounds: int = 2000
) -> dict[str, float]:
    """Carry rounds out exactly as predicted; return the ends of the requests."""
    active = {r.id: r for r in asked}
    ended: dict[str, float] = {}
    now = 0.0
    for _ in range(rounds):
        here = [r for r in active.values() if r.arrived <= now]
        if not here:
            if not active:
                return ended
            now = min(r.arrived for r in active.values())
            continue
        decided = scheduler.decide(now, here)
        for id in decided.drops:
            del active[id]
        homes = {}
        for group in decided.groups:
            step = group.seconds / max(group.steps.values())
            for id, steps in group.steps.items():
                homes[id] = group.devices
                active[id] = replace(active[id], left=active[id].left - steps)
                if not active[id].left:
                    ended[id] = now + steps * step
                    del active[id]
        active = {id: replace(r, home=homes.get(id)) for id, r in active.items()}
        now += decided.length
    raise AssertionError(f"{len(active)} requests are left after {rounds} rounds")


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 4000), st.integers(1, 30), st.sampled_from((1, 2, 3, 6, 8, 16)),
    st.floats(1.0, 10.0), st.one_of(st.none(), st.floats(0.01, 2.0)), st.booleans(),
    st.sampled_from((0.0, 0.02)),
)  # fmt: skip
def test_a_request_that_alone_can_meet_its_deadline_does_in_an_empty_system(
    sites: int, steps: int, devices: int, slack: float, length: float | None, up: bool,
    margin: float,
) -> None:  # fmt: skip
    alone = request("a", sites, steps=steps)
    due = least(alone, devices) * slack
    rules = RoundSettings(length=length, scale_up=up, margin=margin)
    ended = run(RoundScheduler(COSTS, devices, rules), [replace(alone, due=due)])
    assert ended["a"] <= due * (1 + 1e-6)


def test_no_request_starves_under_a_stream_of_urgent_ones() -> None:
    """A request without a deadline, and a late one, beside others that use the device always."""
    stream = [
        request(f"s{n}", 100, due=0.2 * n + 0.5, arrived=0.2 * n)  # 0.2 seconds each
        for n in range(60)
    ]
    others = [request("patient", 200), request("late", 200, due=0.001)]
    rules = RoundSettings(late=LatePolicy.LAST, patience=5, batch=1)
    ended = run(RoundScheduler(COSTS, 1, rules), [*others, *stream])
    assert len(ended) == 62
    for asked in others:
        assert 1.5 < ended[asked.id] < 6.0 < max(ended.values())


def test_late_requests_are_named_and_dropped_or_run_last() -> None:
    asked = [request("late", 1000, due=0.01), *(request(f"n{n}", 1000, due=5.0) for n in range(2))]
    dropping = RoundScheduler(COSTS, 1).decide(0.0, asked)
    assert dropping.late == dropping.drops == ("late",)
    last = RoundScheduler(COSTS, 1, RoundSettings(late=LatePolicy.LAST, batch=1))
    decided = last.decide(0.0, asked)
    assert decided.late == ("late",)
    assert decided.drops == ()
    assert "late" not in decided.groups[0].steps
    ended = run(last, asked)
    assert max(ended, key=lambda id: ended[id]) == "late"


def test_an_urgent_request_gets_more_devices_than_a_patient_one() -> None:
    rules = RoundSettings(scale_up=False)
    urgent = request("urgent", 4000, due=1.1 * least(request("urgent", 4000), 4))
    decided = RoundScheduler(COSTS, 8, rules).decide(0.0, [urgent, request("patient", 4000)])
    sizes = {id: group.devices.size for group in decided.groups for id in group.steps}
    assert sizes["urgent"] >= 4
    assert sizes["patient"] == 1


def test_idle_devices_go_to_the_request_that_gains_most() -> None:
    asked = [request("large", 4000), request("small", 10)]
    decided = RoundScheduler(COSTS, 5).decide(0.0, asked)
    sizes = {id: group.devices.size for group in decided.groups for id in group.steps}
    assert sizes == {"large": 4, "small": 1}
    fixed = RoundScheduler(COSTS, 5, RoundSettings(scale_up=False)).decide(0.0, asked)
    assert {group.devices.size for group in fixed.groups} == {1}


def test_three_devices_are_used_only_where_asked() -> None:
    asked = [request("a", 4000, due=99.0)]
    assert RoundScheduler(COSTS, 3).decide(0.0, asked).groups[0].devices.size == 2
    rules = RoundSettings(degrees=(1, 2, 3))
    assert RoundScheduler(COSTS, 3, rules).decide(0.0, asked).groups[0].devices == Devices(0, 3)


def test_small_requests_share_a_group_where_no_deadline_suffers() -> None:
    small = [request(f"s{n}", 10, due=5.0) for n in range(4)]
    decided = RoundScheduler(COSTS, 1, EXACT).decide(0.0, small)
    assert len(decided.groups[0].steps) == 4
    tight = [replace(r, due=11 * COSTS.step(1, [r.work, r.work])) for r in small]
    decided = RoundScheduler(COSTS, 1, EXACT).decide(0.0, tight)
    assert len(decided.groups[0].steps) == 2


def test_requests_that_gain_nothing_do_not_share_a_group() -> None:
    large = [request(f"l{n}", 4000, due=99.0) for n in range(3)]
    decided = RoundScheduler(COSTS, 1).decide(0.0, large)
    assert [len(group.steps) for group in decided.groups] == [1]


def test_a_request_stays_on_its_devices() -> None:
    scheduler = RoundScheduler(COSTS, 4, RoundSettings(scale_up=False))
    stays = replace(request("stays", 1000, due=99.0), home=Devices(3, 1))
    decided = scheduler.decide(0.0, [request("new", 1000, due=50.0), stays])
    places = {id: group.devices for group in decided.groups for id in group.steps}
    assert places["stays"] == Devices(3, 1)


def test_two_that_need_all_devices_do_not_ruin_each_other() -> None:
    """Each could be in time alone; the devices suffice for one. Sharing them would miss both."""
    one = request("one", 4000, steps=20)
    seconds = least(one, 8)
    asked = [replace(one, due=1.2 * seconds), replace(one, id="two", due=1.25 * seconds)]
    ended = run(RoundScheduler(COSTS, 8, EXACT), asked)
    assert sum(ended.get(r.id, inf) <= r.due for r in asked) == 1


def test_the_most_requests_are_admitted_not_the_largest() -> None:
    memo = ProfileMemo(COSTS, (1,), 1)
    asked = [request("large", 4000, due=4.2), *(request(f"s{n}", 900, due=4.5) for n in range(4))]
    pending = [Pending(r, memo.of(r.work).times, 0.0, patience=20) for r in asked]
    admit(pending, 1)
    ranks = {p.id: p.rank for p in pending}
    assert ranks.pop("large") is Rank.CROWDED
    assert set(ranks.values()) == {Rank.ADMITTED}


def test_requests_that_can_be_in_time_go_first_the_rest_by_what_they_need() -> None:
    memo = ProfileMemo(COSTS, (1,), 1)
    dues = {"large": 4.2, "b": 4.5, "a": 4.5, "larger": 4.35, "never": inf, "late": 0.1}
    sites = {"large": 4000, "larger": 4200}
    asked = [request(id, sites.get(id, 900), due=due) for id, due in dues.items()]
    pending = [Pending(r, memo.of(r.work).times, 0.0, patience=20) for r in asked]
    admit(pending, 1)
    assert [p.id for p in by_urgency(pending)] == ["a", "b", "large", "larger", "never", "late"]


def test_a_step_longer_than_a_round_runs_at_the_fastest_degree() -> None:
    asked = request("a", 4000, steps=5)
    rules = RoundSettings(length=0.001, scale_up=False, margin=0.0)
    decided = RoundScheduler(COSTS, 8, rules).decide(0.0, [replace(asked, due=least(asked, 8))])
    assert decided.groups[0].devices.size == 8
    assert decided.groups[0].steps == {"a": 1}


def test_where_one_is_too_many_the_longest_is_left_out() -> None:
    jobs = [
        RemainingRequest(due=due, left=seconds, times=StepTimes({1: 1.0}), id=id)
        for id, seconds, due in (("long", 5, 5.0), ("first", 2, 6.0), ("second", 2, 6.5))
    ]
    planned = [(p.id, p.start) for p in fastest_first(jobs, 0.0, 1, 1)]
    assert planned == [("first", 0.0), ("second", 2.0)]


def test_schedules_of_the_outlook_end_in_time() -> None:
    times = StepTimes({k: COSTS.step(k, [work(2000)]) for k in (1, 2, 4, 8)})
    jobs = [RemainingRequest(due=0.4 * n + 0.5, left=10, times=times, id=str(n)) for n in range(8)]
    by_id = {job.id: job for job in jobs}
    for plan in (fastest_first(jobs, 0.0, 8, 8), narrow_first(jobs, 0.0, 8, 8)):
        ends = [p.start + 10 * times.seconds[p.degree] - by_id[p.id].due for p in plan]
        assert plan
        assert max(ends) <= 1e-9
        moments = sorted({p.start for p in plan})
        for at in moments:
            used = [
                p.degree for p in plan if p.start <= at < p.start + 10 * times.seconds[p.degree]
            ]
            assert sum(used) <= 8
    assert len(best_schedule(jobs, 0.0, 8, 8)) >= len(narrow_first(jobs, 0.0, 8, 8))


@pytest.mark.parametrize(("free", "devices"), [(2, 3), (3, 8), (1, 2)])
def test_a_group_of_three_has_no_place_on_what_others_leave(free: int, devices: int) -> None:
    times = StepTimes({1: 1.0, 2: 0.7, 3: 0.2})
    jobs = [RemainingRequest(due=3.0, left=5, times=times, id=str(n)) for n in range(3)]
    assert not any(p.degree == 3 for plan in schedules(jobs, 0.0, free, devices) for p in plan)
    assert any(p.degree == 3 for plan in schedules(jobs, 0.0, 4, 4) for p in plan)


def test_the_length_of_a_round_is_a_number_of_steps_of_the_slowest_kind() -> None:
    slow, quick = StepTimes({1: 0.2}), StepTimes({1: 0.13})
    # 0.8 is four and six steps, less 0.02; no other length from 0.5 to 1 wastes a smaller share
    assert round_length({slow: 0.2, quick: 0.13}, granularity=5) == pytest.approx(0.8)
    assert round_length({quick: 0.13}, granularity=1) == pytest.approx(0.13)


def test_settings_are_checked() -> None:
    for wrong in (
        {"degrees": (2, 4)}, {"degrees": (1, 5)}, {"length": 0.0}, {"granularity": 0}, {"batch": 0},
        {"patience": 0.0}, {"margin": 1.0},
    ):  # fmt: skip
        with pytest.raises(InputError):
            RoundSettings(**wrong)
    with pytest.raises(InputError, match="devices 0"):
        RoundScheduler(COSTS, 0)
    with pytest.raises(InputError, match=r"degrees \[4, 8\] have no cost"):
        RoundScheduler(from_efficiency(ONE, {2: 0.9}), 4)
