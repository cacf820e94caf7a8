"""Callbacks among a pipeline call's arguments: code of the caller that runs between the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

AnyCallback = TypeVar("AnyCallback", bound=Callable[..., object])

READS_ONLY = "maskfx_reads_only"


def reads_only(callback: AnyCallback) -> AnyCallback:
    """Mark a callback that sets nothing of the pipeline, which saves comparing all settings."""
    setattr(callback, READS_ONLY, True)
    return callback


def without_callbacks(arguments: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in arguments.items() if "callback" not in name}


def callbacks_of(arguments: Mapping[str, object]) -> list[Callable[..., object]]:
    """Return the callbacks of a call; their options are no callbacks."""
    return [value for name, value in arguments.items() if "callback" in name and callable(value)]


def may_set(arguments: Mapping[str, object]) -> bool:
    """Return True if a callback may set something of the pipeline, such as scales of adapters."""
    return any(not getattr(one, READS_ONLY, False) for one in callbacks_of(arguments))
