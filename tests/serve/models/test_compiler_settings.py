"""Settings of the server that reach the compiler and the templates: each acts, or is refused."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from maskfx.errors import InputError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.runtime.backends import eager
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.serve.config import ServeSettings
from maskfx.serve.models import model_parts
from maskfx.serve.models.pipeline_model import PipelineModel
from maskfx.serve.request import Pixels
from tests.factories.served import Served, build, edit, job, picture, square
from tests.serve.launched import served as launched

NAME = "StableDiffusion3InpaintPipeline"


def edited(seed: int = 5, **settings: Any) -> tuple[Pixels, Served]:
    """What a model of these settings makes of one picture, and the model, which is closed."""
    made = Served(build(NAME), **settings)
    try:
        answer = made.made(job(seed=seed), edit(1))
    finally:
        made.model.close()
    assert answer.pixels is not None
    return answer.pixels, made


def apart(one: Pixels, other: Pixels) -> int:
    return int(np.abs(one.astype(int) - other).max())


def denoisers(served: Served) -> list[CompiledDenoiser]:
    return list(pipeline_state_of(served.model.family.main.pipe).denoisers.values())


def template_bytes(served: Served) -> int:
    return sum(served.model.tiers.counters().nbytes.values())


@pytest.fixture(scope="module")
def usual() -> tuple[Pixels, Served]:
    return edited()


def test_edits_multiply_with_packed_weights(
    usual: tuple[Pixels, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "WORTH", 64)  # the model is small
    found, served = edited(prepack=True)
    assert apart(found, usual[0]) <= 1
    packed, plain = (
        [one for d in denoisers(each) for one in d._executor.graphs.packed.values()]
        for each in (served, usual[1])
    )
    assert packed
    assert not plain
    room, of_two = (
        model_parts.packed_bytes_of(ServeSettings(prepack=True, ranks=count), build(NAME))
        for count in (1, 2)
    )
    assert 0 < sum(one.value.nbytes for one in packed) <= room
    assert of_two == 2 * room


def test_packed_weights_without_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "WORTH", 64)
    monkeypatch.setattr(model_parts, "free_memory", lambda device: 1000.0)
    with pytest.raises(InputError, match="prepack: .* beside .* 500 B of free memory"):
        PipelineModel(ServeSettings(prepack=True, workers=2), lambda event: None, build(NAME))


def test_templates_leave_room_for_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_parts, "free_memory", lambda device: 1000.0)
    assert model_parts.host_bytes_of(ServeSettings(workers=2), 100) == 200


@pytest.mark.slow
def test_edits_run_code_of_inductor(usual: tuple[Pixels, Served]) -> None:
    from maskfx.runtime.backends import inductor

    before = inductor.compiles
    found, _ = edited(inductor=True)
    assert inductor.compiles > before
    assert apart(found, usual[0]) <= 1


@pytest.mark.parametrize(("encoding", "share"), [("16bit", 0.8), ("8bit", 0.6)])
def test_templates_are_stored_in_fewer_bits(
    encoding: str, share: float, usual: tuple[Pixels, Served]
) -> None:
    found, served = edited(encoding=encoding)
    assert template_bytes(served) < share * template_bytes(usual[1])
    assert apart(found, usual[0]) < 16


def test_templates_of_another_encoding_are_not_read(tmp_path: Path) -> None:
    """The picture depends on the settings, not on which server recorded first."""
    alone, _ = edited(cache_dir=tmp_path / "alone")
    edited(cache_dir=tmp_path / "both", encoding="8bit")
    after, _ = edited(cache_dir=tmp_path / "both")
    assert np.array_equal(after, alone)


def test_templates_keep_one_of_keys_and_inputs(usual: tuple[Pixels, Served]) -> None:
    both, inputs = (edited(plans="on", keep=keep) for keep in ("both", "inputs"))
    assert template_bytes(inputs[1]) < template_bytes(both[1])
    for found, _ in (both, inputs):
        assert apart(found, usual[0]) <= 1


@pytest.mark.slow
def test_ranks_read_templates_in_fewer_bits(usual: tuple[Pixels, Served]) -> None:
    found, served = edited(ranks=2, encoding="8bit")
    assert template_bytes(served) < 0.6 * template_bytes(usual[1])
    assert apart(found, usual[0]) < 16


@pytest.mark.slow
def test_a_picture_of_a_server_with_packed_weights_is_the_same() -> None:
    """The shipped model, whose weights are large enough to be packed."""

    def answer(**settings: Any) -> Pixels:
        whole = Image.fromarray(picture(2, 256, 256))
        mask = Image.fromarray(np.uint8(255) * ~square(256, 256, 64, 160))
        whole.putalpha(mask)
        data = io.BytesIO()
        whole.save(data, "PNG")
        with launched(300, model="unet", **settings) as server:
            sent = httpx.post(
                f"{server.url}/v1/images/edits",
                data={"prompt": "a red circle", "seed": "3", "num_inference_steps": "6"},
                files={"image": data.getvalue()},
                timeout=300,
            )
        assert sent.status_code == 200, sent.text
        made = base64.b64decode(sent.json()["data"][0]["b64_json"])
        return np.asarray(Image.open(io.BytesIO(made)).convert("RGB"))

    plain, packed = answer(prepack=False), answer(prepack=True)
    assert apart(plain, packed) <= 1
