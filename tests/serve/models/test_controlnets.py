"""ControlNets that the settings add to a model that was saved without."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

import maskfx
from maskfx.errors import InputError
from maskfx.pipelines.runs import execute
from maskfx.pipelines.runs.run import DenoiserCall
from maskfx.pipelines.runs.step_members import CallMember, choose_steps
from maskfx.serve.models import pipeline_model
from maskfx.serve.models.model import Made
from maskfx.serve.models.model_source import load_pipeline, of_family
from maskfx.serve.request import Pictures, Pixels
from tests.factories import (
    edit_pipelines,  # noqa: F401 - adds pipelines
    more_pipelines,  # noqa: F401 - adds pipelines
    pipelines,
)
from tests.factories.served import SIDE, Served, build, edit, job, picture, square
from tests.factories.shipped import ship_unet


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    ship_unet(folder)
    return folder / "unet"


def save_net(model: Path, folder: Path, seed: int) -> None:
    import diffusers

    library: Any = diffusers
    unet = library.UNet2DConditionModel.from_pretrained(model / "unet")
    torch.manual_seed(seed)
    net = library.ControlNetModel.from_unet(
        unet, conditioning_channels=3, load_weights_from_unet=False
    )
    net.save_pretrained(folder, safe_serialization=True)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, with two ControlNets of other weights beside it."""
    folder = tmp_path_factory.mktemp("spoken")
    build("StableDiffusionInpaintPipeline").save_pretrained(folder / "model")
    for seed in (1, 2):
        net: Any = pipelines.control_net(pipelines.SD15, seed)
        net.save_pretrained(folder / f"net-{seed}")
    return folder


def nets_of(spoken: Path) -> list[str]:
    return [str(spoken / f"net-{seed}") for seed in (1, 2)]


@pytest.fixture(scope="module")
def served(spoken: Path) -> Iterator[Served]:
    made = Served(
        None, model=str(spoken / "model"), controlnets=nets_of(spoken), quality="faithful"
    )
    yield made
    made.model.close()


def test_a_model_gets_one_controlnet_or_several(model: Path, tmp_path: Path) -> None:
    for index in range(2):
        save_net(model, tmp_path / f"net-{index}", index)
    one = load_pipeline(str(model), "bfloat16", "cpu", [str(tmp_path / "net-0")])
    assert type(one).__name__ == "StableDiffusionControlNetInpaintPipeline"
    assert one.controlnet.dtype == one.unet.dtype == torch.bfloat16
    both = load_pipeline(
        str(model), "float32", "cpu", [str(tmp_path / f"net-{index}") for index in range(2)]
    )
    assert len(both.controlnet.nets) == 2
    firsts = [net.conv_in.weight for net in both.controlnet.nets]
    assert not torch.equal(*firsts)


def test_what_is_no_controlnet_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="controlnets: 'nowhere' is neither a folder nor a hub id"):
        load_pipeline(str(model), "float32", "cpu", ["nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="can't be loaded.*the folder of a ControlNet"):
        load_pipeline(str(model), "float32", "cpu", [str(tmp_path / "empty")])


def test_a_controlnet_of_several_kinds_gets_its_own_class() -> None:
    import diffusers

    library: Any = diffusers
    union = pipelines.PIPES["StableDiffusionXLControlNetUnionInpaintPipeline"].build()
    other = library.StableDiffusionXLControlNetInpaintPipeline(**union.components)
    found: Any = of_family(other, union.controlnet)
    assert type(found) is type(union)
    assert found.controlnet is union.controlnet
    plain = pipelines.PIPES["StableDiffusionControlNetInpaintPipeline"].build()
    assert of_family(plain, plain.controlnet) is plain


CONTROLS = (picture(5), picture(6))


@pytest.mark.slow
def test_edits_with_two_are_those_of_the_pipeline_by_hand(spoken: Path, served: Served) -> None:
    """Each net gets its own control image and its own scale."""
    ready = served.model.ready()
    assert ready.controls == 2
    assert {"control", "control_scale"} <= set(ready.takes)
    direct: Any = maskfx.compile(
        load_pipeline(str(spoken / "model"), "float32", "cpu", nets_of(spoken)), quality="faithful"
    )

    def by_hand(controls: tuple[Any, ...], **more: Any) -> Any:
        result = direct(
            "a cat",
            image=Image.fromarray(picture(1)),
            mask_image=Image.fromarray(square().astype(np.uint8) * 255),
            control_image=[*map(Image.fromarray, controls)],
            num_inference_steps=3,
            strength=1.0,
            height=SIDE,
            width=SIDE,
            generator=torch.Generator().manual_seed(4),
            **more,
        )
        return np.asarray(result.images[0]).astype(int)

    def apart(one: Any, other: Any) -> int:
        return int(np.abs(one.astype(int) - other).max())

    made = []
    for id, scales in (("a", None), ("b", [0.7]), ("c", [1.0, 0.2])):
        asked = job(id, seed=4, strength=1.0, control_scale=scales)
        made.append(served.made(asked, edit(1, controls=CONTROLS)).pixels)
        each = [0.7, 0.7] if scales == [0.7] else scales
        more = {} if each is None else {"controlnet_conditioning_scale": each}
        assert apart(made[-1], by_hand(CONTROLS, **more)) <= 1
    assert apart(made[0], made[2]) > 1
    assert apart(made[2], by_hand(CONTROLS[::-1], controlnet_conditioning_scale=[1.0, 0.2])) > 1
    assert apart(made[1], made[2]) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("controls", "scales", "code", "param", "message"),
    [
        ((), None, "missing_parameter", "control_image", "given 2 times, .*, not 0 times"),
        (CONTROLS[:1], None, "invalid_value", "control_image", "given 2 times, .*, not 1 times"),
        (
            CONTROLS,
            [0.1, 0.2, 0.3],
            "invalid_value",
            "controlnet_conditioning_scale",
            "one number, or one for each of 2 control images; it has 3",
        ),
    ],
)
def test_another_number_of_control_images_or_scales_is_refused(
    served: Served, controls: Any, scales: Any, code: str, param: str, message: str
) -> None:
    failed = served.failed(job(control_scale=scales), edit(1, controls=controls))
    assert (failed.code, failed.param) == (code, param)
    assert re.search(message, failed.message)


@pytest.mark.slow
def test_a_request_chooses_its_nets(
    spoken: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together in the engine: by name with a scale each, in another order, one, and none."""
    assert served.model.ready().nets == ["net-1", "net-2"]
    plain = load_pipeline(str(spoken / "model"), "float32", "cpu")
    nets = [load_pipeline(str(spoken / "model"), "float32", "cpu", [n]) for n in nets_of(spoken)]
    several = load_pipeline(str(spoken / "model"), "float32", "cpu", nets_of(spoken))

    def by_hand(pipe: Any, controls: Any, **more: Any) -> Any:
        given = {} if controls is None else {"control_image": controls}
        result = pipe(
            "a cat",
            image=Image.fromarray(picture(1)),
            mask_image=Image.new("L", (SIDE, SIDE), 255),
            num_inference_steps=3,
            strength=1.0,
            height=SIDE,
            width=SIDE,
            generator=torch.Generator().manual_seed(4),
            **given,
            **more,
        )
        return np.asarray(result.images[0]).astype(int)

    first, second = map(Image.fromarray, CONTROLS)
    scale = "controlnet_conditioning_scale"
    wanted = {
        "none": by_hand(plain, None),
        "net-2:0.7": by_hand(nets[1], first, **{scale: 0.7}),
        "net-1": by_hand(nets[0], first),
        "net-2:0.2,net-1": by_hand(several, [second, first], **{scale: [0.5, 0.2]}),
    }
    asked = {}
    for id, chosen in enumerate(wanted):
        controls = CONTROLS[: 0 if chosen == "none" else len(chosen.split(","))]
        one = job(str(id), seed=4, strength=1.0, nets=chosen)
        asked[str(id)] = one, Pictures((picture(1),), np.ones((SIDE, SIDE), bool), controls)
    served.answers(*asked.values())  # the first with a scale of 0 are computed
    names = list[str]()

    def choose(call: DenoiserCall) -> list[CallMember]:
        names.append(call.name)
        return choose_steps(call)

    monkeypatch.setattr(execute, "choose_steps", choose)
    answers = served.answers(*asked.values())
    each = {name: names.count(name) for name in set(names)}
    assert each["controlnet.0"] == each["controlnet.1"] == each["unet"] / 2
    for id, (chosen, expected) in enumerate(wanted.items()):
        found = answers[str(id)]
        assert isinstance(found, Made), found
        assert found.pixels is not None
        assert np.abs(found.pixels.astype(int) - expected).max() <= 1, chosen
    pictures = list(wanted.values())
    assert all(np.abs(a - b).max() > 1 for a, b in zip(pictures, pictures[1:], strict=False))


@pytest.mark.parametrize(
    ("nets", "controls", "message"),
    [
        ("net-3", 1, "'net-3' isn't one of net-1, net-2"),
        ("net-1,net-1", 2, "'net-1' is named twice"),
        ("net-1", 2, "control_image must be given once, not 2 times"),
        ("none", 1, "controlnet names none"),
    ],
)
@pytest.mark.slow
def test_a_choice_that_doesnt_fit_is_refused(
    nets: str, controls: int, message: str, served: Served
) -> None:
    failed = served.failed(job(nets=nets), edit(1, controls=CONTROLS[:controls]))
    assert re.search(message, failed.message)


UNION = "StableDiffusionXLControlNetUnionInpaintPipeline"


def alone(pipe: Any, controls: Sequence[Pixels], **more: Any) -> Any:
    """The picture that diffusers makes alone, of the whole scene."""
    images = [*map(Image.fromarray, controls)]
    pipe.set_progress_bar_config(disable=True)
    result = pipe(
        "a cat",
        image=Image.fromarray(picture(1)),
        mask_image=Image.new("L", (SIDE, SIDE), 255),
        control_image=images[0] if len(images) == 1 else images,
        num_inference_steps=3,
        strength=1.0,
        height=SIDE,
        width=SIDE,
        generator=torch.Generator().manual_seed(4),
        **more,
    )
    return np.asarray(result.images[0]).astype(int)


def check_together(
    served: Served, pipe: Any, cases: Sequence[tuple[dict[str, Any], dict[str, Any], int]]
) -> None:
    """Requests of one batch are each the picture of diffusers, and all differ.

    A case has the fields of the request, the arguments of diffusers, and how many control images.
    """
    jobs = [
        (
            job(str(place), seed=4, strength=1.0, **asked),
            Pictures((picture(1),), np.ones((SIDE, SIDE), bool), CONTROLS[:count]),
        )
        for place, (asked, _, count) in enumerate(cases)
    ]
    answers = served.answers(*jobs)
    wanted = [alone(pipe, CONTROLS[:count], **more) for _, more, count in cases]
    for place, expected in enumerate(wanted):
        found = answers[str(place)]
        assert isinstance(found, Made), found
        assert found.pixels is not None
        assert np.abs(found.pixels.astype(int) - expected).max() <= 1, cases[place]
    for place, one in enumerate(wanted):
        assert all(np.abs(one - other).max() > 1 for other in wanted[:place])


@pytest.mark.slow
def test_guess_mode_is_that_of_diffusers(spoken: Path, served: Served) -> None:
    """In one batch with requests that don't use it."""
    assert "guess_mode" in served.model.ready().takes
    several = load_pipeline(str(spoken / "model"), "float32", "cpu", nets_of(spoken))
    scale = "controlnet_conditioning_scale"
    check_together(
        served,
        several,
        [
            ({"guess_mode": True}, {"guess_mode": True}, 2),
            ({}, {}, 2),
            (
                {"guess_mode": True, "control_scale": [0.4]},
                {"guess_mode": True, scale: [0.4] * 2},
                2,
            ),
        ],
    )


@pytest.fixture(
    scope="module", params=["dense", pytest.param("mask_cache", marks=pytest.mark.slow)]
)
def union(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A ControlNet that takes images of several kinds at once, compiled in each mode."""

    def compiling(quality: Any, tiers: Any, loader: Any, *_: Any, **__: Any) -> Any:
        return partial(
            maskfx.compile, mode=request.param, quality=quality, tiers=tiers, loader=loader
        )

    with mock.patch.object(pipeline_model, "compiling", compiling):
        made = Served(build(UNION), quality="faithful")
    yield made
    made.model.close()


def test_a_controlnet_of_several_kinds_is_that_of_diffusers(union: Served) -> None:
    """Requests of one batch have other kinds, scales and numbers of control images."""
    scale = "controlnet_conditioning_scale"
    two, own = [1, 3], [0.9, 0.2]
    check_together(
        union,
        build(UNION),
        [
            ({"control_mode": [0]}, {"control_mode": 0}, 1),
            ({"control_mode": [3]}, {"control_mode": 3}, 1),
            ({"control_mode": two[::-1]}, {"control_mode": two[::-1]}, 2),
            ({"control_mode": two, "control_scale": own}, {"control_mode": two, scale: own}, 2),
            (
                {"control_mode": [3], "guess_mode": True, "guidance": 1.0},
                {"control_mode": 3, "guess_mode": True, "guidance_scale": 1.0},
                1,
            ),
        ],
    )


def test_guess_mode_that_diffusers_cant_run_is_refused(union: Served) -> None:
    pictures = edit(1, controls=CONTROLS[:1])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        alone(build(UNION), CONTROLS[:1], control_mode=3, guess_mode=True)
    failed = union.failed(job(control_mode=[3], guess_mode=True), pictures)
    assert (failed.code, failed.param) == ("unsupported_parameter", "guess_mode")
    assert "send guidance_scale=1" in failed.message
