"""Client for an edit on a running server: OpenAI's route, with a streamed response.

The mask is sent as a PNG that is transparent where the image is edited.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator

import httpx
import numpy as np
from PIL import Image

from maskfx.cli.edit_request import EditCall
from maskfx.errors import InputError
from maskfx.ir.json_values import Document
from maskfx.serve.request import Mask, Pixels, parameters_of

TIMEOUT = 600.0  # seconds without a byte


class ServerRefused(Exception):
    """The error that a server returned instead of an image."""


def edits(
    call: EditCall,
    server: str,
    api_key: str | None,
    previews: int,
    moved: Callable[[int], None],
) -> Pixels:
    """Return the edited image; calls `moved` with the number of previews received."""
    if not server.startswith(("http://", "https://")):
        raise InputError(f"--server {server}: give a URL such as http://127.0.0.1:8000")
    key = api_key or os.environ.get("MASKFX_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{server.rstrip('/')}/v1/images/edits"
    data, files = fields_of(call, previews), files_of(call)
    try:
        with httpx.stream(
            "POST", url, data=data, files=files, headers=headers, timeout=TIMEOUT
        ) as response:
            if not response.is_success:
                said = told(response.read())
                raise ServerRefused(said or f"{server}: status {response.status_code}, no message")
            return picture_in(events(response.iter_lines()), moved)
    except httpx.InvalidURL as error:
        raise InputError(f"--server {server}: {error}") from None
    except httpx.ConnectError as error:
        raise ServerRefused(
            f"{server} can't be reached ({error}); start a server there with: maskfx serve, or "
            "give another --server"
        ) from None
    except httpx.HTTPError as error:
        raise ServerRefused(f"{server}: {error or type(error).__name__}") from None


def fields_of(call: EditCall, previews: int) -> dict[str, str]:
    """Return the form's fields."""
    names = parameters_of()
    named = {names[field].name: str(value) for field, value in call.parameters.items()}
    return {**named, "output_format": "png", "stream": "true", "partial_images": str(previews)}


def files_of(call: EditCall) -> dict[str, tuple[str, bytes, str]]:
    """Return the name, content and type of the form's files."""
    pictures = {"image": Image.fromarray(call.picture), "mask": alpha_mask(call.mask)}
    return {name: (f"{name}.png", png(one), "image/png") for name, one in pictures.items()}


def alpha_mask(mask: Mask) -> Image.Image:
    """Return a black image, transparent where it is edited: a few bytes for any image size."""
    alpha = np.where(mask, 0, 255).astype(np.uint8)
    return Image.fromarray(np.dstack([np.zeros_like(alpha), alpha]), "LA")


def png(picture: Image.Image) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def events(lines: Iterable[str]) -> Iterator[dict[str, object]]:
    """Yield the data of server-sent events; data lines of one event are joined to one text."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            if data != ["[DONE]"]:
                yield json.loads("\n".join(data))
            data = []
    if data and data != ["[DONE]"]:
        yield json.loads("\n".join(data))


def picture_in(found: Iterator[Document], moved: Callable[[int], None]) -> Pixels:
    """Return the image that completes the stream."""
    for came, event in enumerate(found, 1):
        if "error" in event:
            raise ServerRefused(told(json.dumps(event).encode()))
        if str(event.get("type", "")).endswith(".completed"):
            content = base64.b64decode(event["b64_json"])
            with Image.open(io.BytesIO(content)) as picture:
                return np.asarray(picture.convert("RGB"))
        moved(came)
    raise ServerRefused("the response ended before the picture; the server's log has the reason")


def told(body: bytes) -> str:
    """Return code and message of an error's body; empty if it has none."""
    try:
        error = json.loads(body)["error"]
        return f"{error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return ""
