"""Edit an image file, by a model in this process or by a running server, and write the result.

Owns what the command reads, shows and writes. Of the server it knows only the HTTP contract.
"""

from __future__ import annotations

import queue
import secrets
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from maskfx.cli.edit_request import EditCall
from maskfx.errors import InputError
from maskfx.serve.request import Mask, Pixels

MODES = ("alpha", "luminance")
SHOWN = 3  # previews requested from a server, to show progress


# Files.


def read_edit(image: Path, mask: Path | None, mode: str) -> tuple[Pixels, Mask]:
    """Read an image and the mask of what is edited."""
    if mode not in MODES:
        raise InputError(f"--mask-mode {mode}: choose one of {', '.join(MODES)}")
    if mask is None and mode == "luminance":
        raise InputError("--mask-mode luminance: give --mask, whose white part is edited")
    picture = opened(image)
    where = mask_in(opened(mask) if mask is not None else picture, mode, mask or image)
    pixels = np.asarray(picture.convert("RGB"))
    if where.shape != pixels.shape[:2]:
        raise InputError(
            f"--mask {mask}: {where.shape[1]}x{where.shape[0]}, but the image is "
            f"{pixels.shape[1]}x{pixels.shape[0]}; give them one size"
        )
    if not where.any():
        raise InputError(f"{mask or image}: nothing is masked, so there is nothing to edit")
    return pixels, where


def opened(path: Path) -> Image.Image:
    """Open an image, turned upright by its EXIF orientation."""
    try:
        with Image.open(path) as found:
            return ImageOps.exif_transpose(found) or found.copy()
    except UnidentifiedImageError:
        raise InputError(f"{path}: it is no picture that can be read") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None


def mask_in(picture: Image.Image, mode: str, path: Path) -> Mask:
    if mode == "luminance":
        return np.asarray(picture.convert("L")) >= 128
    if not picture.has_transparency_data:
        raise InputError(
            f"{path}: it has no alpha, whose transparent part would be edited; if white is what "
            "is edited, give --mask and --mask-mode luminance"
        )
    found: Mask = np.asarray(picture.convert("RGBA"))[..., 3] < 128  # the server's threshold
    return found


def check_out(out: Path) -> None:
    """Raise InputError unless an image can be written to `out`; leaves the file as it is."""
    Image.init()
    if Image.registered_extensions().get(out.suffix.lower()) not in Image.SAVE:
        raise InputError(f"--out {out}: no image format has this ending; give .png, .jpg or .webp")
    there = out.exists()
    try:
        with out.open("ab"):
            pass
        if not there:
            out.unlink()
    except OSError as error:
        raise InputError(f"--out {out}: can't be written: {error.strerror}") from None


def write(pixels: Pixels, out: Path) -> None:
    try:
        Image.fromarray(pixels).save(out)
    except (OSError, ValueError) as error:
        raise InputError(f"--out {out}: can't be written: {error}") from None


@contextmanager
def bar(what: str) -> Iterator[Any]:
    """Show a progress bar on stderr; yields a function of the counts done and total."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


# In this process.


def edit_here(call: EditCall, out: Path, effective: Any) -> int:
    """Edit by a model in this process; return 1 if the edit fails."""
    from maskfx.serve import messages
    from maskfx.serve.models.model import Made
    from maskfx.serve.models.pipeline_model import PipelineModel
    from maskfx.serve.request import Pictures, Request, RequestKind

    told: queue.Queue[Any] = queue.Queue()
    parameters = {"seed": secrets.randbits(31)} | dict(call.parameters)
    request = Request(id="edit", kind=RequestKind.EDIT, **parameters)
    with bar("loading"):
        model = PipelineModel(effective.settings, told.put)
    with closing(model):
        takes_seed = "seed" in model.ready().takes
        if "seed" in call.parameters and not takes_seed:
            raise InputError(f"--seed {request.seed}: this model takes no seed; leave it out")
        with bar("editing") as move:
            job = messages.Job(id=request.id, attempt=1, request=request)
            model.start(job, Pictures((call.picture,), call.mask))
            while not isinstance(answer := told.get(), Made | messages.Failed):
                if isinstance(answer, messages.Progress):
                    move(answer.step, answer.steps)
    if isinstance(answer, messages.Failed):
        print(f"maskfx: {answer.code}: {answer.message}", file=sys.stderr)
        return 1
    assert answer.pixels is not None, "an edit makes a picture"
    write(answer.pixels, out)
    seeded = f", seed {request.seed}" if takes_seed else ""
    print(f"{out}: {answer.steps} steps, {answer.mask_ratio:.0%} of the sites{seeded}")
    return 0


# On a server.


def edit_there(call: EditCall, out: Path, server: str, api_key: str | None) -> int:
    """Edit by a server; return 1 if it returns an error."""
    from maskfx.cli.remote import ServerRefused, edits  # its HTTP client is slow to import

    with bar("editing") as move:
        try:
            pixels = edits(call, server, api_key, SHOWN, lambda done: move(done, SHOWN + 1))
        except ServerRefused as error:
            print(f"maskfx: {error}", file=sys.stderr)
            return 1
    write(pixels, out)
    print(f"{out}: edited at {server}")
    return 0
