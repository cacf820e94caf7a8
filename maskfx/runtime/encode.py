"""A StepCache as safetensors bytes, and back.

What can't be a tensor (program, sizes, constants, shapes) stands as JSON in the file's metadata.
Each kind of tensor has a format of its own; statistics, step tensors and whatever a smaller
format can't hold are kept as they are. Sums are dropped: they follow from the rows. Knows nothing
of files and keys.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from maskfx.errors import CacheError
from maskfx.runtime.cache import SiteStats, StepCache

SCHEMA = 1  # belongs into EntryKey.schema: raise it with every change of what is written
DOCUMENT, LABELS = "maskfx", "maskfx.labels"
LENGTH = struct.Struct("<Q")  # safetensors: the header's length, the header as JSON, the data
SCALE_OVER = 128  # an 8-bit scale serves at most so many values, where they divide evenly
WORTH_SCALE = 16  # sites with fewer values are smaller in 16 bits than with a scale each
CACHED = 1 << 16  # values worked on at a time


class Format(Enum):
    """How the values of a tensor are stored."""

    KEEP = "keep"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"  # per row: 8-bit steps of a float32 scale


WIDE = {Format.FP16: torch.float16, Format.BF16: torch.bfloat16}
OTHER = {Format.FP16: Format.BF16, Format.BF16: Format.FP16}


@dataclass(frozen=True)
class Encoding:
    """The format of each kind of tensor; `taps` are rows that differ from the other rows."""

    rows: Format = Format.KEEP
    output: Format = Format.KEEP
    taps: Mapping[str, Format] = field(default_factory=dict)

    def of(self, tap: str) -> Format:
        return self.taps.get(tap, self.rows)

    @property
    def lossless(self) -> bool:
        return {self.rows, self.output, *self.taps.values()} == {Format.KEEP}


LOSSLESS = Encoding()


def encode(
    cache: StepCache,
    encoding: Encoding = LOSSLESS,
    *,
    keep: Collection[str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> bytes:
    """A recorded step as bytes; with `keep`, only these taps' rows (statistics always)."""
    writer = _Writer()
    document = {
        "schema": SCHEMA,
        "lossless": encoding.lossless,
        "program": cache.program,
        "sizes": cache.sizes,
        "dtype": _name_of(cache.dtype),
        "weights": cache.weights,
        "constants": [writer.pack(v, f"constants[{i}]") for i, v in enumerate(cache.constants)],
        "output": [
            writer.pack(v, f"output[{i}]", encoding.output) for i, v in enumerate(cache.output)
        ],
        "step": {name: writer.add(t) for name, t in cache.step.items()},
        "rows": {
            tap: writer.add(t, encoding.of(tap))
            for tap, t in cache.rows.items()
            if keep is None or tap in keep
        },
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
    }
    metadata = {DOCUMENT: json.dumps(document), LABELS: json.dumps(dict(labels or {}))}
    return safetensors.torch.save(writer.tensors, metadata)


def decode(data: bytes | bytearray | memoryview) -> StepCache:
    """The recorded step in these bytes; a `bytearray` belongs to the step from then on."""
    try:
        reader = _Reader(data)
        document = json.loads(reader.metadata[DOCUMENT])
        if document["schema"] != SCHEMA:
            raise CacheError(
                f"a stored step has schema {document['schema']!r}, this maskfx reads {SCHEMA}; "
                "record it again"
            )
        reader.views = document["lossless"]  # a few kept values must not hold all the bytes
        return StepCache(
            document["program"],
            {role: int(size) for role, size in document["sizes"].items()},
            _dtype_of(document["dtype"]),
            [reader.unpack(v) for v in document["output"]],
            {name: reader.tensor(ref) for name, ref in document["step"].items()},
            document["weights"],
            [reader.unpack(v) for v in document["constants"]],
            {tap: reader.tensor(ref) for tap, ref in document["rows"].items()},
            {
                (tuple(s["segments"]), int(s["groups"])): SiteStats(
                    *(reader.tensor(s[part]) for part in ("values", "total", "centre", "size"))
                )
                for s in document["stats"]
            },
        )
    except CacheError:
        raise
    except Exception as error:  # bytes that aren't ours may fail in any way
        raise CacheError(
            f"these {len(data)} bytes are no recorded step ({type(error).__name__}: {error}); "
            "drop them and record again"
        ) from error


def read_labels(data: bytes | bytearray | memoryview) -> dict[str, str]:
    """The labels that `encode` was given; empty where there are none to read."""
    try:
        labels = json.loads(_header(memoryview(data))[0]["__metadata__"][LABELS])
        return {str(k): str(v) for k, v in labels.items()}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return {}


# How far a format is off.


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|, both as lengths of vectors; 0 if both are empty or zero."""
    wide = wanted.double()
    error, length = (got.double() - wide).norm().item(), wide.norm().item()
    return error / length if length else (0.0 if not error else float("inf"))


def tap_errors(cache: StepCache, encoding: Encoding) -> dict[str, float]:
    """The relative error that an encoding does to each tap's rows."""
    rows = {tap: t for tap, t in cache.rows.items() if t.is_floating_point()}
    return {tap: relative_error(_round_trip(t, encoding.of(tap)), t) for tap, t in rows.items()}


def _round_trip(value: Tensor, wanted: Format) -> Tensor:
    format, stored, scale = shrink(value, wanted)
    return grow(stored, scale, format, value.dtype, value.shape)


# Formats.


def shrink(value: Tensor, wanted: Format) -> tuple[Format, Tensor, Tensor | None]:
    """The format used, the stored values, and the scales of 8-bit rows.

    What isn't floating point, is small already, or doesn't fit into the format, is kept.
    """
    if wanted is Format.KEEP or not value.is_floating_point() or not value.numel():
        return Format.KEEP, value, None
    if wanted is Format.INT8 and value.element_size() > 1:
        return _to_int8(value)
    if wanted in WIDE and value.element_size() > 2:
        for format in (wanted, OTHER[wanted]):
            stored = value.to(WIDE[format])
            if torch.equal(stored.isfinite(), value.isfinite()):
                return format, stored, None
    return Format.KEEP, value, None


def _to_int8(value: Tensor) -> tuple[Format, Tensor, Tensor | None]:
    """Rows as steps of their scales; a long row has several, as an outlier coarsens its own."""
    features = value.shape[2:].numel() if value.dim() > 2 else value.shape[-1:].numel()
    if features < WORTH_SCALE:
        return shrink(value, Format.FP16)
    rows = value.reshape(-1, _values_of_a_scale(features))
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    scale = torch.empty(len(rows), 1, device=value.device)
    stored = torch.empty(rows.shape, dtype=torch.int8, device=value.device)
    for part, its_scale, its_steps in _pieces(rows, scale, stored):
        its_scale.copy_(part.to(wide).abs_().amax(-1, keepdim=True) / 127)
        its_scale.masked_fill_(its_scale == 0, 1)
        its_steps.copy_((part.to(wide) / its_scale).round_().clamp_(-127, 127))
    if not scale.isfinite().all():  # inf and nan have no place among 8-bit steps
        return Format.KEEP, value, None
    return Format.INT8, stored, scale


def _values_of_a_scale(features: int) -> int:
    """The largest part that a site's features fall into evenly, unless it is small."""
    part = max(n for n in range(1, min(features, SCALE_OVER) + 1) if features % n == 0)
    return part if 2 * part >= SCALE_OVER else features


def _pieces(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor, few enough on a CPU that what is between stays in its cache."""
    count = len(rows[0])
    if rows[0].device.type == "cpu":
        count = max(1, CACHED // max(tensor.shape[1] for tensor in rows))
    return zip(*(tensor.split(count) for tensor in rows), strict=True)


def grow(
    stored: Tensor, scale: Tensor | None, format: Format, dtype: torch.dtype, shape: torch.Size
) -> Tensor:
    """The inverse of `shrink`."""
    if format is Format.INT8:
        if scale is None:
            raise CacheError("8-bit rows without their scales; record the step again")
        rows = torch.empty(stored.shape, dtype=dtype, device=stored.device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for part, its_steps, its_scale in _pieces(rows, stored, scale):
            part.copy_(its_steps.to(wide) * its_scale)
        return rows.reshape(shape)
    return stored.to(dtype).reshape(shape)


# Tensors and other values.


class _Writer:
    """Collects tensors under numbers; one that several names share is written once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._written: dict[tuple[Any, ...], dict[str, Any]] = {}

    def add(self, value: Tensor, wanted: Format = Format.KEEP) -> dict[str, Any]:
        """Store a tensor; how to find it again."""
        value = value.detach()
        place = (value.device, value.data_ptr(), value.dtype, value.numel(), wanted)
        shared = value.numel() > 0 and value.is_contiguous()
        shape = list(value.shape)
        if shared and place in self._written:
            ref = self._written[place]
            if ref["format"] != Format.INT8.value or ref["shape"] == shape:
                return {**ref, "shape": shape}
        format, stored, scale = shrink(value, wanted)
        ref = {
            "at": str(len(self.tensors)),
            "shape": shape,
            "dtype": _name_of(value.dtype),
            "format": format.value,
        }
        self.tensors[ref["at"]] = _plain(stored)
        if scale is not None:
            self.tensors[ref["at"] + ".scale"] = _plain(scale)
        if shared:
            self._written[place] = ref
        return ref

    def pack(self, value: Any, where: str, wanted: Format = Format.KEEP) -> Any:
        """A value as JSON; what JSON has no word for carries a tag."""
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


class _Reader:
    """Tensors of a safetensors file by their numbers; views of the bytes if `views` is set."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = data if isinstance(data, bytearray) else bytearray(data)
        self._header, self._base = _header(memoryview(self._data))
        self.metadata: Mapping[str, str] = self._header["__metadata__"]
        self.views = True
        self._read: dict[str, Tensor] = {}

    def tensor(self, ref: Mapping[str, Any]) -> Tensor:
        at, shape = ref["at"], torch.Size(ref["shape"])
        if at not in self._read:
            format, dtype = Format(ref["format"]), _dtype_of(ref["dtype"])
            scale = self._raw(at + ".scale") if format is Format.INT8 else None
            stored = self._raw(at)
            if format is Format.KEEP and stored.dtype != dtype:
                stored = stored.view(dtype)
            value = grow(stored, scale, format, dtype, shape)
            self._read[at] = value if self.views or format is not Format.KEEP else value.clone()
        return self._read[at].reshape(shape)

    def _raw(self, name: str) -> Tensor:
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        shape = [int(n) for n in entry["shape"]]
        start, count = self._base + begin, prod(shape)
        if min(shape, default=0) < 0 or not 0 <= begin <= end <= len(self._data) - self._base:
            raise ValueError(f"tensor {name} lies at {begin}..{end}, outside of the data")
        if count * dtype.itemsize != end - begin:
            raise ValueError(f"tensor {name} has {end - begin} bytes for {shape} of {dtype}")
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._data, dtype=dtype, count=count, offset=start).reshape(shape)

    def unpack(self, value: Any) -> Any:
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
    """The header of a safetensors file, and where its data begins."""
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


def _plain(value: Tensor) -> Tensor:
    """Contiguous, on the CPU, of a type in DTYPES: others as bytes along the last dimension."""
    value = value.resolve_conj().resolve_neg().contiguous().cpu()
    return value if value.dtype in DTYPES.values() else value.flatten().view(torch.uint8)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype is called {name!r}")
    return dtype
