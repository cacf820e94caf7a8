"""Pipeline: the interface that a diffusers pipeline offers to maskfx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Pipeline(Protocol):
    """A diffusers pipeline, or an object with the same interface."""

    @property
    def components(self) -> Mapping[str, object]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
