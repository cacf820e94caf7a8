"""Health, version, metrics, and the page's files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import maskfx
from maskfx.serve.request import Health, ModelState
from tests.serve.served import Served, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pages = Path(tmp_path_factory.mktemp("page"))
    (pages / "index.html").write_text("<!doctype html><title>page</title>")
    (pages / "page.css").write_text("body {}")
    (pages / "page.js").write_text("export {};")
    (pages / "more").mkdir()
    (pages / "more" / "part.js").write_text("more")
    (pages / "stolen.txt").symlink_to("/etc/passwd")
    with served(pages=pages) as one:
        yield one


def test_health_is_what_the_frontend_says(server: Served) -> None:
    cases = [
        (Health(True, True, workers=1), (200, 200, 200), None),
        (Health(True, False, "draining"), (503, 200, 503), "draining"),
        (Health(True, False, "no_workers"), (503, 200, 503), "no_workers"),
        (Health(True, False, "model_loading"), (503, 200, 503), "model_loading"),
        (Health(True, False, "something"), (503, 200, 503), "no_workers"),
        (Health(False, False, "no_workers"), (503, 503, 503), "no_workers"),
    ]
    with server.client() as client:
        for shown, statuses, code in cases:
            server.frontend.shown = shown
            for path, status in zip(("", "/live", "/ready"), statuses, strict=True):
                response = client.get("/health" + path)
                assert response.status_code == status, (shown, path)
                assert client.head("/health" + path).status_code == status
                if status == 503:
                    assert response.json()["error"]["code"] == code
                    assert int(response.headers["retry-after"]) >= 1
    server.frontend.shown = Health(True, True)


def test_models_are_listed_with_their_state(server: Served) -> None:
    cards, server.frontend._cards = server.frontend._cards, ()
    with server.client() as client:
        for state in (ModelState.LOADING, ModelState.FAILED):
            server.frontend.state = state
            (one,) = client.get("/v1/models").json()["data"]
            assert (one["id"], one["object"]) == ("soon", "model")
            assert one["maskfx"] == {"state": state.value}
            assert client.get("/v1/models/soon").json() == one
        server.frontend._cards = cards
        one, adapted = client.get("/v1/models").json()["data"]
        assert adapted["id"] == f"{one['id']}:ink"
        assert one["maskfx"]["state"] == "ready"
        assert one["maskfx"]["steps"] == cards[0].steps
        assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_version_and_metrics(server: Served) -> None:
    with server.client() as client:
        assert client.get("/version").json() == {"version": maskfx.__version__}
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "maskfx_num_requests_running" in response.text


def test_the_page_and_its_files(server: Served) -> None:
    kinds = {
        "/": "text/html",
        "/page.css": "text/css",
        "/page.js": "text/javascript",
        "/more/part.js": "text/javascript",
    }
    with server.client() as client:
        for path, kind in kinds.items():
            response = client.get(path)
            assert response.status_code == 200
            assert response.headers["content-type"].startswith(kind)
            assert response.headers["content-security-policy"].startswith("default-src 'self'")
            assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/stolen.txt",
        "/..%2findex.html",
        "/%2e%2e/app.py",
        "/more",
        "/more/",
        "//etc/passwd",
        "/a%00",
    ],
)
def test_nothing_else_is_served(server: Served, path: str) -> None:
    with server.client() as client:
        assert client.get(path).status_code == 404


def test_without_a_page_there_is_none(tmp_path: Path) -> None:
    with served(pages=tmp_path / "absent") as server, server.client() as client:
        assert client.get("/").json()["error"]["code"] == "not_found"
