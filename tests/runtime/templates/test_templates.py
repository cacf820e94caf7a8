"""Templates: recordings that come back from any tier, whole or halved, own or a neighbour's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import maskfx
from maskfx import EditStep, Masks, Templates
from maskfx.errors import CacheError, InputError, MaskError
from maskfx.runtime.cache.rows import Rows, whole
from maskfx.runtime.cache.serialize import encode
from maskfx.runtime.cache.step_cache import SiteStats
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.tier_entry import Tier
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.sites.masks import Reach, find_reach
from tests.factories import masks
from tests.factories.planned import compiled, recorded
from tests.factories.zoo import ZOO, Case, slow_unet
from tests.passes.tools import error

CASES = ("UNet2DConditionModel-sd15", "FluxTransformer2DModel")
LARGE = 1 << 30


@pytest.mark.parametrize("keep", ["both", "keys", "inputs"])
@pytest.mark.parametrize("name", slow_unet(CASES))
def test_edits_from_memory_and_from_disk(name: str, keep: str, tmp_path: Path) -> None:
    case = ZOO[name]
    size = case.sizes[0]
    module = case.build()
    denoiser = maskfx.compile(module, plans=True)
    mask = masks.random(case.mask_shape(size), 0)
    with_tiers = Templates(denoiser, Tiers(Store(tmp_path), host_bytes=LARGE), keep)
    caches = {}
    for step in range(2):
        inputs = case.inputs(size, step)
        caches[step] = denoiser.record(**inputs)[1]
        with_tiers.put("cat", step, caches[step])
    later = Templates(denoiser, Tiers(Store(tmp_path), host_bytes=LARGE), keep)
    for templates, tier in ((with_tiers, Tier.HOST), (later, Tier.DISK)):
        for step in range(2):
            inputs = case.inputs(size, step)
            edit = templates.edit("cat", step, inputs, mask)
            assert edit is not None
            wanted = denoiser.edit([EditStep(inputs, mask, caches[step])])
            assert error(denoiser.edit([edit]), wanted) < 1e-5
        assert templates.tiers.counters().hits[tier] == 2
    assert with_tiers.edit("dog", 0, inputs, mask) is None
    found = later.get("cat", 1)
    assert found is not None
    assert (found.nbytes() < caches[1].nbytes()) == (keep != "both")


@pytest.mark.parametrize("narrowed", ["keep", "between", "masks", "neither"])
def test_a_step_of_a_program_that_isnt_known_is_kept_whole_or_refused(narrowed: str) -> None:
    case, denoiser = compiled(CASES[0])
    cache = replace(recorded(CASES[0], 0), program="another")
    mask = masks.random(case.mask_shape(case.sizes[0]), 0)
    options: dict[str, Any] = {
        "keep": {"keep": "keys"},
        "between": {"between": False},
        "masks": {"masks": Masks.exactly(mask)},
    }
    tiers = Tiers(host_bytes=LARGE)
    templates = Templates(denoiser, tiers, **options.get(narrowed, {}))
    if narrowed == "neither":
        templates.put("cat", 0, cache)
        assert tiers.counters().nbytes[Tier.HOST] == cache.nbytes()
    else:
        with pytest.raises(CacheError, match="record it with this denoiser"):
            templates.put("cat", 0, cache)


def a_template(
    name: str, count: int
) -> tuple[Case, maskfx.CompiledDenoiser, list[maskfx.StepCache]]:
    return *compiled(name), [recorded(name, step) for step in range(count)]


def test_a_neighbours_rows_serve_the_steps_that_share_them() -> None:
    case, denoiser, own = a_template(CASES[1], 4)
    size = case.sizes[0]
    templates = Templates(denoiser, Tiers(host_bytes=LARGE), share=2)
    for step, cache in enumerate(own):
        templates.put("cat", step, cache)
    mask = masks.random(case.mask_shape(size), 0)
    for step in range(4):
        inputs = case.inputs(size, step)
        edit = templates.edit("cat", step, inputs, mask)
        assert edit is not None
        seen = denoiser.edit([edit])[0][0]
        first = own[step - step % 2]
        wanted = denoiser.edit([EditStep(inputs, mask, first, any_step=True)])[0][0]
        assert torch.equal(seen[:, mask], wanted[:, mask])
        assert torch.equal(seen[:, ~mask], own[step].output[0][:, ~mask])  # its own
    held = templates.tiers.counters().nbytes[Tier.HOST]
    outputs = own[0].output[0].nbytes
    assert held == sum(own[step].nbytes() for step in (0, 2)) + 2 * outputs


def test_a_step_that_nobody_put_has_its_neighbours_outputs() -> None:
    case, denoiser, own = a_template(CASES[1], 1)
    mask = masks.random(case.mask_shape(case.sizes[0]), 0)
    templates = Templates(denoiser, Tiers(host_bytes=LARGE), share=2)
    templates.put("cat", 0, own[0])
    inputs = case.inputs(case.sizes[0], 1)
    edit = templates.edit("cat", 1, inputs, mask)
    assert edit is not None
    assert edit.any_step
    wanted = denoiser.edit([EditStep(inputs, mask, own[0], any_step=True)])
    assert error(denoiser.edit([edit]), wanted) == 0
    assert templates.get("cat", 2) is None


@pytest.mark.parametrize("name", CASES)
def test_steps_in_between_read_the_straight_line(name: str, tmp_path: Path) -> None:
    """Of rows, statistics and sums alike: then steps on a line are served without an error."""
    case, denoiser, (first, last) = a_template(name, 2)
    size, mask = case.sizes[0], masks.random(case.mask_shape(case.sizes[0]), 0)
    inputs = case.inputs(size, 5)
    templates = Templates(
        denoiser, Tiers(Store(tmp_path), host_bytes=0), "inputs", share=3, steps=6
    )
    own = first.served_by(first, last, 1 / 3)
    plan = {r: mask | True for r in range(1, len(denoiser.regions) + 1)}  # from inputs
    for step in range(6):
        templates.put("cat", step, last if step == 3 else first)
    for step, weight in ((0, 0.0), (1, 1 / 3), (2, 2 / 3), (3, 1.0), (4, 0.5), (5, 0.0)):
        mixed = on_line(first, last, weight)
        wanted = denoiser.edit([EditStep(inputs, mask, mixed, True, plan)])
        cache = templates.get("cat", step)
        assert cache is not None
        seen = denoiser.edit([EditStep(inputs, mask, cache, True)])
        assert error(inside(seen[0], mask), inside(wanted[0], mask)) < 1e-5
        if weight not in (0, 1):
            assert torch.equal(cache.output[0], first.output[0])
    with pytest.raises(CacheError, match="between two steps"):
        encode(own)
    with pytest.raises(InputError, match="step 6"):
        templates.put("cat", 6, first)
    templates.drop("cat", [5])
    assert [templates.get("cat", step) is not None for step in range(6)] == [True] * 4 + [False] * 2


def test_rows_between_two_steps_are_loaded_like_others() -> None:
    case, denoiser, (first, last) = a_template(CASES[1], 2)
    size, mask = case.sizes[0], masks.random(case.mask_shape(case.sizes[0]), 0)
    loading = maskfx.compile(denoiser.module, plans=True, loader=maskfx.Loader())
    some = first.within(Masks.exactly(mask), reach_of(denoiser, first, mask))
    other = last.within(Masks.exactly(mask), reach_of(denoiser, last, mask))
    step = EditStep(case.inputs(size, 3), mask, first.served_by(some, other, 0.25), True)
    assert error(loading.edit([step]), denoiser.edit([step])) < 1e-6


def reach_of(denoiser: maskfx.CompiledDenoiser, cache: maskfx.StepCache, mask: Tensor) -> Reach:
    interface = denoiser.programs[cache.program].interface
    return find_reach(interface, cache.sizes, Masks.exactly(mask))


def inside(output: Any, mask: Tensor) -> Tensor:
    value: Tensor = output[0]
    return value[:, mask] if mask.dim() == 1 else value[:, :, mask]


def on_line(first: maskfx.StepCache, last: maskfx.StepCache, weight: float) -> maskfx.StepCache:
    """All that two recordings hold, mixed in full."""

    def mix(one: Rows, two: Rows) -> Rows:
        return torch.lerp(whole(one), whole(two), weight)

    stats = {}
    for key, one in first.stats.items():
        two = last.stats[key]
        total = torch.lerp(one.total, two.total, weight)
        centre = torch.lerp(one.centre, two.centre, weight)
        stats[key] = SiteStats(mix(one.values, two.values), total, centre, one.size)
    rows = {tap: mix(kept, last.rows[tap]) for tap, kept in first.rows.items()}
    return replace(first, rows=rows, stats=stats, sums={})


@pytest.mark.parametrize("keep", ["both", "inputs"])
@pytest.mark.parametrize("name", CASES)
def test_edits_under_known_masks(name: str, keep: str, tmp_path: Path) -> None:
    case, denoiser, (cache,) = a_template(name, 1)
    size = case.sizes[0]
    mask = masks.random(case.mask_shape(size), 0)
    tiers = Tiers(Store(tmp_path), host_bytes=LARGE)
    whole_, some = (Templates(denoiser, tiers, keep, masks=m) for m in (None, Masks.exactly(mask)))
    inputs = case.inputs(size, 0)
    for templates in (whole_, some):
        templates.put("cat", 0, cache)
        edit = templates.edit("cat", 0, inputs, mask)
        assert edit is not None
        wanted = denoiser.edit([EditStep(inputs, mask, cache)])
        assert error(denoiser.edit([edit]), wanted) < 1e-5
    held = [t.get("cat", 0) for t in (whole_, some)]
    assert held[1] is not None
    assert held[0] is not None
    assert held[1].nbytes() < held[0].nbytes()
    other = some.edit("cat", 0, inputs, ~mask)
    assert other is not None
    with pytest.raises(MaskError, match="other Masks"):
        denoiser.edit([other])


def test_other_weights_are_another_template() -> None:
    case = ZOO["FluxTransformer2DModel"]
    size = case.sizes[0]
    module = case.build()
    denoiser = maskfx.compile(module)
    templates = Templates(denoiser, Tiers(host_bytes=LARGE))
    inputs = case.inputs(size, 0)
    templates.put("cat", 0, denoiser.record(**inputs)[1])
    assert templates.get("cat", 0) is not None
    assert templates.get("cat", 0, branch="uncond") is None
    with torch.no_grad():
        next(module.parameters()).add_(1)
    assert templates.get("cat", 0) is None


def test_denoisers_of_equal_weights_keep_their_recordings_apart() -> None:
    """Such as two equal ControlNets of a pipeline, each time with another picture."""
    case = ZOO["FluxTransformer2DModel"]
    size, tiers = case.sizes[0], Tiers(host_bytes=LARGE)
    parts = [Templates(maskfx.compile(case.build()), tiers, part=name) for name in ("a", "b")]
    for seed, part in enumerate(parts):
        part.put("cat", 0, part.denoiser.record(**case.inputs(size, seed))[1])
    mask = masks.random(case.mask_shape(size), 0)
    for seed, part in enumerate(parts):
        inputs = case.inputs(size, seed)
        edit = part.edit("cat", 0, inputs, mask)
        assert edit is not None
        assert error(part.denoiser.edit([edit])[0], case.build()(**inputs)) < 1e-4


def test_pins_and_drops_steps() -> None:
    case = ZOO["FluxTransformer2DModel"]
    denoiser = maskfx.compile(case.build())
    cache = denoiser.record(**case.inputs(case.sizes[0], 0))[1]
    templates = Templates(denoiser, Tiers(host_bytes=int(2.5 * cache.nbytes())))
    templates.pin("cat", [0])
    for step in range(4):
        templates.put("cat", step, cache)
    assert [templates.get("cat", step) is not None for step in range(4)] == [
        True,
        False,
        False,
        True,
    ]
    templates.unpin("cat", [0])
    templates.drop("cat", range(4))
    assert templates.get("cat", 0) is None
    assert not any(f.result() for f in templates.prefetch("cat", range(4)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep": "most"},
        {"share": 0},
        {"share": 1.5},
        {"steps": 0},
        {"share": 2, "steps": 4},
    ],
)
def test_refuses_settings_that_mean_nothing(wrong: dict[str, object]) -> None:
    denoiser = maskfx.compile(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="Templates: "):
        Templates(denoiser, Tiers(host_bytes=1), **wrong)  # type: ignore[arg-type]
