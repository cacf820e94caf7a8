"""Every route but health needs the key."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from maskfx.serve.config import ServeSettings
from tests.serve.served import Served, served

KEY = "sk-\N{KEY}"  # its bytes count
ROUTES = ["/", "/metrics", "/version", "/openapi.json", "/v1/models", "/v1/templates", "/nowhere"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pages = tmp_path_factory.mktemp("page")
    (Path(pages) / "index.html").write_text("<!doctype html>")
    settings = ServeSettings(codecs=1, api_key=KEY)
    with served(settings, pages=pages) as one:
        yield one


def bearer(key: str) -> bytes:
    return b"Bearer " + key.encode()


def basic(key: str) -> bytes:
    return b"Basic " + base64.b64encode(b"me:" + key.encode())


@pytest.mark.parametrize("given", [None, b"", bearer("x"), b"Bearer", basic(""), basic("x")])
def test_no_key_and_wrong_keys(server: Served, given: bytes | None) -> None:
    headers = {} if given is None else {b"authorization": given}
    with server.client() as client:
        for path in ROUTES:
            response = client.get(path, headers=headers)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            challenge = "Basic" if path == "/" else "Bearer"
            assert response.headers["www-authenticate"].startswith(challenge)
        for path in ("/v1/images/edits", "/v1/images/generations", "/v1/templates"):
            assert client.post(path, content=b"x", headers=headers).status_code == 401
        for path in ("/health", "/health/live", "/health/ready"):
            assert client.get(path, headers=headers).status_code == 200
    assert server.frontend.seats == 0


def test_the_key_opens_everything(server: Served) -> None:
    with server.client() as client:
        for given in (bearer(KEY), b"bearer " + KEY.encode(), basic(KEY)):
            for path in ROUTES[:-1]:
                assert client.get(path, headers={b"authorization": given}).status_code == 200, path


def test_a_browsers_password_counts_only_for_the_page_itself(server: Served) -> None:
    with server.client() as client:
        for site, status in (("same-origin", 200), ("none", 200), ("cross-site", 401)):
            headers = {b"authorization": basic(KEY), b"sec-fetch-site": site.encode()}
            assert client.get("/v1/models", headers=headers).status_code == status
