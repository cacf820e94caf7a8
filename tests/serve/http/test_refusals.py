"""Whatever is wrong with a call is reported by code and field, and reaches no worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from maskfx.serve.config import Limits, ServeSettings
from maskfx.serve.errors import CODES
from tests.serve.codecs.test_sniff import bomb, text_bomb
from tests.serve.served import MASK, PICTURE, Served, file, mask, picture, served, until

SMALL = Limits(mask_bytes=40_000, body_bytes=200_000, prompt=100)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(ServeSettings(codecs=1, limits=SMALL)) as one:
        yield one


@pytest.fixture(autouse=True)
def reaches_nobody(server: Served) -> Iterator[None]:
    server.frontend.asked.clear()
    yield
    assert server.frontend.asked == []
    until(lambda: server.frontend.seats == 0)  # a seat is left after the answer


def check(response: httpx.Response, code: str, param: str | None) -> None:
    said = response.json()
    assert set(said) == {"error"}
    error = said["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error["message"]
    assert response.status_code == CODES[code][0]
    assert len(response.headers["x-request-id"]) == 32
    assert response.headers["content-type"] == "application/json"
    for private in ("Traceback", "/work", "maskfx/", ".py"):
        assert private not in error["message"]


BAD_NUMBERS = ["NaN", "inf", "-inf", "1e309", "-1", "abc", "", "1_0", "0x1", "\u0661", "1" * 400]
NUMBERS = ["n", "seed", "num_inference_steps", "guidance_scale", "strength", "slo_ms"]
NUMBERS += ["partial_images", "output_compression"]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_in_forms(server: Served, name: str) -> None:
    for value in BAD_NUMBERS:
        check(server.edit(**{name: value}), "invalid_value", name)


def test_numbers_in_json(server: Served) -> None:
    with server.client() as client:
        for name in sorted(set(NUMBERS) - {"strength"}):
            for value in ("NaN", "Infinity", "1e309", "-1", '"5"', "true", "[]", "1" * 400):
                body = f'{{"prompt": "x", "{name}": {value}}}'
                response = client.post(
                    "/v1/images/generations",
                    content=body,
                    headers={"content-type": "application/json"},
                )
                check(response, "invalid_value", name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 5),
        ("n", 0),
        ("num_inference_steps", 201),
        ("num_inference_steps", 2.5),
        ("guidance_scale", 101),
        ("strength", 0),
        ("strength", 1.01),
        ("seed", 2**63),
        ("partial_images", 4),
        ("size", "64"),
        ("size", "60x48"),
        ("size", "0x0"),
        ("size", "99999x99999"),
        ("size", "64x48\n"),
        ("prompt", "x" * 101),
        ("stream", "maybe"),
        ("mask_mode", "guess"),
        ("mask_mode", "luminance"),
        ("output_format", "gif"),
        ("response_format", "url"),
        ("quality", "high"),
        ("background", "transparent"),
        ("moderation", "none"),
        ("user", "x" * 257),
        ("template_id", "../x"),
        ("lora", "x.safetensors/.."),
        ("model", "/etc/passwd"),
    ],
)
def test_values_out_of_range(server: Served, name: str, value: Any) -> None:
    check(server.edit(**{name: value}), "invalid_value", name)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"wibble": "1"}, "unknown_parameter", "wibble"),
        ({"prompt[]": "1"}, "unknown_parameter", "prompt[]"),
        ({"input_fidelity": "high"}, "unsupported_parameter", "input_fidelity"),
        ({"style": "vivid"}, "unsupported_parameter", "style"),
        ({"output_compression": "50"}, "unsupported_parameter", "output_compression"),
        ({"partial_images": "1"}, "unsupported_parameter", "partial_images"),
        ({"prompt": None}, "missing_parameter", "prompt"),
        ({"model": "none"}, "model_not_found", "model"),
        ({"lora": "none"}, "lora_not_found", "lora"),
        ({"template_id": "none"}, "template_not_found", "template_id"),
    ],
)
def test_fields_that_are_not_taken(server: Served, fields: Any, code: str, param: str) -> None:
    check(server.edit(**fields), code, param)


NAMES = [
    "../x",
    "..%2f..%2fetc",
    "%2e%2e",
    "a\0b",
    "/etc/passwd",
    "x" * 300,
    "",
    " ",
    "a/../b",
    ".x",
]


def test_names_are_on_an_allow_list(server: Served) -> None:
    for name in NAMES:
        for field in ("template_id", "lora", "model"):
            check(server.edit(**{field: name}), "invalid_value", field)
    with server.client() as client:
        for path in ("../x", "..%2f..%2fetc", "%2e%2e", "a%00b", "%2fetc%2fpasswd", "x" * 300):
            check(client.get(f"/v1/templates/{path}"), *not_found(path))
            check(client.delete(f"/v1/templates/{path}"), *not_found(path))


def not_found(path: str) -> tuple[str, str | None]:
    """httpx itself resolves plain dots, so that no template is asked for."""
    return ("not_found", None) if path == "../x" else ("template_not_found", "template_id")


def test_missing_and_repeated_pictures(server: Served) -> None:
    check(server.edit({"image": None}), "missing_parameter", "image")
    check(server.edit({"image": [PICTURE] * 5}), "invalid_value", "image")
    check(server.edit({"mask": [MASK, MASK]}), "invalid_value", "mask")
    check(server.edit({"mask": MASK, "mask_image": MASK}), "invalid_value", "mask_image")
    check(server.edit({"mask_image": MASK}, mask_mode="alpha"), "invalid_value", "mask_mode")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"II*\0" + bytes(99), "invalid_image_file"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'></svg>", "invalid_image_file"),
        (b"<!doctype html><html></html>", "invalid_image_file"),
        (b"", "invalid_image_file"),
        (PICTURE[:2000], "invalid_image_file"),
        (b"GIF89a" + bytes(99), "unsupported_image"),
        (text_bomb(20 << 20), "unsupported_image"),
        (text_bomb(20 << 20, b"iTXt"), "unsupported_image"),
        (bomb(13_000, 13_000), "image_too_large"),
        (bomb(2048, 2049), "image_too_large"),
        (b"http://169.254.169.254/latest/meta-data", "url_input_disabled"),
        (b"https://example.com/x.png", "url_input_disabled"),
        (b"file:///etc/passwd", "url_input_disabled"),
        (b"  FTP://x/y", "url_input_disabled"),
        (b"data:image/png,abc", "invalid_image_file"),
        (b"data:image/png;base64,####", "invalid_image_file"),
        (b"data:image/png;base64,aGVsbG8=", "invalid_image_file"),
    ],
)
def test_pictures_that_are_none(server: Served, data: bytes, code: str) -> None:
    check(server.edit({"image": data}), code, "image")
    check(server.edit({"mask": data}), code, "mask")
    check(server.edit({"control_image": data}), code, "control_image")


def test_masks_that_fit_nothing(server: Served) -> None:
    opaque = file(np.full((48, 64, 4), 255, np.uint8))
    black = file(np.zeros((48, 64), np.uint8))
    check(server.edit({"mask": file(mask(48, 64))}), "mask_size_mismatch", "mask")
    check(server.edit({"mask_image": file(mask(48, 64))}), "mask_size_mismatch", "mask_image")
    check(server.edit({"mask": file(picture())}), "mask_missing_alpha", "mask")
    check(server.edit({"mask": opaque}), "mask_empty", "mask")
    check(server.edit({"mask_image": black}), "mask_empty", "mask_image")
    for field, file_, todo in (("mask", opaque, "transparent"), ("mask_image", black, "white")):
        assert f"some of it {todo}." in server.edit({field: file_}).json()["error"]["message"]


def test_sizes_of_bodies_and_fields(server: Served) -> None:
    check(server.edit({"mask": bytes(50_000)}), "payload_too_large", "mask")
    check(server.edit({"image": bytes(300_000)}), "payload_too_large", None)
    with server.client() as client:
        for name, code in (("wibble", "unknown_parameter"), ("image", "too_many_fields")):
            many = [(name, ("x.png", b"x"))] * 1200
            check(client.post("/v1/images/edits", files=many), code, name)


def test_too_many_values_are_not_even_read(server: Served) -> None:
    many = b'{"prompt": [' + b"{}," * 40_000 + b"0]}"
    commas = json.dumps({"prompt": "," * 90, "wibble": 1}).encode()
    with server.client() as client:
        for body, code, param in (
            (many, "too_many_fields", "body"),
            (commas, "unknown_parameter", "wibble"),
        ):
            response = client.post(
                "/v1/images/generations", content=body, headers={"content-type": "application/json"}
            )
            check(response, code, param)


@pytest.mark.parametrize("form", ["webp", "jpeg"])
def test_sides_that_a_format_cannot_write(server: Served, form: str) -> None:
    sides = {"webp": (16, 16_384), "jpeg": (16, 65_504)}[form]
    wide = file(np.zeros((*sides, 3), np.uint8))
    check(server.edit({"image": wide}, output_format=form), "invalid_value", "output_format")


@pytest.mark.parametrize(
    ("kind", "body", "code", "param"),
    [
        ("application/json", b"{}", "unsupported_media_type", "Content-Type"),
        ("text/plain", b"x", "unsupported_media_type", "Content-Type"),
        ("multipart/mixed; boundary=x", b"--x--", "unsupported_media_type", "Content-Type"),
        (
            "application/x-www-form-urlencoded",
            b"prompt=x",
            "unsupported_media_type",
            "Content-Type",
        ),
        ("multipart/form-data", b"--x--", "malformed_body", "body"),
        ("multipart/form-data; boundary=x", b"", "malformed_body", "body"),
        ("multipart/form-data; boundary=x", b"nonsense", "malformed_body", "body"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nabc\r\n--x--", "malformed_body", "body"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nabc',
            "malformed_body",
            "body",
        ),
        ("multipart/form-data; boundary=x", b"--x--\r\n", "missing_parameter", "image"),
    ],
)
def test_malformed_forms(server: Served, kind: str, body: bytes, code: str, param: str) -> None:
    with server.client() as client:
        response = client.post("/v1/images/edits", content=body, headers={"content-type": kind})
    if param == "image":
        param = "prompt" if response.json()["error"]["param"] == "prompt" else "image"
    check(response, code, param)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "malformed_body", "body"),
        (b"{", "malformed_body", "body"),
        (b"[]", "malformed_body", "body"),
        (b"null", "malformed_body", "body"),
        (b"\xff\xfe{}", "malformed_body", "body"),
        (b"[" * 100_000, "too_many_fields", "body"),
        (b"{}", "missing_parameter", "prompt"),
        (b'{"prompt": null}', "invalid_value", "prompt"),
        (b'{"prompt": 5}', "invalid_value", "prompt"),
        (b'{"prompt": "\\ud800"}', "invalid_value", "prompt"),
        (b'{"prompt": "x", "prompt": "y"}', "invalid_value", "prompt"),
        (b'{"prompt": "x", "\\ud800": 1}', "unknown_parameter", "?"),
        (b'{"prompt": "x", "mask": "y"}', "unknown_parameter", "mask"),
        (b'{"prompt": "x", "control_image": "http://x/"}', "url_input_disabled", "control_image"),
    ],
)
def test_malformed_json(server: Served, body: bytes, code: str, param: str) -> None:
    with server.client() as client:
        headers = {"content-type": "application/json"}
        check(client.post("/v1/images/generations", content=body, headers=headers), code, param)


def test_templates_are_checked_as_well(server: Served) -> None:
    with server.client() as client:
        check(client.post("/v1/templates", json={}), "missing_parameter", "image")
        bad = {"image": "https://example.com/x.png"}
        check(client.post("/v1/templates", json=bad), "url_input_disabled", "image")
        bad = {"image": "x", "id": "../x"}
        check(client.post("/v1/templates", json=bad), "invalid_value", "id")
        bad = {"image": "x", "n": "2"}
        check(client.post("/v1/templates", json=bad), "unknown_parameter", "n")
        check(client.post("/v1/templates", json={"image": "plain"}), "invalid_image_file", "image")


def test_routes_and_methods(server: Served) -> None:
    with server.client() as client:
        check(client.get("/nowhere"), "not_found", None)
        check(client.post("/v1/nowhere", json={}), "not_found", None)
        response = client.get("/v1/images/edits")
        check(response, "method_not_allowed", None)
        assert response.headers["allow"] == "POST"
        check(client.request("PUT", "/v1/templates"), "method_not_allowed", None)
        check(client.get("/v1/models/none"), "model_not_found", "model")


def test_what_nobody_expected_tells_nothing(server: Served) -> None:
    def broken() -> Any:
        raise RuntimeError("/home/secret is full")

    health = server.frontend.health
    server.frontend.health = broken  # type: ignore[method-assign]
    try:
        with server.client() as client:
            response = client.get("/health")
    finally:
        server.frontend.health = health  # type: ignore[method-assign]
    check(response, "internal_error", None)
    assert "secret" not in json.dumps(response.json())
