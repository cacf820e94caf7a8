"""Encodes a StepCache as safetensors bytes, and decodes it.

What can't be a tensor (program, sizes, constants, shapes) is JSON in the metadata. The encoding
sets a format per kind of tensor; statistics, step tensors and values that a smaller format can't
hold are written unchanged. Packed rows are written unchanged and decoded as packed: the tensors of
a decoded step are views of the bytes. Sums are dropped: they follow from the rows. Knows nothing of
files and keys.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import safetensors.torch
import torch
import xxhash
from torch import Tensor

from maskfx.errors import CacheError
from maskfx.ir.json_values import Document, Json
from maskfx.ir.values import octets
from maskfx.runtime.cache.quantize import LOSSLESS, STEPS, Encoding, Format, Packed, pack
from maskfx.runtime.cache.rows import (
    InterpolatedRows,
    Rows,
    RowSubset,
    StoredRows,
    in_memory,
    whole,
)
from maskfx.runtime.cache.step_cache import SiteStats, StepCache
from maskfx.runtime.sites.masks import Masks

SCHEMA = 5  # goes into EntryKey.schema: raise it with every change of what is written
DOCUMENT, LABELS = "maskfx", "maskfx.labels"
# checksums: of each tensor, in the order of the names, and of what is written about the tensors
SUMS, CHECK, SUM_BYTES = "maskfx.sums", "maskfx.check", 8
# and of the pieces of large tensors, of which a process may read some
PIECES, PIECE_BYTES = "maskfx.pieces", 1 << 18
LENGTH = struct.Struct("<Q")  # safetensors: the header's length, the header as JSON, the data


def encode(
    cache: StepCache,
    encoding: Encoding = LOSSLESS,
    *,
    keep: Collection[str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> bytes:
    """Encode a recorded step as bytes.

    Args:
        cache: The step.
        encoding: The formats of its tensors.
        keep: The taps whose rows are written; all by default. Statistics are always written.
        labels: Strings to store beside it, which `read_labels` returns.
    """
    writer = _Writer()
    packed = cache.packed(replace(encoding, output=Format.KEEP), keep)
    document = {"schema": SCHEMA, **document_of(packed, writer, encoding)}
    metadata = {DOCUMENT: json.dumps(document), LABELS: json.dumps(dict(labels or {}))}
    metadata[SUMS] = b"".join(sum_of(*one) for one in sorted(writer.tensors.items())).hex()
    metadata[PIECES] = b"".join(piece_sums(*one) for one in sorted(writer.tensors.items())).hex()
    metadata[CHECK] = check_of(metadata)
    return safetensors.torch.save(writer.tensors, metadata)


def document_of(cache: StepCache, writer: _Writer, encoding: Encoding) -> Document:
    """Return what is written about a step whose rows are in their formats."""
    return {
        "program": cache.program,
        "sizes": cache.sizes,
        "dtype": _name_of(cache.dtype),
        "weights": cache.weights,
        "constants": [writer.pack(v, f"constants[{i}]") for i, v in enumerate(cache.constants)],
        "output": [
            writer.pack(v, f"output[{i}]", encoding.output) for i, v in enumerate(cache.output)
        ],
        "given": [writer.pack(v, f"given[{i}]") for i, v in enumerate(cache.given)],
        "adapters": [list(one) for one in cache.adapters],
        "step": {name: writer.add(t) for name, t in cache.step.items()},
        "rows": {tap: writer.add(value) for tap, value in cache.rows.items()},
        "stats": [
            {
                "segments": list(segments),
                "groups": groups,
                "values": writer.add(stats.values),
                "total": writer.add(stats.total),
                "centre": writer.add(stats.centre),
                "size": writer.add(stats.size),
            }
            for (segments, groups), stats in cache.stats.items()
        ],
        "masks": None
        if cache.masks is None
        else [writer.add(cache.masks.ever), writer.add(cache.masks.always)],
        "samples": [document_of(one, writer, encoding) for one in cache.samples],
    }


def decode(data: bytes | bytearray | memoryview) -> StepCache:
    """Decode a recorded step; a `bytearray` must not be changed afterwards, the step views it."""
    try:
        return StepReader(data).step()
    except CacheError:
        raise
    except Exception as error:  # foreign bytes may fail in any way
        raise CacheError(
            f"these {len(data)} bytes are no recorded step ({type(error).__name__}: {error}); "
            "drop them and record again"
        ) from error


def sum_of(name: str, value: Tensor) -> bytes:
    """Return a checksum of a stored tensor: its name, type, shape and bytes."""
    return sum_of_bytes(name, NAMES[value.dtype], value.shape, _bytes_of(value))


def sum_of_bytes(name: str, dtype: str, shape: Sequence[int], data: Any) -> bytes:
    state = xxhash.xxh3_64(f"{name} {dtype} {list(shape)}".encode())
    state.update(data)
    return state.digest()


def piece_sums(name: str, value: Tensor) -> bytes:
    """Return the checksums of the pieces of a stored tensor; none for a small one."""
    if value.nbytes <= PIECE_BYTES:
        return b""
    data = _bytes_of(value)
    starts = range(0, len(data), PIECE_BYTES)
    return b"".join(piece_sum(name, at, data[at : at + PIECE_BYTES]) for at in starts)


def piece_sum(name: str, at: int, data: Any) -> bytes:
    """Return the checksum of the piece of a tensor that begins at a place."""
    state = xxhash.xxh3_64(f"{name} {at}".encode())
    state.update(data)
    return state.digest()


def check_of(metadata: Mapping[str, str]) -> str:
    """Return a checksum of what is written about the tensors, so that it can be read alone."""
    text = "\0".join(metadata[key] for key in (DOCUMENT, LABELS, SUMS, PIECES))
    return xxhash.xxh3_64_hexdigest(text.encode())


def read_labels(data: bytes | bytearray | memoryview) -> dict[str, str]:
    """Return the labels that were passed to `encode`, or {} if none can be read."""
    try:
        labels = json.loads(_header(memoryview(data))[0]["__metadata__"][LABELS])
        return {str(k): str(v) for k, v in labels.items()}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return {}


# Errors of formats.


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Return |got - wanted| / |wanted| in the L2 norm; 0 if both are empty or zero."""
    wide = wanted.double()
    error, length = (got.double() - wide).norm().item(), wide.norm().item()
    return error / length if length else (0.0 if not error else float("inf"))


# Tensors and other values.


class _Writer:
    """Collects tensors under numbers; a tensor with several names is written once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._written: dict[tuple[object, ...], dict[str, Json]] = {}

    def add(self, value: Rows, wanted: Format = Format.KEEP) -> dict[str, Json]:
        """Store rows or any other tensor; return a reference for the reader."""
        if isinstance(value, StoredRows):
            value = in_memory(value)
        if isinstance(value, RowSubset):
            return {**self.add(value.rows), "sites": self.add(value.sites)}
        if isinstance(value, InterpolatedRows):
            raise CacheError(
                "rows interpolated between two steps can't be stored; store the two steps"
            )
        source = value.stored if isinstance(value, Packed) else value.detach()
        shape = [*source.shape[:2], *value.shape] if isinstance(value, Packed) else [*value.shape]
        place = (source.device, source.data_ptr(), value.dtype, source.numel(), wanted)
        shared = source.numel() > 0 and source.is_contiguous()
        if shared and place in self._written:
            ref = self._written[place]
            if wanted is Format.KEEP or ref["shape"] == shape:
                return {**ref, "shape": shape}
        rows = pack(source, wanted) if isinstance(value, Tensor) else value
        assert isinstance(rows, Tensor | Packed)
        ref = self._write(rows, shape)
        if shared:
            self._written[place] = ref
        return ref

    def _write(self, rows: Tensor | Packed, shape: list[int]) -> dict[str, Json]:
        at, format = str(len(self.tensors)), Format.KEEP
        if isinstance(rows, Packed):
            format = rows.format
            self.tensors[at] = _plain(rows.stored)
            if rows.scale is not None:
                self.tensors[at + ".scale"] = _plain(rows.scale)
        else:
            self.tensors[at] = _plain(rows)
        return {"at": at, "shape": shape, "dtype": _name_of(rows.dtype), "format": format.value}

    def pack(self, value: object, where: str, wanted: Format = Format.KEEP) -> Json:
        """Return a value as JSON; types that JSON lacks are tagged."""
        match value:
            case None | bool() | int() | float() | str() if type(value) in PLAIN:
                return value
            case Tensor():
                return {"tensor": self.add(value, wanted)}
            case torch.dtype():
                return {"dtype": _name_of(value)}
            case list() | tuple() if type(value) in (list, tuple):
                items = [self.pack(v, f"{where}[{i}]", wanted) for i, v in enumerate(value)]
                return {type(value).__name__: items}
            case dict() if all(type(k) is str for k in value) and type(value) is dict:
                return {"dict": {k: self.pack(v, f"{where}.{k}", wanted) for k, v in value.items()}}
        raise CacheError(
            f"StepCache.{where} is a {type(value).__name__}, which can't be stored; stored are "
            "tensors, numbers, strings, None, dtypes, and lists, tuples and dicts of them; keep "
            "this recording in memory"
        )


PLAIN = (type(None), bool, int, float, str)


class StepReader:
    """Reads a step, and its tensors by their numbers, as views of the bytes of a safetensors file.

    Args:
        data: The file; of a file that is read in parts, at least its header.
        nbytes: The bytes of the file, if they aren't all in `data`.
    """

    def __init__(self, data: bytes | bytearray | memoryview, nbytes: int | None = None) -> None:
        self._data = data if isinstance(data, bytearray) else bytearray(data)
        self._header, self._base = _header(memoryview(self._data))
        self._end = len(self._data) if nbytes is None else nbytes
        self.metadata: Mapping[str, str] = self._header["__metadata__"]

    def step(self) -> StepCache:
        """Return the step."""
        document = json.loads(self.metadata[DOCUMENT])
        if document["schema"] != SCHEMA:
            raise CacheError(
                f"a stored step has schema {document['schema']!r}, this maskfx reads {SCHEMA}; "
                "record it again"
            )
        return self._step(document)

    def _step(self, document: Document) -> StepCache:
        return StepCache(
            document["program"],
            {role: int(size) for role, size in document["sizes"].items()},
            _dtype_of(document["dtype"]),
            [self.unpack(v) for v in document["output"]],
            {name: self.tensor(ref) for name, ref in document["step"].items()},
            document["weights"],
            [self.unpack(v) for v in document["constants"]],
            {tap: self.tap_rows(ref) for tap, ref in document["rows"].items()},
            {
                (tuple(s["segments"]), int(s["groups"])): SiteStats(
                    self.rows(s["values"]),
                    *(self.tensor(s[part]) for part in ("total", "centre", "size")),
                )
                for s in document["stats"]
            },
            given=[self.unpack(v) for v in document["given"]],
            adapters=tuple((str(d), float(w)) for d, w in document.get("adapters", ())),
            masks=document["masks"] and Masks(*map(self.tensor, document["masks"])),
            samples=list(map(self._step, document.get("samples", ()))),
        )

    def tap_rows(self, ref: Document) -> Rows:
        """Return the rows of a tap."""
        return self.rows(ref)

    def rows(self, ref: Document) -> Rows:
        """Return rows in the form in which they were written."""
        if "sites" in ref:
            return RowSubset(self.values(ref), self.tensor(ref["sites"]))
        return self.values(ref)

    def values(self, ref: Document, raw: Callable[[str], Tensor] | None = None) -> Tensor | Packed:
        """Return the values of rows; `raw` returns a tensor of the file, by default read here."""
        raw = raw or self.raw
        shape, format, dtype = ref["shape"], Format(ref["format"]), _dtype_of(ref["dtype"])
        stored = raw(ref["at"])
        if format is Format.KEEP:
            return (stored if stored.dtype == dtype else stored.view(dtype)).reshape(shape)
        scale = raw(ref["at"] + ".scale") if format in STEPS else None
        width = prod(shape[2:]) // (2 if format is Format.INT4 else 1)
        values = stored.reshape(*shape[:2], width)
        return Packed(values, scale, format, dtype, tuple(shape[2:]))

    def tensor(self, ref: Document) -> Tensor:
        """Return a tensor that isn't rows, in full precision."""
        return whole(self.rows(ref))

    def raw(self, name: str) -> Tensor:
        """Return a tensor of the file by its name."""
        begin, end, dtype, shape = self.place(name)
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        count = prod(shape)
        return torch.frombuffer(self._data, dtype=dtype, count=count, offset=begin).reshape(shape)

    def place(self, name: str) -> tuple[int, int, torch.dtype, list[int]]:
        """Return where a tensor begins and ends in the file, its type and its shape."""
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        shape = [int(n) for n in entry["shape"]]
        if min(shape, default=0) < 0 or not 0 <= begin <= end <= self._end - self._base:
            raise ValueError(f"tensor {name} lies at {begin}..{end}, outside of the data")
        if prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"tensor {name} has {end - begin} bytes for {shape} of {dtype}")
        return self._base + begin, self._base + end, dtype, shape

    def unpack(self, value: object) -> object:
        if not isinstance(value, dict):
            return value
        ((tag, inner),) = value.items()
        match tag:
            case "tensor":
                return self.tensor(inner)
            case "dtype":
                return _dtype_of(inner)
            case "list":
                return [self.unpack(v) for v in inner]
            case "tuple":
                return tuple(self.unpack(v) for v in inner)
            case "dict":
                return {k: self.unpack(v) for k, v in inner.items()}
        raise ValueError(f"a value with the unknown tag {tag!r}")


def _header(data: memoryview) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the offset of its data."""
    (length,) = LENGTH.unpack_from(data)
    base = LENGTH.size + length
    if base > len(data):
        raise ValueError(f"a header of {length} bytes in {len(data)}")
    header = json.loads(bytes(data[LENGTH.size : base]))
    if not isinstance(header, dict):
        raise ValueError("a header that is no table")
    return header, base


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _bytes_of(value: Tensor) -> Any:
    return octets(value).numpy().data


def _plain(value: Tensor) -> Tensor:
    """Return a contiguous CPU tensor of a type in DTYPES; other types as flat bytes."""
    value = value.resolve_conj().resolve_neg().contiguous().cpu()
    return value if value.dtype in DTYPES.values() else octets(value)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype is called {name!r}")
    return dtype
