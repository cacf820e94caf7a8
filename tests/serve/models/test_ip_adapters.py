"""IP-Adapters of the server: the pictures are diffusers', whatever is shown to them together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from maskfx.errors import InputError
from maskfx.runtime.step_kinds import StepKind
from maskfx.serve.models.ip_adapter_files import load_ip_adapters, names_of
from maskfx.serve.models.model import Made
from maskfx.serve.request import Pictures, Pixels
from tests.factories.ip_adapters import save_ip_adapters, tensors_for
from tests.factories.served import SIDE, Served, build, edit, job, picture, square

NAME = "StableDiffusionInpaintPipeline"
A, B = picture(5, 40, 30), picture(6)
WHOLE = np.ones((SIDE, SIDE), bool)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and two IP-Adapters for it beside it."""
    folder = tmp_path_factory.mktemp("saved")
    pipe = build(NAME)
    pipe.save_pretrained(folder / "model")
    save_ip_adapters(pipe.unet, folder, "face", "style")
    return folder


def served_with(saved: Path, *names: str) -> Served:
    files = [str(saved / f"{name}.safetensors") for name in names]
    return Served(None, model=str(saved / "model"), ip_adapters=files, quality="faithful")


@pytest.fixture(scope="module")
def served(saved: Path) -> Iterator[Served]:
    made = served_with(saved, "face", "style")
    yield made
    made.model.close()


def by_hand(saved: Path, scales: dict[str, float], shown: list[Any], seed: int) -> Any:
    """The picture that diffusers makes alone, with its own loader and scales."""
    pipe = build(NAME)
    if scales:
        pipe.load_ip_adapter(
            str(saved),
            subfolder="",
            weight_name=[f"{name}.safetensors" for name in scales],
            low_cpu_mem_usage=False,
        )
        pipe.set_ip_adapter_scale(list(scales.values()))
    pipe.set_progress_bar_config(disable=True)
    result = pipe(
        "a cat",
        image=Image.fromarray(picture(1)),
        mask_image=Image.new("L", (SIDE, SIDE), 255),
        num_inference_steps=3,
        strength=1.0,
        height=SIDE,
        width=SIDE,
        generator=torch.Generator().manual_seed(seed),
        **({"ip_adapter_image": shown} if scales else {}),
    )
    return np.asarray(result.images[0]).astype(int)


def apart(one: Any, other: Any) -> int:
    return int(np.abs(np.asarray(one).astype(int) - other).max())


def whole(*shown: Pixels) -> Pictures:
    return Pictures((picture(1),), WHOLE, shown=shown)


@pytest.mark.slow
def test_requests_of_one_batch_are_those_of_diffusers(saved: Path, served: Served) -> None:
    """Shown nothing, one picture, another one with another scale, two to one, one to each."""
    ready = served.model.ready()
    assert ready.ip_adapters == ["face", "style"]
    assert {"ip_adapters", "ip_scale"} <= set(ready.takes)
    a, b = map(Image.fromarray, (A, B))
    cases: list[tuple[dict[str, Any], Sequence[Pixels], dict[str, float], list[Any]]] = [
        ({}, (), {}, []),
        ({"ip_adapters": "none"}, (), {}, []),
        ({"ip_adapters": "face"}, (A,), {"face": 1.0}, [a]),
        ({"ip_adapters": "style:0.4"}, (B,), {"style": 0.4}, [b]),
        ({"ip_adapters": "face", "ip_scale": [2.0]}, (A, B), {"face": 2.0}, [[a, b]]),
        ({"ip_scale": [0.5, 1.0]}, (A, B), {"face": 0.5, "style": 1.0}, [a, b]),
        ({"ip_adapters": "style,face:0.3"}, (A, B), {"style": 1.0, "face": 0.3}, [a, b]),
    ]
    jobs = {
        str(place): (job(str(place), seed=4, strength=1.0, **asked), whole(*shown))
        for place, (asked, shown, _, _) in enumerate(cases)
    }
    answers = served.answers(*jobs.values())
    assert max(len(step.members) for step in served.told.steps) >= 4
    wanted = []
    for place, (_, _, scales, shown) in enumerate(cases):
        answer = answers[str(place)]
        assert isinstance(answer, Made), answer
        wanted.append(by_hand(saved, scales, shown, 4))
        assert apart(answer.pixels, wanted[-1]) <= 1, place
    assert all(apart(one, other) > 1 for one, other in zip(wanted[1:], wanted[2:], strict=False))


@pytest.mark.slow
def test_one_template_serves_all_pictures_and_scales(served: Served) -> None:
    served.made(job("t", kind="record", template="t", strength=1.0), edit(3))
    served.told.steps.clear()
    found = []
    for place, (shown, more) in enumerate(
        [((), {}), ((A,), {"ip_adapters": "face"}), ((B,), {"ip_adapters": "face:0.3"})]
    ):
        asked = job(str(place), seed=4, strength=1.0, template="t", **more)
        found.append(served.made(asked, edit(3, shown=shown)))
        assert found[-1].mask_ratio < 1
    kinds = {member.kind for step in served.told.steps for member in step.members}
    assert kinds == {StepKind.EDIT}, "no step records another template"
    outside = ~square()
    for one in found:
        assert one.pixels is not None
        assert np.array_equal(one.pixels[outside], picture(3)[outside])
    assert apart(found[0].pixels, found[1].pixels) > 1
    assert apart(found[1].pixels, found[2].pixels) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "shown", "code", "param", "message"),
    [
        ({"ip_adapters": "nose"}, (A,), "invalid_value", "ip_adapter", "isn't one of face, style"),
        ({"ip_adapters": "face"}, (), "missing_parameter", "ip_adapter_image", "needs a picture"),
        ({"ip_adapters": "none"}, (A,), "invalid_value", "ip_adapter_image", "left out"),
        ({}, (A,), "invalid_value", "ip_adapter_image", "2 times, once per IP-Adapter"),
        ({"ip_scale": [1.0]}, (), "invalid_value", "ip_adapter_scale", "left out"),
        (
            {"ip_scale": [1.0, 1.0, 1.0]},
            (A, B),
            "invalid_value",
            "ip_adapter_scale",
            "one number, or one per IP-Adapter that is used; it has 3",
        ),
    ],
)
def test_what_doesnt_fit_is_refused(
    served: Served, asked: Any, shown: Any, code: str, param: str, message: str
) -> None:
    failed = served.failed(job(**asked), edit(1, shown=shown))
    assert (failed.code, failed.param) == (code, param)
    assert re.search(message, failed.message)


@pytest.mark.slow
def test_a_model_without_them_refuses_their_fields() -> None:
    plain = Served(build(NAME), quality="faithful")
    try:
        for asked, shown, param in (
            ({}, (A,), "ip_adapter_image"),
            ({"ip_adapters": "face"}, (), "ip_adapter"),
            ({"ip_scale": [1.0]}, (), "ip_adapter_scale"),
        ):
            failed = plain.failed(job(**asked), edit(1, shown=shown))
            assert (failed.code, failed.param) == ("unsupported_parameter", param)
    finally:
        plain.model.close()


def test_names_are_those_of_files(tmp_path: Path) -> None:
    places = [tmp_path / "a" / "face.safetensors", tmp_path / "b" / "face.safetensors"]
    for place in places:
        place.parent.mkdir()
        save_file({"x": torch.ones(1)}, place)
    assert names_of([str(places[0]), str(places[1].parent)]) == ["face", "face-2"]


def test_files_that_are_no_ip_adapters_are_refused(saved: Path, tmp_path: Path) -> None:
    pipe = build(NAME)
    save_file({"x": torch.ones(1)}, tmp_path / "lora.safetensors")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled.bin").write_bytes(b"x")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "a.safetensors").write_bytes(b"x")
    for place, message in (
        ("nowhere", "neither a .safetensors file nor a folder"),
        (str(tmp_path / "empty"), "must have one .safetensors file, and has none"),
        (str(tmp_path / "pickled.bin"), "pickled weights can run code"),
        (str(tmp_path / "damaged"), "can't be read"),
        (str(tmp_path / "lora.safetensors"), r"has no tensors image_proj.\* and none ip_adapter"),
    ):
        with pytest.raises(InputError, match=message):
            load_ip_adapters(pipe, [place], None)
    alone = tmp_path / "alone.safetensors"
    save_file(tensors_for(pipe.unet, 1), alone)
    with pytest.raises(InputError, match="image_encoder: .* can't be loaded.*name its folder"):
        load_ip_adapters(pipe, [str(alone)], None)
    other = {name: value[:3] for name, value in tensors_for(pipe.unet, 1).items()}
    save_file({name: value.contiguous() for name, value in other.items()}, alone)
    with pytest.raises(InputError, match="expected IP-Adapters of this model"):
        load_ip_adapters(pipe, [str(alone)], saved / "image_encoder")
    with pytest.raises(InputError, match="takes no IP-Adapter"):
        load_ip_adapters(object(), [str(alone)], None)
