"""Whole pictures extrapolate steps by the quality of the request or the setting of the server."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import numpy as np
import pytest

from maskfx.pipelines.quality import NAMED
from maskfx.runtime.reuse.step_selection import WHOLE
from maskfx.serve.config import ServeSettings
from maskfx.serve.models.model import Made
from maskfx.serve.request import Pictures, Request
from tests.factories.served import Served, build, job, picture
from tests.serve.launched import served as launched

NAME, STEPS = "StableDiffusion3InpaintPipeline", 12
COMPUTED = {"all-steps": 12, "half-steps": 7, "third-steps": 6, "fifth-steps": 4}
WHOLE_EDIT = Pictures((picture(3),))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served(build(NAME), max_num_seqs=2)
    yield made
    made.model.close()


def made(served: Served, what: Pictures, quality: str | None, seed: int = 3) -> tuple[Made, int]:
    """What the job returns, and the number of steps that were computed."""
    served.told.steps.clear()
    kind = "edit" if what.images else "generate"
    more: dict[str, Any] = {"strength": 1.0} if what.images else {}
    found = served.made(job(kind=kind, seed=seed, steps=STEPS, quality=quality, **more), what)
    return found, len(served.told.steps)


def test_each_place_has_the_same_names() -> None:
    field = get_type_hints(Request)["quality"]
    assert set(get_args(get_args(field)[0])) == {"auto", *WHOLE}
    assert set(get_args(ServeSettings.model_fields["whole_quality"].annotation)) == set(WHOLE)
    assert WHOLE.keys() <= NAMED.keys()


@pytest.mark.parametrize("what", [Pictures(), WHOLE_EDIT], ids=["generation", "edit"])
def test_a_request_chooses_how_many_steps_are_computed(served: Served, what: Pictures) -> None:
    usual, _ = made(served, what, None)
    found = {name: made(served, what, name) for name in ("auto", *WHOLE)}
    assert {name: count for name, (_, count) in found.items()} == COMPUTED | {"auto": STEPS}
    pixels = {name: one.pixels for name, (one, _) in found.items()}
    assert usual.pixels is not None
    for name in ("auto", "all-steps"):
        assert np.abs(pixels[name].astype(int) - usual.pixels).max() <= 1  # type: ignore[union-attr]
    errors = [np.abs(pixels[name].astype(int) - usual.pixels).mean() for name in list(WHOLE)[1:]]  # type: ignore[union-attr]
    assert 0 < errors[0] < errors[-1]


def test_the_servers_setting_holds_unless_a_request_chooses() -> None:
    own = Served(build(NAME), max_num_seqs=2, whole_quality="half-steps")
    try:
        assert own.model.ready().whole == "half-steps"
        counts = [made(own, Pictures(), quality)[1] for quality in (None, "auto", "all-steps")]
        assert counts == [COMPUTED["half-steps"]] * 2 + [STEPS]
    finally:
        own.model.close()


@pytest.mark.slow
def test_a_client_of_the_server_chooses(tmp_path: Path) -> None:
    build("StableDiffusionPipeline").save_pretrained(tmp_path)
    with (
        launched(300, model=str(tmp_path), max_num_seqs=2) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):

        def steps() -> int:
            time.sleep(1.5)  # a heartbeat with the counts
            found = re.findall(r"maskfx_steps_total\{.*\} ([0-9.]+)", client.get("/metrics").text)
            return round(sum(map(float, found)))

        body = {"prompt": "a cat", "seed": 1, "num_inference_steps": STEPS}
        counts = [steps()]
        pictures = []
        for quality in (None, "all-steps", "half-steps", "fifth-steps"):
            answer = client.post("/v1/images/generations", json=body | {"quality": quality})
            assert answer.status_code == 200, answer.text
            pictures.append(answer.json()["data"][0]["b64_json"])
            counts.append(steps())
        assert pictures[0] == pictures[1] != pictures[2] != pictures[3]
        assert np.diff(counts).tolist() == [
            STEPS,
            *(COMPUTED[name] for name in ("all-steps", "half-steps", "fifth-steps")),
        ]
