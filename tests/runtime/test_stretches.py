"""Stretches: blocks that compute more than the mask, by request, in one graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import maskfx
from maskfx.errors import CacheError, InputError, MaskError
from maskfx.ir.programs.sources import Halo, Loaded, Rest
from maskfx.runtime.batch.flops import row_flops
from maskfx.runtime.cache.loader import Loader
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.planner.blocks import FLOPS, find_blocks
from maskfx.runtime.planner.calibration import one_batch
from maskfx.runtime.planner.choices import KEYS, work_of
from maskfx.runtime.planner.step_planner import StepPlanner
from tests.factories import masks, twin
from tests.factories.zoo import ZOO, slow_unet
from tests.passes.test_cut_stretches import Layers, layer_inputs
from tests.passes.tools import error
from tests.runtime.planner.test_step_planner import costs_of
from tests.runtime.test_changed_inputs import other_inputs
from tests.runtime.test_oracle import assert_near, module_of, relative_error, sites_of, tensors

NAMES = ["FluxTransformer2DModel", "SD3Transformer2DModel", "UNet2DConditionModel-sd15"]
OTHERS = [
    "ControlNetModel",
    "HunyuanDiT2DModel",
    "PixArtTransformer2DModel",
    "SanaTransformer2DModel",
    "UNet2DConditionModel-residuals",
]


@cache
def denoiser_of(name: str) -> maskfx.CompiledDenoiser:
    """One per process: capture is the slow part."""
    case = ZOO[name]
    inputs = case.inputs(case.sizes[0], 0)
    return maskfx.compile(module_of(name), stretches=True, example_inputs=inputs)


@cache
def planned_of(name: str) -> maskfx.CompiledDenoiser:
    """The same with plans and a loader."""
    return maskfx.compile(module_of(name), stretches=True, plans=True, loader=Loader())


def first(count: int, mask: Tensor) -> dict[int, Tensor]:
    """The first stretches compute everything."""
    return {stretch: torch.ones_like(mask) for stretch in range(1, count + 1)}


def anywhere(count: int, mask: Tensor, seed: int) -> dict[int, Tensor]:
    """Row sets by chance: the mask, all sites, none, more or less than the mask, or only others."""
    draw = torch.Generator().manual_seed(seed)
    wide = {}
    for stretch in range(1, count + 1):
        some = torch.rand(mask.shape, generator=draw) < 0.4
        choices = (None, mask | True, mask & False, mask | some, mask & some, some & ~mask, some)
        chosen = choices[int(torch.randint(len(choices), (1,), generator=draw))]
        if chosen is not None:
            wide[stretch] = chosen
    return wide


def edits(
    name: str, denoiser: maskfx.CompiledDenoiser, count: int, changed: bool = False
) -> list[maskfx.EditStep]:
    """A ragged batch: every member has stretches of its own, the last one has none."""
    case, out = ZOO[name], []
    for index in range(count):
        size = case.sizes[index % len(case.sizes)]
        _, kept = denoiser.record(**case.inputs(size, index))
        mask = masks.random(case.mask_shape(size), index)
        inputs = other_inputs(name, size, index + 10 * changed, index)
        stretches = len(denoiser.stretches)
        wide = {} if index == count - 1 else anywhere(stretches, mask, index)
        out.append(maskfx.EditStep(inputs, mask, kept, wide=wide))
    return out


# What it means.


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)]
)
def test_any_stretches_repeat_the_recorded_run(name: str) -> None:
    denoiser = denoiser_of(name)
    steps = edits(name, denoiser, 5)
    found = denoiser.edit(steps)
    assert len(denoiser.stretches) >= 3
    assert len(denoiser.programs) == 1, "stretches are data of one graph"
    for step, output in zip(steps, found, strict=True):
        assert_near(output, module_of(name)(**step.inputs))


@pytest.mark.parametrize("name", NAMES)
def test_batches_without_rows_in_a_stretch(name: str) -> None:
    """No stretch of the batch has a row, then the masks are full and every second one has none."""
    denoiser = denoiser_of(name)
    count = len(denoiser.stretches)
    steps = edits(name, denoiser, 2)
    for number, stretches in enumerate((range(1, count + 1), range(1, count + 1, 2))):
        narrow = [
            dataclasses.replace(
                s, mask=s.mask | bool(number), wide={n: s.mask & False for n in stretches}
            )
            for s in steps
        ]
        for step, output in zip(narrow, denoiser.edit(narrow), strict=True):
            assert_near(output, module_of(name)(**step.inputs))


@pytest.mark.parametrize("name", [NAMES[0], NAMES[2]])
def test_sessions_and_templates_take_wide_stretches(name: str) -> None:
    case, denoiser = ZOO[name], denoiser_of(name)
    size = case.sizes[0]
    inputs, others = case.inputs(size, 0), other_inputs(name, size, 10, 0)
    _, kept = denoiser.record(**inputs)
    mask = masks.random(case.mask_shape(size), 0)
    wide = first(2, mask)
    templates = maskfx.Templates(denoiser, Tiers(host_bytes=1 << 30))
    templates.put("cat", 0, kept)

    def asked(now: Mapping[str, Any]) -> list[maskfx.EditStep]:
        """The same edit by a template, by a session of one, by a session of its own steps."""
        given = maskfx.EditSession(mask, template={(0, ""): kept}, wide=wide)
        own = maskfx.EditSession(mask, maskfx.ReusePolicy("steps", first=1), wide=wide)
        own.take(0, "", denoiser.step([own.ask(0, "", inputs)])[0])
        steps = [
            templates.edit("cat", 0, now, mask, wide=wide),
            given.ask(0, "", now),
            own.ask(1, "", now),
        ]
        assert all(isinstance(s, maskfx.EditStep) for s in steps)
        return [s for s in steps if isinstance(s, maskfx.EditStep)]

    for output in denoiser.edit(asked(inputs)):
        assert_near(output, module_of(name)(**inputs))
    plain = maskfx.EditStep(others, mask, kept)
    wanted, narrow = denoiser.edit([dataclasses.replace(plain, wide=wide), plain])
    assert error(wanted, narrow) > 1e-3, "the rest saw nothing of the edit"
    for output in denoiser.edit(asked(others)):
        assert_near(output, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_all_blocks_wide_give_the_dense_run_of_other_inputs(name: str) -> None:
    denoiser = denoiser_of(name)
    steps = edits(name, denoiser, 3, changed=True)
    steps = [dataclasses.replace(s, wide=first(len(denoiser.stretches), s.mask)) for s in steps]
    narrow = denoiser.edit([dataclasses.replace(s, wide={}) for s in steps])
    for step, output, before in zip(steps, denoiser.edit(steps), narrow, strict=True):
        dense = module_of(name)(**step.inputs)
        for wanted, got, was, kept in zip(
            *map(tensors, (dense, output, before)), step.cache.output, strict=True
        ):
            at = sites_of(step.mask, wanted)
            assert relative_error(got[at], wanted[at]) < 1e-4
            assert relative_error(was[at], wanted[at]) > 1e-3, (
                "the mask alone gives another picture"
            )
            assert torch.equal(got[~at], kept[~at])


@pytest.mark.parametrize("name", NAMES)
def test_first_blocks_wide_mean_what_the_twin_says(name: str) -> None:
    """Two widths, one inside the other, then the mask; wider by chance, not only by everything."""
    case, denoiser = ZOO[name], denoiser_of(name)
    count = len(denoiser.stretches)
    for seed, size in enumerate(case.sizes[:2]):
        old, new = 100 + seed, 200 + seed
        mask = masks.stroke(case.mask_shape(size), seed)
        second = mask | masks.random(case.mask_shape(size), seed, 0.3)
        widest = second | masks.random(case.mask_shape(size), seed + 5, 0.5)
        ends = count // 3, 2 * count // 3
        wide = {s: widest if s <= ends[0] else second for s in range(1, ends[1] + 1)}
        parts = [denoiser.stretches[end - 1].place for end in ends]
        inputs, module = other_inputs(name, size, new, old), module_of(name)
        recording = twin.record(module, case.inputs(size, old))[1]
        wanted, narrow = (
            twin.edit(module, inputs, mask, recording, text_first=case.text_first, first=order)
            for order in (tuple(zip(parts, (widest, second), strict=True)), ())
        )
        _, kept = denoiser.record(**case.inputs(size, old))
        [found] = denoiser.edit([maskfx.EditStep(inputs, mask, kept, wide=wide)])
        for got, right, other in zip(*map(tensors, (found, wanted, narrow)), strict=True):
            at = sites_of(mask, right)
            assert relative_error(got[at], right[at]) < 1e-4
            assert relative_error(other[at], right[at]) > 1e-3


def by_hand(
    model: Layers,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    mask: Tensor,
    wide: Mapping[int, Tensor],
) -> Tensor:
    """What stretches mean, on full values: a site that a stretch begins with and the one before
    didn't compute has the recorded value, an inactive site has recorded keys and values."""

    def turned(hidden: Tensor) -> Tensor:
        return hidden * torch.cos(new["ids"])[..., None]

    was, hidden = old["hidden_states"], new["hidden_states"]
    active = wide.get(1, mask)
    layers: list[Any] = list(model.layers)
    for number, layer in enumerate(layers, 1):
        if number > 1:
            before, active = active, wide.get(number, mask)
            hidden = torch.where(before[:, None], hidden, was)
            hidden, was = (x + layers[number - 2].mlp(x) for x in (hidden, was))
        hidden, was = turned(hidden), turned(was)
        normed = [F.layer_norm(x, x.shape[-1:]) for x in (hidden, was)]
        fresh, kept = (layer.qkv(x).chunk(3, 2) for x in normed)
        keys = [torch.where(active[:, None], x, y) for x, y in zip(fresh, kept, strict=True)]
        mixed = [
            F.scaled_dot_product_attention(
                *(x.unflatten(2, (2, -1)).transpose(1, 2) for x in (q, k, v))
            )
            for q, k, v in ((fresh[0], *keys[1:]), kept)
        ]
        hidden, was = (
            x + layer.out(y.transpose(1, 2).flatten(2))
            for x, y in zip((hidden, was), mixed, strict=True)
        )
    hidden = torch.where(active[:, None], hidden, was)
    hidden, was = (model.head(x + layers[-1].mlp(x)) for x in (hidden, was))
    return torch.where(mask[:, None], hidden, was)


def test_stretches_anywhere_mean_what_is_written_out() -> None:
    torch.manual_seed(0)
    model = Layers(5)
    denoiser = maskfx.compile(model, stretches=True)
    steps, wanted, narrow = [], [], []
    for seed in range(8):
        old = layer_inputs(seed, wide=seed % 2 == 1)
        new = {
            **old,
            "hidden_states": old["hidden_states"]
            + layer_inputs(seed + 9, seed % 2 == 1)["hidden_states"],
        }
        mask = masks.random(old["hidden_states"].shape[1:2], seed)
        mask |= seed == 5  # a full mask, of which the stretches leave sites out
        wide = anywhere(5, mask, seed) if seed else {3: mask | True, 4: mask | True}
        _, kept = denoiser.record(**old)
        steps.append(maskfx.EditStep(new, mask, kept, wide=wide))
        with torch.no_grad():
            wanted.append(by_hand(model, old, new, mask, wide))
            narrow.append(by_hand(model, old, new, mask, {}))
    assert len(denoiser.stretches) == 5
    found = denoiser.edit(steps)
    assert max(error(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-5
    changes = [error(a, b) > 1e-3 for a, b in zip(narrow, wanted, strict=True)]
    assert changes == [bool(step.wide) for step in steps]


@pytest.mark.parametrize("name", slow_unet(NAMES))
def test_plans_do_not_change_what_stretches_mean(name: str) -> None:
    denoiser, plain = planned_of(name), denoiser_of(name)
    planned = edits(name, denoiser, 4, changed=True)
    keys = [n for n, region in enumerate(denoiser.regions, 1) if region.kind == "keys"]
    assert keys[0] == len(plain.stretches) + 1, "stretches are numbered first, as without plans"
    for index, step in enumerate(planned):
        plan = {r: torch.ones_like(step.mask) for r in keys[index % 2 :: 2]}
        planned[index] = dataclasses.replace(step, plan=plan)
    wanted = plain.edit(edits(name, plain, 4, changed=True))
    assert error(denoiser.edit(planned), wanted) < 1e-5


# What it loads and costs.


@pytest.mark.parametrize("name", NAMES)
def test_what_computes_everything_loads_nothing(name: str) -> None:
    case, denoiser = ZOO[name], denoiser_of(name)
    size = case.sizes[0]
    count = len(denoiser.stretches)
    mask = masks.stroke(case.mask_shape(size), 1)
    _, kept = denoiser.record(**case.inputs(size, 0))
    step = maskfx.EditStep(case.inputs(size, 0), mask, kept)
    loads = {}
    for wide in (0, count // 2, count):
        [(program, frame, members)] = denoiser.batches(
            [dataclasses.replace(step, wide=first(wide, mask))]
        )
        loads[wide] = 0
        for job in frame.jobs(members, program.interface.inputs):
            source = program.interface.inputs[job.name]
            assert isinstance(source, Rest | Halo), "narrowing loads nothing"
            segments = (
                source.segments if isinstance(source, Rest) else (f"grid{source.window.target}",)
            )
            region = program.interface.pyramid.region_in(segments)
            assert region == 0 or region > wide
            loads[wide] += job.nbytes
    assert loads[0] > loads[count // 2] > loads[count] == 0


def test_flux_loads_the_keys_and_values_of_the_rest_behind_the_wide_blocks() -> None:
    name, denoiser = NAMES[0], planned_of(NAMES[0])
    case, size, loader = ZOO[name], ZOO[name].sizes[0], denoiser.loader
    assert loader is not None
    mask = masks.random(case.mask_shape(size), 3)
    _, kept = denoiser.record(**case.inputs(size, 0))
    config: Any = module_of(name).config
    width = config.num_attention_heads * config.attention_head_dim
    row = 4 * width * size.batch
    rest, layers = int((~mask).sum()), config.num_layers + config.num_single_layers
    whole = torch.ones_like(mask)
    for wide, rows in (
        ({}, 2 * layers * rest),
        ({1: whole}, 2 * (layers - 1) * rest),
        ({1: whole, 2: whole, 3: whole}, 2 * (layers - 3) * rest),
        ({2: whole, 3: whole}, 2 * (layers - 2) * rest + rest),  # what stretch 2 begins with
        (first(layers, mask), 0),
    ):
        before = loader.loaded_bytes
        denoiser.edit([maskfx.EditStep(case.inputs(size, 0), mask, kept, wide=wide)])
        assert loader.loaded_bytes - before == row * rows


@pytest.mark.parametrize("name", [NAMES[0], NAMES[2]])
def test_blocks_count_what_stretches_compute(name: str) -> None:
    denoiser = denoiser_of(name)
    [step] = edits(name, denoiser, 1)
    count = len(denoiser.stretches)
    total = []
    for wide in (0, 1, count // 2, count):
        program, [member] = one_batch(
            denoiser, [dataclasses.replace(step, wide=first(wide, step.mask))]
        )
        narrow = one_batch(denoiser, [dataclasses.replace(step, wide={})])[1][0]
        blocks = find_blocks(program, narrow.sites)
        work = work_of(blocks, member.sites, member.batch)[:, :FLOPS].sum()
        wanted = sum(row_flops(program, member.sites, member.batch).values())
        assert work == pytest.approx(wanted)
        total.append(work)
    assert total == sorted(total)
    dense = one_batch(denoiser, [dataclasses.replace(step, mask=step.mask | True)])[1][0]
    everything = work_of(blocks, dense.sites, dense.batch)[:, :FLOPS].sum()
    assert 0.5 * everything < total[-1] <= everything


@pytest.mark.parametrize("name", slow_unet([NAMES[0], NAMES[2]]))
def test_plans_around_wide_stretches(name: str) -> None:
    """A plan leaves the request's stretches as they are, and has the bytes right."""
    denoiser, plain = planned_of(name), denoiser_of(name)
    loader = denoiser.loader
    assert loader is not None
    steps = edits(name, denoiser, 3, changed=True)
    wanted = plain.edit(edits(name, plain, 3, changed=True))
    chosen = set()
    for slow in (1e-14, 1e-6):
        planned = StepPlanner(denoiser, costs_of(denoiser, steps, slow)).plan(steps)
        before = loader.loaded_bytes
        assert error(denoiser.edit(planned.steps), wanted) < 1e-5
        moved = sum(cost.staged for cost in planned.plan.timeline.costs)
        assert loader.loaded_bytes - before == moved
        chosen.add(frozenset(n for names in planned.names for n in names if n != KEYS))
        for step, one in zip(steps, planned.steps, strict=True):
            assert one.wide is step.wide
    assert len(chosen) == 2


# What it refuses.


def test_refuses_stretches_that_do_not_fit() -> None:
    denoiser = maskfx.compile(Layers(2), stretches=True)
    inputs = layer_inputs()
    _, kept = denoiser.record(**inputs)
    mask = torch.arange(20) < 3

    def edit(wide: Mapping[int, Any], cache: maskfx.StepCache = kept) -> None:
        denoiser.edit([maskfx.EditStep(inputs, mask, cache, wide=wide)])

    with pytest.raises(InputError, match="stretch 3, but there are stretches 1 to 2"):
        edit({3: mask})
    with pytest.raises(MaskError, match="expected a mask of shape"):
        edit({1: mask[:-1]})
    pruned = maskfx.Templates(denoiser, Tiers(host_bytes=1 << 20), masks=maskfx.Masks.exactly(mask))
    pruned.put("cat", 0, kept)
    exact = pruned.get("cat", 0)
    assert exact is not None
    edit({1: mask | True}, exact)
    with pytest.raises(MaskError, match="keeps nothing of the 3 sites in Masks.always"):
        edit({1: ~mask}, exact)
    with pytest.raises(MaskError, match="boolean"):
        edit({1: mask.float()})
    plain = maskfx.compile(denoiser.module)
    cache = plain.record(**inputs)[1]
    with pytest.raises(InputError, match="this denoiser has none; compile with stretches=True"):
        plain.edit([maskfx.EditStep(inputs, mask, cache, wide={1: mask})])


def test_a_recording_without_what_lies_between_blocks_serves_the_first_ones(
    tmp_path: Path,
) -> None:
    denoiser = maskfx.compile(Layers(3), stretches=True)
    inputs = layer_inputs()
    output, kept = denoiser.record(**inputs)
    [program] = denoiser.programs.values()
    between = {s.tap for s in program.interface.inputs.values() if isinstance(s, Loaded)}
    store = Tiers(Store(tmp_path), host_bytes=1 << 20)
    for templates, dropped in (
        (maskfx.Templates(denoiser, store), set()),
        (maskfx.Templates(denoiser, store, between=False), between),
    ):
        templates.put("cat", 0, kept)
        found = templates.get("cat", 0)
        assert found is not None
        half = found
        assert half.rows.keys() == kept.rows.keys() - dropped
    assert len(between) == 3
    mask = torch.arange(20) < 3
    step = maskfx.EditStep(inputs, mask, half, wide=first(2, mask))
    assert error(denoiser.edit([step])[0], output) < 1e-5
    with pytest.raises(CacheError, match="doesn't keep what this stretch .up to layers.1"):
        denoiser.edit([dataclasses.replace(step, wide={2: mask | True})])


def test_stretches_are_off_unless_asked() -> None:
    plain, wide = maskfx.compile(Layers(2)), maskfx.compile(Layers(2), stretches=True)
    for denoiser in (plain, wide):
        denoiser.batch([layer_inputs()])
    assert (len(plain.stretches), len(wide.stretches)) == (0, 2)
    assert "enter" not in str(plain.graph.code)
