"""WeightData: the file of a directory that holds the weights of its graphs, each of them once.

A weight that lies in a file of its own is copied from there in blocks, so that it is never in
memory as a whole.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, Protocol

import xxhash
from torch import Tensor

from maskfx.export.weight_files import FilePlace, WeightFiles
from maskfx.ir.values import octets

ALIGNED = 4096  # so that runtimes can map the file
BLOCK = 16 << 20  # bytes that are copied at once
FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # whichever way bytes are copied

Place = tuple[int, int]  # the first byte of a weight, and how many there are


class OnnxTensor(Protocol):
    """A tensor of onnx_ir."""

    @property
    def dtype(self) -> object: ...

    @property
    def shape(self) -> Iterable[object]: ...

    def tobytes(self) -> bytes: ...


class WeightData:
    """Writes weights behind each other, and remembers where each is.

    Args:
        path: the file.
        files: where weights lie that are copied from files.
    """

    def __init__(self, path: Path, files: WeightFiles | None = None) -> None:
        self.path, self._files = path, files
        # tensors are held, so that no address is used again
        self._seen: dict[object, tuple[Tensor, Place]] = {}
        self._places: dict[object, Place] = {}

    def place(self, tensor: OnnxTensor) -> Place:
        """Return where a tensor of onnx_ir is in the file; write it if it isn't there."""
        raw = getattr(tensor, "raw", None)
        if not isinstance(raw, Tensor) or not raw.is_contiguous():
            return self._by_content(tensor, tensor.tobytes())
        raw = raw.detach()
        key = (raw.data_ptr(), raw.dtype, raw.shape)
        if key not in self._seen:
            self._seen[key] = raw, self._placed(tensor, raw)
        return self._seen[key][1]

    def _placed(self, tensor: OnnxTensor, raw: Tensor) -> Place:
        source = None if self._files is None else self._files.place_of(raw)
        if source is None:
            return self._by_content(tensor, bytes_of(raw))
        if source not in self._places:
            self._places[source] = self._append(lambda file: copy_from(source, file))
        return self._places[source]

    def _by_content(self, tensor: OnnxTensor, data: bytes | memoryview) -> Place:
        key = (xxhash.xxh3_128_hexdigest(data), str(tensor.dtype), tuple(tensor.shape))
        if key not in self._places:
            self._places[key] = self._append(lambda file: file.write(data))
        return self._places[key]

    def _append(self, write: Callable[[BinaryIO], int]) -> Place:
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            start = file.seek(0, os.SEEK_END)
            file.write(b"\0" * (-start % ALIGNED))
            return file.tell(), write(file)


def bytes_of(value: Tensor) -> memoryview:
    """Return a contiguous tensor's memory."""
    return octets(value.cpu()).numpy().data


def copy_from(source: FilePlace, file: BinaryIO) -> int:
    """Write what lies at a place to a file, in blocks; return the number of bytes."""
    file.flush()
    done = 0
    with source.path.open("rb", buffering=0) as origin:
        while done < source.nbytes:
            count = min(BLOCK, source.nbytes - done)
            copied = copy_block(origin.fileno(), file.fileno(), count, source.offset + done)
            if not copied:
                raise OSError(f"{source.path} ends {source.nbytes - done} bytes before a weight")
            done += copied
    return done


def copy_block(origin: int, target: int, count: int, offset: int) -> int:
    """Copy up to `count` bytes from an offset of a file, in the kernel where it can."""
    try:
        return os.copy_file_range(origin, target, count, offset)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) in FAILED:
            raise
        return os.write(target, os.pread(origin, count, offset))
