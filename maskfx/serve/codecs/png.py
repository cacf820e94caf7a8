"""PNG, written five to ten times as fast as by Pillow, in about as many bytes.

Pillow tries all five filters on each row, which takes longer than all the rest. Here all rows have
one: a photograph's are what they differ by from those above, a drawing's go as they are, and where
much is flat the shorter of both files is taken. ISA-L packs them.
"""

from __future__ import annotations

import struct

import numpy as np
from isal import isal_zlib

from maskfx.serve.request import Pixels

SIGNATURE = b"\x89PNG\r\n\x1a\n"
EIGHT_BITS, RGB = 8, 2
AS_IT_IS, ABOVE = 0, 2  # the filters: nothing, and minus the row above
LEVEL = 2  # of ISA-L's 0 to 3: 3 is several times slower, 0 and 1 write more
LOOK = 8  # of so many rows one tells what kind of picture it is
FLAT = 0.2  # from this share of equal neighbours on a picture may be drawn


def png(pixels: Pixels) -> bytes:
    """A file of an RGB picture."""
    height, width, _ = pixels.shape
    size = struct.pack(">IIBBBBB", width, height, EIGHT_BITS, RGB, 0, 0, 0)
    filters = (ABOVE, AS_IT_IS) if flat(pixels) >= FLAT else (ABOVE,)
    packed = min((isal_zlib.compress(filtered(pixels, f), LEVEL) for f in filters), key=len)
    parts = ((b"IHDR", size), (b"IDAT", packed), (b"IEND", b""))
    return SIGNATURE + b"".join(chunk(kind, data) for kind, data in parts)


def flat(pixels: Pixels) -> float:
    """The share of pixels' values that their left neighbours have, too."""
    rows = pixels[::LOOK]
    return float(np.mean(rows[:, 1:] == rows[:, :-1])) if rows.shape[1] > 1 else 0.0


def filtered(pixels: Pixels, by: int) -> memoryview:
    """All rows, each behind the number of its filter."""
    rows = pixels.reshape(len(pixels), -1)
    found = np.empty((len(rows), 1 + rows.shape[1]), np.uint8)
    found[:, 0], found[:, 1:] = by, rows
    if by == ABOVE:
        np.subtract(rows[1:], rows[:-1], out=found[1:, 1:])
    return found.data


def chunk(kind: bytes, data: bytes) -> bytes:
    check = isal_zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)
