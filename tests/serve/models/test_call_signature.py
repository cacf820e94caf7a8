"""What a pipeline's signature takes, and a job's wishes under its names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from maskfx.serve.errors import ApiError
from maskfx.serve.models.call_signature import CallSignature
from tests.factories.served import job


class Pipe:
    """Guidance twice: a number that the denoiser gets, and true guidance, off by itself."""

    def __call__(
        self,
        prompt: str = "",
        negative_prompt: str | None = None,
        true_cfg_scale: float = 1.0,
        guidance_scale: float = 3.5,
    ) -> None: ...


@pytest.mark.parametrize(
    ("told", "wanted"), [({}, {}), ({"true_cfg_scale": 4.0}, {"negative_prompt": ""})]
)
def test_true_guidance_that_a_folder_tells_is_on(
    told: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """It is away from a negative prompt, and off without one."""
    found = CallSignature.of(Pipe(), told).arguments(job(prompt="a hat", steps=None).request)
    assert found == {"prompt": "a hat", **told, **wanted}
    said = CallSignature.of(Pipe(), told).arguments(
        job(prompt="", steps=None, negative_prompt="rain").request
    )
    assert said["negative_prompt"] == "rain"


class ControlledPipe:
    """A pipeline with this number of ControlNets; None: one that isn't in a list."""

    def __init__(self, nets: int | None) -> None:
        self.controlnet = SimpleNamespace(**({} if nets is None else {"nets": [None] * nets}))

    def __call__(
        self,
        prompt: str = "",
        control_image: Any = None,
        controlnet_conditioning_scale: float | list[float] = 1.0,
    ) -> None: ...


SCALE = "controlnet_conditioning_scale"


@pytest.mark.parametrize(
    ("nets", "images", "scales", "control", "scale"),
    [
        (None, ["a"], [0.5], "a", 0.5),
        (None, ["a"], None, "a", None),
        (1, ["a"], [0.5], ["a"], [0.5]),
        (2, ["a", "b"], [0.5], ["a", "b"], [0.5, 0.5]),
        (2, ["a", "b"], [0.5, 1.0], ["a", "b"], [0.5, 1.0]),
    ],
)
def test_several_controlnets_get_lists_of_images_and_scales(
    nets: int | None, images: list[str], scales: Any, control: Any, scale: Any
) -> None:
    signature = CallSignature.of(ControlledPipe(nets))
    request = job(prompt="a hat", steps=None, control_scale=scales).request
    signature.check(request, len(images))
    assert signature.control(images) == control
    assert signature.arguments(request).get(SCALE) == scale


@pytest.mark.parametrize(
    ("nets", "images", "scales", "code", "message"),
    [
        (None, 0, None, "missing_parameter", "send one as control_image"),
        (None, 2, None, "invalid_value", "control_image must be given once, not 2 times"),
        (2, 0, None, "missing_parameter", "control_image must be given 2 times, once for each"),
        (2, 1, None, "invalid_value", "that the request uses, not 1 times"),
        (None, 1, [1.0, 1.0], "invalid_value", f"{SCALE} must be one number; it has 2"),
        (2, 2, [1.0] * 3, "invalid_value", "or one for each of 2 control images; it has 3"),
    ],
)
def test_another_number_of_control_images_or_scales_is_refused(
    nets: int | None, images: int, scales: Any, code: str, message: str
) -> None:
    request = job(prompt="a hat", steps=None, control_scale=scales).request
    with pytest.raises(ApiError, match=message) as caught:
        CallSignature.of(ControlledPipe(nets)).check(request, images)
    assert caught.value.code == code
    assert caught.value.param == (SCALE if len(scales or ()) > 1 else "control_image")


class UnionPipe(ControlledPipe):
    """A pipeline whose ControlNet takes images of several kinds at once; or a list of such nets."""

    def __init__(self, nets: int | None, **config: Any) -> None:
        net = SimpleNamespace(config=SimpleNamespace(**config))
        self.controlnet = net if nets is None else SimpleNamespace(nets=[net] * nets)

    def __call__(
        self,
        prompt: str = "",
        control_image: Any = None,
        controlnet_conditioning_scale: float | list[float] = 1.0,
        control_guidance_start: float = 0.0,
        control_guidance_end: float = 1.0,
        control_mode: int | list[int] | None = None,
    ) -> None: ...


UNION = UnionPipe(None, num_control_type=6)
FLUX = UnionPipe(2, num_mode=4)


def asked(**fields: Any) -> Any:
    return job(prompt="a hat", steps=None, **fields).request


@pytest.mark.parametrize(
    ("pipe", "modes", "image", "mode"),
    [
        (UNION, [3], "a", 3),
        (UNION, [3, 0], ["a", "b"], [3, 0]),
        (FLUX, [1, 1], ["a", "b"], [1, 1]),
    ],
)
def test_a_net_of_several_kinds_gets_an_image_and_a_mode_for_each(
    pipe: Any, modes: list[int], image: Any, mode: Any
) -> None:
    signature, images = CallSignature.of(pipe), ["a", "b"][: len(modes)]
    request = asked(control_mode=modes, control_scale=[0.5], control_start=0.2, control_end=0.8)
    signature.check(request, len(modes))
    assert signature.control(images) == image
    found = signature.arguments(request)
    assert found["control_mode"] == mode
    assert found[SCALE] == ([0.5] * len(modes) if len(modes) > 1 else 0.5)
    assert (found["control_guidance_start"], found["control_guidance_end"]) == (0.2, 0.8)
    assert "control_mode" in signature.takes()


@pytest.mark.parametrize(
    ("pipe", "fields", "images", "param", "message"),
    [
        (UNION, {}, 1, "control_mode", "takes 6 kinds of images; send the number of the kind"),
        (UNION, {"control_mode": [6]}, 1, "control_mode", "a number from 0 to 5 per control image"),
        (UNION, {"control_mode": [1, 1]}, 2, "control_mode", "each another one, not 1, 1"),
        (UNION, {"control_mode": [1, 2]}, 1, "control_image", "must be given 2 times"),
        (FLUX, {"control_mode": [1]}, 2, "control_mode", "from 0 to 3 per control image, not 1"),
        (
            UNION,
            {"control_mode": [1], "control_start": 0.5, "control_end": 0.25},
            1,
            "control_guidance_start",
            "less than control_guidance_end, not 0.5 of 0.25",
        ),
        (ControlledPipe(None), {"control_mode": [1]}, 1, "control_mode", "control_mode"),
    ],
)
def test_modes_and_ranges_that_do_not_fit_are_refused(
    pipe: Any, fields: dict[str, Any], images: int, param: str, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        CallSignature.of(pipe).check(asked(**fields), images)
    assert caught.value.param == param


def test_a_warm_up_has_the_first_kind_unless_the_folder_names_one() -> None:
    assert CallSignature.of(UNION).mode(None) == 0
    assert CallSignature.of(FLUX).mode(None) == [0, 0]
    told = CallSignature.of(UNION, {"control_mode": [2, 4]})
    assert told.mode(None) is None
    assert told.controls == 2
    told.check(asked(), 2)
    assert CallSignature.of(ControlledPipe(None)).mode(None) is None
