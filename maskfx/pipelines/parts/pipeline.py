"""Pipeline and Scheduler: the interfaces of diffusers objects that maskfx uses.

A pipeline may have others among its attributes and run them in turn: one makes an embedding, the
next one the picture. They share its components.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

from torch import Tensor


class Pipeline(Protocol):
    """A diffusers pipeline, or an object with the same interface."""

    @property
    def components(self) -> Mapping[str, object]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class SchedulerOutput(Protocol):
    """What a scheduler's step returns as an object."""

    prev_sample: Tensor


StepOutput = Tensor | tuple[Tensor, ...] | SchedulerOutput  # of a scheduler; the latents come first


class Scheduler(Protocol):
    """A diffusers scheduler. Its times, `timesteps`, are set by the pipeline's run."""

    def step(self, *args: Any, **kwargs: Any) -> StepOutput: ...

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None: ...


def is_pipeline(value: object) -> TypeGuard[Pipeline]:
    """Return True for a diffusers pipeline, or an object with the same interface."""
    return hasattr(value, "components") and callable(value) and not isinstance(value, type)


def is_inner(part: object) -> bool:
    """Return True if an attribute of a pipeline is a pipeline too."""
    return hasattr(type(part), "components") and is_pipeline(part)


def attributes_of(pipe: object) -> dict[str, object]:
    """Return the attributes of an object itself, for callers that may change them."""
    return getattr(pipe, "__dict__", {})


def nested_pipelines(pipe: object) -> list[object]:
    """Return the pipeline, and after it those among its attributes and theirs, each once."""
    found = {id(pipe): pipe}
    ahead = [pipe]
    while ahead:
        for part in attributes_of(ahead.pop(0)).values():
            if id(part) not in found and is_inner(part):
                found[id(part)] = part
                ahead.append(part)
    return list(found.values())


def config_of(part: object) -> dict[str, object]:
    """Return a component's config without names that begin with _.

    Those are bookkeeping of diffusers, in a random order.
    """
    config = getattr(part, "config", {})
    return {k: v for k, v in dict(config).items() if not k.startswith("_")}
