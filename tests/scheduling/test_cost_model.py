"""Predicted costs: the formula, its file, and what is learnt while serving."""

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskfx.errors import InputError
from maskfx.runtime.planner.plan import plan
from maskfx.runtime.planner.timeline import BlockChoice, BlockTimes
from maskfx.scheduling.composition import members_of
from maskfx.scheduling.cost_model import EVERY, START, FittedCosts, LearnedCosts
from maskfx.scheduling.load import TemplateTier, Work
from maskfx.scheduling.regression import ObservationWindow
from maskfx.scheduling.step_reports import LoadFacts, Stepped

COSTS = FittedCosts(
    base=0.05,
    per_request=0.02,
    per_site=1e-4,
    per_pair=1e-8,
    load_bandwidth=1e9,
    around_base=0.1,
    around_per_site=1e-5,
    record=1.2,
    disk_bandwidth=5e8,
    r2=0.99,
    origin="a test",
)
WORK = Work(sites=500, whole=4096, steps=20, branches=2, template="t", bytes=1_000_000)


def test_a_step_is_the_sum_of_its_members_unless_loads_take_longer() -> None:
    one = 0.02 + 1000 * (1e-4 + 1e-8 * 4096)
    assert COSTS.step([WORK]) == pytest.approx(0.05 + one)
    assert COSTS.step([WORK, WORK]) == pytest.approx(0.05 + 2 * one)
    heavy = Work(10, 4096, 20, bytes=10**9)
    assert COSTS.step([heavy, WORK]) == pytest.approx(1.001)


PLANNED = msgspec.structs.replace(COSTS, loaded=0.5, avoidable=0.6, per_avoided_byte=2e-9)


def test_a_step_is_the_best_of_the_plans_that_share_its_loads() -> None:
    """Each share of the avoidable loads, and the compute that it costs, tried one by one."""
    draw = np.random.default_rng(3)
    for _ in range(50):
        compute, load = draw.uniform(0, 1, 2)
        shares = np.linspace(0, 1, 20001)
        again = PLANNED.per_avoided_byte * PLANNED.load_bandwidth  # type: ignore[operator]
        streams = compute + shares * 0.6 * again * load, (1 - 0.6 * shares) * load
        best = np.maximum(*streams).min()
        assert PLANNED.joint(np.array(compute), np.array(load)) == pytest.approx(best, abs=1e-4)
        assert COSTS.joint(np.array(compute), np.array(load)) == max(compute, load)


def test_its_step_is_about_what_the_planner_predicts() -> None:
    """Blocks whose keys and values may be loaded or projected again; at most a block apart."""
    members, count = [0.4, 1.0, 1.7], 24  # seconds of a step's loads, in times of its compute
    for scale in (0.3, 1.0, 2.0, 5.0):
        loads = [scale * each for each in members]
        again = PLANNED.per_avoided_byte * PLANNED.load_bandwidth  # type: ignore[operator]
        block = BlockTimes(
            tuple(
                (
                    BlockChoice("keys", load, load / count, 1 / count),
                    BlockChoice(
                        "inputs",
                        0.4 * load,
                        0.4 * load / count,
                        (1 + 0.6 * again * load) / count,
                    ),
                )
                for load in loads
            )
        )
        blocks = tuple(replace(block) for _ in range(count))
        found = plan(blocks).end
        said = float(PLANNED.joint(np.array(float(len(members))), np.array(sum(loads))))
        assert said <= found * (1 + 1e-9)
        assert found <= said + 3 * sum(loads) / count + 0.02 * said


def test_a_worker_tells_of_its_loads_until_steps_tell_better() -> None:
    learned = LearnedCosts(START)
    version = learned.version
    learned.learn_loads(LoadFacts(2e8, 0.7, 0.5, 1e-9))
    now = learned.now
    assert (now.load_bandwidth, now.loaded, now.avoidable) == (2e8, 0.7, 0.5)
    assert learned.version > version
    for batch in batches(2 * EVERY):
        learned.observe(told(COSTS, batch))
    assert learned.now.load_bandwidth == pytest.approx(2e8), "no step waited for its loads"
    given = LearnedCosts(COSTS)
    given.learn_loads(LoadFacts(2e8, 0.7, 0.5, 1e-9))
    assert given.now.load_bandwidth == COSTS.load_bandwidth


def test_the_speed_of_the_disk_is_learnt_from_reads() -> None:
    learned = LearnedCosts(START)
    assert learned.now.disk_bandwidth is None
    for nbytes in (10**8, 3 * 10**8) * EVERY:
        learned.observe_reads(nbytes, nbytes / 2e8)
    assert learned.now.disk_bandwidth == pytest.approx(2e8)
    assert learned.recording(WORK, TemplateTier.DISK) >= WORK.bytes / 2e8
    given = LearnedCosts(COSTS)
    for batch in batches(2 * EVERY):
        given.observe(told(COSTS, batch))
    assert given.now.disk_bandwidth == pytest.approx(5e8), "nothing was read"
    for _ in range(2 * EVERY):
        given.observe_reads(10**8, 1.0)
    assert given.now.disk_bandwidth == pytest.approx(1e8, rel=0.3)


def test_a_template_costs_more_the_farther_it_is() -> None:
    taken = [COSTS.recording(WORK, tier) for tier in TemplateTier]
    assert taken[:2] == [0.0, 0.0]
    read, step = 1e6 / 5e8, COSTS.step([WORK])
    assert read < step
    assert taken[2] == pytest.approx(read), "later steps' rows are read while steps compute"
    slow = msgspec.structs.replace(COSTS, disk_bandwidth=1e6)
    assert slow.recording(WORK, TemplateTier.DISK) == pytest.approx(1.0 + 19 * (1.0 - step))
    assert taken[3] == pytest.approx(1.2 * 20 * COSTS.step([Work(4096, 4096, 20, 2)]))
    assert COSTS.recording(Work(500, 4096, 20), TemplateTier.NONE) == 0.0


def test_json_holds_every_field_and_comes_back_the_same() -> None:
    text = COSTS.to_json()
    assert set(json.loads(text)) == set(COSTS.__struct_fields__)
    assert FittedCosts.from_json(text) == COSTS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"per_sit": 1.0}, "per_sit"),
        ({"base": -1.0}, "base"),
        ({"base": "fast"}, "base"),
        ({"load_bandwidth": 0.0}, "load_bandwidth"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(change: dict[str, object], said: str) -> None:
    broken = {**json.loads(COSTS.to_json()), **change}
    with pytest.raises(InputError, match=said):
        FittedCosts.from_json(json.dumps(broken))


def batches(count: int, seed: int = 0) -> list[list[Work]]:
    draw = np.random.default_rng(seed)
    return [
        [
            Work(int(draw.integers(20, 3000)), int(draw.choice([1024, 4096, 9216])), 20)
            for _ in range(draw.integers(1, 9))
        ]
        for _ in range(count)
    ]


def told(truth: FittedCosts, batch: list[Work], factor: float = 1.0) -> Stepped:
    return Stepped(truth.step(batch) * factor, members_of(batch))


TRUTH = FittedCosts(base=0.2, per_request=0.01, per_site=5e-4, per_pair=3e-8)


def test_costs_are_learnt_in_spite_of_noise_and_outliers() -> None:
    learned = LearnedCosts(COSTS)
    draw = np.random.default_rng(1)
    for number, batch in enumerate(batches(300)):
        factor = 20.0 if number % 10 == 0 else float(draw.normal(1.0, 0.02))
        learned.observe(told(TRUTH, batch, factor))
    off = [learned.step(b) / TRUTH.step(b) - 1 for b in batches(50, seed=9)]
    assert max(map(abs, off)) < 0.06
    assert learned.now.r2 is not None
    assert learned.now.r2 > 0.98
    assert learned.version == 300 // EVERY


def test_requests_that_ran_alone_do_not_show_that_batches_gain_nothing() -> None:
    learned, truth = LearnedCosts(START), FittedCosts(base=0.4, per_request=0.1, per_site=1e-4)
    for batch in batches(100):
        learned.observe(told(truth, batch[:1]))
    assert learned.now.base > 2 * learned.now.per_request
    assert learned.step(batch[:1]) == pytest.approx(truth.step(batch[:1]), rel=0.02)
    for batch in batches(100):
        learned.observe(told(truth, batch))
    assert learned.now.per_request == pytest.approx(0.1, rel=0.3)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    learned = LearnedCosts(COSTS, window=64)
    for batch in batches(100):
        learned.observe(told(TRUTH, batch))
    for batch in batches(100, seed=3):
        learned.observe(told(TRUTH, batch, 3.0))
    [batch] = batches(1, seed=4)
    assert learned.step(batch) == pytest.approx(3 * TRUTH.step(batch), rel=0.02)


def test_what_is_around_is_learnt_from_totals() -> None:
    learned = LearnedCosts(COSTS)
    for number in range(64):
        work = Work(100, 1024 * (1 + number % 3), 20, template="t", bytes=10**6)
        learned.observe_around(work, 0.5 + 1e-4 * work.whole)
    work = Work(100, 2048, 20, template="t", bytes=10**6)
    assert learned.around(work) == pytest.approx(0.5 + 1e-4 * 2048, rel=0.02)


def test_what_nothing_was_seen_of_stays_as_it_was() -> None:
    learned = LearnedCosts(COSTS)
    for batch in batches(64):
        learned.observe(told(TRUTH, batch))
    assert learned.around(WORK) == pytest.approx(COSTS.around(WORK))
    assert learned.recording(WORK, TemplateTier.DISK) == pytest.approx(
        COSTS.recording(WORK, TemplateTier.DISK)
    )


def test_nonsense_is_no_observation() -> None:
    window = ObservationWindow((1.0, 2.0))
    window.add((1.0, float("nan")), 1.0)
    window.add((1.0, 1.0), -1.0)
    window.add((1.0, 1.0), float("inf"))
    assert len(window) == 0
    assert window.fit()[0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("count", [2, 8, 64])
def test_the_prior_fades_with_the_number_of_rows(count: int) -> None:
    window = ObservationWindow((1.0, 1.0), trust=4.0)
    for _ in range(count // 2):
        window.add((1.0, 0.0), 1.0)
        window.add((0.0, 1.0), 3.0)
    weight = 4.0 / count  # the prior is (2, 2): the machine takes twice what was thought
    wanted = [(count * seen + weight * 2.0) / (count + weight) for seen in (1.0, 3.0)]
    assert window.fit()[0].tolist() == pytest.approx(wanted, rel=1e-6)


@given(
    st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.sampled_from((None, 1e9)),
)  # fmt: skip
def test_seconds_of_one_step_are_those_of_arrays(
    compute: float, load: float, avoidable: float, bandwidth: float | None
) -> None:
    costs = FittedCosts(
        base=0.0, per_request=0.0, per_site=0.0, avoidable=avoidable, per_avoided_byte=1e-9,
        load_bandwidth=bandwidth,
    )  # fmt: skip
    arrays = costs.joint(np.array([compute]), np.array([load]))
    assert costs.joint_seconds(compute, load) == arrays[0]


def test_a_change_of_speed_counts_between_two_fits() -> None:
    """The eighth step is fitted; the next ones take three times as long."""
    costs, work = LearnedCosts(START), Work(400, 4096, 20)
    for _ in range(8):
        costs.observe(Stepped(1.0, members_of([work])))
    before, version = costs.step([work]), costs.version
    for _ in range(7):
        costs.observe(Stepped(3.0, members_of([work])))
    assert costs.version > version
    assert costs.step([work]) > 2 * before
