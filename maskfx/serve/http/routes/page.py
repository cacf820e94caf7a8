"""Serves the web page's files, read once at start, so that no request path reaches the disk."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).resolve().parents[2] / "page"
INDEX = "index.html"
POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "frame-ancestors 'none'; form-action 'self'"
)
TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
}


class Page:
    """The files of the web page by URL path."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {_route(path, folder): path.read_bytes() for path in _found(folder)}

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(self._files)

    def add_to(self, app: FastAPI) -> None:
        for path in self._files:
            app.router.routes.append(Route(path, self._answer, methods=["GET"]))

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}
        return Response(self._files[path], media_type=_type(path), headers=headers)


def _found(folder: Path) -> list[Path]:
    """Return the regular files of the folder; none if it has no `INDEX`."""
    if not (folder / INDEX).is_file():
        return []
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.suffix != ".py"
    ]


def _route(path: Path, folder: Path) -> str:
    name = path.relative_to(folder).as_posix()
    return "/" if name == INDEX else f"/{name}"


def _type(path: str) -> str:
    suffix = ".html" if path == "/" else Path(path).suffix
    return TYPES.get(suffix) or mimetypes.types_map.get(suffix, "application/octet-stream")
