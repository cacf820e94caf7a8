"""The codec process: decodes, resizes, pastes and encodes images. No other process runs codecs.

`pool.py` starts it. An image that crashes or hangs the process fails one request only. The process
ends when its channel closes, or by SIGALRM after the time limit of a task.
"""

from __future__ import annotations

import base64
import contextlib
import io
import resource
import signal
import struct
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, PngImagePlugin

from maskfx.runtime.processes.channel import Channel, Part, connect_to_parent
from maskfx.serve.codecs import messages
from maskfx.serve.codecs.messages import Shape, Size
from maskfx.serve.codecs.paste import paste
from maskfx.serve.codecs.png import png
from maskfx.serve.request import Mask, Pixels

MEMORY = 2 << 30  # bytes of address space
TEXT = 64 << 10  # limit of inflated bytes, for each PNG text chunk and for all together
OPAQUE_FROM = 128  # alpha; below, a pixel is transparent
WHITE_FROM = 128  # luminance; below, a pixel is black

Planes = list[NDArray[np.uint8]]
Reply = tuple[messages.Planes | messages.File, Sequence[Part]]


class RefusedPicture(Exception):
    """Raised if an image is refused."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


# Decoding


def opened(data: Part, form: str, pixels: int) -> Image.Image:
    """Open and load an image with EXIF orientation applied.

    Checks the header again, although `sniff.py` has checked it.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=[form])
        if image.width * image.height > pixels:
            raise RefusedPicture("image_too_large", f"it has {image.width}x{image.height} pixels")
        # a camera's JPEG may hold previews after the photo, which is the first frame
        if form != "jpeg" and getattr(image, "n_frames", 1) > 1:
            raise RefusedPicture("unsupported_image", "it is animated; a single picture is taken")
        image.load()
        turned: Image.Image = ImageOps.exif_transpose(image)
        return turned
    except (OSError, SyntaxError, EOFError, struct.error, zlib.error, IndexError, KeyError) as bad:
        raise RefusedPicture("invalid_image_file", "it is damaged or cut short") from bad
    except ValueError as bad:
        if "ecompressed data too large" in str(bad) or "text chunk" in str(bad).lower():
            raise RefusedPicture(
                "unsupported_image", "its text chunks inflate to too much"
            ) from bad
        raise RefusedPicture("invalid_image_file", "it is damaged") from bad
    except (Image.DecompressionBombError, MemoryError, OverflowError) as bad:
        raise RefusedPicture("image_too_large", "it takes too much memory") from bad


def has_alpha(image: Image.Image) -> bool:
    return "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info


def eight_bits(image: Image.Image) -> Image.Image:
    """Reduce 16-bit samples to their upper 8 bits; Pillow's conversion would clip them."""
    if not image.mode.startswith("I"):
        return image
    samples = np.asarray(image).astype(np.uint32)
    return Image.fromarray((samples >> 8).clip(0, 255).astype(np.uint8))


def transparent(image: Image.Image) -> Mask:
    """Return where an image with alpha is transparent.

    Of 16-bit samples one value is, which Pillow's conversion doesn't find.
    """
    if image.mode.startswith("I"):
        clear: Mask = np.asarray(image) == image.info["transparency"]
        return clear
    return np.asarray(image.convert("RGBA"))[..., 3] < OPAQUE_FROM


def decode(task: messages.Decode, parts: Sequence[Part]) -> Reply:
    image = opened(parts[0], task.format, task.pixels)
    pixels = np.asarray(eight_bits(image).convert("RGB"))
    if not has_alpha(image):
        return messages.Planes([pixels.shape]), [bytes_of(pixels)]
    clear = transparent(image).astype(np.uint8)
    head = messages.Planes([pixels.shape, clear.shape], alpha=True, edits=int(clear.sum()))
    return head, [bytes_of(pixels), bytes_of(clear)]


def decode_mask(task: messages.DecodeMask, parts: Sequence[Part]) -> Reply:
    image = opened(parts[0], task.format, task.pixels)
    alpha = has_alpha(image)
    if task.luminance:
        edit = np.asarray(eight_bits(image).convert("L")) >= WHITE_FROM
    elif alpha:
        edit = transparent(image)
    else:
        edit = np.zeros((image.height, image.width), np.bool_)
    head = messages.Planes([edit.shape], alpha=alpha, edits=int(edit.sum()))
    return head, [bytes_of(edit)]


# Resizing


def resized(pixels: Pixels, size: Size) -> Pixels:
    if (pixels.shape[1], pixels.shape[0]) == size:
        return pixels
    image = Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)
    return np.asarray(image)


def resized_mask(mask: Mask, size: Size) -> Mask:
    """Resize a mask: a pixel is True if any source pixel is, so the thinnest strokes survive."""
    if (mask.shape[1], mask.shape[0]) == size:
        return mask
    for axis, there in ((0, size[1]), (1, size[0])):
        here = mask.shape[axis]
        starts = np.arange(there) * here // there
        stops = -(-(np.arange(there) + 1) * here // there)
        sums = np.insert(mask.cumsum(axis=axis, dtype=np.int32), 0, 0, axis=axis)
        mask = np.take(sums, stops, axis=axis) > np.take(sums, starts, axis=axis)
    return mask


def fit(task: messages.Resize, parts: Sequence[Part]) -> Reply:
    planes: Planes = []
    for plane in planes_of(task.shapes, parts):
        if plane.ndim == 3:
            planes.append(resized(plane, task.size))
        else:
            planes.append(resized_mask(plane.view(np.bool_), task.size).view(np.uint8))
    return messages.Planes([plane.shape for plane in planes]), [bytes_of(one) for one in planes]


# Encoding


def encode(task: messages.Encode, parts: Sequence[Part]) -> Reply:
    result, *into = planes_of(task.shapes, parts)
    pixels = resized(result, task.size)
    if into:
        original, mask = into
        pixels = paste(pixels, original, mask.view(np.bool_))
    return messages.File(), [base64.b64encode(written(task, pixels))]


def written(task: messages.Encode, pixels: Pixels) -> Part:
    if task.format == "png":
        return png(pixels)
    file = io.BytesIO()
    quality = 100 if task.quality is None else task.quality
    Image.fromarray(pixels).save(file, task.format, quality=quality)
    return file.getbuffer()


# Conversion between bytes and pixels


def planes_of(shapes: Sequence[Shape], parts: Sequence[Part]) -> Planes:
    pairs = zip(shapes, parts, strict=True)
    return [np.frombuffer(part, np.uint8).reshape(shape) for shape, part in pairs]


def bytes_of(plane: NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(plane).data.cast("B")


# The process

ROOMS: dict[type, Callable[[Any, Sequence[Part]], Reply]] = {
    messages.Decode: decode,
    messages.DecodeMask: decode_mask,
    messages.Resize: fit,
    messages.Encode: encode,
}


def answer(task: object, parts: Sequence[Part]) -> Sequence[Part]:
    """Run one task and return its reply; failures are returned as replies, not raised."""
    reply: messages.CodecReply
    sent: Sequence[Part] = ()
    try:
        reply, sent = ROOMS[type(task)](task, parts)
    except RefusedPicture as unfit:
        reply = messages.CodecRefusal(unfit.code, unfit.reason)
    except Exception as fault:
        reply = messages.Broken(f"{type(fault).__name__}: {fault}"[:500])
    return [messages.encode(reply), *sent]


def serve(channel: Channel) -> None:
    while True:
        head, *parts = channel.receive()
        asked = messages.decode_request(head)
        signal.alarm(asked.seconds)
        sent = answer(asked.task, parts)
        signal.alarm(0)
        del parts
        channel.send(*sent)
        del sent


def restrain() -> None:
    """Ignore a server's signals, as the front end ends the process, and limit its memory."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # each task has its limit
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = TEXT


def main() -> None:
    restrain()
    Image.init()
    with contextlib.suppress(EOFError, ConnectionError):  # the front end closed the channel
        serve(connect_to_parent())


if __name__ == "__main__":
    main()
