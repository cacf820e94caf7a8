"""Edits and generations: what reaches the frontend, and what comes back of it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maskfx.serve.config import Limits, ServeSettings
from maskfx.serve.request import RequestKind
from tests.serve.fake_frontend import CARD
from tests.serve.served import EDITED, MASK, PICTURE, Served, file, mask, picture, pixels_of, served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one


def result(server: Served, files=None, **data):
    response = server.edit(files, **data)
    assert response.status_code == 200, response.text
    said = response.json()["data"][0]
    return pixels_of(said["b64_json"]), server.frontend.asked[-1]


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_pixels_outside_the_mask_are_byte_identical(server: Served) -> None:
    made, asked = result(server, {"mask": MASK})
    assert np.array_equal(made[~EDITED], picture()[~EDITED])
    assert np.array_equal(made[EDITED], 255 - picture()[EDITED])
    assert asked.request.kind is RequestKind.EDIT
    assert asked.pictures.mask is not None
    assert np.array_equal(asked.pictures.mask, EDITED)


def test_sizes_that_the_model_cannot_are_worked_around(server: Served) -> None:
    original, where = picture(61, 45), mask(61, 45)[..., 3] == 0
    made, asked = result(server, {"image": file(original), "mask": file(mask(61, 45))})
    assert asked.pictures.images[0].shape == (40, 56, 3)
    assert asked.pictures.mask is not None
    assert asked.pictures.mask.shape == (40, 56)
    assert made.shape == original.shape
    assert np.array_equal(made[~where], original[~where])


def test_a_size_that_is_asked_for(server: Served) -> None:
    made, asked = result(server, {"mask": MASK}, size="32x24")
    assert made.shape == asked.pictures.images[0].shape == (24, 32, 3)
    assert asked.pictures.mask is not None
    assert np.array_equal(
        made[~asked.pictures.mask], asked.pictures.images[0][~asked.pictures.mask]
    )
    assert result(server, {"mask": MASK}, size="auto")[0].shape == (48, 64, 3)


def test_fields_reach_the_frontend(server: Served) -> None:
    _, asked = result(
        server,
        {"mask": MASK, "control_image": file(picture(32, 24, 5))},
        prompt="a red hat \N{TOP HAT}",
        seed=7,
        num_inference_steps=3,
        guidance_scale="2.5e0",
        strength="0.75",
        negative_prompt="blur",
        slo_ms=60_000,
        lora="ink",
        user="me",
        model="fake/model",
    )
    sent = asked.request
    assert (sent.prompt, sent.seed, sent.steps) == ("a red hat \N{TOP HAT}", 7, 3)
    assert (sent.guidance, sent.strength, sent.negative_prompt) == (2.5, 0.75, "blur")
    assert (sent.lora, sent.user) == ("ink", "me")
    assert sent.seconds is not None
    assert 55 < sent.seconds < 60
    waited = server.frontend.waited[-1]  # at most until the deadline, while a model loads
    assert waited is not None
    assert 55 < waited <= 60
    (control,) = asked.pictures.controls
    assert control.shape == (48, 64, 3)


def test_n_pictures_are_n_requests_with_seeds_in_a_row(server: Served) -> None:
    response = server.edit({"mask": MASK}, n=3, seed=40)
    assert [one["maskfx"]["seed"] for one in response.json()["data"]] == [40, 41, 42]
    requests = server.frontend.asked[-3:]
    assert sorted(one.request.seed for one in requests) == [40, 41, 42]
    assert len({one.request.id for one in requests}) == 3


def test_a_seed_is_chosen_and_told(server: Served) -> None:
    seeds = []
    for _ in range(2):
        response = server.edit()
        seeds.append(response.json()["data"][0]["maskfx"]["seed"])
        assert server.frontend.asked[-1].request.seed == seeds[-1]
    assert seeds[0] != seeds[1]


def test_what_a_mask_means(server: Served) -> None:
    white = np.where(EDITED, 255, 0).astype(np.uint8)
    own = np.dstack([picture(), mask()[..., 3]])
    for files, data in (
        ({"mask": MASK}, {}),
        ({"mask": MASK}, {"mask_mode": "alpha"}),
        ({"mask": file(white)}, {"mask_mode": "luminance"}),
        ({"mask_image": file(white)}, {}),
        ({"mask_image": file(white)}, {"mask_mode": "luminance"}),
        ({"image": file(own)}, {}),
        ({"image": file(np.dstack([picture(), 255 - mask()[..., 3]])), "mask": MASK}, {}),
    ):
        _, asked = result(server, files, **data)
        assert asked.pictures.mask is not None, (files.keys(), data)
        assert np.array_equal(asked.pictures.mask, EDITED), (files.keys(), data)


def test_no_mask_and_a_mask_of_everything(server: Served) -> None:
    opaque = np.dstack([picture(), np.full((48, 64), 255, np.uint8)])
    for files in ({}, {"image": file(opaque)}):
        made, asked = result(server, files)
        assert asked.pictures.mask is None
        assert np.array_equal(made, 255 - picture())
    made, asked = result(server, {"mask": file(np.zeros((48, 64, 4), np.uint8))})
    assert asked.pictures.mask is not None
    assert asked.pictures.mask.all()
    assert np.array_equal(made, 255 - picture())


def test_masks_are_compared_upright(server: Served) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    made, asked = result(
        server, {"image": file(picture(), exif=exif), "mask": file(mask(48, 64, (4, 4, 20, 20)))}
    )
    assert asked.pictures.images[0].shape == made.shape == (64, 48, 3)
    assert server.edit({"image": file(picture(), exif=exif), "mask": MASK}).status_code == 400


def test_several_images_and_their_other_name(server: Served) -> None:
    _, asked = result(server, {"image": None, "image[]": [PICTURE, file(picture(seed=3))]})
    assert len(asked.pictures.images) == 2
    assert np.array_equal(asked.pictures.images[1], picture(seed=3))


def test_references_are_fitted_without_distortion(server: Served) -> None:
    tall = np.zeros((90, 30, 3), np.uint8)
    tall[:, 10:20] = 200
    _, asked = result(server, {"image": None, "image[]": [PICTURE, file(tall)]})
    edited, reference = asked.pictures.images
    assert np.array_equal(edited, picture())
    assert reference.shape == (48, 64, 3)
    bright = (reference[..., 0] > 100).sum(axis=1)
    assert ((bright >= 4) & (bright <= 7)).all(), "a third of 16 pixels, as 30 of 90 are of 48"
    assert (reference[:, :24] < 50).all(), "edges are repeated to the left"
    assert (reference[:, 40:] < 50).all(), "and to the right"


def test_a_size_of_other_proportions_is_refused(server: Served) -> None:
    for size, seen in (("64x64", "64x48"), ("48x48", "48x32"), ("16x40", "16x16")):
        response = server.edit({"mask": MASK}, size=size)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (
            400,
            "invalid_value",
            "size",
        )
        assert "64x48" in error["message"]
        assert f"send {seen} or auto" in error["message"]
    assert result(server, {"mask": MASK}, size="128x96")[0].shape == (96, 128, 3)
    odd = {"image": file(picture(61, 45)), "mask": file(mask(61, 45))}
    assert result(server, odd, size="64x48")[0].shape == (48, 64, 3)  # up to the multiple of 8


def test_control_images_are_fitted_and_those_of_other_proportions_refused(server: Served) -> None:
    def generated(control: bytes, **more: Any) -> Any:
        asks = {"prompt": "x", "control_image": url(control), **more}
        with server.client() as client:
            return client.post("/v1/images/generations", json=asks)

    half = file(picture(32, 24, 5))
    for size, shape in (("auto", (48, 64, 3)), ("128x96", (96, 128, 3))):
        assert generated(half, size=size).status_code == 200
        (control,) = server.frontend.asked[-1].pictures.controls
        assert control.shape == shape
    before = len(server.frontend.asked)
    for refused in (
        generated(half, size="64x64"),
        server.edit({"control_image": file(picture(48, 48))}),
    ):
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "control_image")
        assert "of the proportions of the picture, 64x" in error["message"]
    assert len(server.frontend.asked) == before


def test_ip_adapters_are_shown_pictures_as_they_are() -> None:
    """Of any size, in a form or in JSON; wrong numbers are refused before a worker sees them."""
    first, second = picture(20, 30, 5), picture(90, 10, 6)
    takes = CARD.takes | {"ip_adapters", "ip_scale"}
    card = replace(CARD, ip_adapters=("face", "style"), takes=takes)
    with served(cards=(card,)) as server, server.client() as client:
        edited = server.edit(
            {"mask": MASK, "ip_adapter_image": [file(first), file(second)]},
            ip_adapter="style,face:0.3",
            ip_adapter_scale="0.5",
        )
        assert edited.status_code == 200, edited.text
        asks: dict[str, Any] = {"prompt": "x", "ip_adapter_image": url(file(first))}
        said = client.post("/v1/images/generations", json={**asks, "ip_adapter": "face"})
        assert said.status_code == 200, said.text
        edit, made = server.frontend.asked
        assert (edit.request.ip_adapters, edit.request.ip_scale) == ("style,face:0.3", [0.5])
        for shown, wanted in (
            (edit.pictures.shown, (first, second)),
            (made.pictures.shown, (first,)),
        ):
            assert all(map(np.array_equal, shown, wanted))
            assert len(shown) == len(wanted)
        assert client.get("/v1/models").json()["data"][0]["maskfx"]["ip_adapters"] == [
            "face",
            "style",
        ]
        wrong: list[tuple[dict[str, Any], str, str]] = [
            ({"ip_adapter": "nose"}, "ip_adapter", "'nose' isn't one of face, style"),
            ({"ip_adapter": "face:11"}, "ip_adapter", "NAME or NAME:SCALE"),
            ({}, "ip_adapter_image", "given 2 times, once per IP-Adapter"),
            (
                {"ip_adapter_scale": 1, "ip_adapter": "none", "ip_adapter_image": None},
                "ip_adapter_scale",
                "left out, as the request uses no IP-Adapter; it has 1.",
            ),
            (
                {"ip_adapter": "face", "ip_adapter_image": url(file(picture(65, 2)))},
                "ip_adapter_image",
                "at most 32 times as long as wide, not 65x2.",
            ),
            ({"ip_adapter_image": None, "ip_adapter": "face"}, "ip_adapter_image", "needs a pictu"),
            ({"ip_adapter": "face", "ip_adapter_scale": [1, 2]}, "ip_adapter_scale", "one number"),
        ]
        for more, param, message in wrong:
            error = client.post("/v1/images/generations", json={**asks, **more}).json()["error"]
            assert error["param"] == param
            assert message in error["message"]
        template = {"image": url(PICTURE), "ip_adapter_image": url(PICTURE)}
        error = client.post("/v1/templates", json=template).json()["error"]
        assert (error["code"], error["param"]) == ("unknown_parameter", "ip_adapter_image")
    assert len(server.frontend.asked) == 2


def test_each_controlnet_gets_a_control_image_and_a_scale() -> None:
    """They may be repeated, or in JSON a list; one that is no list is the only one."""
    first, second = picture(seed=5), picture(seed=6)
    asks: dict[str, Any] = {"prompt": "x", "control_image": [url(file(first)), url(file(second))]}
    scale = "controlnet_conditioning_scale"
    with (
        served(cards=(replace(CARD, controls=2, takes=CARD.takes | {"control_scale"}),)) as server,
        server.client() as client,
    ):
        parts: list[Any] = [("control_image", ("x.png", file(one))) for one in (first, second)]
        parts += [(scale, (None, one)) for one in (b"0.5", b"1")]
        parts += [("image", ("x.png", PICTURE)), ("prompt", (None, b"x"))]
        edited = client.post("/v1/images/edits", files=parts)
        assert edited.status_code == 200, edited.text
        scales: list[Any] = [([0.5, 1], [0.5, 1.0]), (2, [2.0]), (None, None)]
        for given, wanted in scales:
            said = client.post("/v1/images/generations", json={**asks, scale: given})
            assert said.status_code == 200, said.text
            assert server.frontend.asked[-1].request.control_scale == wanted
        for asked in server.frontend.asked:
            assert np.array_equal(asked.pictures.controls, [first, second])
        assert server.frontend.asked[0].request.control_scale == [0.5, 1.0]
        template = client.post("/v1/templates", json={**asks, "image": url(PICTURE)})
        assert template.status_code == 200, template.text
        assert len(server.frontend.asked[-1].pictures.controls) == 2
        assert client.get("/v1/models").json()["data"][0]["maskfx"]["controls"] == 2

        wrong: list[tuple[str, Any, str]] = [
            ("control_image", asks["control_image"][:1], "given 2 times, once for each"),
            ("control_image", asks["control_image"][0], "that the request uses, not 1 times."),
            ("control_image", asks["control_image"] * 2, "not 4 times."),
            ("control_image", asks["control_image"] * 9, "at most 16 times, not 18."),
            (scale, [1, 1, 1], "one number, or one for each of 2 control images; it has 3."),
            (scale, [], "given 1 to 16 times"),
            (scale, [1, "x"], "a number from 0, at most 10, not 'x'."),
            (scale, -1, "a number from 0, at most 10, not -1"),
        ]
        for field, given, message in wrong:
            refused = client.post("/v1/images/generations", json={**asks, field: given})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, field)
            assert error["code"] == "invalid_value"
            assert message in error["message"]


def test_data_urls_are_files(server: Served) -> None:
    _, asked = result(server, {"image": url(PICTURE).encode(), "mask": url(MASK).encode()})
    assert np.array_equal(asked.pictures.images[0], picture())
    assert asked.pictures.mask is not None


@pytest.mark.parametrize("form", ["jpeg", "webp", "png"])
def test_output_formats(server: Served, form: str) -> None:
    response = server.edit({"mask": MASK}, output_format=form)
    said = response.json()
    assert said["output_format"] == form
    data = base64.b64decode(said["data"][0]["b64_json"])
    assert Image.open(io.BytesIO(data)).format == form.upper()
    if form != "png":
        worse = server.edit({"mask": MASK}, output_format=form, output_compression=5).json()
        assert len(worse["data"][0]["b64_json"]) < len(said["data"][0]["b64_json"]) / 2


def test_what_is_done_anyway_may_be_asked_for(server: Served) -> None:
    asked = {"quality": "auto", "background": "opaque", "moderation": "low"}
    response = server.edit({"mask": MASK}, **asked)
    assert response.status_code == 200, response.text
    assert response.json()["background"] == "opaque"


def test_the_steps_of_a_whole_picture_are_chosen(server: Served) -> None:
    """In an edit with a mask the server's quality decides."""
    for quality in ("half-steps", "all-steps", "auto"):
        assert result(server, quality=quality)[1].request.quality == quality
    refused = server.edit({"mask": MASK}, quality="half-steps")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "quality"
    assert "auto, or left out, in an edit with a mask" in refused.json()["error"]["message"]


def test_generations(server: Served) -> None:
    with server.client() as client:
        asks = {"prompt": "a hill", "n": 2, "seed": 9, "size": "32x16", "user": None}
        said = client.post("/v1/images/generations", json=asks).json()
        parts = {name: (None, str(value)) for name, value in asks.items() if value is not None}
        again = client.post("/v1/images/generations", files=parts).json()
    assert [pixels_of(one["b64_json"])[0, 0, 0] for one in said["data"]] == [9, 10]
    assert again["data"] == said["data"]
    assert said["size"] == "32x16"
    assert server.frontend.asked[-1].request.kind is RequestKind.GENERATE


def test_templates_are_a_resource(server: Served) -> None:
    with server.client() as client:
        made = client.post(
            "/v1/templates", files={"image": PICTURE}, data={"id": "shoe", "prompt": "a shoe"}
        )
        assert made.status_code == 200, made.text
        assert (made.json()["id"], made.json()["width"]) == ("shoe", 64)
        assert server.frontend.asked[-1].request.kind is RequestKind.RECORD
        unnamed = client.post("/v1/templates", json={"image": url(PICTURE)}).json()["id"]
        listed = client.get("/v1/templates").json()["data"]
        assert {one["id"] for one in listed} == {"shoe", unnamed}
        assert listed[0]["bytes"] == {"host": 10}
        assert client.get("/v1/templates/shoe").json()["height"] == 48

        kept, asked = result(server, {"image": None, "mask": MASK}, template_id="shoe")
        assert asked.request.template == "shoe"
        assert np.array_equal(kept[~EDITED], picture()[~EDITED])
        assert result(server, {"mask": MASK}, template_id="shoe")[1].request.template == "shoe"
        other = server.edit({"image": file(picture(seed=9)), "mask": MASK}, template_id="shoe")
        assert (other.status_code, other.json()["error"]["param"]) == (400, "image")

        assert client.delete("/v1/templates/shoe").json()["deleted"] is True
        assert client.get("/v1/templates/shoe").status_code == 404
        assert client.delete("/v1/templates/shoe").status_code == 404
        gone = server.edit({"image": None, "mask": MASK}, template_id="shoe")
        assert gone.json()["error"]["code"] == "template_not_found"


def test_templates_take_control_images_and_no_mask(server: Served) -> None:
    clear = file(np.dstack([picture(), mask()[..., 3]]))
    opaque = file(np.dstack([picture(), np.full(picture().shape[:2], 255, np.uint8)]))
    with server.client() as client:
        for name in ("mask", "mask_image"):
            refused = client.post("/v1/templates", files={"image": PICTURE, name: MASK})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == name
        for image in (clear, opaque):
            assert client.post("/v1/templates", files={"image": image}).status_code == 200
            assert server.frontend.asked[-1].pictures.mask is None
        body = {"image": url(PICTURE), "control_image": url(PICTURE)}
        assert client.post("/v1/templates", json=body).status_code == 200
        asked = server.frontend.asked[-1]
        assert np.array_equal(asked.pictures.controls, [picture()])


def test_a_template_is_recorded_later_without_a_name(server: Served) -> None:
    with server.client() as client:
        idle = {"record_at": "idle", "num_inference_steps": "3"}
        answer = client.post("/v1/templates", files={"image": PICTURE}, data=idle)
        assert answer.status_code == 202
        assert answer.json() == {"object": "template.recording", "record_at": "idle"}
        asked = server.frontend.asked[-1].request
        assert (asked.kind, asked.template, asked.steps) == (RequestKind.AHEAD, None, 3)
        assert asked.user == "127.0.0.1"
        client.post("/v1/templates", files={"image": PICTURE}, data={**idle, "user": "ada"})
        assert server.frontend.asked[-1].request.user == "ada"
        named = client.post("/v1/templates", files={"image": PICTURE}, data={**idle, "id": "x"})
        assert (named.status_code, named.json()["error"]["param"]) == (400, "id")
        now = client.post("/v1/templates", files={"image": PICTURE}, data={"record_at": "now"})
        assert now.status_code == 200
        assert server.frontend.asked[-1].request.kind is RequestKind.RECORD


def test_streams_tell_previews_then_the_result(server: Served) -> None:
    asks = {"prompt": "x", "stream": "true", "partial_images": "2", "n": "2", "seed": "5"}
    with server.client() as client:
        response = client.post(
            "/v1/images/edits", files={"image": PICTURE, "mask": MASK}, data=asks
        )
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in response.text.strip().split("\n\n")]
    events = [(one[0].removeprefix("event: "), json.loads(one[1][6:])) for one in blocks]
    assert all(name == said["type"] for name, said in events)
    for index in (0, 1):
        own = [said for _, said in events if said["index"] == index]
        assert [one.get("partial_image_index") for one in own] == [0, 1, None]
        assert own[-1]["type"] == "image_edit.completed"
        assert own[-1]["maskfx"]["seed"] == 5 + index
        assert own[-1]["usage"]["total_tokens"] > 0
        shown = pixels_of(own[0]["b64_json"])
        assert np.array_equal(shown[~EDITED], picture()[~EDITED])


def test_urls_as_results_where_they_are_enabled() -> None:
    settings = ServeSettings(codecs=1, limits=Limits(urls=True))
    with served(settings) as server:
        said = server.edit({"mask": MASK}, response_format="url").json()["data"][0]
        assert "b64_json" not in said
        head, _, data = said["url"].partition(",")
        assert head == "data:image/png;base64"
        assert pixels_of(data).shape == (48, 64, 3)


def test_a_model_is_given_only_what_it_takes() -> None:
    plain = replace(CARD, name="plain", takes=frozenset({"image"}), generates=False)
    own = file(np.dstack([picture(), mask()[..., 3]]))
    with served(cards=(plain, CARD)) as server:
        for files, data, param in (
            ({"mask": MASK}, {}, "mask"),
            ({}, {"strength": 0.5}, "strength"),
            ({}, {"guidance_scale": 2}, "guidance_scale"),
            ({}, {"negative_prompt": "x"}, "negative_prompt"),
            ({}, {"lora": "ink"}, "lora"),
            ({}, {"control": "late"}, "control"),
            ({}, {"parallel": "late"}, "parallel"),
            ({}, {"seed": 3}, "seed"),
            ({}, {"num_inference_steps": 3}, "num_inference_steps"),
            ({"control_image": PICTURE}, {}, "control_image"),
            ({"ip_adapter_image": PICTURE}, {}, "ip_adapter_image"),
            ({}, {"ip_adapter": "face"}, "ip_adapter"),
            ({}, {"ip_adapter_scale": 0.5}, "ip_adapter_scale"),
            ({"image": [PICTURE, PICTURE]}, {}, "image"),
            ({"image": own}, {}, "image"),
        ):
            response = server.edit(files, **data)
            error = response.json()["error"]
            assert response.status_code == 400
            assert (error["code"], error["param"]) == ("unsupported_parameter", param)
            assert "plain" in error["message"]
            assert "accepts" in error["message"]
        assert server.frontend.asked == []
        assert server.edit({"mask": MASK}, model="fake/model").status_code == 200
        [own] = server.edit({}, model="plain").json()["data"]
        assert "seed" not in own["maskfx"], "none that could be sent back"
        with server.client() as client:
            for path, asked in (
                ("images/generations", {"prompt": "x"}),
                ("templates", {"image": url(PICTURE)}),
            ):
                refused = client.post(f"/v1/{path}", json=asked)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
