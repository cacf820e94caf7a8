"""Placement against all placements, and the group knapsack against all choices."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskfx.scheduling.degree_costs import DEGREES
from maskfx.scheduling.rounds.knapsack import Option, choose_options
from maskfx.scheduling.rounds.placement import EXACT, Devices, PlacedGroup, footprint, moves, place


def every_placement(sizes: Sequence[int], devices: int) -> Iterator[list[Devices]]:
    """All ways to give disjoint places to groups, by trying each start."""
    if not sizes:
        yield []
        return
    for rest in every_placement(sizes[1:], devices):
        taken = {n for at in rest for n in at.numbers}
        for start in range(0, devices - sizes[0] + 1, 4 if sizes[0] == 3 else sizes[0]):
            at = Devices(start, sizes[0])
            if not taken & set(at.numbers):
                yield [at, *rest]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[PlacedGroup], int]:
    """Groups at disjoint homes, some of which change size or end, and new ones."""
    devices = draw(st.integers(1, 12))
    groups: list[PlacedGroup] = []
    start = 0
    while start < devices and len(groups) < 4:
        sizes = [s for s in DEGREES if start % footprint(s) == 0 and start + s <= devices]
        home = Devices(start, draw(st.sampled_from(sizes)))
        start += home.size if home.size != 3 else 3
        if draw(st.booleans()):
            groups.append(PlacedGroup(draw(st.sampled_from(DEGREES)), home))
    groups += [PlacedGroup(size) for size in draw(st.lists(st.sampled_from(DEGREES), max_size=2))]
    return groups, devices


@settings(max_examples=150, deadline=None)
@given(rounds())
def test_as_few_groups_move_as_in_the_best_of_all_placements(
    case: tuple[list[PlacedGroup], int],
) -> None:
    groups, devices = case
    every = list(every_placement([g.size for g in groups], devices))
    placed = place(groups, devices)
    if placed is None:
        assert not every
        return
    assert placed in every  # aligned, disjoint, of the wanted sizes
    assert moves(groups, placed) == min(moves(groups, other) for other in every)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(DEGREES), max_size=40), st.integers(1, 64))
def test_groups_whose_footprints_fit_can_be_placed(sizes: list[int], devices: int) -> None:
    fitting: list[int] = []
    for size in sizes:
        if sum(map(footprint, [*fitting, size])) <= devices:
            fitting.append(size)
    placed = place([PlacedGroup(size) for size in fitting], devices)
    assert placed is not None
    taken = [n for at in placed for n in at.numbers]
    assert len(taken) == len(set(taken)) <= devices


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(DEGREES), min_size=20, max_size=80), st.data())
def test_groups_on_many_devices_get_disjoint_places_and_most_stay(
    sizes: list[int], data: st.DataObject
) -> None:
    devices = EXACT + 40
    fitting: list[int] = []
    for size in sizes:
        if sum(map(footprint, [*fitting, size])) <= devices:
            fitting.append(size)
    first = place([PlacedGroup(size) for size in fitting], devices)
    assert first is not None
    assert (
        place([PlacedGroup(size, at) for size, at in zip(fitting, first, strict=True)], devices)
        == first
    )
    changed = data.draw(st.permutations(fitting))
    groups = [PlacedGroup(size, at) for size, at in zip(changed, first, strict=True)]
    placed = place(groups, devices)
    assert placed is not None
    taken = [n for at in placed for n in at.numbers]
    assert len(taken) == len(set(taken)) <= devices
    assert [at.size for at in placed] == changed
    assert all(at.start % footprint(at.size) == 0 for at in placed)


def test_ranges_nest_if_one_has_all_devices_of_the_other() -> None:
    every = [Devices(start, size) for start in range(6) for size in range(1, 6)]
    for one, other in product(every, every):
        mine, theirs = set(one.numbers), set(other.numbers)
        assert one.nests(other) == (mine <= theirs or theirs <= mine)


def test_more_groups_than_devices_can_not_be_placed() -> None:
    assert place([PlacedGroup(1, Devices(0, 1))] * 200, 8) is None


def test_three_devices_leave_the_fourth_to_a_small_group() -> None:
    assert place([PlacedGroup(3), PlacedGroup(3), PlacedGroup(1), PlacedGroup(1)], 8) is not None
    assert place([PlacedGroup(3), PlacedGroup(3), PlacedGroup(2)], 8) is None


def test_a_group_that_keeps_its_place_makes_a_new_one_go_elsewhere() -> None:
    """Largest first would take the devices of the group that stays."""
    placed = place([PlacedGroup(1, Devices(0, 1)), PlacedGroup(4)], 8)
    assert placed == [Devices(0, 1), Devices(4, 4)]


@pytest.mark.parametrize("grown", [2, 4, 8])
def test_a_group_grows_around_its_devices(grown: int) -> None:
    home = Devices(9, 1)
    placed = place([PlacedGroup(grown, home)], 16)
    assert placed is not None
    assert set(home.numbers) <= set(placed[0].numbers)


options = st.builds(Option, st.integers(1, 8), st.floats(-2, 2))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(options, max_size=3).map(lambda o: [Option(0, 0.0), *o]), max_size=5),
    st.integers(0, 8),
)
def test_the_knapsack_is_as_good_as_the_best_of_all_choices(
    groups: list[list[Option]], capacity: int
) -> None:
    def worth(choice: Sequence[int]) -> float | None:
        chosen = [group[n] for group, n in zip(groups, choice, strict=True)]
        fits = sum(o.weight for o in chosen) <= capacity
        return sum(o.value for o in chosen) if fits else None

    every = [worth(choice) for choice in product(*(range(len(g)) for g in groups))]
    found = worth(choose_options(groups, capacity))
    assert found is not None
    assert found == pytest.approx(max(v for v in every if v is not None))
