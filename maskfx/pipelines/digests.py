"""Digests of arguments: equal for values of equal content, in every process."""

from __future__ import annotations

import hashlib
import pickle
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from PIL import Image
from torch import Tensor

from maskfx.ir.values import octets


def digest(value: object) -> str:
    """Return a digest that is equal for values of equal content, in every process."""
    found = hashlib.sha256()
    update_digest(found, value)
    return found.hexdigest()


class Digest(Protocol):
    """A hash that is updated with bytes, as those of `hashlib`."""

    def update(self, data: Any, /) -> None: ...


def update_digest(found: Digest, value: object) -> None:
    if isinstance(value, Image.Image):
        update_digest(found, ["picture", value.mode, list(value.size)])
        found.update(value.tobytes())
    elif isinstance(value, Tensor):
        update_digest(found, ["tensor", str(value.dtype), list(value.shape)])
        found.update(octets(value.cpu()).numpy())
    elif isinstance(value, np.ndarray):
        update_digest(found, ["array", str(value.dtype), list(value.shape)])
        found.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, (list, tuple)):
        found.update(f"list {len(value)}".encode())
        for item in value:
            update_digest(found, item)
    elif isinstance(value, Mapping):
        found.update(f"mapping {len(value)}".encode())
        for name in sorted(value, key=str):
            found.update(str(name).encode())
            update_digest(found, value[name])
    elif isinstance(value, (str, int, float, bool, type(None))):
        found.update(f"{type(value).__name__} {value!r}".encode())
    else:
        found.update(type(value).__name__.encode() + content_of(value))


def content_of(value: object) -> bytes:
    """Return the pickled content of any other object; unique bytes if it can't be pickled."""
    try:
        return pickle.dumps(value)
    except Exception:
        return uuid.uuid4().bytes
