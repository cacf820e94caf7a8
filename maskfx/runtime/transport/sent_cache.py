"""Recordings that are sent to another process once and named by a number afterwards."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace

from maskfx.errors import CacheError
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.steps import AnyStep, EditStep


@dataclass(frozen=True)
class SentCache:
    """A recording by its number, with its contents when it is sent for the first time."""

    number: int
    contents: StepCache | None


def received(step: AnyStep, caches: MutableMapping[int, StepCache]) -> AnyStep:
    """Return a step with its recording instead of the number.

    Args:
        step: The step as it was sent.
        caches: The recordings of this process by number; a new one is added.
    """
    if not isinstance(step, EditStep):
        return step
    sent: object = step.cache
    assert isinstance(sent, SentCache)
    if sent.contents is not None:
        caches[sent.number] = sent.contents
    if sent.number not in caches:
        raise CacheError(f"recording {sent.number} isn't in this process; send it again")
    return replace(step, cache=caches[sent.number])
