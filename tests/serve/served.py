"""An app on a real socket, in a thread of this process, and what tests need to talk to it."""

from __future__ import annotations

import base64
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from maskfx.serve.config import ServeSettings
from maskfx.serve.frontend_protocol import Frontend
from maskfx.serve.http import create_app, make_server
from maskfx.serve.http.routes.page import FOLDER
from maskfx.serve.metrics import Metrics
from tests.serve.fake_frontend import FakeFrontend


@dataclass
class Served:
    """A server under test."""

    url: str
    port: int
    frontend: FakeFrontend
    metrics: Metrics
    app: Any

    @property
    def codec_pids(self) -> list[int]:
        pids: list[int] = self.app.state.context.codecs.pids
        return pids

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=30)

    def edit(self, files: Any = None, **data: Any) -> httpx.Response:
        """An edit with a picture and a prompt unless they are given, or given as None."""
        fields = {"prompt": "a cat", **data}
        files = {"image": PICTURE, **(files or {})}
        parts: list[Any] = [
            (k, (None, str(v).encode())) for k, v in fields.items() if v is not None
        ]
        for name, value in files.items():
            several = value if isinstance(value, list) else [value]
            parts += [(name, ("x.png", one)) for one in several if one is not None]
        with self.client() as client:
            return client.post("/v1/images/edits", files=parts)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)


@contextmanager
def served(
    settings: ServeSettings | None = None, *, pages: Path = FOLDER, **fake: Any
) -> Iterator[Served]:
    metrics = Metrics()
    frontend = FakeFrontend(metrics, **fake)
    checked: Frontend = frontend
    settings = settings or ServeSettings(codecs=1)
    app = create_app(checked, settings, metrics, pages=pages)
    server = make_server(app, settings)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as line:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [line]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        port = line.getsockname()[1]
        try:
            yield Served(f"http://127.0.0.1:{port}", port, frontend, metrics, app)
        finally:
            server.should_exit = True
            thread.join(10)


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


# Pictures


def picture(width: int = 64, height: int = 48, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def mask(width: int = 64, height: int = 48, box: tuple[int, int, int, int] = (8, 8, 40, 32)) -> Any:
    """RGBA, transparent within left, top, right, bottom."""
    pixels = np.full((height, width, 4), 255, np.uint8)
    left, top, right, bottom = box
    pixels[top:bottom, left:right, 3] = 0
    return pixels


def file(pixels: NDArray[np.uint8], form: str = "png", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form, **options)
    return out.getvalue()


def pixels_of(b64: str) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64))).convert("RGB"))


PICTURE = file(picture())
MASK = file(mask())
EDITED = mask()[..., 3] == 0
