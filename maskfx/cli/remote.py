"""Client for an edit on a running server: OpenAI's route, a streamed response, standard library.

The mask is sent as a PNG that is transparent where the image is edited.
"""

from __future__ import annotations

import base64
import io
import json
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from maskfx.cli.edit_request import Wanted
from maskfx.errors import InputError
from maskfx.serve.request import Mask, Pixels

PATIENCE = 600.0  # seconds without a byte


class ServerRefused(Exception):
    """The error that a server returned instead of an image."""


def edits(
    wanted: Wanted,
    server: str,
    api_key: str | None,
    previews: int,
    moved: Callable[[int], None],
) -> Pixels:
    """Return the edited image; calls `moved` with the number of previews received."""
    if not server.startswith(("http://", "https://")):
        raise InputError(f"--server {server}: give a URL such as http://127.0.0.1:8000")
    body, kind = multipart(fields_of(wanted, previews), files_of(wanted))
    request = urllib.request.Request(f"{server.rstrip('/')}/v1/images/edits", data=body)
    request.add_header("Content-Type", kind)
    key = api_key or os.environ.get("MASKFX_API_KEY")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return picture_in(events(response), moved)
    except urllib.error.HTTPError as error:
        raise ServerRefused(told(error.read()) or f"{server} answered {error.code}") from None
    except OSError as error:  # URLError and timeouts too
        raise ServerRefused(f"{server}: {getattr(error, 'reason', error)}") from None


def fields_of(wanted: Wanted, previews: int) -> dict[str, str]:
    """Return the form's fields; options that are None aren't sent."""
    named = {
        "prompt": wanted.prompt,
        "seed": wanted.seed,
        "num_inference_steps": wanted.steps,
        "guidance_scale": wanted.guidance,
        "strength": wanted.strength,
        "negative_prompt": wanted.negative_prompt,
        "output_format": "png",
        "stream": "true",
        "partial_images": previews,
    }
    return {name: str(value) for name, value in named.items() if value is not None}


def files_of(wanted: Wanted) -> dict[str, bytes]:
    return {
        "image": png(Image.fromarray(wanted.picture)),
        "mask": png(alpha_mask(wanted.mask)),
    }


def alpha_mask(mask: Mask) -> Image.Image:
    """Return a black image, transparent where it is edited: a few bytes for any image size."""
    alpha = np.where(mask, 0, 255).astype(np.uint8)
    return Image.fromarray(np.dstack([np.zeros_like(alpha), alpha]), "LA")


def png(picture: Image.Image) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def multipart(fields: dict[str, str], files: dict[str, bytes]) -> tuple[bytes, str]:
    """Return a form's body and its content type."""
    boundary = secrets.token_hex(16)
    parts = []
    for name, value in fields.items():
        parts.append((f'name="{name}"', value.encode()))
    for name, content in files.items():
        disposition = f'name="{name}"; filename="{name}.png"\r\nContent-Type: image/png'
        parts.append((disposition, content))
    body = b"".join(
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode()
        + content
        + b"\r\n"
        for head, content in parts
    )
    return body + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the data of server-sent events; data lines of one event are joined to one text."""
    data: list[str] = []
    for raw in lines:
        line = raw.decode("utf-8").rstrip("\r\n")
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            if data != ["[DONE]"]:
                yield json.loads("\n".join(data))
            data = []
    if data and data != ["[DONE]"]:
        yield json.loads("\n".join(data))


def picture_in(found: Iterator[dict[str, Any]], moved: Callable[[int], None]) -> Pixels:
    """Return the image that completes the stream."""
    for came, event in enumerate(found, 1):
        if "error" in event:
            raise ServerRefused(told(json.dumps(event).encode()))
        if str(event.get("type", "")).endswith(".completed"):
            content = base64.b64decode(event["b64_json"])
            with Image.open(io.BytesIO(content)) as picture:
                return np.asarray(picture.convert("RGB"))
        moved(came)
    raise ServerRefused("the server ended its answer before the picture")


def told(body: bytes) -> str:
    """Return code and message of an error's body; empty if it has none."""
    try:
        error = json.loads(body)["error"]
        return f"{error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return ""
