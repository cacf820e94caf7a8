"""How a step is divided, by cost: which members and rows ranks share, and which keys they read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from diffusers import FluxTransformer2DModel
from torch import nn

import maskfx
from maskfx import CompiledDenoiser, DenseStep, EditStep
from maskfx.compiler.rank_twins import split_program
from maskfx.distributed.divider import Divider
from maskfx.distributed.division.attention_ways import attentions_of
from maskfx.distributed.division.links import LinkCosts
from maskfx.distributed.division.measure import slowest
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.division.step_costs import Exchanges, exchanges_of, sent_bytes, step_seconds
from maskfx.distributed.division.work import RankWork, Work
from maskfx.distributed.rank_group import RankGroup
from maskfx.distributed.rank_step import RankPrograms
from maskfx.ir.programs.head_sources import AttentionWay, AttentionWays
from maskfx.runtime.batch.flops import row_flops
from tests.distributed import tiny
from tests.distributed.test_ranks import BOUND, error
from tests.factories.masks import MASKS
from tests.factories.own_cases import OWN
from tests.factories.thread_ranks import ThreadRanks
from tests.factories.zoo import ZOO

CHEAP = LinkCosts(exchange=0.0, send=0.0)


def batch_of(denoiser: CompiledDenoiser, count: int = 1) -> tuple[Any, Any]:
    """Return the program and the members of a step."""
    found: list[Any] = []

    def seen(program: Any, recording: bool, frame: Any, calls: Any, members: Any) -> None:
        found.append((program, members))

    denoiser.step([DenseStep(tiny.inputs(seed)) for seed in range(count)], seen)
    return found[0][0], found[0][1]


def group_of(denoiser: CompiledDenoiser, costs: LinkCosts) -> RankGroup:
    return RankGroup(denoiser, 2, costs=costs)  # its processes start at the first step


@pytest.mark.parametrize(
    ("kind", "costs", "shared"),
    [
        (tiny.Joint, CHEAP, True),
        (tiny.Joint, LinkCosts(exchange=0.0, send=1.0), False),
        (tiny.Joint, LinkCosts(exchange=1.0, send=0.0), False),  # of the text with itself
        (tiny.Tiny, CHEAP, False),  # nothing is computed of its text
    ],
    ids=["cheap", "slow bytes", "slow exchanges", "no rows"],
)
def test_a_text_is_shared_where_that_costs_less(
    kind: Callable[[], nn.Module], costs: LinkCosts, shared: bool
) -> None:
    denoiser = tiny.compiled(kind)
    program, members = batch_of(denoiser)
    found = group_of(denoiser, costs).partition(program, members, 2)
    assert found.texts == (shared,)


def test_a_text_on_one_rank_is_whole() -> None:
    denoiser = tiny.compiled(tiny.Joint)
    program, members = batch_of(denoiser, 2)
    assert group_of(denoiser, CHEAP).partition(program, members, 2).texts == (False, False)


def test_the_work_of_a_member() -> None:
    denoiser = tiny.compiled(tiny.Joint)
    program, (member,) = batch_of(denoiser)
    work = RankWork().of(program, member)
    text, sites, square = 5, 16, 2 * 16 * 16  # rows, and the FLOPs of a layer 16 wide
    joint = 2 * 4 * 16 * (text + sites)  # queries with all keys and values, twice
    alone = 3 * square + 4 * 16 * text
    # nothing reads the text after the last attention
    assert work.text == text * (joint + alone + 2 * 3 * square + square)
    assert work.sites == sites * (joint + 2 * 4 * square + 2 * square)
    assert work.once == 2 * 16  # the time


def test_the_seconds_of_a_flop_are_those_of_the_quickest_step() -> None:
    work, member = RankWork(), Work(once=1.0, text=4.0, sites=6.0)
    assert work.flop(7.0) == 7.0
    work.note([member], Partition(((2.0, 1.0, 0.0),)), [18.0, 70.0, 0.0])
    assert work.flop(7.0) == 18.0 / (1 + 4 + 4)
    work.note([member], Partition(((1.0, 1.0),), (True,)), [6.0, 9.0])
    assert work.flop(7.0) == 6.0 / (1 + 2 + 3)
    work.note([member], Partition(((1.0, 1.0),)), [100.0, 100.0])
    assert work.flop(7.0) == 1.0
    assert work.flop(0.5) == 0.5


DEAR = LinkCosts(exchange=1.0)


def test_a_step_is_cut_where_that_is_predicted_to_be_faster() -> None:
    denoiser = tiny.compiled()
    program, members = batch_of(denoiser)
    assert group_of(denoiser, CHEAP).partition(program, members, 2).cut == (True,)
    whole = group_of(denoiser, DEAR).partition(program, members, 3)
    assert whole.shares == ((1.0, 0.0, 0.0),)
    program, members = batch_of(denoiser, 2)
    assert group_of(denoiser, DEAR).partition(program, members, 2).cut == (False, False)


def test_the_predicted_seconds_of_a_step() -> None:
    """By hand, for a member that is whole, cut into equal parts and into others."""
    denoiser = tiny.compiled(tiny.Joint)
    program, members = batch_of(denoiser)
    work = [Work(once=1.0, text=4.0, sites=6.0)]
    costs = LinkCosts(exchange=10.0, send=0.5)
    exchanges = Exchanges(3, ((("text:0", "grid1"), 8),))
    (member,) = members
    counts = [member.sites.active_count(segment) for segment in ("grid1", "text:0")]
    assert counts == [16, 5]

    def seconds(*shares: float, shared: bool = False) -> float:
        partition = Partition((shares,), (shared,))
        return step_seconds(exchanges, members, work, partition, costs, 2.0)

    assert seconds(1.0, 0.0) == 2.0 * 11
    assert seconds(1.0, 1.0) == 2.0 * (1 + 4 + 3) + 30.0 + 0.5 * 8 * 8
    assert seconds(3.0, 1.0) == 2.0 * (1 + 4 + 4.5) + 30.0 + 0.5 * 8 * 12
    assert seconds(3.0, 1.0, shared=True) == 2.0 * (1 + 7.5) + 30.0 + 0.5 * 8 * (12 + 4)
    assert seconds(1.0, 1.0, 1.0, 1.0) == 2.0 * (1 + 4 + 1.5) + 30.0 + 0.5 * 8 * 4 * 3


def test_costs_that_ranks_measure() -> None:
    denoiser = tiny.compiled()
    group = RankGroup(denoiser, 2)
    step = DenseStep(tiny.inputs(1))
    try:
        (wanted,) = denoiser.step([step])
        (got,) = denoiser.step([step], group)
        assert error(got, wanted) < BOUND
        assert group.pool.ranks is not None
        assert group.costs == group.pool.ranks.costs != LinkCosts()
        assert 1e-5 < group.costs.exchange < 0.5
        assert min(group.costs.load, group.costs.flop) > 0 <= group.costs.send
        # the small step stays on one rank, which exchanges nothing
        assert [part.sent for part in group.last if part is not None] == [0]
        assert group.computed_here == group.failures == 0
    finally:
        group.stop()


def test_the_slowest_rank_counts() -> None:
    found = slowest([LinkCosts(1.0, 2.0, 3.0, 4.0), LinkCosts(4.0, 3.0, 2.0, 1.0)])
    assert found == LinkCosts(4.0, 3.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("name", "count"),
    [("tiny", 2), ("axial", 0)],  # keys and values of one attention; only attention along lines
)
def test_keys_that_ranks_may_share(name: str, count: int) -> None:
    denoiser, inputs, shape = tiny.compiled(), tiny.inputs(3), (8, 8)
    if name in OWN:
        case = OWN[name]
        size = case.sizes[0]
        denoiser, inputs = maskfx.compile(case.build()), case.inputs(size, 3)
        shape = case.mask_shape(size)  # type: ignore[assignment]
    cache = denoiser.record(**inputs)[1]
    found: list[Any] = []

    def seen(program: Any, recording: bool, frame: Any, calls: Any, members: Any) -> None:
        found.append((program, frame, members))

    denoiser.step([EditStep(inputs, MASKS["square"](shape, 1), cache)], seen)
    program, frame, members = found[0]
    gathered, by_rank = split_program(program), split_program(program, "keys by rank")
    assert not isinstance(gathered, str)
    assert not isinstance(by_rank, str)
    attentions = attentions_of(
        {"gathered": gathered, "keys by rank": by_rank}, RankWork().widths(program, members[0])
    )
    assert sum(len(one.cached) for one in attentions) == count

    def prefers(costs: LinkCosts, *shares: float) -> bool:
        divider = Divider(RankPrograms(denoiser.settings))
        found = divider.attention_ways(program, frame, members, Partition((shares,)), costs)
        return found == "keys by rank"

    assert prefers(LinkCosts(exchange=0.0), 1.0, 1.0) == (count > 0)
    assert not prefers(LinkCosts(exchange=1.0), 1.0, 1.0)
    assert not prefers(LinkCosts(exchange=0.0), 1.0, 0.0)


@cache
def flux_of_12_heads() -> tuple[CompiledDenoiser, dict[str, Any]]:
    """2, 3 and 4 divide the number of its heads."""
    case = ZOO["FluxTransformer2DModel"]
    config: Any = case.build().config
    module: Any = FluxTransformer2DModel(**{**config, "num_attention_heads": 12})
    return maskfx.compile(module.eval().requires_grad_(False)), case.inputs(case.sizes[0], 0)


@pytest.mark.parametrize("way", ["gathered", "heads"])
@pytest.mark.parametrize("shared", [False, True], ids=["whole text", "shared text"])
def test_the_bytes_of_a_dense_step_are_those_of_theory(shared: bool, way: AttentionWay) -> None:
    """Each block sends each row's key and value to all other ranks: 2 d numbers for n rows.

    With divided heads it sends queries, keys, values and results: 4 d numbers of each row, to one
    rank a share of them alone; results of a text that each rank has go to all others.
    """
    denoiser, inputs = flux_of_12_heads()
    config: Any = denoiser.module.config
    found = list[Any]()
    width = config["num_attention_heads"] * config["attention_head_dim"]
    blocks = config["num_layers"] + config["num_single_layers"]
    rows = inputs["hidden_states"].shape[1]
    if shared:
        rows += inputs["encoder_hidden_states"].shape[1]
    for ranks in (2, 3, 4):
        if way == "gathered":
            numbers = (ranks - 1) * rows * 2 * width
        else:
            numbers = (ranks - 1) * rows * 4 * width // ranks
            text = inputs["encoder_hidden_states"].shape[1]
            numbers += 0 if shared else (ranks - 1) * text * width
        theory = blocks * numbers * 4 * len(inputs["hidden_states"])
        partition = Partition(((1.0,) * ranks,), (shared,))
        split = ThreadRanks(denoiser.settings, partition, way)

        def both(program: Any, recording: bool, frame: Any, calls: Any, members: Any) -> Any:
            found.append((program, members))
            return split(program, recording, frame, calls, members)  # noqa: B023

        denoiser.step([DenseStep(inputs)], both)
        assert sum(split.sent) == theory
        program, members = found[-1]
        programs = split.programs.split(program, way)
        assert not isinstance(programs, str)
        exchanges = exchanges_of(programs, RankWork().widths(program, members[0]))
        predicted = [sent_bytes(exchanges, members, partition, rank) for rank in range(ranks)]
        assert predicted == split.sent
        assert exchanges.count == len(exchanges.whole) + len(exchanges.heads)
        assert exchanges.count == (blocks if way == "gathered" else 2 * blocks)


def test_measured_steps_decide_where_costs_arent_given() -> None:
    denoiser = tiny.compiled()
    program, members = batch_of(denoiser)
    divider = group_of(denoiser, CHEAP).divider
    whole, halves = Partition(((1.0, 0.0),)), Partition(((1.0, 1.0),))

    def cut() -> bool:
        return any(divider.chosen(program, members, 2, CHEAP).cut)

    for _ in range(2):
        assert not cut()
        divider.note(program, members, whole, [1.0, 0.0], waited=True)
    assert cut()
    for _ in range(2):
        divider.note(program, members, halves, [9.0, 9.0], waited=False)
    assert cut()  # late exchanges don't count
    for _ in range(2):
        divider.note(program, members, halves, [1.5, 2.0], waited=True)
    assert not cut()


def test_heads_are_divided_where_that_costs_less() -> None:
    """From 3 ranks on it sends fewer bytes, for one exchange more; and 2 heads keep a rank idle."""
    denoiser = tiny.compiled()
    found: list[Any] = []
    step = DenseStep(tiny.inputs(1, 16, 16))
    denoiser.step([step], lambda *given: found.append(given))
    program, _, frame, _, members = found[0]
    divider = Divider(RankPrograms(denoiser.settings))

    def chosen(ranks: int, costs: LinkCosts) -> AttentionWays:
        own = Partition(((1.0,) * ranks,))
        return divider.attention_ways(program, frame, members, own, costs)

    bytes_alone = LinkCosts(exchange=0.0, load=0.0, send=1.0, flop=0.0)
    assert [chosen(ranks, bytes_alone) for ranks in (1, 2, 3)] == ["gathered", "gathered", "heads"]
    assert chosen(3, LinkCosts(exchange=1.0, load=0.0, send=1e-9)) == "gathered"
    assert chosen(3, LinkCosts(exchange=0.0, load=0.0, send=1e-9, flop=1.0)) == "gathered"


@pytest.mark.parametrize("kind", [tiny.Tiny, tiny.Joint, tiny.Sigmoid])
def test_the_work_of_an_edit_is_counted_once_for_all_masks(kind: Callable[[], nn.Module]) -> None:
    """It follows from the rows alone, and is what a count at these sites gives."""
    denoiser, inputs, known = tiny.compiled(kind), tiny.inputs(1, 12, 12), RankWork()
    cache = denoiser.record(**inputs)[1]
    for seed in range(2):
        mask = MASKS["random"]((12, 12), seed)
        for program, (member,) in denoiser.members([EditStep(inputs, mask, cache)]):
            work = known.of(program, member)
            counted = sum(row_flops(program, member.sites, member.batch).values())
            assert work.total == pytest.approx(counted)
    assert len(list(known._whole.items())) == 1
