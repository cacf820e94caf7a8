"""Templates: recordings that come back from any tier, whole or halved, own or a neighbour's."""

from pathlib import Path

import pytest
import torch

import maskfx
from maskfx import EditStep, Templates
from maskfx.errors import InputError
from maskfx.runtime.store import Store
from maskfx.runtime.tiers import Tier, Tiers
from tests import masks
from tests.passes.tools import error
from tests.zoo import ZOO

CASES = ("UNet2DConditionModel-sd15", "FluxTransformer2DModel")
LARGE = 1 << 30


@pytest.mark.parametrize("keep", ["both", "keys", "inputs"])
@pytest.mark.parametrize("name", CASES)
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


def test_a_neighbour_serves_the_steps_that_share_it() -> None:
    case = ZOO["FluxTransformer2DModel"]
    size = case.sizes[0]
    denoiser = maskfx.compile(case.build())
    templates = Templates(denoiser, Tiers(host_bytes=LARGE), share=2)
    recorded = [denoiser.record(**case.inputs(size, step))[1] for step in range(4)]
    for step, cache in enumerate(recorded):
        templates.put("cat", step, cache)
    mask = masks.random(case.mask_shape(size), 0)
    for step in range(4):
        inputs = case.inputs(size, step)
        edit = templates.edit("cat", step, inputs, mask)
        assert edit is not None
        assert edit.any_step == bool(step % 2)
        wanted = denoiser.edit([EditStep(inputs, mask, recorded[step - step % 2], any_step=True)])
        assert error(denoiser.edit([edit]), wanted) == 0
    held = templates.tiers.counters().nbytes[Tier.HOST]
    assert held == sum(recorded[step].nbytes() for step in (0, 2))


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


@pytest.mark.parametrize("wrong", [{"keep": "most"}, {"share": 0}, {"share": 1.5}])
def test_refuses_settings_that_mean_nothing(wrong: dict[str, object]) -> None:
    denoiser = maskfx.compile(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="Templates: "):
        Templates(denoiser, Tiers(host_bytes=1), **wrong)  # type: ignore[arg-type]
