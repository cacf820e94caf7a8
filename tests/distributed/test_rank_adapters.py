"""Members with adapters over ranks: each has the result of the module with merged weights."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import maskfx
from maskfx import CompiledDenoiser, DenseStep, EditStep, RecordStep
from maskfx.distributed.division.partition import Partition
from maskfx.distributed.messages import Unneeded, WholeRequest
from maskfx.distributed.rank_child import RankProcess
from maskfx.distributed.rank_group import RankGroup
from maskfx.distributed.rank_process import RankState
from maskfx.ir.programs.head_sources import WAYS, AttentionWay
from maskfx.runtime.lora.adapter import WeightedLayers
from maskfx.runtime.lora.sent import HeldAdapters, LayerNumbers, SentLayers, nbytes_of
from maskfx.runtime.steps import sent_layers
from maskfx.runtime.transport.tensor_transport import pack, unpack
from tests.distributed import tiny
from tests.distributed.test_ranks import cache_error, error, shares
from tests.factories.lora import difference_of, merged, update_of
from tests.factories.masks import MASKS
from tests.factories.thread_ranks import ThreadRanks
from tests.factories.zoo import ZOO
from tests.runtime.test_adapters import Odd, odd_inputs

BOUND = 1e-4
Sets = list[tuple[WeightedLayers, ...]]


def some_sets(module: nn.Module) -> Sets:
    """Other ranks of the matrices, several adapters for a member, none for another."""
    small, large = update_of(module, 4, 1), update_of(module, 32, 2, share=0.5, weight=0.7)
    middle = update_of(module, 16, 3, share=0.7, weight=-1.5)
    return [(small,), (), (large, middle), (middle,)]


def mixed(
    denoiser: CompiledDenoiser, sets: Sets, make: Callable[..., dict[str, Any]] = tiny.inputs
) -> tuple[list[Any], list[Any]]:
    """Return edits, recordings and dense members with these adapters, and their results."""
    sizes = [(8, 8, 1), (8, 12, 2), (12, 8, 1)]
    steps: list[Any] = []
    wanted = []
    for number, own in enumerate(sets):
        height, width, batch = sizes[number % 3]
        call = make(number, height, width, batch)
        cache = denoiser.step([RecordStep(call, own)])[0][1]
        mask = MASKS[("random", "stroke", "border")[number % 3]]((height, width), number)
        for step in (
            EditStep(call, mask, cache, adapters=own),
            RecordStep(call, own),
            DenseStep(call, own),
        ):
            steps.append(step)
            wanted.append(merged(denoiser.module, own)(**call))
    return steps, wanted


def check(denoiser: CompiledDenoiser, steps: list[Any], wanted: list[Any], split: Any) -> None:
    whole, got = denoiser.step(steps), denoiser.step(steps, split)
    for step, ours, theirs, dense in zip(steps, got, whole, wanted, strict=True):
        if isinstance(step, RecordStep):
            assert cache_error(ours[1], theirs[1]) < BOUND
            ours, theirs = ours[0], theirs[0]
        assert error(ours, theirs) < BOUND
        assert error(ours, dense) < BOUND


@pytest.mark.parametrize(
    ("ranks", "kind", "way"),
    [
        (2, "equal", "gathered"),
        (2, "members", "gathered"),
        (3, "unequal", "keys by rank"),
        (3, "empty", "heads"),
        (4, "unequal", "heads"),
        (4, "equal", "keys by rank"),
    ],
)
@pytest.mark.parametrize("net", [tiny.Tiny, tiny.Joint])
def test_a_mixed_batch(
    net: Callable[[], nn.Module], ranks: int, kind: str, way: AttentionWay
) -> None:
    denoiser = tiny.compiled(net)
    steps, wanted = mixed(denoiser, some_sets(denoiser.module))
    own = shares(kind, ranks, len(steps), texts=(True, False))
    split = ThreadRanks(denoiser.settings, own, way)
    check(denoiser, steps, wanted, split)
    assert split.batches == 1


@pytest.mark.parametrize("kinds", [(nn.Linear, nn.Conv2d), (nn.Module,)], ids=["layers", "all"])
@pytest.mark.parametrize("net", [tiny.Tiny, tiny.Joint])
def test_full_differences_beside_low_rank_updates(
    net: Callable[[], nn.Module], kinds: tuple[type[nn.Module], ...]
) -> None:
    denoiser = tiny.compiled(net)
    module = denoiser.module
    first, second = (difference_of(module, n, share=0.6, kinds=kinds) for n in (5, 6))
    sets: Sets = [(first,), (), (update_of(module, 4, 1), second)]
    steps, wanted = mixed(denoiser, sets)
    own = shares("unequal", 3, len(steps), texts=(True, False))
    check(denoiser, steps, wanted, ThreadRanks(denoiser.settings, own))


def test_a_full_difference_is_sent_to_the_processes() -> None:
    denoiser = tiny.compiled()
    group, own = RankGroup(denoiser, 2), (difference_of(denoiser.module, 5),)
    step = DenseStep(tiny.inputs(1), own)
    wanted = merged(denoiser.module, own)(**step.inputs)
    try:
        for _ in range(2):
            found = denoiser.step([step], group.on(2, Partition(((1.0, 1.0),))))[0]
            assert error(found, wanted) < BOUND
        assert group.computed_here == group.failures == 0
    finally:
        group.stop()


def odd(number: int, height: int, width: int, batch: int) -> dict[str, Any]:
    return odd_inputs(batch, height, width, number)


def test_layers_that_are_used_in_any_way() -> None:
    """Weights that requests have in common: members with other adapters run one after another."""
    denoiser = maskfx.compile(Odd().eval().requires_grad_(False))
    steps, wanted = mixed(denoiser, some_sets(denoiser.module), odd)
    split = ThreadRanks(denoiser.settings, Partition(((2.0, 1.0, 0.0), (0.0, 1.0, 1.0))))
    check(denoiser, steps, wanted, split)
    assert split.batches > 1


def test_each_rank_reads_the_matrices_of_its_members_alone() -> None:
    denoiser = tiny.compiled()
    steps = [DenseStep(tiny.inputs(n), (update_of(denoiser.module, 4, n),)) for n in range(2)]
    split = ThreadRanks(denoiser.settings, Partition(((1.0, 0.0), (0.0, 1.0))))
    denoiser.step(steps, split)
    stacks = [one for _, one in split.programs._stacks.kept.items()]
    assert [len(one.sets) for one in stacks] == [1, 1]


def test_an_adapter_is_sent_once_and_kept_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    denoiser = tiny.compiled()
    sets = [(update_of(denoiser.module, 8, seed),) for seed in range(3)]
    nbytes = nbytes_of(sets[0][0].layers)
    sent: list[tuple[int, bool]] = []
    dropped: list[int] = []
    original = RankProcess.note

    def note(self: RankProcess, request: Any) -> None:
        sent.extend((one.number, one.contents is not None) for one in sent_layers(request.steps))
        dropped.extend(request.dropped.adapters)
        original(self, request)

    monkeypatch.setattr(RankProcess, "note", note)
    group = RankGroup(denoiser, 2, adapter_bytes=2 * nbytes)
    even, alone = group.on(2, Partition(((1.0, 1.0),))), group.on((1,))
    try:
        for number, own in enumerate((sets[0], sets[0], sets[1], sets[0], sets[2], sets[1])):
            step = DenseStep(tiny.inputs(number), own)
            wanted = merged(denoiser.module, own)(**step.inputs)
            assert error(denoiser.step([step], even)[0], wanted) < BOUND
            assert error(alone.run(denoiser, [step])[0], wanted) < BOUND
        assert group.computed_here == group.failures == 0
        assert group.pool.ranks is not None
        ranks = group.pool.ranks.all
        assert [rank.adapters.nbytes for rank in ranks] == [2 * nbytes] * 2
        # by each of two ranks: 0 and 1, then 2 in the place of 1, then 1 in the place of 0
        assert sorted(n for n, whole in sent if whole) == [0, 0, 1, 1, 1, 1, 2, 2]
        assert sorted(dropped) == [0, 0, 1, 1]
        denoiser.adapters.drop({id(sets[2][0].layers)})
        del sets[2:]
        gc.collect()
        dropped.clear()
        denoiser.step([DenseStep(tiny.inputs(0), sets[1])], even)
        assert dropped == [2, 2]
    finally:
        group.stop()


def test_a_rank_frees_what_it_made_of_adapters() -> None:
    """Stacks, checked sets and side results of updates that were dropped are gone."""
    denoiser = tiny.compiled(tiny.Joint)
    rank = RankState(heartbeat=None)  # type: ignore[arg-type]
    rank.take(tiny.build(tiny.Joint), denoiser.settings, None, 1)
    own = update_of(denoiser.module, 8, 1)

    def steps(contents: Any) -> list[Any]:
        sent: Any = SentLayers(5, contents)
        call = tiny.inputs(1)
        adapters = (WeightedLayers(sent, 1.0, own.digest),)
        return unpack(
            [*map(bytearray, pack([DenseStep(call, adapters), RecordStep(call, adapters)]))]
        )

    results = rank.compute_whole(WholeRequest(steps(own.layers))).results
    rank.compute_whole(WholeRequest(steps(None)))
    wanted = merged(denoiser.module, [own])(**tiny.inputs(1))
    assert error(results[0], wanted) < BOUND
    held = [weakref.ref(layer) for layer in rank.adapters[5].values()]
    rank.compute_whole(WholeRequest([], Unneeded(adapters=(5,))))
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_what_a_process_holds() -> None:
    held, sizes = HeldAdapters(100), {n: 40 for n in range(4)}

    def step(*numbers: int, alive: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[int, ...]:
        gone = held.unneeded({n: sizes[n] for n in numbers}, alive)
        layers: Any = {"layer": FakeLayer()}
        held.note((SentLayers(n, None if n in held else layers) for n in numbers), gone)
        return gone

    assert step(0) == step(1) == ()
    assert step(0, 2) == (1,)
    assert held.nbytes == 80
    assert step(0, 1, 3) == (2,)
    assert held.nbytes == 120, "those of one step may take more"
    assert step(alive=(1, 3)) == (0,)
    assert step(3, alive=()) == (1,)
    assert 3 in held
    assert 1 not in held


class FakeLayer:
    nbytes = 40


def test_numbers_of_updates_that_no_longer_exist() -> None:
    numbers, module = LayerNumbers(), tiny.build()
    layers = [update_of(module, 2, seed).layers for seed in range(2)]
    assert [numbers.of(own) for own in (*layers, *layers)] == [0, 1, 0, 1]
    layers.pop(0)
    gc.collect()
    assert numbers.alive() == {1}
    assert numbers.of(update_of(module, 2, 3).layers) == 2
    changed = dict(layers[0])
    assert numbers.of(changed) == 3
    changed.update(update_of(module, 2, 4).layers)
    assert numbers.of(changed) == 4, "the same object with other updates"


CLASSES = (
    "UNet2DConditionModel-sd15",
    "UNet2DConditionModel-sdxl",
    "UNet2DConditionModel-residuals",
    "ControlNetModel",
    "UNetMotionModel",
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "SD3Transformer2DModel",
    "QwenImageTransformer2DModel",
    "PixArtTransformer2DModel",
    "SanaTransformer2DModel",
    "HiDreamImageTransformer2DModel-experts",
    "ZImageTransformer2DModel",
    "WanTransformer3DModel",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_diffusers(name: str) -> None:
    case = ZOO[name]
    denoiser = maskfx.compile(case.build())
    steps: list[Any] = []
    wanted: list[Any] = []
    for number, own in enumerate(some_sets(denoiser.module)):
        size = case.sizes[0 if number % 2 else -1]
        call = case.inputs(size, number)
        cache = denoiser.step([RecordStep(call, own)])[0][1]
        mask = MASKS["random"](case.mask_shape(size), number)
        steps += [EditStep(call, mask, cache, adapters=own), RecordStep(call, own)]
        steps += [DenseStep(call, own)]
        wanted += [merged(denoiser.module, own)(**call)] * 3
    for ranks, kind, way in zip((2, 3, 4), ("equal", "unequal", "empty"), WAYS, strict=True):
        own_shares = shares(kind, ranks, len(steps), texts=(True, False))
        split = ThreadRanks(denoiser.settings, own_shares, way)
        check(denoiser, steps, wanted, split)
        assert split.batches > 0
