"""Pipeline and Scheduler: the interfaces of diffusers objects that maskfx uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Pipeline(Protocol):
    """A diffusers pipeline, or an object with the same interface."""

    @property
    def components(self) -> Mapping[str, object]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Scheduler(Protocol):
    """A diffusers scheduler. Its times, `timesteps`, are set by the pipeline's run."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None: ...
