"""Files of adapters: read, checked against a pipeline's layers, and turned into an `Adapter`.

Safetensors are read, and Fooocus's patches. Sizes are bounded before anything is allocated for
them; a file that doesn't fit raises InputError, which names the file, what was found, and what to
do.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor, nn

from maskfx.errors import InputError
from maskfx.ir.values import octets
from maskfx.runtime.lora.adapter import (
    Adapter,
    Difference,
    LayerChange,
    Layers,
    LowRank,
    tensors_of,
)
from maskfx.runtime.lora.differences import PATCH, parse_patch
from maskfx.runtime.lora.layers import KINDS, is_packed, weight_shape

DOWN, UP, ALPHA = ".lora_A.weight", ".lora_B.weight", ".alpha"
ADDED = ".lora_B.bias"  # to the layer's bias, scaled as the product
METADATA = "lora_adapter_metadata"  # under which diffusers stores peft's settings
SUFFIX = ".safetensors"
UNSUPPORTED = {  # parts of names of tensors, and the method that they belong to
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "lora_mid": "LoCon with a Tucker core",
    "oft_": "OFT",
    "ia3_": "IA3",
    ".set_weight": "a weight that replaces the model's",
    ".reshape_weight": "a layer of another shape",
}
ELSEWHERE = "use another file, or merge the adapter into the model's weights"

Read = Callable[[str], bytes]  # the content of a file by its path
Shape = tuple[int, ...]
Targets = Mapping[str, Mapping[str, Shape]]  # part -> layer -> shape of its weight


@dataclass(frozen=True)
class FileLimits:
    """Limits of a LoRA file.

    Args:
        nbytes: Size of the file.
        tensors: Number of tensors.
        rank: Rank of a layer's update.
    """

    nbytes: int = 4 << 30
    tensors: int = 20_000
    rank: int = 1024


@dataclass(frozen=True)
class AdapterFile:
    """A file as it was registered: a later change of it is detected, not served.

    Args:
        path: Absolute path.
        size: Bytes.
        changed: Time of the last change in nanoseconds.
    """

    path: str
    size: int
    changed: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> AdapterFile:
        """Look at a file without opening it; InputError if it can't be a LoRA."""
        where = Path(path).absolute()
        if where.suffix not in (SUFFIX, PATCH):
            raise InputError(
                f"{where.name}: a LoRA file ends with {SUFFIX}, or {PATCH} if it is a patch of "
                "Fooocus; a pickle can run code: convert it where you trust it"
            )
        try:
            seen = where.stat()
        except (OSError, ValueError) as error:
            raise InputError(f"{where.name}: it can't be read ({reason(error)})") from None
        return cls(str(where), seen.st_size, seen.st_mtime_ns)

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def key(self) -> str:
        """A digest of all fields, equal as long as the file isn't changed."""
        return xxhash.xxh3_128_hexdigest(repr((self.path, self.size, self.changed)).encode())


def read_bytes(path: str) -> bytes:
    """Return a file's content; the default of `Read`."""
    return Path(path).read_bytes()


def reason(error: BaseException) -> str:
    """Return an error's text without the path, which clients aren't shown."""
    return getattr(error, "strerror", None) or type(error).__name__


def read_adapter_file(
    file: AdapterFile, limits: FileLimits, read: Read = read_bytes
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Read a file's tensors and peft's settings, keyed by part and name."""
    name = file.name
    if file.size > limits.nbytes:
        raise InputError(
            f"{name}: {file.size} bytes, and a LoRA may have {limits.nbytes}; is it a whole model?"
        )
    try:
        content = read(file.path)
        now = AdapterFile.of(file.path) if read is read_bytes else None
    except OSError as error:
        raise InputError(f"{name}: it can't be read ({reason(error)}); put it back") from None
    if len(content) != file.size or now not in (None, file):
        raise InputError(
            f"{name}: it was registered with {file.size} bytes and has {len(content)} now, or was "
            "written again; register it again"
        )
    return parse(name, content, limits)


def check_header(path: str | os.PathLike[str]) -> None:
    """Raise InputError if a file of this format has no whole header, without reading its rest."""
    where = Path(path)
    if where.suffix != SUFFIX:
        return
    try:
        with safe_open(where, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{where.name}: not a whole safetensors file ({error!s:.120}); copy it again. If it is "
            "a pickle, convert it to safetensors where you trust it"
        ) from None


def parse(
    name: str, content: bytes, limits: FileLimits
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the tensors and peft's settings of a file's content."""
    if Path(name).suffix == PATCH:
        return parse_patch(name, content, limits.tensors), {}
    try:
        header = header_of(content)
        metadata = header.pop("__metadata__", None) or {}
        settings = json.loads(metadata.get(METADATA, "{}"))
        if len(header) > limits.tensors:
            raise InputError(
                f"{name}: {len(header)} tensors, and a LoRA may have {limits.tensors}; is it a "
                "whole model?"
            )
        refuse_methods(name, header)
        return load(content), settings if isinstance(settings, dict) else {}
    except InputError:
        raise
    except (SafetensorError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise InputError(
            f"{name}: not a whole safetensors file ({error!s:.120}); copy it again. If it is a "
            "pickle, convert it to safetensors where you trust it"
        ) from error


def header_of(content: bytes) -> dict[str, Any]:
    """Return the JSON header of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    if length > len(content) - 8:
        raise ValueError("its header is cut off")
    found = json.loads(content[8 : 8 + length])
    if not isinstance(found, dict):
        raise ValueError("its header is no object")
    return found


def refuse_methods(name: str, tensors: Mapping[str, object]) -> None:
    """Raise InputError for tensors of methods that aren't low-rank products of two matrices."""
    for key in tensors:
        for part, method in UNSUPPORTED.items():
            if part in key:
                raise InputError(f"{name}: {method} ({key}) isn't supported; {ELSEWHERE}")


# From tensors to updates.


def parameters_of(module: nn.Module) -> dict[str, Shape]:
    """Return the shapes of the weights and biases of all layers, by their names."""
    found: dict[str, Shape] = {}
    for layer, part in module.named_modules():
        for name in ("weight", "bias"):
            if layer and isinstance(value := part._parameters.get(name), Tensor):
                packed = name == "weight" and is_packed(part)
                found[f"{layer}.{name}"] = weight_shape(part) if packed else tuple(value.shape)
    return found


def targets_of(module: nn.Module) -> dict[str, Shape]:
    """Return the shapes of the weights that a LoRA may update, by layer."""
    return {
        layer: weight_shape(part)
        for layer, part in module.named_modules()
        if isinstance(part, KINDS) and getattr(part, "groups", 1) == 1
    }


def adapter_of(
    name: str,
    by_part: Mapping[str, Mapping[str, Tensor]],
    alphas: Mapping[str, object],
    settings: Mapping[str, object],
    targets: Targets,
    limits: FileLimits,
    differences: Mapping[str, Mapping[str, LayerChange]] | None = None,
) -> Adapter:
    """Return the adapter that tensors under peft's names describe.

    Args:
        name: Name of the file.
        by_part: Tensors by component and name.
        alphas: Alphas by component, layer and ".alpha".
        settings: peft's settings, as in the file's metadata.
        targets: The layers of the pipeline.
        limits: Limits of the ranks.
        differences: Full differences by component and layer.
    """
    parts: dict[str, Layers] = {}
    for part, tensors in by_part.items():
        if part not in targets:
            raise InputError(
                f"{name}: it changes {part!r}, but the pipeline has {sorted(targets)}; the LoRA "
                "was made for another model, or needs to be saved by the pipeline's "
                "save_lora_weights"
            )
        scales = LayerScales(name, part, alphas, settings)
        parts[part] = layers_of(name, part, dict(tensors), scales, targets[part], limits)
    for part, own in (differences or {}).items():
        parts[part] = joined(name, part, parts.get(part, {}), own)
    if not any(parts.values()):
        raise InputError(f"{name}: it has no LoRA tensors; {ELSEWHERE}")
    return Adapter(name, digest_of(parts), parts)


def joined(
    name: str, part: str, low_rank: Layers, differences: Mapping[str, LayerChange]
) -> Layers:
    """Return a component's updates; a low-rank one may come with a difference of the bias."""
    found = {**differences, **low_rank}
    for layer in low_rank.keys() & differences.keys():
        first, second = low_rank[layer], differences[layer]
        assert isinstance(first, LowRank)
        assert isinstance(second, Difference)
        if second.weight is not None or first.bias is not None:
            raise InputError(
                f"{name}: {part}.{layer}: a low-rank update and a difference of one parameter; "
                f"{ELSEWHERE}"
            )
        found[layer] = replace(first, bias=second.bias)
    return found


class LayerScales:
    """The factor of each layer's product, from alphas and peft's settings of one component."""

    def __init__(
        self, name: str, part: str, alphas: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        self._part, self._alphas = part, alphas
        own = {
            key.removeprefix(f"{part}."): value
            for key, value in settings.items()
            if key.startswith(f"{part}.")
        }
        if own.get("use_dora"):
            raise InputError(f"{name}: DoRA (use_dora) isn't supported; {ELSEWHERE}")
        self._alpha = own.get("lora_alpha")
        self._patterns: Mapping[str, Any] = own.get("alpha_pattern") or {}
        self._root = bool(own.get("use_rslora"))

    def of(self, layer: str, rank: int) -> float:
        """Return alpha divided by the rank, or by its root with rsLoRA; 1 without an alpha."""
        alpha = self._alphas.get(f"{self._part}.{layer}{ALPHA}")
        if alpha is None:
            matched = (
                value
                for pattern, value in self._patterns.items()
                if re.fullmatch(rf"(.*\.)?({pattern})", layer)
            )
            alpha = next(matched, self._alpha)
        if alpha is None:
            return 1.0
        return float(alpha) / (sqrt(rank) if self._root else rank)


def layers_of(
    name: str,
    part: str,
    tensors: dict[str, Tensor],
    scales: LayerScales,
    targets: Mapping[str, Shape],
    limits: FileLimits,
) -> Layers:
    """Return one component's updates, each checked against the shape of its layer."""
    found: dict[str, LowRank] = {}
    for key in [key for key in tensors if key.endswith(DOWN)]:
        written = key.removesuffix(DOWN)
        down, up = tensors.pop(key), tensors.pop(written + UP, None)
        layer = known_layer(written, targets)
        shape = targets.get(layer)
        if up is None or shape is None:
            raise InputError(
                f"{name}: {part}.{written}: the pipeline has no such linear or convolution layer, "
                "or one of its two matrices is missing; the LoRA was made for another model"
            )
        check_shapes(f"{name}: {part}.{layer}", down, up, shape, limits)
        scale, bias = scales.of(written, down.shape[0]), tensors.pop(written + ADDED, None)
        bias = None if bias is None else bias * scale
        found[layer] = LowRank(down.reshape(down.shape[0], *shape[1:]), up.flatten(1), scale, bias)
    if tensors:
        raise InputError(
            f"{name}: {len(tensors)} tensors aren't part of a LoRA, such as "
            f"{part}.{next(iter(tensors))}; {ELSEWHERE}"
        )
    return found


def known_layer(written: str, targets: Mapping[str, Shape]) -> str:
    """Return a layer's name in the pipeline; releases of transformers differ in a prefix."""
    inner = "text_model."
    others = (written.removeprefix(inner), inner + written)
    return next((name for name in (written, *others) if name in targets), written)


def check_shapes(where: str, down: Tensor, up: Tensor, shape: Shape, limits: FileLimits) -> None:
    """Raise InputError unless the product of the matrices has the shape of the weight."""
    if not (down.is_floating_point() and up.is_floating_point()):
        raise InputError(f"{where}: {down.dtype}; a LoRA has floating-point numbers")
    rank = down.shape[0] if down.dim() else 0
    fits = (
        down.dim() >= 2
        and up.dim() >= 2
        and up.flatten(1).shape == (shape[0], rank)
        and down.flatten(1).shape[1] == torch.Size(shape[1:]).numel()
    )
    if not fits:
        raise InputError(
            f"{where}: {tuple(up.shape)} by {tuple(down.shape)}, but the pipeline's weight is "
            f"{shape}; the LoRA was made for another model"
        )
    if not 1 <= rank <= limits.rank:
        raise InputError(f"{where}: rank {rank}, and a LoRA may have {limits.rank}; {ELSEWHERE}")
    if not all(bool(matrix.isfinite().all()) for matrix in (down, up)):
        raise InputError(f"{where}: numbers that aren't finite; the file is damaged")


def digest_of(parts: Mapping[str, Layers]) -> str:
    """Return a hash of all updates, equal for files that change pictures alike."""
    seen = xxhash.xxh3_128()
    for part in sorted(parts):
        for layer in sorted(parts[part]):
            update = parts[part][layer]
            scale = update.scale if isinstance(update, LowRank) else None
            for matrix in tensors_of(update):
                seen.update(repr((part, layer, scale, matrix.dtype, matrix.shape)).encode())
                seen.update(octets(matrix).numpy().data)
    return seen.hexdigest()


def split_parts(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors by component and name."""
    by_part: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in state.items():
        part, _, rest = key.partition(".")
        by_part[part][rest] = value
    return by_part
