"""FunctionChanges: notices from call to call whether a denoiser computes another function.

Outputs before such a call don't continue: the range of a ControlNet has ended, another scale
applies from here on, or another adapter acts.
"""

from __future__ import annotations

from typing import Any, Protocol

from maskfx.pipelines.runs.call_inputs import Constants, constants_of
from maskfx.runtime.lora.adapter import Updates

Branch = tuple[str, str]  # a denoiser and a guidance branch of it


class FollowedCall(Protocol):
    """What is known of a denoiser call before it is computed."""

    name: str
    branch: str
    inputs: dict[str, object]

    @property
    def adapters(self) -> Updates: ...


class FunctionChanges:
    """The constants and the adapters of the last call, by denoiser and branch."""

    def __init__(self) -> None:
        self._constants: dict[Branch, Constants] = {}
        self._adapters: dict[Branch, Updates] = {}

    def of_constants(self, call: FollowedCall) -> bool:
        """Return True if a call has other constants than the last one."""
        return self._notes(self._constants, call, constants_of(call.inputs))

    def of_adapters(self, call: FollowedCall) -> bool:
        """Return True if other adapters act in a call than in the last one."""
        return self._notes(self._adapters, call, call.adapters)

    @staticmethod
    def _notes(known: dict[Branch, Any], call: FollowedCall, now: object) -> bool:
        key = call.name, call.branch
        before, known[key] = known.get(key, now), now
        return bool(before != now)
