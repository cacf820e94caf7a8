"""Reads recorded steps that maskfx stored: the files of a `Store`.

A file is `magic | version | key digest | length | XXH3-128 | payload`; the payload is a safetensors
file whose metadata holds a document: which tensors are rows, statistics and results, and how rows
are packed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from maskfx.errors import CacheError
from maskfx.export.host.arrays import Array, dtype_of
from maskfx.export.host.recording import (
    HostPacked,
    HostSiteStats,
    Recording,
    Rows,
    Subset,
    all_rows,
)
from maskfx.ir.json_values import Document

MAGIC, VERSION = b"maskfx\r\n", 1
HEADER = struct.Struct("<8sI32sQ16s")  # magic, version, key digest, length, XXH3-128
HASHED = struct.calcsize("<8sI32sQ")  # bytes of the header that the hash covers too
LENGTH = struct.Struct("<Q")  # of the payload's own header
SCHEMA = 5  # of the document
SUFFIX = ".maskfx"

TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class StoredStep:
    """A file of a store, and the labels of its key: template, step, branch and others, as text."""

    path: Path
    labels: dict[str, str]


def find_steps(directory: str | Path, **labels: str | int) -> Iterator[StoredStep]:
    """Yield the recorded steps of a store whose keys have these labels, such as `template="cat"`.

    The labels are template, model, revision, dtype, numerics, schema, step and branch. Files that
    aren't entries of a store are left out.
    """
    wanted = {name: str(value) for name, value in labels.items()}
    for path in sorted(Path(directory).glob(f"*{SUFFIX}")):
        try:
            with path.open("rb") as file:
                file.seek(HEADER.size)
                (length,) = LENGTH.unpack(file.read(LENGTH.size))
                header = json.loads(file.read(length))
            found = json.loads(header["__metadata__"]["maskfx.labels"])
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            continue
        if wanted.items() <= found.items():
            yield StoredStep(path, found)


def read_step(path: str | Path, xxh3_128: Callable[[bytes], bytes] | None = None) -> Recording:
    """Read a recorded step from a file of a store.

    Args:
        path: the file.
        xxh3_128: returns the 16 bytes of a hash XXH3-128, such as `xxhash.xxh3_128_digest`; without
            it, damage that leaves the file's structure intact isn't noticed.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CacheError(
            f"{path} can't be read: {error.strerror}; record the step again"
        ) from error
    problem = ""
    if len(data) < HEADER.size:
        problem = "it is shorter than a header"
    else:
        magic, version, digest, length, found = HEADER.unpack_from(data)
        if (magic, version) != (MAGIC, VERSION):
            problem = "it is no entry of a store of this version"
        elif digest.hex() != Path(path).name.removesuffix(SUFFIX):
            problem = "its name isn't the digest of its key"
        elif length != len(data) - HEADER.size:
            problem = f"it holds {len(data) - HEADER.size} bytes of {length}"
        elif xxh3_128 and xxh3_128(data[:HASHED] + data[HEADER.size :]) != found:
            problem = "its hash differs"
    if problem:
        raise CacheError(f"{path} is damaged: {problem}; record the step again")
    return decode_step(data[HEADER.size :])


def decode_step(payload: bytes) -> Recording:
    """Return the recorded step of a payload."""
    try:
        return _HostReader(payload).recording()
    except CacheError:
        raise
    except Exception as error:  # foreign bytes may fail in any way
        raise CacheError(
            f"these {len(payload)} bytes are no recorded step ({type(error).__name__}: {error}); "
            "drop them and record again"
        ) from error


class _HostReader:
    """Reads tensors of a safetensors file by their numbers, as views of its bytes."""

    def __init__(self, payload: bytes) -> None:
        (length,) = LENGTH.unpack_from(payload)
        self._data = memoryview(payload)[LENGTH.size + length :]
        self._header = json.loads(payload[LENGTH.size : LENGTH.size + length])
        self._document: Document = json.loads(self._header["__metadata__"]["maskfx"])

    def recording(self) -> Recording:
        found = self._document
        if found["schema"] != SCHEMA:
            raise CacheError(
                f"a stored step has schema {found['schema']!r}, this maskfx reads {SCHEMA}; "
                "record it again"
            )
        masks = found["masks"] and [self.tensor(ref) for ref in found["masks"]]
        return Recording(
            found["program"],
            dict(found["sizes"]),
            [self.value(item) for item in found["output"]],
            {name: self.tensor(ref) for name, ref in found["step"].items()},
            found["weights"],
            {tap: self.rows(ref) for tap, ref in found["rows"].items()},
            {(tuple(s["segments"]), s["groups"]): self.stats(s) for s in found["stats"]},
            [self.value(item) for item in found["constants"]],
            (masks[0], masks[1]) if masks else None,
        )

    def stats(self, ref: Document) -> HostSiteStats:
        total, centre, size = (self.tensor(ref[part]) for part in ("total", "centre", "size"))
        return HostSiteStats(self.rows(ref["values"]), total, centre, size)

    def rows(self, ref: Document) -> Rows:
        """Return rows in the form in which they were written."""
        rows = self._rows(ref)
        return Subset(rows, self.tensor(ref["sites"])) if "sites" in ref else rows

    def _rows(self, ref: Document) -> Array | HostPacked:
        shape, dtype, stored = ref["shape"], dtype_of(ref["dtype"]), self.raw(ref["at"])
        if ref["format"] == "keep":
            return stored.view(dtype).reshape(shape)
        halves = ref["format"] == "int4"
        scale = self.raw(ref["at"] + ".scale") if ref["format"] in ("int8", "int4") else None
        width = prod(shape[2:]) // (2 if halves else 1)
        return HostPacked(stored.reshape(*shape[:2], width), scale, tuple(shape[2:]), dtype, halves)

    def tensor(self, ref: Document) -> Array:
        """Return a tensor that isn't rows, in full."""
        return all_rows(self.rows(ref))

    def raw(self, name: str) -> Array:
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        dtype, shape = dtype_of(TYPES[entry["dtype"]]), entry["shape"]
        if not 0 <= begin <= end <= len(self._data) or prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"tensor {name} lies at {begin}..{end} of {len(self._data)} bytes")
        return np.frombuffer(self._data[begin:end], dtype).reshape(shape)

    def value(self, item: object) -> object:
        """Return a value that isn't a tensor alone: JSON, with types that JSON lacks tagged."""
        if not isinstance(item, dict):
            return item
        ((tag, inner),) = item.items()
        match tag:
            case "tensor":
                return self.tensor(inner)
            case "dtype":
                return inner
            case "list" | "tuple":
                return [self.value(part) for part in inner]
            case "dict":
                return {name: self.value(part) for name, part in inner.items()}
        raise ValueError(f"a value with the unknown tag {tag!r}")
