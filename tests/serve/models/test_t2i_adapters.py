"""Served pipelines whose `image` steers a generation: those of T2I-Adapters and ControlNets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

import tests.factories.edit_pipelines  # noqa: F401 - adds pipelines
from maskfx.runtime.step_kinds import StepKind
from maskfx.serve.models.call_signature import CallSignature
from maskfx.serve.models.model import Made
from maskfx.serve.models.pipeline_set import multiple_of, roles_of
from maskfx.serve.request import Pictures, Pixels
from tests.factories import small_unets
from tests.factories.pipelines import PIPES, pipe_of, seeded
from tests.factories.served import SIDE, Served, edit, job, picture, square

NAME = "StableDiffusionAdapterPipeline"
CONTROLS = (picture(5), picture(6))


def adapters() -> list[Any]:
    """Two, of which the second takes images of one channel."""
    from diffusers import T2IAdapter

    kind: Any = T2IAdapter
    made = [seeded(4, kind, channels, [16, 32], 1, 2, "full_adapter") for channels in (3, 1)]
    for adapter, name in zip(made, ("depth", "edges"), strict=True):
        adapter.register_to_config(_name_or_path=f"owner/{name}")
    return made


def build(count: int) -> Any:
    found = adapters()[:count]
    kept = found if count > 1 else found[0]
    made = pipe_of(NAME, lambda: {**small_unets.spoken(**small_unets.LEAST), "adapter": kept})
    made.unet.register_to_config(sample_size=SIDE // made.vae_scale_factor)
    return made


def alone(pipe: Any, **more: Any) -> Any:
    """The picture that diffusers makes alone."""
    import torch

    generator = torch.Generator().manual_seed(4)
    asked = {"num_inference_steps": 3, "height": SIDE, "width": SIDE, "generator": generator}
    return np.asarray(pipe("a cat", **asked, **more).images[0]).astype(int)


def check(served: Served, cases: list[tuple[dict[str, Any], tuple[Pixels, ...], Any]]) -> None:
    """Requests of one batch are each the wanted picture, and all differ."""
    answers = served.answers(
        *(
            (job(str(place), "generate", seed=4, **asked), Pictures((), None, controls))
            for place, (asked, controls, _) in enumerate(cases)
        )
    )
    for place, (asked, _, wanted) in enumerate(cases):
        found = answers[str(place)]
        assert isinstance(found, Made), found
        assert found.pixels is not None
        assert np.abs(found.pixels.astype(int) - wanted).max() <= 1, asked
        assert all(np.abs(wanted - other).max() > 1 for _, _, other in cases[:place]), asked


def test_the_image_of_an_adapter_is_a_control_image() -> None:
    made, pipe = Served(build(1), quality="faithful"), build(1)
    try:
        ready = made.model.ready()
        assert ready.generates
        assert (ready.controls, ready.nets) == (1, ["depth"])
        assert {"control", "control_scale", "nets"} <= set(ready.takes)
        assert "template" not in ready.takes, "it records no pictures"
        first, second = map(Image.fromarray, CONTROLS)
        check(
            made,
            [
                ({}, CONTROLS[:1], alone(pipe, image=first)),
                ({}, CONTROLS[1:], alone(pipe, image=second)),
                (
                    {"control_scale": [0.3]},
                    CONTROLS[:1],
                    alone(pipe, image=first, adapter_conditioning_scale=0.3),
                ),
                (
                    {"nets": "none"},
                    (),
                    alone(pipe, image=first, adapter_conditioning_scale=0.0),
                ),
            ],
        )
        failed = made.failed(job(kind="generate"), Pictures((), None))
        assert (failed.code, failed.param) == ("missing_parameter", "control_image")
        assert made.failed(job(), edit(1)).param == "image"
    finally:
        made.model.close()


def test_each_of_several_adapters_gets_its_image_and_scale() -> None:
    made, pipe = Served(build(2), quality="faithful"), build(2)
    first, second = (Image.fromarray(one) for one in CONTROLS)

    def by_hand(*controls: Image.Image, scales: list[float]) -> Any:
        images = [controls[0], controls[1].convert("L")]
        return alone(pipe, image=images, adapter_conditioning_scale=scales)

    try:
        assert made.model.ready().nets == ["depth", "edges"]
        check(
            made,
            [
                ({}, CONTROLS, by_hand(first, second, scales=[1.0, 1.0])),
                ({"control_scale": [0.4]}, CONTROLS, by_hand(first, second, scales=[0.4, 0.4])),
                (
                    {"nets": "edges:0.3,depth:0.9"},
                    CONTROLS,
                    by_hand(second, first, scales=[0.9, 0.3]),
                ),
                ({"nets": "edges"}, CONTROLS[1:], by_hand(first, second, scales=[0.0, 1.0])),
            ],
        )
    finally:
        made.model.close()


def test_it_edits_what_it_made_and_nothing_else() -> None:
    made = Served(build(1))
    try:
        assert {"image", "mask"} <= set(made.model.ready().takes)
        asked = job("g", "generate", seed=4, size=(SIDE, SIDE))
        first = made.made(asked, Pictures((), None, CONTROLS[:1])).pixels
        assert first is not None

        def edited(seed: int, prompt: str) -> Pixels:
            given = Pictures((first,), square(), CONTROLS[:1])
            made.told.steps.clear()
            found = made.made(job("e", seed=seed, prompt=prompt), given).pixels
            assert found is not None
            kinds = {member.kind for step in made.told.steps for member in step.members}
            assert StepKind.RECORD not in kinds
            assert np.array_equal(found[~square()], first[~square()])
            return found

        assert np.abs(edited(4, "a cat").astype(int) - first).max() <= 1
        assert (edited(5, "a dog") != first).any()
        for images, mask, controls, param in (
            ((picture(1),), square(), CONTROLS[:1], "image"),
            ((first,), square(), CONTROLS[1:], "image"),
            ((first,), None, CONTROLS[:1], "mask"),
            ((first,), square(), (), "control_image"),
        ):
            failed = made.failed(job(), Pictures(images, mask, controls))
            assert failed.param == param, failed
        failed = made.failed(job("r", "record"), Pictures((first,), None, CONTROLS[:1]))
        assert failed.param == "image"
    finally:
        made.model.close()


@pytest.mark.parametrize(
    ("name", "editor", "generator"),
    [
        ("StableDiffusionXLAdapterPipeline", None, "StableDiffusionXLAdapterPipeline"),
        (
            "StableDiffusionControlNetPipeline",
            "StableDiffusionControlNetInpaintPipeline",
            "StableDiffusionControlNetPipeline",
        ),
        (
            "StableDiffusionXLControlNetPAGPipeline",
            "StableDiffusionXLControlNetPAGImg2ImgPipeline",
            "StableDiffusionXLControlNetPAGPipeline",
        ),
    ],
)
def test_a_pipeline_whose_image_steers_edits_none(
    name: str, editor: str | None, generator: str | None
) -> None:
    pipe: Any = PIPES[name].build()
    assert CallSignature.of(pipe).control_argument == "image"
    names = [None if one is None else type(one).__name__ for one in roles_of(pipe)]
    assert names == [editor, generator]


def test_sizes_are_multiples_of_what_an_adapter_folds() -> None:
    pipe = PIPES["StableDiffusionXLAdapterPipeline"].build()
    assert (pipe.vae_scale_factor, multiple_of(pipe)) == (2, 4)
