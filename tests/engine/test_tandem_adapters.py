"""IP-Adapters and T2I-Adapters beside a denoiser: the picture, and what is encoded how often."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import maskfx
import tests.factories.edit_pipelines  # noqa: F401 - adds the pipeline
from tests.factories.pipelines import (
    PIPES,
    Steps,
    anew,
    call_of,
    distance,
    latents,
    picture,
    square,
    white,
)
from tests.pipelines.test_adapters import told_of_pictures

NAME = "StableDiffusionXLAdapterPipeline"
pytestmark = pytest.mark.slow


def build() -> Any:
    """A UNet with the keys and values of a picture, and the features of a control picture."""
    return told_of_pictures(PIPES[NAME].build(), 1)


def call(seed: int, shown: int = 0, **more: Any) -> dict[str, Any]:
    """A request with a prompt, and the picture that the IP-Adapter is shown."""
    draw = np.random.default_rng(shown)
    pixels = draw.integers(0, 255, (40, 50, 3), dtype=np.uint8)
    return call_of(PIPES[NAME], seed, ip_adapter_image=Image.fromarray(pixels), **more)


@pytest.fixture(scope="module")
def original() -> Any:
    return build()


@pytest.fixture(scope="module")
def compiled() -> Any:
    return maskfx.compile(build(), quality="all-steps")


@pytest.fixture
def pipe(compiled: Any) -> Any:
    return anew(NAME, compiled_pipe=compiled)


def test_a_run_without_a_mask_is_diffusers(pipe: Any, original: Any) -> None:
    found = [latents(pipe, **call(1, shown)) for shown in (0, 1)]
    for shown, one in enumerate(found):
        assert torch.equal(one, latents(original, **call(1, shown)))
    assert distance(*found) > 1e-3, "the shown picture has no effect"
    other = latents(pipe, **{**call(1), "image": picture(51)})
    assert distance(other, found[0]) > 1e-3, "the control picture has no effect"


def test_an_edit_is_diffusers(pipe: Any, original: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all sites with another prompt and another picture; of some with the same ones."""
    first = pipe(**call(1), record=True, output_type="latent")
    template = {"template": first.template}
    wanted = latents(original, **call(2, 1))
    found = latents(pipe, **call(2, 1), mask_image=white(), **template)
    assert distance(found, wanted) < 1e-4
    steps = Steps(monkeypatch)
    same = latents(pipe, **call(1), mask_image=square(), **template)
    assert steps.kinds() == {"EditStep"}
    assert distance(same, latents(original, **call(1))) < 1e-4
    edits: list[dict[str, Any]] = [
        {**call(seed, shown, output_type="latent", return_dict=False), "mask_image": mask}
        for seed, shown, mask in ((2, 1, white()), (1, 0, square()))
    ]
    with maskfx.Engine(maskfx.BatchPolicy(patience=1.0)) as engine:
        tickets = [engine.submit(pipe, **one, **template) for one in edits]
        batch = [ticket.result()[0] for ticket in tickets]
        assert max(step.requests for step in engine.steps) == 2
    assert distance(batch[0], wanted) < 1e-4
    assert distance(batch[1], same) < 1e-4


class Counted:
    """Counts the calls of a pipeline's parts."""

    def __init__(self, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        for name in ("adapter", "image_encoder"):
            part = getattr(pipe, name)
            monkeypatch.setattr(part, "forward", self._counting(name, part.forward))

    def _counting(self, name: str, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return original(*args, **kwargs)

        return forward


@pytest.fixture
def counted(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return Counted(compiled, monkeypatch).calls


def test_requests_of_a_batch_are_diffusers_and_share_what_is_encoded(
    pipe: Any, original: Any, counted: Counter[str]
) -> None:
    """Two requests are shown the same picture, a third another; all have one control picture."""
    shown = (0, 1, 0)
    wanted = [latents(original, **call(seed, one)) for seed, one in enumerate(shown)]
    pipe_call: dict[str, Any] = {"output_type": "latent", "return_dict": False}
    with maskfx.Engine(maskfx.BatchPolicy(patience=1.0)) as engine:
        first = engine.submit(pipe, **call(0, 0), **pipe_call).result()[0]
        tickets = [
            engine.submit(pipe, **call(seed, one), **pipe_call)
            for seed, one in list(enumerate(shown))[1:]
        ]
        found: list[Tensor] = [first, *(ticket.result()[0] for ticket in tickets)]
        assert max(step.requests for step in engine.steps) == 2
    for one, other in zip(found, wanted, strict=True):
        assert distance(one, other) < 1e-4
    assert counted == {"adapter": 1, "image_encoder": 2}


def test_without_a_cache_features_are_computed_once_per_request(
    pipe: Any, counted: Counter[str]
) -> None:
    with maskfx.Engine(remember=0) as engine:
        for _ in range(2):
            engine.submit(pipe, **call(0), output_type="latent").result()
    assert counted == {"adapter": 2, "image_encoder": 2}
