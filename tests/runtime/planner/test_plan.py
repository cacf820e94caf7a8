"""The planner against brute force, the paper's greedy choice and an independent simulation."""

import itertools
import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskfx.errors import InputError
from maskfx.runtime.planner import baselines
from maskfx.runtime.planner.bounds import best_mix
from maskfx.runtime.planner.plan import QUICK, WIDTHS, plan
from maskfx.runtime.planner.problem import tables_of
from maskfx.runtime.planner.search import undominated
from maskfx.runtime.planner.storage_budget import restrict
from maskfx.runtime.planner.timeline import (
    NOW,
    BlockChoice,
    BlockTimes,
    Cost,
    Start,
    batch_costs,
    repeat,
    run_streams,
    simulate,
)

CLOSE = 1e-9


# Oracles


def events(costs, buffer_bytes, start):
    """The end of the last compute, by walking from event to event."""
    now = min([start.load, *(when for _, when in start.staged)])
    held = [(size, when) for size, when in start.staged]
    loaded = computed = 0  # blocks done
    load_until, compute_until = start.load, start.compute
    loading = computing = False
    while computed < len(costs):
        moved = True
        while moved:
            moved = False
            held = [(size, when) for size, when in held if when > now]
            if loading and load_until <= now:
                loading, loaded, moved = False, loaded + 1, True
            if computing and compute_until <= now:
                computing, moved = False, True
                size = costs[computed].staged
                held.remove((size, math.inf))
                computed += 1
            if computed == len(costs):
                return now
            if not loading and loaded < len(costs) and load_until <= now:
                cost = costs[loaded]
                used = sum(size for size, _ in held)
                if not (cost.load or cost.staged) or used + cost.staged <= buffer_bytes:
                    held.append((cost.staged, math.inf))
                    loading, load_until, moved = True, now + cost.load, True
            if not computing and loaded > computed and compute_until <= now:
                computing, moved = True, True
                compute_until = now + costs[computed].compute
        later = [load_until, compute_until, *(when for _, when in held)]
        now = min(when for when in later if now < when < math.inf)
    return now


def selections(blocks):
    each = [itertools.product(*[range(len(c)) for c in block.members]) for block in blocks]
    return itertools.product(*[list(options) for options in each])


def kept_of(blocks, selection, live, tiers):
    flags = [live] * len(blocks[0].members)
    total = [0.0] * tiers
    for block, picked in zip(blocks, selection, strict=True):
        for member, index in enumerate(picked):
            choice = block.members[member][index]
            extra = choice.needs_full and not flags[member] and not block.begins_step
            for tier in range(tiers):
                total[tier] += choice.kept_bytes[tier] + extra * choice.extra_kept[tier]
            flags[member] = choice.leaves_full
    return total


def brute_force(blocks, buffer_bytes=math.inf, start=NOW, budgets=()):
    """The earliest end of all selections; infinite if none fits."""
    best = math.inf
    for selection in selections(blocks):
        kept = kept_of(blocks, selection, start.live, len(budgets))
        if any(a > b for a, b in zip(kept, budgets, strict=True)):
            continue
        try:
            best = min(best, simulate(blocks, selection, buffer_bytes, start).end)
        except InputError:
            continue
    return best


# Random problems


def random_choice(pick, name, tiers=0):
    """Whole numbers often, so that ends and bytes tie."""
    whole = pick.random() < 0.5

    def number(most):
        return float(pick.randint(0, most)) if whole else pick.uniform(0, most)

    size = float(pick.randint(0, 4))
    return BlockChoice(
        name,
        load_bytes=size,
        load_seconds=number(5) if size or pick.random() < 0.3 else 0.0,
        compute_seconds=number(6),
        needs_full=pick.random() < 0.4,
        leaves_full=pick.random() < 0.5,
        extra_bytes=math.inf if pick.random() < 0.1 else float(pick.randint(0, 3)),
        extra_seconds=number(3),
        kept_bytes=tuple(float(pick.randint(0, 4)) for _ in range(tiers)),
        extra_kept=tuple(float(pick.randint(0, 2)) for _ in range(tiers)),
    )


def random_blocks(pick, tiers=0):
    count = pick.randint(1, 5)
    members = pick.randint(1, 3) if count <= 2 else 1 + (count == 3 and pick.random() < 0.5)
    most = 3 if count * members <= 5 else 2
    twins = pick.random() < 0.4
    blocks = []
    for _ in range(count):
        menus = [
            tuple(random_choice(pick, str(i), tiers) for i in range(pick.randint(1, most)))
            for _ in range(members)
        ]
        members_ = (menus[0],) * members if twins else tuple(menus)
        blocks.append(BlockTimes(members_, pick.uniform(0, 2), pick.random() < 0.2))
    return blocks


def random_start(pick):
    if pick.random() < 0.5:
        return NOW
    compute = pick.uniform(0, 3)
    ahead = compute - pick.uniform(0, 6)
    staged = [(float(pick.randint(0, 3)), compute - pick.uniform(0, 6)) for _ in range(2)]
    return Start(ahead, compute, pick.random() < 0.6, tuple(staged))


def random_buffer(pick):
    return math.inf if pick.random() < 0.3 else float(pick.randint(2, 12))


def flux_like(pick, members, count=60, bandwidth=2.5e10, noise=0.0, same=False):
    """Blocks of four choices: compute falls and loads grow with the cached share of the picture."""
    masks = [0.15] * members if same else [pick.uniform(0.03, 0.5) for _ in range(members)]
    blocks = []
    for _ in range(count):
        menus = []
        for mask in masks:
            rest = 25e6 * (1 - mask)
            full = 1.2e-3 * (1 + noise * pick.random())
            keys = full * (0.15 + 0.85 * mask)
            inputs = keys + 0.15 * full * (1 - mask)
            menus.append(
                (
                    BlockChoice("all", 0, 0, full, True, True, rest).over(bandwidth),
                    BlockChoice("input", rest, 0, inputs).over(bandwidth),
                    BlockChoice("half", 1.5 * rest, 0, (inputs + keys) / 2).over(bandwidth),
                    BlockChoice("keys", 2 * rest, 0, keys).over(bandwidth),
                )
            )
        blocks.append(BlockTimes(tuple(menus), 1e-4))
    return blocks


# The rules of the timeline


def test_two_blocks_by_hand():
    timeline = run_streams([Cost(2, 4, 3), Cost(5, 4, 1)], 8.0)
    assert timeline.loads == ((0, 2), (2, 7))
    assert timeline.computes == ((2, 5), (7, 8))
    assert timeline.bubbles == ((0, 2), (5, 7))


def test_a_load_waits_for_room():
    timeline = run_streams([Cost(2, 4, 3), Cost(5, 4, 1)], 7.0)
    assert timeline.loads == ((0, 2), (5, 10))


def test_a_block_without_a_load_does_not_wait_for_loads():
    timeline = run_streams([Cost(0, 0, 1), Cost(4, 1, 1), Cost(0, 0, 1)], 8.0)
    assert timeline.computes == ((0, 1), (4, 5), (5, 6))


def test_timeline_repeats_an_independent_simulation():
    pick = random.Random(1)
    for _ in range(3000):
        blocks, buffer_bytes, start = random_blocks(pick), random_buffer(pick), random_start(pick)
        selection = [[pick.randrange(len(c)) for c in block.members] for block in blocks]
        try:
            timeline = simulate(blocks, selection, buffer_bytes, start)
        except InputError:
            continue
        if sum(size for size, _ in start.staged) <= buffer_bytes:
            assert timeline.end == pytest.approx(
                events(timeline.costs, buffer_bytes, start), abs=CLOSE
            )


def test_carry_continues_a_step():
    """Two steps in a row end when the second, started from what the first left, ends."""
    pick = random.Random(2)
    for _ in range(500):
        blocks, buffer_bytes = random_blocks(pick), 12.0
        selection = [[pick.randrange(len(c)) for c in block.members] for block in blocks]
        try:
            both = simulate(repeat(blocks, 2), [*selection, *selection], buffer_bytes)
            first = simulate(repeat(blocks, 1), selection, buffer_bytes)
        except InputError:
            continue
        second = simulate(repeat(blocks, 1), selection, buffer_bytes, first.carry())
        assert first.end + second.end == pytest.approx(both.end, abs=CLOSE)


# Exactness


@pytest.mark.parametrize("seed", range(8))
def test_ends_when_the_best_of_all_selections_ends(seed):
    pick = random.Random(seed)
    fitted = 0
    for _ in range(400):
        blocks, buffer_bytes, start = random_blocks(pick), random_buffer(pick), random_start(pick)
        best = brute_force(blocks, buffer_bytes, start)
        if math.isinf(best):
            with pytest.raises(InputError, match="staging buffer"):
                plan(blocks, buffer_bytes, start)
            continue
        fitted += 1
        found = plan(blocks, buffer_bytes, start)
        assert found.end == pytest.approx(best, abs=CLOSE)
        assert found.optimal
        again = simulate(blocks, found.selection, buffer_bytes, start)
        assert again.end == pytest.approx(found.end, abs=CLOSE)
        assert np.allclose(again.loads, found.timeline.loads)
    assert fitted > 250


def test_a_later_compute_end_may_free_the_buffer_earlier():
    """The way that is behind after two blocks wins: its first block frees the buffer earlier."""
    first = BlockChoice("a", 3, 1.0, 6.0, leaves_full=True), BlockChoice("b", 3, 1.0, 3.0)
    second = (
        BlockChoice("a", 1, 1.0, 1.0, needs_full=True, extra_seconds=99),
        BlockChoice("b", 1, 1.0, 6.0),
    )
    blocks = [
        BlockTimes((first,)),
        BlockTimes((second,)),
        BlockTimes(((BlockChoice("a", 3, 10.0, 1.0),),)),
    ]
    assert simulate(blocks, [[0], [0], [0]], 4.0).end == 18.0
    found = plan(blocks, 4.0)
    assert (found.end, found.selection) == (15.0, ((1,), (1,), (0,)))
    assert found.optimal


def test_loads_alone():
    """No compute at all: the scale of what counts as equal comes from the loads."""
    blocks = [BlockTimes(((BlockChoice("a", 2, 3.0), BlockChoice("b", 1, 2.0)),))] * 3
    assert plan(blocks).end == 6.0
    assert plan([BlockTimes(((BlockChoice("a"),),))]).end == 0.0


@pytest.mark.parametrize("widths", [QUICK, (1,)])
@pytest.mark.parametrize("seed", range(4))
def test_every_effort_tells_the_truth_about_what_it_proved(seed, widths):
    pick = random.Random(100 + seed)
    for _ in range(300):
        blocks, buffer_bytes, start = random_blocks(pick), random_buffer(pick), random_start(pick)
        best = brute_force(blocks, buffer_bytes, start)
        try:
            found = plan(blocks, buffer_bytes, start, widths=widths)
        except InputError:
            continue
        assert found.bound <= best + CLOSE
        assert found.end >= best - CLOSE
        again = simulate(blocks, found.selection, buffer_bytes, start)
        assert again.end == pytest.approx(found.end, abs=CLOSE)


def test_several_steps_are_planned_together():
    pick = random.Random(5)
    for _ in range(150):
        step = random_blocks(pick)[:2]
        step = [replace(block, members=block.members[:1]) for block in step]
        blocks, buffer_bytes = repeat(step, 2), random_buffer(pick)
        best = brute_force(blocks, buffer_bytes)
        if math.isfinite(best):
            assert plan(blocks, buffer_bytes).end == pytest.approx(best, abs=CLOSE)


def test_near_enough_is_near_enough():
    pick = random.Random(6)
    for _ in range(200):
        blocks = random_blocks(pick)
        best = brute_force(blocks)
        if not math.isfinite(best):
            continue
        found = plan(blocks, within=1.0)
        assert found.end <= best + 1.0 + CLOSE
        assert found.bound <= best + CLOSE


def test_undominated_rows_are_those_that_no_other_row_undercuts():
    pick = np.random.default_rng(0)
    for _ in range(50):
        keys = pick.integers(0, 6, (700, 3)).astype(float)
        rows = {tuple(row) for row in keys[undominated(keys)]}
        distinct = np.unique(keys, axis=0)
        below = (distinct[None] <= distinct[:, None]).all(-1).sum(1)
        assert rows == {tuple(row) for row in distinct[below == 1]}


def test_tables_say_what_a_selection_costs():
    pick = random.Random(7)
    for _ in range(300):
        blocks = random_blocks(pick, tiers=2)
        selection = [[pick.randrange(len(c)) for c in block.members] for block in blocks]
        tables = tables_of(tuple(blocks), math.inf, 2)
        for live in (True, False):
            costs = tables.costs(np.array(selection), live)
            try:
                wanted = batch_costs(blocks, selection, live)
            except InputError:  # it needs rows that can't be loaded; no search selects it
                continue
            assert np.allclose(costs, wanted)
            kept = tables.kept_by(np.array(selection), live)
            assert kept.tolist() == kept_of(blocks, selection, live, 2)


def test_tables_are_made_once_for_the_same_blocks():
    blocks = tuple(random_blocks(random.Random(8)))
    assert tables_of(blocks, 4.0, 0) is tables_of((*blocks,), 4.0, 0)
    assert tables_of(blocks, 4.0, 0) is not tables_of(tuple(map(replace, blocks)), 4.0, 0)


def test_the_best_mix_is_as_short_as_its_weights_prove():
    pick = np.random.default_rng(1)
    for _ in range(300):
        plans, paths, tiers = pick.integers(1, 8), pick.integers(1, 9), pick.integers(0, 3)
        lengths = pick.integers(-4, 9, (plans, paths)).astype(float)
        over = pick.integers(-3, 4, (plans, tiers)).astype(float)
        mix = best_mix(lengths, over)
        if mix is None:
            assert tiers
            continue
        assert (mix.shares @ lengths).max() == pytest.approx(mix.length, abs=CLOSE)
        assert (mix.shares @ over).max(initial=0.0) <= CLOSE
        assert min(mix.shares.min(), mix.weights.min(), mix.prices.min(initial=0.0)) >= 0.0
        assert (mix.shares.sum(), mix.weights.sum()) == pytest.approx((1.0, 1.0))
        least = (lengths @ mix.weights + over @ mix.prices).min()
        assert least == pytest.approx(mix.length, abs=CLOSE)


numbers = st.integers(0, 6).map(float)
choices = st.builds(
    BlockChoice,
    st.just("x"),
    numbers,
    numbers,
    numbers,
    st.booleans(),
    st.booleans(),
    numbers,
    numbers,
)
menus = st.lists(choices, min_size=1, max_size=3).map(tuple)
problems = st.lists(
    st.builds(lambda menu, fixed: BlockTimes((menu,), fixed), menus, numbers),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(problems)
def test_more_never_hurts(blocks):
    """A larger buffer, an earlier load stream, a further choice."""
    end = plan(blocks, 24.0).end
    assert plan(blocks).end <= end + CLOSE
    assert plan(blocks, 24.0, Start(load=-2.0)).end <= end + CLOSE
    more = [replace(b, members=((*b.members[0], BlockChoice("more", 1, 1, 1)),)) for b in blocks]
    assert plan(more, 24.0).end <= end + CLOSE


@settings(max_examples=100, deadline=None)
@given(problems, st.floats(0.1, 10))
def test_time_scales(blocks, scale):
    def scaled(choice):
        return replace(
            choice,
            load_seconds=choice.load_seconds * scale,
            compute_seconds=choice.compute_seconds * scale,
            extra_seconds=choice.extra_seconds * scale,
        )

    slower = [
        BlockTimes((tuple(map(scaled, block.members[0])),), block.fixed_seconds * scale)
        for block in blocks
    ]
    assert plan(slower, 20.0).end == pytest.approx(plan(blocks, 20.0).end * scale, abs=1e-7)


# Baselines


def test_algorithm_1_by_hand():
    """Figure 9: the first blocks are computed while the third is loaded."""
    full, cached = BlockChoice("all", 0, 0, 3.0), BlockChoice("cached", 1, 5.0, 1.0)
    blocks = [BlockTimes(((full, cached),))] * 3
    assert baselines.greedy(blocks, "cached", "all") == ((0,), (1,), (0,))
    assert simulate(blocks, baselines.greedy(blocks, "cached", "all")).end == 9.0
    assert plan(blocks).end == 7.0  # computes two, loads the last
    assert baselines.naive(blocks, "cached").end == 18.0
    assert baselines.strawman(blocks, "cached").end == 16.0
    assert baselines.compute_all(blocks, "all").end == 9.0


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("bandwidth", [1e9, 5e9, 2e10, 1e11])
def test_never_worse_than_the_baselines(members, bandwidth):
    pick = random.Random(members)
    for noise in (0.0, 0.3):
        blocks = flux_like(pick, members, count=16, bandwidth=bandwidth, noise=noise)
        for buffer_bytes in (math.inf, 6 * 25e6 * members):
            end = plan(blocks, buffer_bytes, widths=QUICK).end + CLOSE
            assert end >= baselines.compute_all(blocks, "all").end * 0.1
            assert end <= baselines.compute_all(blocks, "all").end + 2 * CLOSE
            for cached in ("input", "half", "keys"):
                picked = baselines.greedy(blocks, cached, "all")
                assert end <= simulate(blocks, picked, buffer_bytes).end + 2 * CLOSE
                assert end <= baselines.naive(blocks, cached, buffer_bytes).end + 2 * CLOSE
                assert end <= baselines.strawman(blocks, cached, buffer_bytes).end + 2 * CLOSE


def test_a_quick_plan_is_never_later_than_algorithm_1():
    pick = random.Random(9)
    for _ in range(400):
        members, full = (
            pick.randint(1, 3),
            BlockChoice("all", 0, 0, pick.uniform(1, 9), True, True, 3, 4),
        )
        menus = [
            tuple((full, *(random_choice(pick, name) for name in "ab")) for _ in range(members))
            for _ in range(pick.randint(3, 12))
        ]
        blocks, start = [BlockTimes(menu) for menu in menus], Start(load=-pick.uniform(0, 20))
        buffer_bytes = pick.choice([12.0, 25.0, math.inf])
        end = plan(blocks, buffer_bytes, start, widths=QUICK).end
        for cached in "ab":
            picked = baselines.greedy(blocks, cached, "all", start)
            try:
                assert end <= simulate(blocks, picked, buffer_bytes, start).end + CLOSE
            except InputError:  # more than the buffer at once
                continue


def test_answers_do_not_cache():
    """Over a slow link nothing is loaded."""
    found = plan(flux_like(random.Random(0), 2, count=20, bandwidth=1e7))
    assert {index for picked in found.selection for index in picked} == {0}
    assert found.timeline.bubbles == ()
    assert found.optimal


# Budgets


@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_restriction_loses_least(seed, tiers):
    pick = random.Random(10 * seed + tiers)
    fitted = 0
    for _ in range(250):
        blocks, buffer_bytes = random_blocks(pick, tiers), random_buffer(pick)
        budgets = [float(pick.randint(0, 12)) for _ in range(tiers)]
        best = brute_force(blocks, buffer_bytes, budgets=budgets)
        if math.isinf(best):
            with pytest.raises(InputError, match="kept bytes"):
                restrict(blocks, budgets, buffer_bytes=buffer_bytes)
            continue
        fitted += 1
        left, found = restrict(blocks, budgets, buffer_bytes=buffer_bytes)
        assert found.end == pytest.approx(best, abs=CLOSE)
        assert found.optimal
        kept = kept_of(blocks, found.selection, True, tiers)
        assert all(a <= b for a, b in zip(kept, budgets, strict=True))
        assert plan(left, buffer_bytes).end <= found.end + CLOSE
    assert fitted > 50


def test_templates_share_a_budget():
    full = BlockChoice("all", 0, 0, 3.0, True, True)
    cached = BlockChoice("kv", 4, 0, 1.0, kept_bytes=(4.0,))
    blocks = [BlockTimes(((full, cached),))] * 4
    for templates, ends in ((1, 4.0), (2, 6.0), (6, 10.0), (7, 12.0)):
        left, found = restrict(blocks, [24.0], templates)
        assert found.end == ends
        assert sum(len(block.members[0]) - 1 for block in left) == min(4, 24 // (4 * templates))


# Bad input

ONE = BlockChoice("all", 0, 0, 1.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BlockChoice("kv", load_bytes=-1), "load_bytes=-1"),
        (lambda: BlockChoice("kv", compute_seconds=math.nan), "compute_seconds=nan"),
        (lambda: BlockChoice("kv", extra_seconds=math.inf), "extra_seconds=inf"),
        (lambda: BlockChoice("kv", kept_bytes=(-1,)), "kept_bytes=-1"),
        (lambda: ONE.over(0), "bytes_per_second=0"),
        (lambda: BlockTimes(()), "no members"),
        (lambda: BlockTimes(((ONE,), ())), "member 1 has no choices"),
        (lambda: BlockTimes(((ONE,),), fixed_seconds=-1), "fixed_seconds=-1"),
        (lambda: Start(load=1), "load must not be the later"),
        (lambda: Start(staged=((1, 5),)), "after compute"),
        (lambda: plan([]), "no blocks"),
        (lambda: plan([BlockTimes(((ONE,),)), BlockTimes(((ONE,),) * 2)]), "members"),
        (lambda: plan([BlockTimes(((ONE,),))], buffer_bytes=-1), "buffer_bytes=-1"),
        (
            lambda: plan([BlockTimes(((BlockChoice("kv", 3, 1),),))], buffer_bytes=2),
            "staging buffer of 2",
        ),
        (
            lambda: simulate([BlockTimes(((BlockChoice("kv", 3, 1),),))], [[0]], 2),
            "block 0: its load has 3",
        ),
        (lambda: simulate([BlockTimes(((ONE,),))], []), "0 selections for 1 blocks"),
        (lambda: repeat([], 2), "0 blocks"),
        (
            lambda: baselines.all_same([BlockTimes(((ONE,),))], "kv"),
            "baseline 'kv': choose one of all",
        ),
        (lambda: restrict([BlockTimes(((ONE,),))], []), "0 budgets"),
        (lambda: restrict([BlockTimes(((ONE,),))], [-1]), "budget 0 is -1"),
    ],
)
def test_refuses(make, words):
    with pytest.raises(InputError, match=words):
        make()


# Size


def test_one_request_is_planned_exactly_at_full_size():
    """The wide passes agree with a bound that knows nothing of the search."""
    for noise in (0.0, 0.2):
        found = plan(flux_like(random.Random(4), 1, count=57, noise=noise), 5e8)
        assert found.optimal
        assert found.end <= plan(flux_like(random.Random(4), 1, 57, noise=noise), 4e8).end + CLOSE


@pytest.mark.parametrize("bandwidth", [6e9, 2.5e10, 6e10])
@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize(("members", "same"), [(1, True), (8, True), (8, False)])
def test_sixty_blocks_are_planned_at_once(members, same, noise, bandwidth):
    """Milliseconds on an idle machine (`bench.planner` states how many); the limit is generous."""
    blocks = flux_like(random.Random(3), members, bandwidth=bandwidth, noise=noise, same=same)
    for buffer_bytes in (math.inf, members * 5e8):
        start = plan(blocks, buffer_bytes, widths=QUICK).timeline.carry()
        for now in (NOW, start):
            began = time.perf_counter()
            found = plan(blocks, buffer_bytes, now, widths=QUICK)
            assert time.perf_counter() - began < 0.5
            assert found.end - found.bound <= 0.03 * found.end
            for cached in ("input", "half", "keys"):
                picked = baselines.greedy(blocks, cached, "all", now)
                assert found.end <= simulate(blocks, picked, buffer_bytes, now).end + CLOSE


@pytest.mark.parametrize("buffer_bytes", [math.inf, 5e8])
def test_a_quick_plan_is_nearly_the_exact_one(buffer_bytes):
    for seed in range(6):
        blocks = flux_like(random.Random(seed), 1, noise=0.2, bandwidth=1e10)
        quick = plan(blocks, buffer_bytes, widths=QUICK)
        exact = plan(blocks, buffer_bytes, widths=WIDTHS[:2])
        assert exact.optimal
        assert exact.end <= quick.end + CLOSE
        assert quick.end <= 1.01 * exact.end
