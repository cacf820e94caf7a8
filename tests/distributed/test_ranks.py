"""A step over ranks gives what it gives on one: ranks as threads, with the same exchanges."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from maskfx import CompiledDenoiser, DenseStep, EditStep, RecordStep, StepCache, ops
from maskfx.distributed.division.partition import Partition
from maskfx.ir.programs.head_sources import WAYS, AttentionWay
from tests.distributed import tiny
from tests.factories.masks import MASKS
from tests.factories.thread_ranks import ThreadRanks

BOUND = 1e-5
KINDS = ("equal", "unequal", "empty", "members")


def error(got: object, wanted: object) -> float:
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True)
    return max(
        float((a - b).norm() / (b.norm() + 1e-12)) for a, b in pairs if isinstance(b, Tensor)
    )


def cache_error(got: StepCache, wanted: StepCache) -> float:
    assert got.rows.keys() == wanted.rows.keys()
    assert got.stats.keys() == wanted.stats.keys()
    rows: list[tuple[Any, Any]] = [(got.rows[tap], wanted.rows[tap]) for tap in wanted.rows]
    stats = [(got.stats[k].total, wanted.stats[k].total) for k in wanted.stats]
    stats += [(got.stats[k].centre, wanted.stats[k].centre) for k in wanted.stats]
    return max(error(a, b) for a, b in [*rows, *stats])


def shares(
    kind: str, ranks: int, members: int, seed: int = 0, texts: tuple[bool, ...] = ()
) -> Partition:
    """Return shares of a kind; `texts` states of the members in turn whether ranks share theirs."""
    rng = random.Random(f"{kind} {ranks} {seed}")
    rows: list[tuple[float, ...]] = []
    for member in range(members):
        match kind:
            case "equal":
                own = [1.0] * ranks
            case "unequal":
                own = [rng.random() + 0.01 for _ in range(ranks)]
            case "empty":
                own = [float(rng.randint(0, 1)) for _ in range(ranks)]
                own[rng.randrange(ranks)] = 1.0
            case _:
                own = [float(rank == member % ranks) for rank in range(ranks)]
        rows.append(tuple(own))
    return Partition(tuple(rows), tuple(islice(cycle(texts), members)))


def mixed(
    seed: int, kind: Callable[[], nn.Module] = tiny.Tiny
) -> list[EditStep | RecordStep | DenseStep]:
    """Edits, a recording and a dense member, of several sizes and batches."""
    denoiser = tiny.compiled(kind)
    rng = random.Random(seed)
    sizes = [(8, 8, 1), (8, 12, 2), (12, 8, 1)]
    steps: list[EditStep | RecordStep | DenseStep] = []
    for number, size in enumerate(rng.sample(sizes, 2)):
        cache = denoiser.record(**tiny.inputs(number, *size))[1]
        mask = MASKS[rng.choice(["random", "stroke", "one_site", "border"])](size[:2], seed)
        steps.append(EditStep(tiny.inputs(number + 10, *size), mask, cache))
    steps.append(DenseStep(tiny.inputs(20, *rng.choice(sizes))))
    steps.append(RecordStep(tiny.inputs(21, *rng.choice(sizes))))
    rng.shuffle(steps)
    return steps


def check(denoiser: CompiledDenoiser, steps: list[Any], split: ThreadRanks) -> None:
    wanted, got = denoiser.step(steps), denoiser.step(steps, split)
    assert split.batches == 1
    for step, ours, theirs in zip(steps, got, wanted, strict=True):
        if isinstance(step, RecordStep):
            assert error(ours[0], theirs[0]) < BOUND
            assert cache_error(ours[1], theirs[1]) < BOUND
        else:
            assert error(ours, theirs) < BOUND


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_mixed_batch(ranks: int, kind: str, way: AttentionWay) -> None:
    denoiser, steps = tiny.compiled(), mixed(ranks)
    split = ThreadRanks(denoiser.settings, shares(kind, ranks, len(steps)), way)
    check(denoiser, steps, split)
    if kind != "empty":
        assert (sum(split.sent) > 0) == (kind != "members" and ranks > 1)


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_attention_without_a_softmax(ranks: int, kind: str, way: AttentionWay) -> None:
    denoiser, steps = tiny.compiled(tiny.Sigmoid), mixed(ranks, tiny.Sigmoid)
    program = next(iter(denoiser.programs.values()))
    assert any(node.target is ops.site_pair_sum for node in program.module.graph.nodes)
    check(denoiser, steps, ThreadRanks(denoiser.settings, shares(kind, ranks, len(steps)), way))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("texts", [(True,), (False, True)], ids=["shared", "some shared"])
@pytest.mark.parametrize("kind", ["equal", "unequal", "empty"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_texts_that_ranks_share(
    ranks: int, kind: str, texts: tuple[bool, ...], way: AttentionWay
) -> None:
    denoiser, steps = tiny.compiled(tiny.Joint), mixed(ranks, tiny.Joint)
    own = shares(kind, ranks, len(steps), texts=texts)
    check(denoiser, steps, ThreadRanks(denoiser.settings, own, way))


def test_a_shared_text_of_values_that_each_rank_has() -> None:
    """Its keys were computed once per request; sharing gains nothing, and is right."""
    denoiser, steps = tiny.compiled(), mixed(5)
    own = shares("unequal", 3, len(steps), texts=(True,))
    check(denoiser, steps, ThreadRanks(denoiser.settings, own))


def test_each_rank_computes_its_share_of_a_text() -> None:
    denoiser, inputs = tiny.compiled(tiny.Joint), tiny.inputs(1, batch=2)
    for texts, counts in (((False,), [5, 5, 0]), ((True,), [4, 1, 0])):
        split = ThreadRanks(denoiser.settings, Partition(((3.0, 1.0, 0.0),), texts))
        check(denoiser, [DenseStep(inputs)], split)
        assert [own.counts("text:0") for own in split.layouts] == [[n, n] for n in counts]


@pytest.mark.parametrize("texts", [False, True])
def test_the_edit_with_a_text_over_ranks_is_the_dense_run(texts: bool) -> None:
    denoiser, inputs = tiny.compiled(tiny.Joint), tiny.inputs(5, 12, 12)
    cache = denoiser.record(**inputs)[1]
    step = EditStep(inputs, MASKS["random"]((12, 12), 1), cache)
    for way in WAYS:
        own = shares("unequal", 3, 1, texts=(texts,))
        split = ThreadRanks(denoiser.settings, own, way)
        (got,) = denoiser.step([step], split)
        assert split.batches == 1
        assert error(got, denoiser.module(**inputs)) < 1e-4


def test_the_edit_over_ranks_is_the_dense_run() -> None:
    """The oracle: an edit with a cache recorded from the same inputs gives the module's result."""
    denoiser, inputs = tiny.compiled(), tiny.inputs(5, 12, 12)
    cache = denoiser.record(**inputs)[1]
    step = EditStep(inputs, MASKS["random"]((12, 12), 1), cache)
    split = ThreadRanks(denoiser.settings, shares("equal", 3, 1), "keys by rank")
    (got,) = denoiser.step([step], split)
    assert split.batches == 1
    assert error(got, denoiser.module(**inputs)) < 1e-4


def test_a_recording_made_over_ranks_serves_an_edit() -> None:
    denoiser, inputs = tiny.compiled(), tiny.inputs(6)
    split = ThreadRanks(denoiser.settings, shares("equal", 2, 1))
    ((_, cache),) = denoiser.step([RecordStep(inputs)], split)
    (got,) = denoiser.step([EditStep(inputs, MASKS["stroke"]((8, 8), 1), cache)])
    assert error(got, denoiser.module(**inputs)) < 1e-4


def test_each_rank_reads_its_share_of_cached_keys() -> None:
    denoiser, inputs = tiny.compiled(), tiny.inputs(7, 16, 16)
    cache = denoiser.record(**inputs)[1]
    mask = torch.zeros(16, 16, dtype=torch.bool)
    mask[6:9, 6:9] = True
    loaded = []
    for way in WAYS:
        split = ThreadRanks(denoiser.settings, shares("equal", 2, 1), way)
        denoiser.step([EditStep(inputs, mask, cache)], split)
        loaded.append(split.loaded)
    keys = (64 - 4) * 2 * 16 * 4  # of the inactive coarse sites
    gathered, by_rank, by_head = loaded
    assert sum(gathered) - sum(by_rank) == keys  # a second copy
    # each rank has read one of two heads of all rows
    assert [whole - some for whole, some in zip(gathered, by_head, strict=True)] == [keys / 2] * 2


def test_members_on_ranks_of_their_own_exchange_nothing_and_load_their_own() -> None:
    denoiser = tiny.compiled()
    caches = [denoiser.record(**tiny.inputs(n))[1] for n in (0, 1)]
    mask = MASKS["square"]((8, 8), 0)
    steps = [EditStep(tiny.inputs(n), mask, cache) for n, cache in enumerate(caches)]
    split = ThreadRanks(denoiser.settings, Partition(((1.0, 0.0), (0.0, 1.0))))
    check(denoiser, steps, split)
    assert split.sent == [0, 0]
    assert split.loaded[0] == split.loaded[1] > 0


def test_shares_of_a_step_may_differ_from_the_last_one() -> None:
    denoiser, steps = tiny.compiled(), mixed(3)
    split = ThreadRanks(denoiser.settings, shares("equal", 2, len(steps)))
    for kind, ranks in (("equal", 2), ("unequal", 3), ("equal", 1), ("unequal", 2)):
        split.partition, split.batches = shares(kind, ranks, len(steps)), 0
        check(denoiser, steps, split)


def test_a_rank_that_sends_nothing_fails_the_step() -> None:
    """The shares of one rank's frame differ, as if it ran another step."""
    denoiser, steps = tiny.compiled(), mixed(2)
    split = ThreadRanks(denoiser.settings, shares("equal", 2, len(steps)), seconds=0.5)
    right = split.programs.run

    def wrong(*args: Any) -> Any:
        if args[5].rank == 1:
            raise ValueError("a rank failed")
        return right(*args)

    split.programs.run = wrong  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match="a rank failed"):
        denoiser.step(steps, split)
