"""Members with adapters: each has the result of the module with its updates in the weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx import CacheError, CompiledDenoiser, DenseStep, EditStep, InputError, RecordStep
from maskfx.compiler.low_rank_twins import make_twin, originals
from maskfx.runtime.backends import inductor
from maskfx.runtime.cache.rolling.rolling_pool import RollingPool
from maskfx.runtime.cache.serialize import decode, encode
from maskfx.runtime.execution import twins
from maskfx.runtime.lora.adapter import LowRank, Updates, WeightedLayers
from maskfx.runtime.programs import program_cache
from tests.factories.experts import Routed, Tokens, seeded
from tests.factories.lora import layers_of, merged, update_of
from tests.factories.zoo import ZOO
from tests.passes.tools import a_mask, error, tokens
from tests.runtime.backends.test_inductor import MASKS, SIZES, Stack, inputs

TOLERANCE = 1e-5


class Odd(nn.Module):
    """Layers that are used in all ways: grouped, twice, under two paths, turned, by the request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Conv2d(4, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.twice = nn.Linear(8, 8)
        self.other_path = self.twice
        self.turned, self.time = nn.Linear(8, 8, bias=False), nn.Linear(1, 8)
        self.text, self.fixed = nn.Linear(6, 8), nn.Linear(3, 8)
        self.table = nn.Parameter(torch.randn(3))
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        x = self.into(sample)
        x = self.grouped(torch.tanh(self.depthwise(x))) + x
        rows = x.flatten(2).transpose(1, 2)
        rows = self.other_path(torch.tanh(self.twice(rows))) + rows
        rows = rows @ self.turned.weight + self.time(timestep[:, None])[:, None]
        rows = rows + self.text(encoder_hidden_states).mean(1, keepdim=True)
        rows = torch.tanh(rows + self.fixed(self.table))
        return self.out(rows.transpose(1, 2).reshape(x.shape))


def odd_inputs(batch: int, height: int, width: int, seed: int = 0) -> dict[str, Tensor]:
    text = torch.randn(batch, 5, 6, generator=torch.Generator().manual_seed(seed + 9))
    return {**inputs(batch, height, width, seed), "encoder_hidden_states": text}


def check_members(
    denoiser: CompiledDenoiser,
    module: nn.Module,
    sets: list[tuple[WeightedLayers, ...]],
    make: Callable[..., dict[str, Tensor]] = inputs,
) -> None:
    """Record, edit and compute dense members with these adapters, together."""
    kinds, wanted = list(MASKS.values()), []
    calls = [make(1 + i % 2, *SIZES[i % len(SIZES)], i) for i in range(len(sets))]
    for own, call in zip(sets, calls, strict=True):
        wanted.append(merged(module, own)(**call))
    recorded = denoiser.step([RecordStep(c, own) for c, own in zip(calls, sets, strict=True)])
    edits = [
        EditStep(c, kinds[i % len(kinds)](SIZES[i % len(SIZES)]), recorded[i][1], adapters=own)
        for i, (c, own) in enumerate(zip(calls, sets, strict=True))
    ]
    dense = [DenseStep(c, own) for c, own in zip(calls, sets, strict=True)]
    results = denoiser.step([*edits, *dense])
    for i, expected in enumerate(wanted):
        assert error(recorded[i][0], expected) < TOLERANCE, f"recording {i}"
        assert error(results[i], expected) < TOLERANCE, f"edit {i}"
        assert error(results[len(sets) + i], expected) < TOLERANCE, f"dense {i}"
        assert error(denoiser.step([edits[i]])[0], results[i]) < TOLERANCE, f"alone {i}"


def some_sets(module: nn.Module) -> list[tuple[WeightedLayers, ...]]:
    """Ranks of 4 to 128, several adapters for one member, none for another."""
    small, large = update_of(module, 4, 1), update_of(module, 128, 2, share=0.5, weight=0.7)
    middle = update_of(module, 16, 3, share=0.7, weight=-1.5)
    return [(small,), (), (large, middle), (middle,)]


def test_each_member_has_its_own_adapters() -> None:
    module = Stack(2).eval()
    denoiser = maskfx.compile(module)
    check_members(denoiser, module, some_sets(module))
    [found] = denoiser._executor.twins._twins.values()
    assert all(not twin.whole for twin in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"plans": True}, {"plans": True, "stretches": True}])
def test_regions_with_other_sites(settings: dict[str, Any]) -> None:
    module = Stack(3).eval()
    denoiser, sets = maskfx.compile(module, **settings), some_sets(module)
    calls, mask = [inputs(1, 8, 8, i) for i in range(4)], MASKS["some"]((8, 8))
    pairs = list(zip(calls, sets, strict=True))
    recorded = denoiser.step([RecordStep(call, own) for call, own in pairs])
    for number, region in enumerate(denoiser.regions, 1):
        other = "plan" if region.kind == "keys" else "wide"
        edits = [
            EditStep(call, mask, cache, adapters=own, **{other: {number: mask | True}})  # type: ignore[arg-type]
            for (call, own), (_, cache) in zip(pairs, recorded, strict=True)
        ]
        for (call, own), found in zip(pairs, denoiser.step(edits), strict=True):
            assert error(found, merged(module, own)(**call)) < TOLERANCE


def test_rolling_caches() -> None:
    module = Stack(2).eval()
    denoiser, own, pool = maskfx.compile(module), (update_of(module, 4, 1),), RollingPool(1 << 24)
    old, new, mask = inputs(1, 8, 8, 0), inputs(1, 8, 8, 1), MASKS["some"]((8, 8))
    _, cache = denoiser.step([RecordStep(old, own)])[0]
    [program] = denoiser.programs.values()
    rolling = pool.start(program, cache)
    assert rolling.adapters == cache.adapters
    wanted = merged(module, own)(**new)
    for sites in (mask | True, mask):
        step = EditStep(new, sites, rolling, record=True, adapters=own)
        assert error(denoiser.step([step])[0], wanted) < TOLERANCE


def test_layers_that_are_used_in_any_way() -> None:
    module = Odd().eval()
    denoiser = maskfx.compile(module)
    check_members(denoiser, module, some_sets(module), odd_inputs)
    program = denoiser.compilations[0].program
    assert program is not None
    twin = make_twin(program, set(originals(program)))
    assert {"depthwise.weight", "grouped.weight", "turned.weight"} <= twin.whole
    assert {"into.weight", "twice.weight", "time.weight", "out.weight"}.isdisjoint(twin.whole)


def test_the_same_inputs_with_other_adapters() -> None:
    """What is kept of a request's text belongs to its adapters too."""
    module = Odd().eval()
    denoiser, call = maskfx.compile(module), odd_inputs(1, 8, 8)
    one, other = (update_of(module, 4, 1),), (update_of(module, 4, 1, weight=0.5),)
    for own in (one, (), other, one):
        found = denoiser.step([RecordStep(call, own)])[0][0]
        assert error(found, merged(module, own)(**call)) < TOLERANCE


def test_what_a_batch_has_once_differs_between_members() -> None:
    """The table's layer depends on no request: its result is one value of a batch."""
    module = Odd().eval()
    one, other = (
        WeightedLayers({"fixed": layers_of(module, 2, seed)["fixed"]}, 1.0, str(seed))
        for seed in (1, 2)
    )
    check_members(maskfx.compile(module), module, [(one,), (other,), (), (one,)], odd_inputs)


@torch.no_grad()
def test_layers_inside_modules_that_stay_whole() -> None:
    """Experts that route tokens by themselves: each member has its own updates of their layers."""
    module = seeded(partial(Tokens, partial(Routed, "sorted")))
    denoiser, given = maskfx.compile(module), tokens()
    sets = [(update_of(module, 2, 1),), (update_of(module, 2, 2),), (), (update_of(module, 2, 1),)]
    wanted = [merged(module, own)(**given) for own in sets]
    assert error(wanted[0], wanted[2]) > 0.01
    recorded = denoiser.step([RecordStep(given, own) for own in sets])
    mask = a_mask(given)
    edits = [
        EditStep(given, mask, r[1], adapters=own) for r, own in zip(recorded, sets, strict=True)
    ]
    found = denoiser.step([*edits, *(DenseStep(given, own) for own in sets)])
    for one, other in zip([*(r[0] for r in recorded), *found], wanted * 3, strict=True):
        assert error(one, other) < TOLERANCE
    assert denoiser.compilations[0].program is not None


@pytest.mark.parametrize(
    "name",
    [
        "AuraFlowTransformer2DModel",
        pytest.param("SD3Transformer2DModel-sd35", marks=pytest.mark.slow),
        pytest.param("UNet2DConditionModel-sdxl", marks=pytest.mark.slow),
        pytest.param("UNet2DConditionModel-residuals", marks=pytest.mark.slow),
        pytest.param("ControlNetModel", marks=pytest.mark.slow),
        pytest.param("FluxTransformer2DModel-control", marks=pytest.mark.slow),
        pytest.param("HiDreamImageTransformer2DModel-experts", marks=pytest.mark.slow),
        pytest.param("SanaTransformer2DModel", marks=pytest.mark.slow),
        pytest.param("QwenImageTransformer2DModel", marks=pytest.mark.slow),
        pytest.param("ChromaTransformer2DModel", marks=pytest.mark.slow),
    ],
)
def test_families(name: str) -> None:
    case = ZOO[name]
    module = case.build()
    denoiser, sets = maskfx.compile(module), some_sets(module)
    sizes = [case.sizes[i % len(case.sizes)] for i in range(len(sets))]
    with torch.no_grad():
        calls = [case.inputs(size, i) for i, size in enumerate(sizes)]
        wanted = [merged(module, own)(**c) for own, c in zip(sets, calls, strict=True)]
    recorded = denoiser.step([RecordStep(c, own) for c, own in zip(calls, sets, strict=True)])
    masks = [mask_of(case.mask_shape(size), i) for i, size in enumerate(sizes)]
    edits = [
        EditStep(c, m, r[1], adapters=own)
        for c, m, r, own in zip(calls, masks, recorded, sets, strict=True)
    ]
    results = denoiser.step([*edits, DenseStep(calls[0], sets[2])])
    for i, expected in enumerate(wanted):
        assert error(recorded[i][0], expected) < 1e-4
        assert error(results[i], expected) < 1e-4
    with torch.no_grad():
        assert error(results[-1], merged(module, sets[2])(**calls[0])) < 1e-4


def mask_of(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4


# What is made once.


def test_other_adapters_make_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Stack(1).eval()
    denoiser = maskfx.compile(module)
    check_members(denoiser, module, [(update_of(module, 4, 1),), ()])
    made, runners = denoiser._executor.twins.made, dict(denoiser._executor.graphs.runners)

    def again(*_: object, **__: object) -> Any:
        raise AssertionError("captured again")

    monkeypatch.setattr(program_cache, "capture", again)
    for seed, rank in ((2, 1), (3, 64), (4, 7)):
        check_members(denoiser, module, [(update_of(module, rank, seed),), ()])
    assert denoiser._executor.twins.made == made == 1
    assert denoiser._executor.graphs.runners == runners


def test_many_sets_of_layers_end_with_one_twin() -> None:
    module = Stack(2).eval()
    denoiser = maskfx.compile(module)
    paths = sorted(layers_of(module, 2, 0))
    for number in (*range(3 + twins.TWINS), 0, 1):
        own = WeightedLayers({paths[number]: layers_of(module, 2, 0)[paths[number]]}, 1.0, "a")
        check_members(denoiser, module, [(own,)])
    assert denoiser._executor.twins.made == 3 + twins.TWINS
    [known] = denoiser._executor.twins._twins.values()
    assert [len(twin.weights) for twin in known.values()] == [3 + twins.TWINS]
    codes = {code for code, *_ in denoiser._executor.graphs.runners}
    assert codes == {*denoiser.programs, *(twin.program.code for twin in known.values())}


@pytest.mark.slow
def test_one_compiled_twin_serves_all_adapters() -> None:
    module, before = Stack(2).eval(), inductor.compiles
    denoiser = maskfx.compile(module, inductor=True)
    check_members(denoiser, module, [(update_of(module, 8, 1),), ()])
    assert inductor.compiles == before + 2
    check_members(denoiser, module, some_sets(module))
    assert inductor.compiles == before + 2


def test_a_saved_program_has_twins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Stack(1).eval()
    maskfx.compile(module, programs=str(tmp_path)).record(**inputs(1, 8, 8))
    monkeypatch.setattr(program_cache, "compile_capture", None)
    check_members(maskfx.compile(module, programs=str(tmp_path)), module, some_sets(module))


def test_weights_that_move_are_found() -> None:
    module = Stack(1).eval()
    denoiser = maskfx.compile(module)
    check_members(denoiser, module, [(update_of(module, 4, 1),)])
    denoiser.share_memory()
    check_members(denoiser, module, [(update_of(module, 4, 2),), ()])


def test_changed_weights_are_followed() -> None:
    module = Odd().eval()
    denoiser, own = maskfx.compile(module), (update_of(module, 4, 1),)
    check_members(denoiser, module, [own, ()], odd_inputs)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(0.7)
    check_members(denoiser, module, [own, ()], odd_inputs)


# Recordings.


def test_recordings_know_their_adapters() -> None:
    module = Stack(1).eval()
    denoiser, own = maskfx.compile(module), (update_of(module, 4, 1),)
    call, mask = inputs(1, 8, 8), MASKS["some"]((8, 8))
    (_, plain), (_, cache) = denoiser.step([RecordStep(call), RecordStep(call, own)])
    cache = decode(encode(cache))
    assert cache.adapters == ((own[0].digest, 1.0),)
    with pytest.raises(CacheError, match="give it the same, or record it again"):
        denoiser.step([EditStep(call, mask, cache)])
    [same, mixed] = denoiser.step(
        [EditStep(call, mask, kept, adapters=own) for kept in (cache, plain)]
    )
    wanted = merged(module, own)(**call)
    assert error(same, wanted) < TOLERANCE
    assert error(mixed, wanted) > 1e-3
    whole = EditStep(call, mask | True, plain, adapters=own)
    assert error(denoiser.step([whole])[0], wanted) < TOLERANCE


# Calls of the module.


@pytest.mark.wrong_program
def test_members_without_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Stack(1).eval()
    denoiser = maskfx.compile(module)
    monkeypatch.setattr(program_cache, "same_values", lambda *given: False)
    check_members(denoiser, module, some_sets(module))
    assert denoiser.compilations[0].program is None


def test_one_call_of_the_module_for_members_with_different_adapters() -> None:
    module = Stack(1).eval()
    denoiser, sets = maskfx.compile(module), some_sets(module)
    calls = [inputs(2, 8, 8, seed) for seed in range(4)]
    [group] = denoiser.alike(calls, sets)
    assert group.numbers == [0, 1, 2, 3]
    found = denoiser.plain_together(group)
    for i, own in enumerate(sets):
        assert error(found[i], merged(module, own)(**calls[i])) < TOLERANCE


def test_a_module_that_reads_a_weight_is_called_once_for_each_set() -> None:
    module = Odd().eval()
    denoiser, sets = maskfx.compile(module), some_sets(module)
    calls = [odd_inputs(1, 8, 8, seed) for seed in range(4)]
    groups = denoiser.alike([*calls, calls[0]], [*sets, sets[0]])
    assert sorted(group.numbers for group in groups) == [[0, 4], [1], [2], [3]]
    assert any("NotSeparable" in why for why in denoiser.stays_alone)


def test_other_threads_use_the_module_as_it_is() -> None:
    module = Stack(1).eval()
    denoiser, call = maskfx.compile(module), inputs(1, 8, 8)
    own, entered, done = (update_of(module, 4, 1),), threading.Event(), threading.Event()
    wanted = merged(module, own)(**call)
    with torch.no_grad():
        plain, found = module(**call), []

    def pause(*_: object) -> None:
        entered.set()
        done.wait(10)

    hook = module.into.register_forward_hook(pause)
    step = DenseStep(call, own)
    thread = threading.Thread(target=lambda: found.append(denoiser.plain_step(step)))
    thread.start()
    entered.wait(10)
    hook.remove()
    with torch.no_grad():
        assert torch.equal(module(**call), plain)
    done.set()
    thread.join()
    assert error(found[0], wanted) < TOLERANCE


# Checks.

WRONG: dict[str, tuple[Updates, str]] = {
    "path": (
        [WeightedLayers({"gone": LowRank(torch.ones(1, 8), torch.ones(8, 1), 1.0)}, 1.0, "a")],
        "'gone' of Stack: there is no such layer",
    ),
    "kind": (
        [WeightedLayers({"blocks": LowRank(torch.ones(1, 8), torch.ones(8, 1), 1.0)}, 1.0, "a")],
        "is a ModuleList; adapters change linear layers and convolutions",
    ),
    "shape": (
        [WeightedLayers({"into": LowRank(torch.ones(2, 9), torch.ones(8, 2), 1.0)}, 1.0, "a")],
        "down must be (rank, 4, 3, 3) and up (8, rank)",
    ),
    "rank": (
        [WeightedLayers({"into": LowRank(torch.ones(2, 4, 3, 3), torch.ones(8, 3), 1.0)}, 1, "a")],
        "has a weight of (8, 4, 3, 3)",
    ),
    "weight": (
        [WeightedLayers({"into": LowRank(torch.ones(2, 4, 3, 3), torch.ones(8, 2), 1.0)},
                        float("nan"), "a")],
        "give a finite number",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_adapters_that_dont_fit(kind: str) -> None:
    adapters, message = WRONG[kind]
    denoiser = maskfx.compile(Stack(1).eval())
    with pytest.raises(InputError) as raised:
        denoiser.step([DenseStep(inputs(1, 8, 8), adapters)])
    assert message in str(raised.value)
