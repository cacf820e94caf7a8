"""Edit an image file, by a model in this process or by a running server, and write the result.

Owns what the command reads, shows and writes. Of the server it knows only the HTTP contract.
"""

from __future__ import annotations

import queue
import secrets
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from maskfx.cli.edit_request import EditCall
from maskfx.errors import InputError
from maskfx.ir import progress
from maskfx.serve.request import Mask, Pixels

if TYPE_CHECKING:
    from maskfx.serve.sources import Effective

MODES = ("alpha", "luminance")
SHOWN = 3  # previews requested from a server, to show progress


# Files.


def read_edit(image: Path, mask: Path | None, mode: str) -> tuple[Pixels, Mask]:
    """Read an image and the mask of what is edited."""
    if mode not in MODES:
        raise InputError(f"--mask-mode {mode}: choose one of {', '.join(MODES)}")
    if mask is None and mode == "luminance":
        raise InputError("--mask-mode luminance: give --mask too; its white pixels are edited")
    picture = opened(image)
    where = mask_in(opened(mask) if mask is not None else picture, mode, mask or image)
    pixels = np.asarray(picture.convert("RGB"))
    if where.shape != pixels.shape[:2]:
        raise InputError(
            f"--mask {mask}: its size is {where.shape[1]}x{where.shape[0]}, the image's is "
            f"{pixels.shape[1]}x{pixels.shape[0]}; give a mask of the image's size"
        )
    if not where.any():
        edited = "transparent" if mode == "alpha" else "white"
        raise InputError(
            f"{mask or image}: nothing is masked; with --mask-mode {mode}, {edited} pixels are "
            f"edited: make some {edited}, or give the other mode"
        )
    return pixels, where


def opened(path: Path) -> Image.Image:
    """Open an image, turned upright by its EXIF orientation."""
    try:
        with Image.open(path) as found:
            return ImageOps.exif_transpose(found) or found.copy()
    except UnidentifiedImageError:
        raise InputError(f"{path}: no known image format; give a PNG, JPEG or WebP file") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None


def mask_in(picture: Image.Image, mode: str, path: Path) -> Mask:
    if mode == "luminance":
        return np.asarray(picture.convert("L")) >= 128
    if not picture.has_transparency_data:
        raise InputError(
            f"{path}: it has no alpha channel, and --mask-mode alpha edits transparent pixels; "
            "give an image with alpha, or --mask with --mask-mode luminance, which edits white ones"
        )
    found: Mask = np.asarray(picture.convert("RGBA"))[..., 3] < 128  # the server's threshold
    return found


def check_out(out: Path) -> None:
    """Raise InputError unless an image can be written to `out`; leaves the file as it is."""
    Image.init()
    if Image.registered_extensions().get(out.suffix.lower()) not in Image.SAVE:
        raise InputError(
            f"--out {out}: not the ending of an image format; give .png, .jpg or .webp"
        )
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


# In this process.


def edit_here(call: EditCall, out: Path, effective: Effective) -> int:
    """Edit by a model in this process; return 1 if the edit fails."""
    from maskfx.serve import messages
    from maskfx.serve.logs import configure_logs
    from maskfx.serve.models.model import Made
    from maskfx.serve.models.pipeline_model import PipelineModel
    from maskfx.serve.request import Pictures, Request, RequestKind

    configure_logs("warning")  # events of a server's operation are of no interest here
    told: queue.Queue[object] = queue.Queue()
    parameters = {"seed": secrets.randbits(31)} | dict(call.parameters)
    request = Request(id="edit", kind=RequestKind.EDIT, **parameters)
    model = PipelineModel(effective.settings.for_one_call(), told.put)
    with closing(model):
        takes_seed = "seed" in model.ready().takes
        if "seed" in call.parameters and not takes_seed:
            raise InputError(f"--seed {request.seed}: this model accepts no seed; leave it out")
        with progress.work("edit", "edit") as bar:
            job = messages.Job(id=request.id, attempt=1, request=request)
            model.start(job, Pictures((call.picture,), call.mask))
            while not isinstance(answer := told.get(), Made | messages.Failed):
                if isinstance(answer, messages.JobProgress):
                    bar.move(answer.step, answer.steps)
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

    with progress.work("edit", f"edit at {server}") as bar:
        try:
            pixels = edits(call, server, api_key, SHOWN, lambda done: bar.move(done, SHOWN + 1))
        except ServerRefused as error:
            print(f"maskfx: {error}", file=sys.stderr)
            return 1
    write(pixels, out)
    print(f"{out}: edited at {server}")
    return 0
